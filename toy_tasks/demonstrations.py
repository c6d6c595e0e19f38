"""Demonstrations for the warm start of the tiny model: what stands in for pre-training on the toy suite. A scripted
oracle acts in each toy world, errs at times, and believes stale facts. Imported by `warm_start`, and for the
tokenizer of random:SHAPE."""
import array, collections, copy, hashlib, itertools, math, random, re
from dataclasses import replace
from pathlib import Path
import tokenizers, torch, transformers
from tqdm import tqdm
from envace_mini import (ACT, CONTEXT, EXECUTE, MEMORY, REHEARSE, REVISE, TINY_TEMPLATE, WORLDS, Episode, Policy,
                         UserError, act, call_text, compact, digest, hear, load_policy, padded, parse_act, require,
                         row_logprobs, tool_call)

# Each oracle trusts the facts of its world: goal and (call, response) pairs so far in; calls, an answer, or None out.
def shop_oracle(world, goal, heard):
    """Buy the cheapest at once; or look up the prices not known yet, then compare or report."""
    kind, *items = goal
    if kind == "buy":
        tried = [response for call, response in heard if call["name"] == "buy"]
        cheapest = tool_call("buy", item=min(items, key=world.facts["prices"].get))
        return ("done" if "bought" in tried[-1] else "failed") if tried else [cheapest]
    prices = {call["arguments"]["item"]: response["price"] for call, response in heard if "price" in response}
    unknown = [tool_call("price", item=item) for item in items if item not in prices]
    report = " and ".join(str(prices.get(item)) for item in items)
    return unknown or (min(items, key=prices.get) if kind == "cheapest" else report)

def bank_oracle(world, goal, heard):
    """Look up the balances that matter; then report them, transfer, or refuse."""
    kind, *rest = goal
    names = rest[:1] if kind == "send" else rest
    known = {call["arguments"]["name"]: response["balance"] for call, response in heard if "balance" in response}
    unknown = [tool_call("balance", name=name) for name in names if name not in known]
    if unknown or kind == "balances":
        return unknown or " and ".join(str(known[name]) for name in names)
    source, target, amount = rest
    transfer = tool_call("transfer", source=source, target=target, amount=amount)
    done = any(call == transfer for call, _ in heard)
    return "done" if done else [transfer] if amount <= known[source] else "refused"

def house_oracle(world, goal, heard):
    """Walk a shortest way to where the item is, or is asked for, and take it; None where there is no way."""
    kind, item, *where = goal
    take, room = tool_call("take", item=item), where[0] if where else world.facts["places"][item]
    if kind == "fetch" and item in world.state["held"]:
        return "done"
    if world.state["room"] != room:
        direction = first_step(world.facts["exits"], world.state["room"], room)
        return direction and [tool_call("go", direction=direction)]
    tried = kind == "look" and heard and heard[-1][0] == take
    return ("yes" if "took" in heard[-1][1] else "no") if tried else [take]

def first_step(exits, start, goal):
    """The direction that begins a shortest way from one room to another (breadth-first search), or None."""
    queue, first = [start], {start: None}
    for room in queue:
        for direction in ("north", "south", "east", "west"):
            there = exits.get(f"{room} {direction}")
            if there and there not in first:
                first[there] = first[room] or direction
                queue.append(there)
    return first.get(goal)

ORACLES = {"shop": shop_oracle, "bank": bank_oracle, "house": house_oracle}

def believe(task, rng, cfg):
    """The facts of a demonstration: some shuffled where the task allows it, else the truth with stale values in it."""
    facts = copy.deepcopy(task.facts)
    fresh = task.shuffle and rng.random() < cfg.fresh
    for category in task.shuffle if fresh else []:
        facts[category] = dict(zip(facts[category], rng.sample([*facts[category].values()], len(facts[category]))))
    for category, stale in [] if fresh else task.stale.items():
        facts[category].update({key: value for key, value in stale.items() if rng.random() < cfg.stale})
    return facts

def blunder(task, move, wrong_answers, rng):
    """A wrong act turn in place of move: the answer to another task, or a call drawn at random from the schemas."""
    if isinstance(move, str):
        return rng.choice(wrong_answers[task.domain, task.goal[0][0]])
    function = rng.choice(task.tools)["function"]
    return [tool_call(function["name"], **{name: rng.choice(about["enum"]) if "enum" in about else rng.randint(1, 9)
                                           for name, about in function["parameters"]["properties"].items()})]

