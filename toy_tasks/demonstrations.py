"""Demonstrations for the warm start of the tiny model: what stands in for pre-training on the toy suite. A scripted
oracle acts in each toy world, errs at times, and believes stale facts. Imported by `warm_start`, and for the
tokenizer of random:SHAPE."""
import collections, copy, itertools, random, re
import tokenizers, transformers
from envace_mini import (ACT, CONTEXT, REHEARSE, TINY_TEMPLATE, WORLDS, UserError, call_text, compact, require,
                         tool_call)

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

def demonstrate(task, rng, cfg, wrong_answers):
    """A demonstration as [(tag, text)], later user turns tagged CONTEXT; None if the oracle sees no way or is slow."""
    world, heard, script = WORLDS[task.world](task, "demonstration", believe(task, rng, cfg)), [], []
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

def corpus(tasks, cfg):
    """The corpus of the warm start: warm_steps x warm_batch pairs (task, script)."""
    rng, wrong, pairs = random.Random(f"demonstrations {cfg.seed}"), collections.defaultdict(list), []
    for task in tasks:
        wrong[task.domain, task.goal[0][0]] += [check["equals"] for check in task.checks if check["kind"] == "answer"]
    for tried in itertools.count():
        if len(pairs) == cfg.warm_steps * cfg.warm_batch:
            return pairs
        require(tried < 1000 + 10 * len(pairs),
                f"--tasks: the oracle sees no way to solve most of them in --max-turns {cfg.max_turns}")
        task = rng.choice(tasks)
        try:
            script = demonstrate(task, rng, cfg, wrong)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"task {task.id!r}: its 'goal', 'tools' or 'facts' are not what its world's oracle knows")
        pairs += [(task, script)] if script else []

def build_tokenizer(corpus):
    """A byte-level BPE learned from the corpus. White space, digits, letters and punctuation are split apart first, but
    not what frames calls and turns: names have the same tokens everywhere, so that copying is one rule, not a table."""
    split, level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
    texts = ["system\nuser\nassistant\ntool\n"] * 100 + [
        text for task, script in corpus[:4000] for text in
        [task.system, compact(task.tools), *task.user, *(re.sub("</?tool_call>", " ", text) for _, text in script)]]
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