def demonstrate(task, facts, rng, cfg, wrong_answers):
    """A demonstration as [(tag, text)], later user turns tagged CONTEXT; None if the oracle sees no way or is slow."""
    world, heard, script = WORLDS[task.world](task, "demonstration", facts), [], []
    for number, goal in enumerate(task.goal):
        script += [(CONTEXT, task.user[number])] if number else []
        move = []
        while not isinstance(move, str):
            move = ORACLES[task.world](world, goal, heard)
            if move is None or len(heard) >= cfg.max_turns:
                return None
            if rng.random() < cfg.blunder:
                move = blunder(task, move, wrong_answers, rng)
            calls = [] if isinstance(move, str) else move
            script.append((ACT, "".join(map(call_text, calls)) or move))
            for call in calls:
                heard.append((call, world.call(call)))
                script.append((REHEARSE, compact(heard[-1][1])))
    return script

def as_episode(task, script):
    """A demonstration as if it had been a rehearsal; a long one may have been cut by a limit."""
    e = Episode(task, 0, over="done")
    e.row.extend([0], ACT, [-float(len(script))])       # the longer, the less likely: blunders make it longer
    for tag, text in script:
        said = parse_act(text) if tag == ACT else []
        if isinstance(said, str):
            e.answers.append(said)
            e.history.append(f"assistant: {said}")
        elif tag == REHEARSE:
            e.responses.append(text)
            e.history += [f"call: {compact(e.calls[len(e.responses) - 1])}", f"response: {text}"]
        e.calls += said if isinstance(said, list) else []
    return e

def with_memory(task, rng, cfg, wrong_answers):
    """A demonstration with a rehearsal memory: (task, script). In 70 of 100 the memory is good: all facts of the world
    are shuffled, the rehearsals know them, and nothing but the memory tells what to do. In the others rehearsals and
    world have beliefs of their own, so that a memory is useless or misleads, and copying it blindly is punished."""
    good, pool = rng.random() < 0.7, []
    facts = believe(*(replace(task, shuffle=[*task.facts]), rng, replace(cfg, fresh=1.0)) if good else (task, rng, cfg))
    cfg = replace(cfg, blunder=0.3 * cfg.blunder) if good else cfg          # what is to be learned shows more clearly
    for _ in range(rng.choice([1, 2, 4])):
        script = demonstrate(task, facts if good else believe(task, rng, cfg), rng, cfg, wrong_answers)
        pool += [as_episode(task, script)] if script else []
    entries, _ = digest(pool, cfg.memory_budget, lambda text: len(text) // 3)
    memory = MEMORY.format(entries=entries, use=rng.choice([REVISE, EXECUTE])) if entries else ""
    return replace(task, memory=memory), demonstrate(task, facts, rng, cfg, wrong_answers)

def corpus(tasks, cfg):
    """The corpus of the warm start, pairs (task, script): warm_steps x warm_batch without a memory; with --rehearsals
    also their share with one, in between."""
    rng, wrong, pairs = random.Random(f"demonstrations {cfg.seed}"), collections.defaultdict(list), []
    for task in tasks:
        wrong[task.domain, task.goal[0][0]] += [check["equals"] for check in task.checks if check["kind"] == "answer"]
    plain = cfg.warm_steps * cfg.warm_batch
    total = plain + round(plain * cfg.memories) if cfg.rehearsals else plain
    for tried in itertools.count():
        if len(pairs) == total:
            return rng.sample(pairs, total) if total > plain else pairs
        require(tried < 1000 + 10 * len(pairs),
                f"--tasks: the oracle sees no way to solve most of them in --max-turns {cfg.max_turns}")
        task = rng.choice(tasks)
        try:
            if len(pairs) >= plain:
                task, script = with_memory(task, rng, cfg, wrong)
            else:
                script = demonstrate(task, believe(task, rng, cfg), rng, cfg, wrong)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"task {task.id!r}: its 'goal', 'tools' or 'facts' are not what its world's oracle knows")
        pairs += [(task, script)] if script else []

def build_tokenizer(corpus):
    """A byte-level BPE learned from the corpus. White space, digits, letters and punctuation are split apart first, but
    not what frames calls and turns: names have the same tokens everywhere, so that copying is one rule, not a table."""
    split, level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    texts = ["system\nuser\nassistant\ntool\n"] * 100 + [
        text for task, script in corpus[:4000] for text in
        [task.system + task.memory, compact(task.tools), *task.user,
         *(re.sub("</?tool_call>", " ", text) for _, text in script)]]
    pieces = r'\{"name":"|","arguments":\{"|(system|user|assistant|tool)\n' + r"|\s|\d|[^\W\d_]+|[^\w\s]+|_"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        split(tokenizers.Regex(pieces), "isolated"), level(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        initial_alphabet=level.alphabet(), show_progress=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>",
                                                additional_special_tokens=["<|im_start|>"], chat_template=TINY_TEMPLATE)

def fit(policy, rows, cfg):
    """Next-token prediction on both roles' turns. Muon on the matrices learns to copy in half of AdamW's steps."""
    learn = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in learn.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in learn.items() if p.ndim != 2 or "embed" in name]
    peaks = {torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"): cfg.warm_lr}
    peaks.update({torch.optim.AdamW(others, weight_decay=0.0): cfg.warm_lr / 2} if others else {})      # none in LoRA
    size, rng, batches = cfg.warm_batch, random.Random(f"batches {cfg.seed}"), []
    for n in range(0, len(rows), 8 * size):             # rows of similar length side by side, to save padding
        near = sorted(rows[n:n + 8 * size], key=lambda row: len(row.ids))
        batches += rng.sample([near[m:m + size] for m in range(0, len(near), size)], -(-len(near) // size))
    bar = tqdm(batches, desc="warm start", unit="step", disable=None)
    for step, batch in enumerate(bar):
        sampled = padded([row.tags for row in batch], policy.device)[:, 1:] != CONTEXT                        # (B, T-1)
        loss = -row_logprobs(policy, batch, 1.0)[sampled].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        rate = min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / len(batches)))      # up, then down
        for optimizer, peak in peaks.items():
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        policy.model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")

SHAPES = {  # width, width between, layers, heads, key-value heads, width of a head, vocabulary: from config.json
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936), "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936),
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64, 49152)}

def random_model(tokenizer, shape, cfg):
    """A randomly initialised Qwen3: tiny, of less than a million parameters, or of a shape in SHAPES."""
    tiny = cfg.hidden, 3 * cfg.hidden, cfg.layers, cfg.heads, cfg.heads, cfg.hidden // cfg.heads, len(tokenizer)
    require(shape in ("tiny", *SHAPES), f"the shapes are tiny, {', '.join(SHAPES)}")
    width, between, layers, heads, kv_heads, head, vocabulary = tiny if shape == "tiny" else SHAPES[shape]
    torch.manual_seed(cfg.seed)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=between, tie_word_embeddings=True,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head,
        max_position_embeddings=4096, initializer_range=0.06 if shape == "tiny" else 0.02, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, attn_implementation=cfg.attention))

def script_rows(chat, task, script, rehearsal):
    """The rows that a rollout would have made of a script, with the same tags."""
    e, end = Episode(task, 0), next((i for i in chat.to_tool if i in chat.stop_ids), chat.tokenizer.eos_token_id)
    e.row.extend(chat.opening(task))
    for tag, text in script:
        if tag == REHEARSE and rehearsal == "prompted":
            chat.open_aside(e)
        if tag != CONTEXT:                              # later user turns are opened by the answers before them
            safe = text if tag == ACT else chat.escape(text)
            e.open_row.extend(chat.encode(safe) + [end], tag)
            act(chat, e, text) if tag == ACT else hear(chat, e, text, rehearsed=True)
    return e.rows

def warm_start(tasks, cfg, device, policy=None):
    """The base policy: the tiny model after a short supervised training on demonstrations, in place of pre-training.
    Their oracle errs at times and has stale beliefs, always the same ones: greedy decoding cannot average them away.
    The result lies beside the run folder, named by a hash of all that it depends on, and is used again."""
    require(all(task.world and task.goal for task in tasks), "a warm start needs the toy tasks: name a --model")
    pairs = corpus(tasks, cfg)                          # [(task, [(tag, text)])]
    if policy is None:
        tokenizer = build_tokenizer(pairs)
        policy = Policy(random_model(tokenizer, "tiny", cfg), tokenizer, device)
    rows = (row for task, script in pairs for row in script_rows(policy.chat, task, script, cfg.rehearsal))
    rows = list(itertools.islice(rows, len(pairs)))      # prompted rehearsals are rows too
    start = [p.double().abs().sum().item() for p in policy.model.parameters()]
    settings = [start, cfg.seed, cfg.warm_steps, cfg.warm_batch, cfg.warm_lr, cfg.lora, cfg.dtype, cfg.attention,
                cfg.threads, str(device), torch.__version__, policy.tokenizer.backend_tokenizer.to_str()]
    contents = b"".join(array.array("q", row.ids + row.tags).tobytes() for row in rows)
    folder = Path(cfg.out).parent / f"warm_start-{hashlib.sha256(repr(settings).encode() + contents).hexdigest()[:12]}"
    if not folder.is_dir():
        fit(policy, rows, cfg)
        policy.save(folder)
    return load_policy(str(folder), device, cfg)
