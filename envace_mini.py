#!/usr/bin/env python3
"""envace_mini: one policy acts, imagines the world's answer, and learns both from task success alone.

EnvACE ("Internalizing Environment Dynamics via World Rehearsal for Agentic RL", arXiv 2608.06197) trains a tool-using
language model without an environment in the loop. This file is the method, on a toy suite that a laptop can train:
  1. choose a few tasks; make a group of episodes of each                                          choose_tasks
  2. act: the policy emits a tool call, or an answer                                               rollout, act
  3. rehearse: the same policy plays the environment and emits the response to its call            rollout, hear
  4. go on from that response until the task is answered; reward the episode for task success      grade
  5. compare every episode with its group, once for each role: two baselines, one reward           role_advantages
  6. clipped policy gradient on the tokens that a role sampled, both roles at once                 surrogate_loss
  7. repeat. No response came from the world, yet the policy comes to know it                      train

One episode, one token sequence; the tags under it say who wrote each token and so what is trained:
  <system: tools> <user: task>  {"name":"go",...}<end>  <tool:>  {"room":"hall"}<end>  <assistant:>  done<end>
  CONTEXT ....................  ACT ..................  CONTEXT  REHEARSE ...........  CONTEXT ....  ACT .....

  python envace_mini.py                          train on the toy suite; evaluate in the real toy world before and after
  python envace_mini.py eval --temperature 0     success of the trained policy, greedy (--model FOLDER for any other)
  python envace_mini.py show                     one episode, token by token, and what the world would have said
  python envace_mini.py rehearse                 imagine in private, remember, then act once in the real toy world
  python envace_mini.py train --help             every flag of training, its default and its reason
Departures: here                                          in the paper, or in the official reference run
  inline rehearsal by default: one sequence, both roles   each rehearsal is a prompt of its own (--rehearsal prompted)
  a toy suite with worlds, checks in code                 published benchmarks, generated tasks, a model as judge
  warm start on demonstrations with stale beliefs         a pre-trained Qwen3
  a role alone in its group gets advantage 0              it keeps its raw reward
  inline, code refuses calls that do not fit the schemas  the rehearsal decides
  learning rate 4e-4, falling to a tenth; AdamW eps 1e-6  1e-6 and 1e-8 (--preset gpu starts from them)
"""
import argparse, collections, concurrent.futures, contextlib, copy, datetime, hashlib, importlib.util, itertools, json
import math, os, random, re, shutil, sys, time, weakref
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
import torch, transformers
from tqdm import tqdm

sys.modules["envace_mini"] = sys.modules[__name__]      # what toy_tasks/*.py import, also if this is run as a program
CONTEXT, ACT, REHEARSE = 0, 1, 2        # the role tag of every token: who wrote it
ROLE_NAMES = {ACT: "act", REHEARSE: "rehearse"}
RANK, PROCESSES = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))      # torchrun: one a GPU

class UserError(Exception):
    """A mistake of the user's (flag, file, folder): printed as one sentence, exit status 2, no traceback."""

def require(condition, message):
    """Raise UserError(message) unless the condition holds."""
    if not condition:
        raise UserError(message)
# ---- 1. Config: every flag, its default and its reason --------------------------------------------------------------
def option(default, help, choices=""):
    """A field of Config: its default, the help text of its flag, and its choices as words."""
    return field(default=default, metadata={"help": help, "choices": choices.split() or None})

@dataclass
class Config:
    """All settings of a run; each field is a flag of the same name (`--tasks-per-round 12`)."""
    out: str = option("runs/toy", "run folder; the same command goes on with a run that was interrupted")
    seed: int = option(0, "all random choices follow from it: on one machine's CPU, same seed, same numbers")
    device: str = option("auto", "cpu, cuda or cuda:N; auto takes the GPU where there is one")
    threads: int = option(2, "CPU threads of torch; more than there are free cores makes it several times slower")
    tasks: str = option("toy", "toy (the suite in toy_tasks/); a task file or a folder of task files of your own; "
                        "or a benchmark: bfcl:CATEGORY, tau2:DOMAIN, vita:DOMAIN, finmcp:FILE")
    tasks_dir: str = option("", "what you downloaded of a benchmark; vita: the clone's folder, finmcp: tool schemas")
    reward: str = option("auto", "verdict on a benchmark's task: static (ground truth alone), official (its own "
                         "scorer), judge (a model); auto: official if it has one", "auto static official judge")
    judge: str = option("", "URL of an OpenAI-compatible endpoint that judges, as http://localhost:8000/v1; its key "
                        "comes from the environment variable OPENAI_API_KEY")
    judge_model: str = option("", "the model that judges there")
    user: str = option("script", "who plays the user of a task that has one: script (nobody: one turn says all), "
                       "policy, or the URL of an OpenAI-compatible endpoint")
    user_model: str = option("", "the model that plays the user there")
    preset: str = option("cpu", "defaults of other flags: cpu (tiny model), gpu (Qwen3-0.6B, one card)", "cpu gpu")
    model: str = option("tiny", "tiny (built and warm-started here); a chat model's folder (a GGUF file in it will do) "
                        "or Hugging Face id; random:SHAPE (untrained: Qwen3-0.6B, Qwen3-1.7B, SmolLM2-135M)")
    warm_start: bool = option(False, "give another --model than tiny the warm start too")
    dtype: str = option("auto", "of matrix products; auto: bfloat16 for real models on a GPU; weights and log-probabili"
                        "ties are float32 all the same, but for weights frozen by --lora", "auto float32 bfloat16")
    attention: str = option("sdpa", "attention kernel of transformers", "sdpa eager")
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    lora: int = option(0, "rank of LoRA adapters on all linear layers (package peft); 0 trains all weights")
    thinking: str = option("off", "whether turns may think first, where the template has that switch", "off on")
    # the tiny model and its warm start
    hidden: int = option(128, "width of the tiny model, a multiple of 2 x heads")
    layers: int = option(3, "layers of the tiny model")
    heads: int = option(4, "attention heads of the tiny model")
    warm_steps: int = option(900, "optimiser steps on demonstrations; after too few it cannot copy what it reads")
    warm_batch: int = option(16, "demonstrations a step; small batches and many steps beat large batches here")
    warm_lr: float = option(6e-3, "Muon's learning rate for the matrices; AdamW takes half of it for the rest")
    blunder: float = option(0.17, "share of demonstrated act turns that are replaced by a wrong one")
    stale: float = option(0.7, "how often a demonstration believes a fact's stale value, where it has one")
    fresh: float = option(0.6, "share of demonstrations with shuffled facts, which teach reading the response")
    memories: float = option(0.75, "with --rehearsals: further demonstrations, which have a rehearsal memory (good, "
                             "useless or misleading), as a share of those without")
    # the rollout
    responder: str = option("rehearsal", "who answers: itself, a frozen model, the world", "rehearsal simulator world")
    rehearsal: str = option("inline", "inline: one row, one KV cache for both roles; prompted: a prompt of its own for "
                            "each response, which may show what the actor must not see", "inline prompted")
    simulator: str = option("base", "with --responder simulator: as --model, or base (train only: the initial policy)")
    temperature: float = option(1.0, "of sampling and of every log-probability; 0 is greedy (not in train)")
    max_turns: int = option(9, "act turns in an episode: the longest toy task needs 8, and one mistake is allowed")
    max_act_tokens: int = option(72, "tokens in an act turn; a call cut by the limit is never executed")
    max_response_tokens: int = option(32, "tokens in a rehearsed response")
    max_tokens: int = option(480, "tokens in an episode's act row, beside a memory; an episode that reaches a "
                             "limit is cut and graded as it is")
    # role-wise GRPO
    rounds: int = option(75, "rounds of rollout and update")
    tasks_per_round: int = option(24, "task instances in a round; each makes one group")
    group: int = option(10, "episodes of each task instance: they are each other's baseline")
    minibatches: int = option(8, "optimiser steps a round, each on its share of the groups")
    lr: float = option(4e-4, "AdamW's learning rate in training; it falls to a tenth of this by the last round")
    lr_warmup: int = option(10, "optimiser steps over which it rises from 0; without it a weak policy can break")
    adam_eps: float = option(1e-6, "AdamW's eps: gradients far below it move little; at 1e-8 a rare token's tiny ones "
                             "make full steps, and the tiny model's JSON wears out")
    clip: float = option(0.2, "how far a token's probability now / when sampled may leave 1 before it is cut")
    kl: float = option(0.0, "weight of the KL penalty to the initial policy; 0 keeps no copy of that policy")
    baseline: str = option("turn", "what a role's rewards are compared with: their mean over turns or over episodes, "
                           "or one mean for both roles (plain GRPO)", "turn trajectory pooled")
    aggregation: str = option("turn", "what weighs the same: a turn, a token, or a role", "turn token role")
    train_roles: str = option("act,rehearse", "which roles learn", "act,rehearse act rehearse")
    scale_advantages: bool = option(False, "divide a group's advantages by the standard deviation of its rewards")
    max_grad_norm: float = option(1.0, "gradients longer than this are scaled down to it")
    token_budget: int = option(2048, "padded tokens in one pass of an update: what fits caches and memory")
    eval_samples: int = option(4, "sampled episodes a held-out task, in train, eval and rehearse; --compare: seeds")
    probe_every: int = option(20, "rounds between two looks at the reality gap on held-out tasks; 0 for none")
    probe_tasks: int = option(40, "held-out tasks in such a look; each in the world and imagined, once")
    checkpoint_every: int = option(5, "rounds between two checkpoints, from which an interrupted run goes on")
    # private rehearsal
    rehearsals: int = option(0, "private rehearsals before the one execution that counts; in train: the warm start "
                             "teaches to read memories, and in the second half every second group acts with one")
    mode: str = option("parallel", "parallel: rehearsals know nothing of each other; sequential: each reads the memory "
                       "of those before it", "parallel sequential")
    memory: str = option("digest", "who condenses rehearsals: code (digest) or the policy (summary; for real models)",
                         "digest summary")
    memory_budget: int = option(100, "tokens of a rehearsal memory; the tiny model mixes up several entries")
    compare: bool = option(False, "all ways to spend 1 to 8 rehearsals on the run's tasks, by base and trained policy")
    split: str = option("eval", "which tasks eval, show and rehearse take", "eval train")
    task: str = option("", "id of the one task that show or rehearse takes; empty: show the first, rehearse all")

PRESETS = {"cpu": {}, "gpu": dict(                      # one card; group, tasks a round and lr as in the reference run
    model="Qwen/Qwen3-0.6B", gradient_checkpointing=True, tasks_per_round=16, group=4, minibatches=1, lr=1e-6,
    adam_eps=1e-8, rounds=200, token_budget=4096, memory_budget=1024, max_turns=12, max_act_tokens=256,
    max_response_tokens=128, max_tokens=4096)}

def check_config(cfg, command):
    """Refuse values that cannot work, in one sentence that names the flag."""
    may_be_zero = {"seed", "temperature", "rounds", "kl", "probe_every", "blunder", "stale", "fresh", "lora",
                   "memories", "rehearsals"}
    for f in fields(cfg):
        value, bound = getattr(cfg, f.name), "of at least" if f.name in may_be_zero else "above"
        fits = f.type not in (int, float) or (math.isfinite(value) and value >= 0 and (value or f.name in may_be_zero))
        require(fits, f"--{f.name.replace('_', '-')} must be a number {bound} 0, not {value}")
        require(f.type is not int or value < 2 ** 31, f"--{f.name.replace('_', '-')} {value}: it must be below 2 ** 31")
    require(max(cfg.blunder, cfg.stale, cfg.fresh, cfg.memories) <= 1,
            "--blunder, --stale, --fresh and --memories are shares between 0 and 1")
    require(cfg.hidden % (2 * cfg.heads) == 0, f"--hidden {cfg.hidden} must be a multiple of 2 x --heads {cfg.heads}")
    require(command != "train" or cfg.temperature > 0 and cfg.group > 1,
            "training needs --temperature above 0, and --group of at least 2: episodes are compared within their group")
    require(command != "train" or cfg.train_roles != "rehearse" or cfg.responder == "rehearsal",
            "--train-roles rehearse needs --responder rehearsal: nothing else would be trained")
    require(command != "train" or cfg.minibatches <= cfg.tasks_per_round,
            f"--minibatches {cfg.minibatches} must not exceed --tasks-per-round {cfg.tasks_per_round}")
    require(cfg.device in ("auto", "cpu") or
            re.fullmatch(r"cuda(:\d+)?", cfg.device) and int(cfg.device[5:] or 0) < torch.cuda.device_count(),
            f"--device {cfg.device}: not auto, cpu, cuda or cuda:N, or a GPU that this torch does not see")
    require(cfg.dtype != "bfloat16" or pick_device(cfg).type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            "--dtype bfloat16: this CPU lacks it; use float32")
    require(cfg.thinking == "off" or cfg.rehearsal == "prompted" or cfg.responder == "world" and command != "train",
            "--thinking on needs --rehearsal prompted: in one row, the rehearse role would read the actor's thoughts")
    require(not cfg.lora or importlib.util.find_spec("peft"), "--lora needs the package peft: pip install peft")

def pick_device(cfg):
    """The torch device that --device names; auto means the first GPU, or this process's own, where there is one."""
    return torch.device(cfg.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
# ---- 2. Tasks, checks, worlds ---------------------------------------------------------------------------------------
JSON_TYPES = dict(string=[str], integer=[int], number=[int, float], boolean=[bool], array=[list], object=[dict])
LEDGER = collections.Counter()          # calls to worlds by purpose: rollout, evaluation, grading, demonstration

@dataclass(eq=False)
class Task:
    """One thing to do: what the policy reads (system, tools, user turns), how it is graded (checks), and its world."""
    id: str
    system: str
    tools: list                                        # OpenAI function schemas
    user: list                                         # the user's turns, in order
    checks: list                                       # see `grade`
    domain: str = ""
    split: str = "train"
    reference: list = field(default_factory=list)      # calls that solve it: [{"name", "arguments"}]
    world: str = ""                                    # a key of WORLDS, or nothing: graded by calls and answers alone
    facts: dict = field(default_factory=dict)          # {category: {key: value}}: what is true in the world
    memory: str = ""                                   # what private rehearsals left behind; part of the prompt
    secret: str = ""                                   # for the rehearse role only: text, or function(pending call)
    history: list = field(default_factory=list)        # messages before the first user turn, in OpenAI's form
    later: dict = field(default_factory=dict)          # {number of a user turn: tools that exist from then on}
    speaker: str = ""                                  # a key of USERS: who goes on after the turns in `user`
    hidden: dict = field(default_factory=dict)         # what a benchmark's world, user, checks know: in no prompt
    stale: dict = field(default_factory=dict)          # as facts, but wrong: what demonstrations may believe
    shuffle: list = field(default_factory=list)        # categories whose values demonstrations may permute
    start: dict = field(default_factory=dict)          # the world's state when the episode begins
    goal: list = field(default_factory=list)           # one goal a user turn, read by the demonstrations' oracle only

def compact(value):
    """JSON without spaces, so that equal content has equal tokens wherever it stands."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

def read_json(text):
    """The value of a JSON text that a model wrote, or None where it is malformed."""
    try:
        value = json.loads(text)
        compact(value).encode()                         # a lone surrogate can stand in JSON, but in no file
        return value
    except (ValueError, RecursionError):
        return None

def tool_call(name, /, **arguments):
    """A call as it is passed around: {"name": str, "arguments": dict}."""
    return {"name": name, "arguments": arguments}

def misfit(value, schema, name, part="argument"):
    """Why a JSON value does not fit a JSON Schema (type, enum, minimum, items, properties, required of it), or None."""
    if type(value) not in JSON_TYPES.get(schema.get("type"), [type(value)]):
        return f"wrong type of {name}"
    low = isinstance(value, (int, float)) and value < schema.get("minimum", value)
    if low or value not in schema.get("enum", [value]):
        return f"wrong value of {name}"
    missing = [key for key in schema.get("required", []) if isinstance(value, dict) and key not in value]
    if missing:
        return f"missing {part} {missing[0]}"
    parts = [(f"{name}[{n}]", item, schema["items"]) for n, item in enumerate(value)] if "items" in schema else []
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        parts = [(key, item, known.get(key, more)) for key, item in value.items()]
    for key, item, about in parts:
        reason = f"unknown {part}" if about is False else isinstance(about, dict) and misfit(item, about, key, part)
        if reason:
            return reason

def check_call(tools, call):
    """Why a call does not fit the tool schemas, in words, or None."""
    schema = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}.get(call["name"])
    if schema is None:
        return "unknown tool"
    return misfit(call["arguments"], {"additionalProperties": False, **schema}, "arguments")

class World:
    """A toy environment of one episode: facts that calls read, and a state that they change."""
    tools, categories, kept, blank = (), (), (), {}     # kept: the categories that calls change, a part of the state
    def __init__(self, task, purpose, facts=None):
        self.schemas, self.purpose, self.facts = sum(task.later.values(), task.tools), purpose, facts or task.facts
        self.state = copy.deepcopy({**self.blank, **task.start, **{name: self.facts[name] for name in self.kept}})
    def call(self, call):
        """The response, a JSON object; {"error": reason} for a call that does not fit the schemas."""
        LEDGER[self.purpose] += 1
        error = check_call(self.schemas, call)
        try:
            return {"error": error} if error else getattr(self, call["name"])(**call["arguments"])
        except (KeyError, TypeError, AttributeError):   # a user's schemas may allow what this world does not have
            return {"error": "impossible"}

class Shop(World):
    """Prices to look up and compare, and things to buy with few coins, once and for all."""
    tools, categories, blank = ("price", "buy"), ("prices",), {"coins": 0, "bought": []}
    def price(self, item):
        return {"price": self.facts["prices"][item]}
    def buy(self, item):
        if self.facts["prices"][item] > self.state["coins"]:
            return {"error": "too dear"}
        self.state["coins"] -= self.facts["prices"][item]
        self.state["bought"].append(item)
        return {"bought": item}

class Bank(World):
    """Balances and transfers; a transfer above the balance changes nothing but is fined for good."""
    tools, categories, kept, blank = ("balance", "transfer"), ("balances",), ("balances",), {"fined": 0}
    def balance(self, name):
        return {"balance": self.state["balances"][name]}
    def transfer(self, source, target, amount):
        if amount > self.state["balances"][source]:
            self.state["fined"] += 1
            return {"error": "fined"}
        self.state["balances"][target] += amount
        self.state["balances"][source] -= amount
        return {"ok": True}

class House(World):
    """Rooms, some with walls between them, and items to fetch in few moves: the first step needs the map."""
    tools, categories, blank = ("go", "take"), ("exits", "places"), {"held": []}
    def go(self, direction):
        room = self.facts["exits"].get(f"{self.state['room']} {direction}")
        self.state["room"] = room or self.state["room"]
        return {"room": room} if room else {"error": "wall"}
    def take(self, item):
        if item in self.state["held"] or self.facts["places"][item] != self.state["room"]:
            return {"error": "not here"}
        self.state["held"] = sorted(self.state["held"] + [item])
        return {"took": item}

WORLDS = {"shop": Shop, "bank": Bank, "house": House}       # files in toy_tasks/ add to these, and to:
VERDICTS = {}           # {kind of check: function(episode, check) -> verdict in [0, 1], None where none could be had}
USERS = {}              # {speaker: function(policy, episodes, cfg, generator) -> their next user turns, None to end}

def load_tasks(where, cfg=None):
    """The tasks of the toy suite, of a JSON file or folder of the user's (every field is checked), of a benchmark."""
    if where != "toy":
        from toy_tasks import own_tasks
        return own_tasks.load(where, cfg or Config(tasks=where))
    files = [Path(__file__).parent / "toy_tasks" / f"{name}.json" for name in ("bank", "house", "shop")]
    contents = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
    return [Task(**{"domain": name, **data, **task}) for name, data in contents.items() for task in data.pop("tasks")]

def grade(task, calls, answers, episode=None):
    """(reward in [0, 1], a verdict for each check). Checks read the actor's calls and answers, and the state that a new
    World reaches when the calls are replayed in it; no response, rehearsed or real, is ever read. Kinds: `calls` (all
    were made), `max_calls` (no more than that), `answer` (to a user turn, the last if not said), `state` (these keys of
    the world's), and those of VERDICTS, which read the whole episode. Verdicts of checks without a weight are factors
    of the reward; those with one share it by weight. Without a verdict (a judge is down) the reward is None."""
    world = WORLDS[task.world](task, "grading") if any(check["kind"] == "state" for check in task.checks) else None
    for call in calls if world else []:
        world.call(call)
    answers = answers + [""] * (len(task.user) - len(answers))              # a user turn that was never reached
    verdicts = []
    for check in task.checks:
        if check["kind"] == "calls":
            verdicts.append(all(call in calls for call in check["calls"]))
        elif check["kind"] == "max_calls":
            verdicts.append(len(calls) <= check["calls"])
        elif check["kind"] == "state":
            verdicts.append(all(world.state.get(key) == value for key, value in check["equals"].items()))
        elif check["kind"] in VERDICTS:
            verdicts.append(VERDICTS[check["kind"]](episode, check))
        else:
            verdicts.append(plain(answers[check.get("turn", -1)]) == plain(check["equals"]))
    weights = [check.get("weight", 0.0) for check in task.checks]
    if None in verdicts:
        return None, verdicts
    share = sum(w * ok for w, ok in zip(weights, verdicts)) / sum(weights) if any(weights) else 1.0
    return share * math.prod(ok for ok, check in zip(verdicts, task.checks) if "weight" not in check), verdicts

def plain(text):
    """An answer as checks compare it: lower case, single spaces, no full stop at its end."""
    return " ".join(text.casefold().split()).rstrip(".! ")
# ---- 3. Roles and tokens --------------------------------------------------------------------------------------------
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MARK = "\ue000"         # put inside control strings that occur in data, so that they are encoded as plain text
TINY_TEMPLATE = """{%- if tools or messages[0].role == 'system' -%}<|im_start|>system
{{- '\\n' + messages[0].content if messages[0].role == 'system' else '' }}{%- for t in tools or [] -%}{{ '\\n' ~
t.function.name ~ '(' ~ (t.function.parameters or {}).properties | join(',') ~ ') ' ~ t.function.description }}
{%- endfor %}{{ eos_token ~ '\\n' }}{% endif -%}
{%- for m in messages if m.role != 'system' -%}<|im_start|>{{ m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] -%}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} |
tojson(separators=(',', ':')) }}</tool_call>{%- endfor -%}
{{ eos_token ~ '\\n' }}{% endfor -%}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""
FALLBACK_TOOLS = """\n\nYou can call these functions (JSON Schema, one a line):\n{tools}
To call one, write <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>. When done, answer in plain words."""
SIMULATOR = """You are the environment behind these functions (JSON Schema): {tools}
Reply to the pending call with what its function returns, one JSON object and nothing else, in keeping with all earlier
responses. Refuse what does not fit with {{"error":"unknown tool"}}, or likewise "missing argument NAME",
"unknown argument", "wrong type of NAME", "wrong value of NAME". Calls that solve the task: {reference}\n{secret}"""

@dataclass
class Turn:
    """A stretch of a row that one role sampled: row.ids[start:end], its end-of-turn token included."""
    role: int
    start: int
    end: int

@dataclass
class Row:
    """One token sequence, as a forward pass sees it, and what is known of each token; the lists have equal length."""
    ids: list = field(default_factory=list)
    tags: list = field(default_factory=list)           # CONTEXT, ACT or REHEARSE
    logprobs: list = field(default_factory=list)       # of sampled tokens, as they were sampled; 0.0 for CONTEXT
    turns: list = field(default_factory=list)
    def extend(self, ids, tag=CONTEXT, logprobs=None):
        """The one place where tokens and tags are written. Sampled tokens go on with the role's turn or open one."""
        if tag != CONTEXT:
            if not (self.turns and (self.turns[-1].role, self.turns[-1].end) == (tag, len(self.ids))):
                self.turns.append(Turn(tag, len(self.ids), len(self.ids)))
            self.turns[-1].end += len(ids)
        self.ids += ids
        self.tags += [tag] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)

def call_text(call):
    """A call as the policy writes it."""
    return f"<tool_call>{compact({'name': call['name'], 'arguments': call['arguments']})}</tool_call>"

def spoken(text):
    """What follows the <think>...</think> that may open a turn: thoughts are trained, but nobody else reads them."""
    return text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text

def parse_act(text):
    """What an act turn says: a list of calls, or an answer (str), or None where a call is malformed. Takes any text."""
    text = spoken(text)
    if text.rfind("<tool_call>") > text.rfind("</tool_call>"):
        return None                                     # never closed: the expression would search for long
    calls, rest = [read_json(body) for body in TOOL_CALL.findall(text)], TOOL_CALL.sub("", text)
    valid = not re.search("</?tool_call>", rest) and all(
        isinstance(c, dict) and type(c.get("name")) is str and type(c.get("arguments")) is dict for c in calls)
    return ([{key: call[key] for key in ("name", "arguments")} for call in calls] or rest.strip()) if valid else None

class ChatFormat:
    """Turns messages into tokens by the model's own chat template; supplies what that template, probed once, does not
    know. What stands between turns is found by rendering, so that rows grow token by token, never rendered again."""
    def __init__(self, tokenizer, stop_ids, thinking="off"):
        self.tokenizer, self.stop_ids, self.thinking = tokenizer, set(stop_ids), thinking == "on"
        controls = [text for text in map(str, tokenizer.added_tokens_decoder.values()) if text.strip()]
        self.controls = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or r"(?!)")
        allowed = self.stop_ids | set(self.encode("<think></think><tool_call></tool_call>"))
        self.forbidden = set(tokenizer.all_special_ids) - allowed           # whoever samples one of these forges a turn
        self.opened = weakref.WeakKeyDictionary()       # opening ids by task; one with a memory lives for a round only
        self.missing = set()                                                # see `probe`
        self.missing = self.probe()
        self.to_tool, self.tool_to_tool, self.to_act = self.separators("tool")
        self.to_user, _, self.user_to_act = self.separators("user")
        self.thought = "<think>" if tokenizer.decode(self.to_act).rstrip().endswith("<think>") else ""  # opened for us
    def probe(self):
        """What the template drops or refuses, of: system text, tools, calls in our form, tool responses."""
        user, said = {"role": "user", "content": "USER"}, {"role": "assistant", "content": "SAID"}
        about = {"type": "object", "properties": {"ARG": {"type": "string"}}, "required": ["ARG"]}
        tool = {"type": "function", "function": {"name": "TOOL", "description": "ABOUT", "parameters": about}}
        call = {"id": "call00000", "type": "function", "function": {"name": "TOOL", "arguments": {"ARG": "VALUE"}}}
        trials = {"system": ([{"role": "system", "content": "SYSTEM"}, user], None, ["SYSTEM"]),
                  "tools": ([user], [tool], ["TOOL", "ABOUT", "ARG"]),
                  "calls": ([user, {**said, "tool_calls": [call]}], None, ["<tool_call>", '"TOOL"', '"VALUE"']),
                  "tool": ([user, said, {"role": "tool", "content": "HEARD"}], None, ["HEARD"])}
        return {name for name, (messages, tools, sentinels) in trials.items()
                if not all(sentinel in self.attempt(messages, tools) for sentinel in ["USER", *sentinels])}
    def attempt(self, messages, tools=None):
        """`render`, or "" where the template refuses: templates are other people's programs, raising what they like."""
        try:
            return self.render(messages, tools)
        except Exception:
            return ""
    def render(self, messages, tools=None):
        """The prompt of messages (the first a system text): by the template where it can, else in our own words."""
        messages = [dict(m) for m in messages]
        if tools and self.missing & {"tools", "calls"}:
            messages[0]["content"] += FALLBACK_TOOLS.format(tools="\n".join(compact(t["function"]) for t in tools))
            tools = None
        if "system" in self.missing:
            system = messages.pop(0)
            messages[0]["content"] = f"{system['content']}\n\n{messages[0]['content']}"
        for m in messages:
            if m.get("tool_calls") and "calls" in self.missing:
                m["content"] += "".join(call_text(call["function"]) for call in m.pop("tool_calls"))
            if m["role"] == "tool" and "tool" in self.missing:
                m.update(role="user", content=f"<tool_response>\n{m['content']}\n</tool_response>")
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True,
                                                  enable_thinking=self.thinking)
    def separators(self, role):
        """Ids between an assistant's text and a turn of `role`, between two of these, and between that and an act."""
        said, first, second = "\x02A\x03", "\x02B\x03", "\x02C\x03"
        turns = [("system", "s"), ("user", "u"), ("assistant", said), (role, first), (role, second)]
        messages = [{"role": speaker, "content": content} for speaker, content in turns]
        before, after = self.render(messages[:4]).split(said)[1].split(first)
        both = self.attempt(messages)                   # a template may refuse two such turns in a row
        between = both.split(first)[1].split(second)[0] if first in both else "\n</tool_response>\n<tool_response>\n"
        return self.encode(before), self.encode(between), self.encode(after)
    def escape(self, text):
        """Data made safe for `encode`: control strings come out as plain text, those of one character as `?`."""
        text = text.replace(MARK, "").encode("utf-8", "replace").decode("utf-8")
        return self.controls.sub(lambda m: m[0][0] + MARK + m[0][1:] if len(m[0]) > 1 else "?", text)
    def encode(self, text):
        return [i for piece in text.split(MARK) for i in self.tokenizer.encode(piece, add_special_tokens=False)]
    def decode(self, ids):
        """The text of a sampled turn, without its end-of-turn token."""
        ids = ids[:-1] if ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    def opening(self, task):
        """Ids of the system text, the tools, the first user turn and the header of the first act turn."""
        if task not in self.opened:
            messages = [{"role": "system", "content": task.system + task.memory}, *task.history,
                        {"role": "user", "content": task.user[0]}]
            messages, tools = (json.loads(self.escape(json.dumps(part, ensure_ascii=False)))
                               for part in (messages, task.tools))
            text = self.attempt(messages, tools)
            require(text, f"task {task.id}: the model's chat template refuses its messages")
            self.opened[task] = self.encode(text)
        return list(self.opened[task])
    def open_aside(self, e):
        """Open a row for a prompted rehearsal: instruction, schemas, reference, secret; all that was said; the call."""
        secret = e.task.secret(e.pending[0]) if callable(e.task.secret) else e.task.secret
        system = SIMULATOR.format(tools=compact([tool["function"] for tool in e.tools]), secret=secret,
                                  reference=compact(e.task.reference))
        said = "\n".join([*map(compact, e.task.history), f"user: {e.task.user[0]}", *e.history,
                          f"pending call: {compact(e.pending[0])}"])
        e.aside = Row()
        e.asides.append(e.aside)
        e.aside.extend(self.encode(self.render([{"role": "system", "content": self.escape(system)},
                                                {"role": "user", "content": self.escape(said)}])))
    def join(self, row, separator):
        """Append a separator. It begins with the end of the turn before it, which a sampled turn has already."""
        stops = [n for n, i in enumerate(separator) if i in self.stop_ids]
        row.extend(separator[stops[0] + 1:] if stops and row.ids[-1] in self.stop_ids else separator)
    def add_user(self, row, text):
        """Append a user turn and the header of the act turn that answers it."""
        self.join(row, self.to_user)
        row.extend(self.encode(self.escape(text)))
        self.join(row, self.user_to_act)
# ---- 4. Policy: load, sample, log-probabilities ---------------------------------------------------------------------
class Policy:
    """A causal language model and its chat format: actor and world model in one set of weights."""
    def __init__(self, model, tokenizer, device, thinking="off", bfloat16=False):
        ends = model.generation_config.eos_token_id
        ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        self.model, self.tokenizer, self.device, self.bfloat16 = model.to(device).eval(), tokenizer, device, bfloat16
        self.positions = getattr(model.config, "max_position_embeddings", None) or 10 ** 9
        self.adapters = contextlib.nullcontext          # of a frozen copy under LoRA: switches the adapters off
        self.chat = ChatFormat(tokenizer, [i for i in ends if i is not None], thinking)
        if self.chat.missing:
            print(f"the chat template does not know {sorted(self.chat.missing)}: our own wording serves there")
    def logits(self, **inputs):
        with self.adapters(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.model(**inputs).logits
    def save(self, folder):
        """Write model (adapters merged) and tokenizer as save_pretrained does; first beside the folder, then there."""
        part, lora = Path(f"{folder}.part"), hasattr(self.model, "merge_and_unload")
        shutil.rmtree(part, ignore_errors=True)
        (copy.deepcopy(self.model).float().merge_and_unload() if lora else self.model).save_pretrained(part)
        self.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    def frozen_copy(self):
        """A frozen copy of the policy as it is. Under LoRA: the same weights, with the adapters switched off."""
        frozen, lora = copy.copy(self), hasattr(self.model, "disable_adapter")
        frozen.adapters = self.model.disable_adapter if lora else contextlib.nullcontext
        frozen.model = self.model if lora else copy.deepcopy(self.model).requires_grad_(False)
        return frozen

def load_policy(name, device, cfg=Config()):
    """A policy by name: a folder that save_pretrained wrote, a folder with one GGUF file, a Hugging Face id, or
    random:SHAPE. Raises UserError if it is none of these, or cannot serve."""
    half = cfg.dtype == "bfloat16" or cfg.dtype == "auto" and device.type == "cuda" and cfg.model != "tiny"
    kwargs = {"attn_implementation": cfg.attention, "dtype": torch.bfloat16 if half and cfg.lora else torch.float32}
    ggufs = [] if Path(name, "config.json").exists() else sorted(Path(name).glob("*.gguf"))
    source, dense = ({"gguf_file": ggufs[0].name}, transformers.GgufConfig(dequantize=True)) if ggufs else ({}, None)
    for package in ("gguf", "accelerate") if ggufs else ():
        require(importlib.util.find_spec(package), f"{name}: a GGUF file needs {package}: pip install {package}")
    folder = name.startswith(("/", ".", "~")) or Path(name).is_dir()        # else a Hugging Face id
    require(name and (not folder or ggufs or Path(name, "config.json").exists()),
            f"{name or '--model'}: no such folder, or neither config.json nor a GGUF file in it")
    try:
        if name.startswith("random:"):
            from toy_tasks import demonstrations
            tokenizer = demonstrations.build_tokenizer([(task, []) for task in load_tasks("toy")])
            model = demonstrations.random_model(tokenizer, name[7:], cfg).to(kwargs["dtype"])
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **source)
            kwargs.update({"quantization_config": dense} if dense else {})
            model = transformers.AutoModelForCausalLM.from_pretrained(name, **source, **kwargs)
        full = {*(getattr(model.config, "layer_types", None) or [])} <= {"full_attention"}
        require(full and len(tokenizer) > 256, "it needs a tokenizer, and layers of full attention only")
        if not tokenizer.chat_template:
            print(f"{name}: no chat template; our own serves")
            tokenizer.chat_template = TINY_TEMPLATE
        if cfg.gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if cfg.lora:
            import peft
            model = peft.get_peft_model(model, peft.LoraConfig(
                r=cfg.lora, lora_alpha=2 * cfg.lora, target_modules="all-linear", task_type="CAUSAL_LM"))
        policy = Policy(model, tokenizer, device, cfg.thinking, half)
        for module in policy.model.modules():           # layers recompute in train mode only; dropout stays off
            module.training = isinstance(module, transformers.modeling_layers.GradientCheckpointingLayer)
        return policy
    except Exception as error:                          # the libraries raise many kinds; all mean the same to the user
        hint = f"; no such folder here; with network: hf download {name}" if isinstance(error, OSError) else ""
        raise UserError(f"{name}: cannot be loaded ({(str(error) or repr(error)).strip().splitlines()[0]}){hint}")

def padded(lists, device):
    """Lists of numbers as one tensor (B, T), zeros at the ends: a causal model cannot look there, so needs no mask."""
    width = max(map(len, lists))
    return torch.tensor([x + [0] * (width - len(x)) for x in lists], device=device)

def row_logprobs(policy, rows, temperature):
    """Log-probability of every token but the first, given those before it: (B, T-1), float32 or wider."""
    ids = padded([row.ids for row in rows], policy.device)                                                    # (B, T)
    logits = policy.logits(input_ids=ids, use_cache=False)[:, :-1]                                         # (B, T-1, V)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)                             # (B, T-1)

class Stream:
    """Rows that grow side by side, each at a place of its own (in a call, a response, a header), and their KV cache."""
    def __init__(self, policy, rows):
        self.policy, self.rows, self.cache = policy, rows, transformers.DynamicCache()
        prompts = list(dict.fromkeys(tuple(row.ids) for row in rows))       # a group shares its prompt: compute it once
        self.mask = torch.zeros(len(prompts), 0, dtype=torch.long, device=policy.device)       # (B, L): 0 marks a hole
        self.forward([list(prompt[:-1]) for prompt in prompts])
        self.fed = [len(row.ids) - 1 for row in rows]                       # tokens of each row that the cache holds
        self.select([prompts.index(tuple(row.ids)) for row in rows])
    def select(self, index):
        index = torch.tensor(index, dtype=torch.long, device=self.policy.device)
        self.mask = self.mask[index]
        self.cache.batch_select_indices(index)
    def keep(self, rows):
        """Drop the rows that are not among these, once they are an eighth of all: dropping copies the cache."""
        wanted = {id(row) for row in rows}
        index = [n for n, row in enumerate(self.rows) if id(row) in wanted]
        if len(index) <= 0.875 * len(self.rows):
            self.rows, self.fed = [self.rows[n] for n in index], [self.fed[n] for n in index]
            self.select(index)
    @torch.inference_mode()
    def forward(self, gained):
        """Feed each row its gained tokens, padded on the left with holes; logits of the last position, (B, V)."""
        width, device = max(len(ids) for ids in gained), self.policy.device
        ids = torch.tensor([[0] * (width - len(g)) + g for g in gained], device=device)                       # (B, W)
        mask = torch.tensor([[0] * (width - len(g)) + [1] * len(g) for g in gained], device=device)           # (B, W)
        self.mask = torch.cat([self.mask, mask], dim=1)                                                       # (B, L)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -width:]                                        # (B, W)
        return self.policy.logits(input_ids=ids, attention_mask=self.mask, position_ids=positions, cache=self.cache,
                                  use_cache=True, logits_to_keep=1)[:, -1].float()                            # (B, V)
    def step(self, episodes, temperature, generator):
        """Feed these episodes' rows their backlog: tokens that are not in the cache yet (a row that waits gets a hole).
        A row with none left gains a sampled token (the likeliest if temperature is 0). Returns who gained one."""
        speakers = {id(e.open_row): e for e in episodes}
        backlog = [len(row.ids) - n if id(row) in speakers else 0 for row, n in zip(self.rows, self.fed)]
        if not any(backlog):
            return []                                               # none of them is in this stream
        width = max(backlog) if max(backlog) > 16 else 1            # a long response is fed in one pass
        gained = [row.ids[n:n + min(width, b)] for row, n, b in zip(self.rows, self.fed, backlog)]
        self.fed = [n + len(ids) for n, ids in zip(self.fed, gained)]
        logp = (self.forward(gained) / (temperature or 1.0)).log_softmax(-1)                                  # (B, V)
        token = torch.multinomial(logp.exp(), 1, generator=generator) if temperature else logp.argmax(-1, keepdim=True)
        sampled = zip(token.squeeze(1).tolist(), logp.gather(1, token).squeeze(1).tolist())                   # 2 x (B,)
        spoke = []
        for row, fed, (token, logprob) in zip(self.rows, self.fed, sampled):
            if id(row) in speakers and fed == len(row.ids):
                row.extend([token], speakers[id(row)].role, [logprob])
                spoke.append(speakers[id(row)])
        return spoke
# ---- 5. Rollout -----------------------------------------------------------------------------------------------------
@dataclass
class Episode:
    """One attempt at a task: its row, the calls it made, the responses it saw, its answers, and how it was graded."""
    task: Task
    group: int
    row: Row = field(default_factory=Row)
    calls: list = field(default_factory=list)
    responses: list = field(default_factory=list)      # texts, one for each call that was answered
    rehearsed: list = field(default_factory=list)      # whether a model imagined that response
    answers: list = field(default_factory=list)        # one for each user turn that was brought to its end
    ends: list = field(default_factory=list)           # how many calls had been made by then
    steps: list = field(default_factory=list)          # how many calls had been made after each act turn with calls
    history: list = field(default_factory=list)        # what was said so far, a line each: all but thoughts
    asides: list = field(default_factory=list)         # rows of prompted rehearsals, one for each response
    aside: Row = None                                  # the one of them that is being written
    pending: list = field(default_factory=list)        # calls that wait for a response
    waiting: bool = False                              # for a user who is played by a model
    over: str = ""                                     # why it ended: done, malformed, truncated
    reward: float = 0.0                                # None: there is no verdict; left out of baseline and loss
    verdicts: list = field(default_factory=list)
    world: World = None                                # with the real world as responder
    @property
    def role(self):
        return REHEARSE if self.pending else ACT
    @property
    def rows(self):
        return [self.row, *self.asides]
    @property
    def open_row(self):
        return self.aside or self.row
    @property
    def tools(self):
        later = [tools for turn, tools in self.task.later.items() if int(turn) <= len(self.answers)]
        return sum(later, self.task.tools)
    @property
    def scored(self):
        return self.reward is not None
    @property
    def success(self):
        return self.over == "done" and all(v == 1 for v in self.verdicts) if self.scored else None

def rollout(policy, tasks, cfg, responder, generator, temperature, groups=None, simulator=None, purpose="rollout"):
    """One graded episode for every entry of tasks, all side by side: some act while others rehearse, in one batch.
    With a simulator, that frozen model speaks the rehearse turns; `training_samples` then trains the act role only."""
    episodes = [Episode(task, group) for task, group in zip(tasks, groups or range(len(tasks)))]
    positions = min(policy.positions, (simulator or policy).positions)
    more = cfg.memory_budget + 64 if any(task.memory for task in tasks) else 0         # 64: the words around a memory
    cfg = replace(cfg, max_tokens=min(cfg.max_tokens + more, positions))
    for e in episodes:
        e.row.extend(policy.chat.opening(e.task))
        e.world = WORLDS[e.task.world](e.task, purpose) if responder == "world" else None
        e.over = "truncated" if len(e.row.ids) >= cfg.max_tokens else ""
    live, prompted = [e for e in episodes if not e.over], cfg.rehearsal == "prompted"
    rows, policy_roles = [e.row for e in live], [ACT] if simulator or prompted else [ACT, REHEARSE]
    streams = [(Stream(policy, rows), policy_roles)] if live else []
    streams += [(Stream(simulator, rows), [REHEARSE])] if live and simulator and not prompted else []
    while live:
        if prompted and all(e.pending and not e.aside for e in live):           # all wait: each rehearses in a new row
            for e in live:
                policy.chat.open_aside(e)
                e.over = "truncated" if len(e.aside.ids) + cfg.max_response_tokens > positions else ""
            asides = [e.aside for e in live if not e.over]
            streams[1:] = [(Stream(simulator or policy, asides), [REHEARSE])] if asides else []
        for stream, roles in streams:
            stream.keep([row for e in live for row in (e.row, e.open_row)])
            speakers = [e for e in live if e.role in roles and not e.over]      # act, or rehearse what the call induces
            for e in stream.step(speakers, temperature, generator):
                end_turn(policy.chat, e, cfg)
        asked = [e for e in live if e.waiting and not e.over]
        for e, text in zip(asked, USERS[asked[0].task.speaker](policy, asked, cfg, generator) if asked else []):
            go_on(policy.chat, e, text)
        live = [e for e in live if not e.over]
    outside = any(check["kind"] in VERDICTS for task in tasks for check in task.checks)
    with concurrent.futures.ThreadPoolExecutor(16 if outside else 1) as threads:        # a judge takes its time
        for e, (reward, e.verdicts) in zip(episodes, threads.map(
                lambda e: grade(e.task, e.calls, e.answers, e), episodes)):
            e.reward, e.world = 0.0 if e.over == "malformed" else reward, None
    return episodes

def end_turn(chat, e, cfg):
    """If the token just sampled completes a turn: read the turn, and open the next one or end the episode."""
    turn = e.open_row.turns[-1]
    ids = e.open_row.ids[turn.start:turn.end]
    if ids[-1] not in chat.stop_ids:
        limit = cfg.max_act_tokens if turn.role == ACT else cfg.max_response_tokens
        e.over = "truncated" if len(ids) >= limit or len(e.row.ids) >= cfg.max_tokens else ""
    elif chat.forbidden & set(ids):
        e.over = "malformed"
    else:
        text = (chat.thought if turn.role == ACT or e.aside else "") + chat.decode(ids)
        act(chat, e, text) if turn.role == ACT else hear(chat, e, text, rehearsed=True)
        answer_known(chat, e, cfg.rehearsal)
        acts = sum(t.role == ACT for t in e.row.turns)
        if not e.over and (len(e.row.ids) >= cfg.max_tokens or (acts >= cfg.max_turns and not e.pending)):
            e.over = "truncated"

def act(chat, e, text):
    """Take an act turn: calls to be answered, an answer to the user, or a malformed call, which ends the episode."""
    said = parse_act(text)
    if said is None:
        e.over = "malformed"
    elif isinstance(said, list):
        e.calls, e.pending, e.steps = e.calls + said, list(said), [*e.steps, len(e.calls + said)]
        chat.join(e.row, chat.to_tool)
    else:
        e.answers, e.ends = [*e.answers, said], [*e.ends, len(e.calls)]
        e.history.append(f"assistant: {said}")
        e.waiting = bool(e.task.speaker) and len(e.answers) >= len(e.task.user)
        if not e.waiting:
            go_on(chat, e, next(iter(e.task.user[len(e.answers):]), None))

def go_on(chat, e, text):
    """The user's next turn; None ends the episode."""
    e.waiting, e.over = False, "done" if text is None else ""
    if not e.over:
        e.history.append(f"user: {text}")
        chat.add_user(e.row, text)

def hear(chat, e, text, rehearsed):
    """Take a response, whose tokens stand in the row if it was rehearsed inline, and open the next turn."""
    call, response = e.pending.pop(0), spoken(text).strip().removesuffix("</tool_response>").strip()
    if e.aside or not rehearsed:
        e.row.extend(chat.encode(chat.escape(response)))
    e.aside, e.responses, e.rehearsed = None, e.responses + [response], e.rehearsed + [rehearsed]
    e.history += [f"call: {compact(call)}", f"response: {response}"]
    chat.join(e.row, chat.tool_to_tool if e.pending else chat.to_act)

def answer_known(chat, e, rehearsal):
    """Answer calls that need no imagination: all in the real world; inline, those that do not fit the schemas."""
    while e.pending and ((error := check_call(e.tools, e.pending[0])) and rehearsal == "inline" or e.world):
        hear(chat, e, compact({"error": error} if error else e.world.call(e.pending[0])), rehearsed=False)

def spread(jobs, run):
    """run(jobs), a result for each job. Where torchrun started several processes, each runs its share, and all get all
    results, in the order of the jobs."""
    parts = [run(jobs[RANK::PROCESSES])] * PROCESSES
    if PROCESSES > 1:
        torch.distributed.all_gather_object(parts, parts[0])
    done = [None] * len(jobs)
    for rank, part in enumerate(parts):
        done[rank::PROCESSES] = part
    return done

def everyone(value):
    """The value that each process has, in a list; nobody goes on before all have come here."""
    return spread(range(PROCESSES), lambda _: [value])

def first_of_all(make):
    """What make() returns, called by the first process and then by the others, which find on the disk what it left."""
    made = error = None
    try:
        made = make() if RANK == 0 else None
    except UserError as mistake:
        error = mistake
    if error := everyone(error)[0]:                     # then nobody goes on
        raise error
    return make() if RANK else made
# ---- 6. Role-wise GRPO ----------------------------------------------------------------------------------------------
def role_advantages(episodes, baseline, scale=False):
    """{(episode number, role): A}: how much better an episode did than its group, as seen from one role: A = R - b. For
    one role in one group, b is the mean reward over that role's turns (`turn`, as in the official reference run), over
    the episodes in which it speaks (`trajectory`), or over all episodes, whatever the role (`pooled`, plain GRPO). If a
    role speaks in one episode only, A = 0 (but for `pooled`). Unscored episodes take no part. `scale` divides by the
    deviation of R."""
    advantages = {}
    for group, role in itertools.product({e.group for e in episodes}, ROLE_NAMES):
        members = [i for i, e in enumerate(episodes) if e.group == group and e.scored]
        turns = {i: sum(t.role == role for row in episodes[i].rows for t in row.turns) for i in members}
        times = {i: {"turn": n, "trajectory": min(n, 1), "pooled": 1}[baseline] for i, n in turns.items()}
        rewards = [episodes[i].reward for i in members for _ in range(times[i])]    # each as often as it counts
        b, signal = mean(rewards), len(set(rewards)) > 1                    # else exactly 0, whatever the rounding
        spread = math.sqrt(mean((reward - b) ** 2 for reward in rewards)) if scale and signal else 1.0
        advantages.update({(i, role): (episodes[i].reward - b) / spread if signal else 0.0 for i in turns if turns[i]})
    return advantages

def token_weights(rows, aggregation, roles):
    """A weight for every token of every row; over an update they sum to 1, so the loss is a plain sum, whatever the
    micro-batches, padding and order. What weighs the same: every turn, shared by its tokens (`turn`, to which the
    reference run's token mean over micro-batches of one turn amounts), every `token`, or each `role`."""
    turns = sum(t.role in roles for row in rows for t in row.turns)
    tokens = collections.Counter(tag for row in rows for tag in row.tags if tag in roles)           # of each role
    weights = [[0.0] * len(row.ids) for row in rows]
    for t, row_weights in [(t, w) for row, w in zip(rows, weights) for t in row.turns if t.role in roles]:
        equals = {"turn": turns * (t.end - t.start), "token": tokens.total(), "role": len(tokens) * tokens[t.role]}
        row_weights[t.start:t.end] = [1 / equals[aggregation]] * (t.end - t.start)
    return weights

Sample = collections.namedtuple("Sample", "row weights advantages")   # ready for the loss: two more values a token
def training_samples(episodes, cfg):
    """The samples of one update. Rows without signal (gradient 0) are left out; the weights' denominator has them."""
    episodes = [e for e in episodes if e.scored]
    advantages = role_advantages(episodes, cfg.baseline, cfg.scale_advantages)
    roles = {role for role, name in ROLE_NAMES.items() if name in cfg.train_roles.split(",")}
    roles -= {REHEARSE} if cfg.responder == "simulator" else set()          # those tokens are another model's
    rows = [(i, row) for i, e in enumerate(episodes) for row in e.rows]
    weights = token_weights([row for _, row in rows], cfg.aggregation, roles)
    samples = [Sample(row, row_weights, [advantages.get((i, tag), 0.0) for tag in row.tags])
               for (i, row), row_weights in zip(rows, weights)]
    samples = [s for s in samples if any(s.weights)]                        # something of it is trained
    return [s for s in samples if cfg.kl or any(weight * value for weight, value in zip(s.weights, s.advantages))]

def micro_batches(samples, token_budget):
    """Batches of rows of similar length, each with at most token_budget padded tokens (or of a single longer row)."""
    batches = []
    for sample in sorted(samples, key=lambda s: len(s.row.ids)):
        if not batches or len(sample.row.ids) * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
        batches[-1].append(sample)
    return batches

def surrogate_loss(policy, batch, cfg, reference=None):
    """One micro-batch's share of the loss (shares add up to the update's); of every token the ratio of its probability
    now to when it was sampled, and whether that was clipped, both (B, T-1). Clipped surrogate of PPO (arXiv 1707.06347)
    with a weight a token in place of a mean. The KL penalty, where there is a reference, is GRPO's low-variance
    estimate exp(d) - d - 1 (arXiv 2402.03300), d = log(reference / policy)."""
    rows = [s.row for s in batch]
    old = padded([row.logprobs for row in rows], policy.device)[:, 1:]                                        # (B, T-1)
    weight = padded([s.weights for s in batch], policy.device)[:, 1:]                                         # (B, T-1)
    advantage = padded([s.advantages for s in batch], policy.device)[:, 1:]                                   # (B, T-1)
    new = row_logprobs(policy, rows, cfg.temperature)                                                         # (B, T-1)
    ratio = torch.where(weight > 0, new - old, 0.0).exp()                                                     # (B, T-1)
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - cfg.clip, 1 + cfg.clip) * advantage)         # (B, T-1)
    loss = -(weight * objective).sum()
    if reference:
        base = torch.no_grad()(row_logprobs)(reference, rows, cfg.temperature)                                # (B, T-1)
        gap = torch.where(weight > 0, base - new, 0.0)                                                        # (B, T-1)
        loss = loss + cfg.kl * (weight * (gap.exp() - gap - 1)).sum()
    return loss, ratio.detach(), ((weight > 0) & (objective < ratio * advantage)).detach()

def update(policy, optimizer, samples, cfg, reference=None):
    """One optimiser step: (gradient norm, largest |ratio - 1|, share of tokens clipped), or None if not finite. Several
    processes share the samples and add their gradients up: the step does not depend on how many they are."""
    optimizer.zero_grad(set_to_none=True)
    total, error, cut = 0.0, 0.0, 0
    for batch in micro_batches(samples[RANK::PROCESSES], cfg.token_budget):
        loss, ratio, clipped = surrogate_loss(policy, batch, cfg, reference)
        loss.backward()
        total, error, cut = total + loss.item(), max(error, (ratio - 1).abs().max().item()), cut + clipped.sum().item()
    for p in [p for p in policy.model.parameters() if p.requires_grad and PROCESSES > 1]:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
    total, error, cut = (merge(part) for merge, part in zip((sum, max, sum), zip(*everyone((total, error, cut)))))
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), cfg.max_grad_norm).item()
    if not math.isfinite(total) or not math.isfinite(norm):
        return None
    optimizer.step()
    return norm, error, cut / sum(weight > 0 for s in samples for weight in s.weights)
# ---- 7. Warm start --------------------------------------------------------------------------------------------------
def warm_start(tasks, cfg, device, policy=None):
    """The base policy, in place of pre-training; see toy_tasks/demonstrations.py, which imports from this file."""
    from toy_tasks import demonstrations
    return demonstrations.warm_start(tasks, cfg, device, policy)
# ---- 8. Training loop -----------------------------------------------------------------------------------------------
def train(cfg):
    """The whole job: base policy, evaluation, rounds of rehearsal and update, evaluation. Returns the run's result."""
    device, tasks = pick_device(cfg), load_tasks(cfg.tasks, cfg)
    learn, held_out = ([task for task in tasks if task.split == split] for split in ("train", "eval"))
    require(learn, f"--tasks {cfg.tasks}: no task has the split train")
    policy = None if cfg.model == "tiny" else load_policy(cfg.model, device, cfg)
    simulator, clock = load_simulator(cfg, device), Clock()
    run = first_of_all(lambda: RunFolder(cfg))          # nothing is written before all of the above is known to work
    if run.result:
        print(f"{run.path} holds the finished run of this configuration")
        return run.result
    if cfg.warm_start or not policy:
        policy = first_of_all(lambda: warm_start(learn, cfg, device, policy))
    learn, held_out = (fitting(policy, part, cfg) for part in (learn, held_out))
    probed = random.Random("probe").sample(held_out, min(cfg.probe_tasks, len(held_out)))
    clock.lap("warm_start")
    simulator, reference = frozen_simulator(policy, simulator, cfg), policy.frozen_copy() if cfg.kl else None
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, cfg.lr, eps=cfg.adam_eps, weight_decay=0.0)
    state = run.resume(policy, optimizer, clock)
    if not state["base"]:
        state["base"] = evaluate(policy, held_out, cfg, "base", cfg.eval_samples)
        clock.lap("eval")
    rounds = range(state["round"], cfg.rounds)
    for number in tqdm(rounds, "training", cfg.rounds, unit="round", initial=state["round"], disable=RANK or None):
        metrics, episodes = train_round(policy, optimizer, learn, cfg, number, simulator, reference, clock)
        state["round"] = number + 1
        if cfg.probe_every and state["round"] % cfg.probe_every == 0:
            look = evaluate(policy, probed, cfg, f"probe {state['round']}", 1, greedy=False)
            state["probe"] = {key: look[key] for key in ("world_success", "imagined_success", "reality_gap")}
            clock.lap("eval")
        state["world_calls"] += metrics["world_calls"]
        state["skipped"] = 0 if metrics["steps"] else state["skipped"] + metrics["skipped_steps"]
        run.log({**metrics, **state["probe"]}, episodes[:2])
        tqdm.write(status_line(metrics, state["probe"], clock))
        require(metrics["unscored"] + metrics["malformed"] < len(episodes) or not metrics["unscored"],
                f"{run.path}: stopped, a whole round got no verdict: does the judge, or the user's model, reply?")
        require(state["skipped"] < 10, f"{run.path}: stopped after 10 steps without a finite loss; lower --lr")
        if state["round"] % cfg.checkpoint_every == 0 and not state["skipped"] and RANK == 0:
            run.checkpoint(policy, optimizer, state, clock)
    trained = evaluate(policy, held_out, cfg, "trained", cfg.eval_samples)
    clock.lap("eval")
    return run.finish(policy, state, trained, clock)

def load_simulator(cfg, device):
    """The model that --simulator names for --responder simulator; None for any other responder, and for base."""
    wanted = cfg.responder == "simulator" and cfg.simulator != "base"
    return load_policy(cfg.simulator, device, cfg) if wanted else None

def frozen_simulator(policy, simulator, cfg):
    """Who answers calls with --responder simulator, else None: the one loaded, which must read the policy's tokens, or
    a frozen copy of the policy."""
    simulator = simulator or (policy.frozen_copy() if cfg.responder == "simulator" else None)
    require(not simulator or simulator.tokenizer.get_vocab() == policy.tokenizer.get_vocab(),
            f"--simulator {cfg.simulator}: its tokenizer is not the policy's")
    return simulator

def fitting(policy, tasks, cfg):
    """The tasks whose prompt leaves room for an act turn; says how many do not."""
    require(cfg.responder != "world" or all(t.world for t in tasks), "--responder world: not all tasks have one")
    limit = min(cfg.max_tokens, policy.positions) - cfg.max_act_tokens
    fit = [task for task in tasks if len(policy.chat.opening(task)) <= limit]
    if len(fit) < len(tasks):
        print(f"{len(tasks) - len(fit)} of {len(tasks)} tasks are left out: the prompt is too long for --max-tokens")
    require(fit or not tasks, "--max-tokens: no task's prompt leaves room for --max-act-tokens")
    return fit

def choose_tasks(tasks, cfg, number):
    """The tasks of one round: every task comes once before any comes again, in an order fixed by the seed."""
    order = (t for n in itertools.count() for t in random.Random(f"order {cfg.seed} {n}").sample(tasks, len(tasks)))
    return list(itertools.islice(order, number * cfg.tasks_per_round, (number + 1) * cfg.tasks_per_round))

def train_round(policy, optimizer, tasks, cfg, number, simulator, reference, clock):
    """A group of episodes for each chosen task, then cfg.minibatches optimiser steps. Returns (metrics, episodes)."""
    chosen, before = choose_tasks(tasks, cfg, number), LEDGER["rollout"]                                    # step 1
    groups = [n for n in range(len(chosen)) for _ in range(cfg.group)]
    if cfg.rehearsals and number >= cfg.rounds // 2:    # every second group acts with a memory; before, it cost reward
        chosen[::2] = private_rehearsal(policy, chosen[::2], cfg, f"round {number}")[0]
    generator = seeded(policy.device, cfg.seed, "round", number)
    episodes = spread(groups, lambda part: rollout(policy, [chosen[n] for n in part], cfg, cfg.responder, generator,
                                                   cfg.temperature, part, simulator))                   # steps 2 to 4
    clock.lap("rollout", tokens=sum(len(row.ids) for e in episodes for row in e.rows))
    steps = []
    for m in range(cfg.minibatches):
        samples = training_samples([e for e in episodes if e.group % cfg.minibatches == m], cfg)            # step 5
        pace = min(1.0, (number * cfg.minibatches + m + 1) / cfg.lr_warmup) * (1 - 0.9 * number / cfg.rounds)
        optimizer.param_groups[0]["lr"] = cfg.lr * pace
        steps.append(update(policy, optimizer, samples, cfg, reference) if samples else ())     # step 6; (): no signal
        clock.lap("update", tokens=sum(len(s.row.ids) for s in samples))
    return round_metrics(episodes, steps, number, sum(everyone(LEDGER["rollout"] - before))), episodes

def round_metrics(episodes, steps, number, world_calls):
    """A line of metrics.jsonl; README has the glossary. Nothing in it depends on the clock."""
    endings, made = collections.Counter(e.over for e in episodes), [step for step in steps if step]
    variety = collections.Counter(group for group, _ in {(e.group, e.reward) for e in episodes if e.scored})
    line = {"round": number, "reward": mean(e.reward for e in episodes), "success": mean(e.success for e in episodes),
            "no_signal": mean(variety[e.group] < 2 for e in episodes), "grad_norm": mean(norm for norm, _, _ in made),
            "fidelity": mean(same for _, same in fidelity(episodes)), "clipped": mean(cut for _, _, cut in made),
            "first_ratio_error": made[0][1] if made else None, "steps": len(made), "skipped_steps": steps.count(None),
            "truncated": endings["truncated"], "malformed": endings["malformed"],
            "unscored": sum(not e.scored for e in episodes), "world_calls": world_calls}
    for role, name in ROLE_NAMES.items():
        surprise = [-logprob for e in episodes for row in e.rows
                    for logprob, tag in zip(row.logprobs, row.tags) if tag == role]
        line.update({f"{name}_tokens": len(surprise), f"{name}_entropy": mean(surprise)})
    return line

def status_line(m, probe, clock):
    """What a round prints: its metrics, the last look at held-out tasks, speeds."""
    reward, truth, gap, norm = ("  -  " if value is None else f"{value:5.2f}" for value in (
        m["reward"], m["fidelity"], probe.get("reality_gap"), m["grad_norm"]))
    return (f"round {m['round']:3d}  reward {reward}  no signal {m['no_signal']:4.0%}  fidelity {truth}  reality gap "
            f"{gap}  grad norm {norm}  tokens/s {clock.speed('rollout')} rollout {clock.speed('update')} update")

def peak_memory():
    """The most memory that this process held, in GiB: on the GPU if it used one, else main memory (0 on Windows)."""
    used = sum(torch.cuda.max_memory_allocated(n) for n in range(torch.cuda.device_count()))
    if used or sys.platform == "win32":
        return round(used / 2 ** 30, 2)
    import resource                                     # counts KiB, on a Mac bytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (30 if sys.platform == "darwin" else 20), 2)

class Clock:
    """Seconds and tokens by kind of work; kept out of metrics.jsonl, which must not differ between equal runs."""
    def __init__(self):
        self.seconds, self.tokens, self.last = collections.Counter(), collections.Counter(), time.time()
    def lap(self, kind, tokens=0):
        before, self.last = self.last, time.time()
        self.seconds[kind] += self.last - before
        self.tokens[kind] += tokens
    def speed(self, kind):
        return round(self.tokens[kind] / self.seconds[kind]) if self.seconds[kind] else 0
# ---- 9. Private rehearsal and committed execution -------------------------------------------------------------------
MEMORY = "\n\nPrivate rehearsals, best first:\n{entries}\nNone of this has happened yet. {use}"
REVISE, EXECUTE = "Rehearse again, and better.", "Now act for real: every action is final."
SUMMARY = """Below is a task, and what you imagined when you rehearsed it in private.
Say in a few sentences how to do it when it counts, and what to avoid."""

def plan(e):
    """All that an episode did, calls and answers, as one text."""
    return compact([e.calls, e.answers])

def self_judgement(e):
    """What the policy itself can tell of a rehearsal, to sort by, better is higher: whether it came to its end, and how
    likely all that it did and imagined was. It asks neither checks nor world. On the toys agreement between rehearsals
    and the absence of imagined errors choose worse: "not here" may well be true."""
    return e.over == "done", sum(sum(row.logprobs) for row in e.rows)

def digest(pool, budget, size):
    """(memory entries as text, the rehearsals kept): the best first, every plan once, while size(text) <= budget."""
    kept, entries, plans = [], [], [plan(e) for e in pool]
    for e in sorted(pool, key=self_judgement, reverse=True):
        errors = any('"error"' in response for response in e.responses)
        ending = "unfinished" if e.over != "done" else "with errors" if errors else "well"
        steps = " ".join(line.partition(": ")[2] for line in e.history)
        entry = f"{plans.count(plan(e))} of {len(pool)}, {ending}: {steps}"
        if plan(e) not in map(plan, kept) and size("\n".join([*entries, entry])) <= budget:
            kept, entries = [*kept, e], [*entries, entry]
    return "\n".join(entries), kept

def remember(policy, tasks, pools, cfg, use):
    """The tasks with a memory of their pools of rehearsals in the prompt, and the rehearsals that each memory keeps.
    Raises UserError if the budget holds no entry of any; a task whose memory stays empty is left as it is."""
    size = lambda text: len(policy.chat.encode(policy.chat.escape(text)))
    texts, kept = zip(*(digest(pool, cfg.memory_budget, size) for pool in pools))
    require(any(texts) or not any(pools), f"--memory-budget {cfg.memory_budget}: no entry of a memory is so short")
    texts = summarise(policy, tasks, texts, cfg) if cfg.memory == "summary" and any(texts) else texts
    return [replace(task, memory=MEMORY.format(entries=text, use=use)) if memory else task
            for task, text, memory in zip(tasks, texts, kept)], kept

def summarise(policy, tasks, texts, cfg):
    """The policy's own words for each digest, at most cfg.memory_budget tokens."""
    prompts = [[{"role": "system", "content": SUMMARY},
                {"role": "user", "content": f"{task.system}\n{task.user[0]}\n\n{text}"}]
               for task, text in zip(tasks, texts)]
    generator = seeded(policy.device, cfg.seed, "summary")
    return spread(prompts, lambda part: compose(policy, part, cfg.memory_budget, cfg.temperature, generator))

def compose(policy, prompts, limit, temperature, generator):
    """What the policy writes in reply to each prompt (a list of messages), at most limit tokens."""
    writers, chat = [Episode(None, 0) for _ in prompts], policy.chat
    for e, messages in zip(writers, prompts):
        e.row.extend(chat.encode(chat.render([{**m, "content": chat.escape(m["content"])} for m in messages])))
    stream, live = writers and Stream(policy, [e.row for e in writers]), writers
    while live:
        stream.step(live, temperature, generator)
        live = [e for e in live if e.row.ids[-1] not in chat.stop_ids and not (
            e.row.turns and e.row.turns[-1].end - e.row.turns[-1].start >= limit)]
    return [spoken(chat.thought + chat.decode(e.row.ids[e.row.turns[-1].start:])).strip() for e in writers]

def private_rehearsal(policy, tasks, cfg, label):
    """Imagine every task cfg.rehearsals times; the world is not touched. Returns the tasks with a memory for the one
    committed execution, the rehearsals that each memory keeps, and all of them. Without any, tasks stay as they are."""
    pools, at_once = [[] for _ in tasks], cfg.rehearsals if cfg.mode == "parallel" else 1
    for n in range(0, cfg.rehearsals, at_once or 1):
        guided = remember(policy, tasks, pools, cfg, REVISE)[0] if n else tasks
        imagined = run_tasks(policy, guided, cfg, "rehearsal", cfg.temperature, f"{label}: rehearsal {n}", at_once)
        pools = [[*pool, *imagined[m * at_once:(m + 1) * at_once]] for m, pool in enumerate(pools)]
    return *remember(policy, tasks, pools, cfg, EXECUTE), pools
# ---- 10. Evaluation, logging, checkpoints ---------------------------------------------------------------------------
def mean(values):
    """The mean of numbers or truth values, of those that are not None; None if there are none."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None

def seeded(device, *names):
    """A random generator that depends on the names alone: a resumed run draws what an uninterrupted one would."""
    names += (f"process {RANK}",) * (RANK > 0)          # each process draws its own
    return torch.Generator(device).manual_seed(int(hashlib.sha256(repr(names).encode()).hexdigest()[:14], 16))

def compare_responses(e):
    """[(equal as JSON, what a fresh World answers after the same calls)] for every answered call of an episode."""
    world = WORLDS[e.task.world](e.task, "grading")
    truths = [compact(world.call(call)) if imagined else text       # real ones, and refusals by code, are what they are
              for call, text, imagined in zip(e.calls, e.responses, e.rehearsed)]
    key = lambda text: text if (value := read_json(text)) is None else json.dumps(value, sort_keys=True)
    return [(key(text) == key(truth), truth) for text, truth in zip(e.responses, truths)]

def fidelity(episodes):
    """[(tool, equal)] for every imagined response: whether it equals what the World answers after the same calls."""
    return [(call["name"], same) for e in episodes if e.task.world
            for call, imagined, (same, _) in zip(e.calls, e.rehearsed, compare_responses(e)) if imagined]

def run_tasks(policy, tasks, cfg, responder, temperature, label, samples=1, simulator=None):
    """`samples` graded episodes of each task, for evaluation; the random numbers follow from the seed and the label."""
    jobs, done, size = [task for task in tasks for _ in range(samples)], [], cfg.tasks_per_round * cfg.group
    generator = seeded(policy.device, cfg.seed, label, responder)
    for n in tqdm(range(0, len(jobs), size), desc=label, unit="batch", leave=False, disable=RANK or None):
        done += spread(jobs[n:n + size], lambda part: rollout(
            policy, part, cfg, responder, generator, temperature, None, simulator, "evaluation"))
    for e, task in zip(done, jobs):                     # other processes sent copies
        e.task = task
    return done

def by_domain(episodes):
    """{domain: its episodes}, in alphabetical order."""
    return {name: [e for e in episodes if e.task.domain == name] for name in sorted({e.task.domain for e in episodes})}

def evaluate(policy, tasks, cfg, label, samples, greedy=True):
    """Success on tasks in the World (sampled, greedy) and as imagined; fidelity; reality gap (imagined minus world
    success, on tasks with a world); the same by domain."""
    with_world = [task for task in tasks if task.world]
    world = run_tasks(policy, with_world, cfg, "world", cfg.temperature, f"{label}: world", samples)
    best = run_tasks(policy, with_world, cfg, "world", 0.0, f"{label}: world, greedy") if greedy else []
    imagined = run_tasks(policy, tasks, cfg, "rehearsal", cfg.temperature, f"{label}: imagined", samples)
    def measures(*parts):
        real, surest, dreamt = (mean(e.success for e in part) for part in parts)
        both = mean(e.success for e in parts[2] if e.task.world)
        return {"world_success": real, "world_success_greedy": surest, "imagined_success": dreamt,
                "fidelity": mean(same for _, same in fidelity(parts[2])),
                "reality_gap": None if None in (real, both) else both - real}
    parts, pairs = [by_domain(episodes) for episodes in (world, best, imagined)], fidelity(imagined)
    lines = [f"{label}, {where}: {line.strip()}" for where, part in (("world", world), ("imagined", imagined))
             for line in reports().report(part, samples, "eval")]
    return {**measures(world, best, imagined), "report": lines,
            "fidelity_by_tool": {tool: mean(ok for name, ok in pairs if name == tool) for tool in sorted(dict(pairs))},
            "by_domain": {domain: measures(*(part.get(domain, []) for part in parts)) for domain in parts[2]}}

def write_json(path, content):
    """Write a JSON file beside its place and move it there, so that it is never half written. One process does."""
    part = Path(f"{path}.part")
    if RANK == 0:
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)

class RunFolder:
    """config.json, metrics.jsonl, episodes.jsonl, checkpoint.pt, and at the end result.json and model/."""
    def __init__(self, cfg):
        self.cfg, self.path = cfg, Path(cfg.out)
        config, result, last = (self.path / name for name in ("config.json", "result.json", "checkpoint.pt"))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            saved = dict(json.loads(config.read_text("utf-8"))) if last.exists() or result.exists() else asdict(cfg)
            write_json(config, saved)
            self.result = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"--out {self.path}: the run folder cannot be written or read ({error})")
        other = [f"{key} is {saved.get(key)!r} there and {value!r} here" for key, value in asdict(cfg).items()
                 if key not in ("out", "token_budget", "gradient_checkpointing") and saved.get(key) != value]
        require(not other, f"--out {self.path} holds a run of another configuration: {'; '.join(other)}")
    def log(self, metrics, episodes):
        """Append a line to metrics.jsonl, and the episodes, readable, to episodes.jsonl."""
        lines = [{"round": metrics["round"], "task": e.task.id, "user": e.task.user, "reward": e.reward,
                  "ended": e.over, "calls": e.calls, "responses": e.responses, "answers": e.answers} for e in episodes]
        for name, rows in (("metrics.jsonl", [metrics]), ("episodes.jsonl", lines)) if RANK == 0 else ():
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write("".join(compact(row) + "\n" for row in rows))
    def checkpoint(self, policy, optimizer, state, clock):
        part = self.path / "checkpoint.part"
        weights = {name: p.data for name, p in policy.model.named_parameters() if p.requires_grad}
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "state": state,
                    "seconds": dict(clock.seconds), "tokens": dict(clock.tokens)}, part)
        os.replace(part, self.path / "checkpoint.pt")
    def resume(self, policy, optimizer, clock):
        """Load the last checkpoint, if there is one, and drop what was logged after it. Returns the run's state."""
        state = {"round": 0, "base": None, "probe": {}, "world_calls": 0, "skipped": 0}
        if (self.path / "checkpoint.pt").exists():
            try:
                saved = torch.load(self.path / "checkpoint.pt", map_location="cpu")
            except Exception as error:                  # torch raises many kinds for a damaged file
                raise UserError(f"{self.path / 'checkpoint.pt'}: cannot be read ({error!r}); delete it or change --out")
            policy.model.load_state_dict(saved["model"], strict=False)
            optimizer.load_state_dict(saved["optimizer"])
            state = saved["state"]
            clock.seconds.update(saved["seconds"])
            clock.tokens.update(saved["tokens"])
            print(f"going on with {self.path} at round {state['round']}")
        for path in (self.path / "metrics.jsonl", self.path / "episodes.jsonl") if RANK == 0 else ():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            kept = [line for line in lines if (read_json(line) or {}).get("round", state["round"]) < state["round"]]
            path.write_text("".join(kept), encoding="utf-8")
        return state
    def finish(self, policy, state, trained, clock):
        """Save the policy and write result.json; returns its content."""
        if RANK == 0:
            policy.save(self.path / "model")
        spent, total = clock.seconds, sum(clock.seconds.values())
        train = spent["rollout"] + spent["update"]
        seconds = {"warm_start": spent["warm_start"], "train": train, "eval": spent["eval"], "total": total}
        result = {"base": state["base"], "trained": trained, "world_calls_in_rollouts": state["world_calls"],
                  "episodes": state["round"] * self.cfg.tasks_per_round * self.cfg.group, "seed": self.cfg.seed,
                  "seconds": {kind: round(spent, 1) for kind, spent in seconds.items()}, "config": asdict(self.cfg),
                  "tokens_per_second": {kind: clock.speed(kind) for kind in ("rollout", "update")},
                  "peak_memory_gib": peak_memory()}
        write_json(self.path / "result.json", result)
        return result
# ---- 11. Commands ---------------------------------------------------------------------------------------------------
def open_policy(cfg):
    """(policy, tasks of the split, simulator) for eval and show."""
    trained = str(Path(cfg.out, "model").resolve())
    require(cfg.model != "tiny" or Path(trained).is_dir(), f"{trained}: no such folder; train first, or give --model")
    policy = load_policy(trained if cfg.model == "tiny" else cfg.model, pick_device(cfg), cfg)
    tasks = [task for task in load_tasks(cfg.tasks, cfg) if task.split == cfg.split]
    require(tasks, f"--split {cfg.split}: --tasks {cfg.tasks} has no such task")
    tasks = fitting(policy, tasks, cfg)
    require(cfg.responder != "simulator" or cfg.simulator != "base", "--simulator: name a model folder")
    return policy, tasks, frozen_simulator(policy, load_simulator(cfg, policy.device), cfg)

def reports():
    """The commands, which measure and print. Imported late: they import from this file."""
    from toy_tasks import reports
    return reports

MODEL_FLAGS = "preset seed device threads model dtype attention "
BENCH_FLAGS = MODEL_FLAGS + """max_act_tokens group max_tokens tasks_per_round hidden layers heads
    gradient_checkpointing lora lr token_budget"""
SAVED_FLAGS = MODEL_FLAGS + """thinking out tasks tasks_dir reward judge judge_model user user_model split rehearsal
    temperature max_turns max_act_tokens max_response_tokens max_tokens tasks_per_round group """
TRAIN_FLAGS = " ".join(f.name for f in fields(Config) if f.name not in ("compare", "split", "task"))
COMMANDS = {  # flags, defaults of its own, purpose; the function is reports.command_NAME
    "train": (TRAIN_FLAGS, {}, "train a policy, evaluate before and after"),
    "eval": (SAVED_FLAGS + "responder simulator eval_samples", {"model": "tiny", "responder": "world"},
             "success of a policy on one split"),
    "show": (SAVED_FLAGS + "responder simulator task baseline scale_advantages", {"model": "tiny", "group": 4},
             "one episode, token by token, and the world"),
    "rehearse": (SAVED_FLAGS + "task eval_samples rehearsals mode memory memory_budget compare",
                 {"model": "tiny", "rehearsals": 4}, "imagine in private, remember, then act once in the world"),
    "bench": (BENCH_FLAGS, {}, "speed, memory and precision with random weights, as a JSON line")}

class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are UserErrors like all others."""
    def error(self, message):
        raise UserError(f"{message}; --help lists every flag")

def parse_flags(arguments):
    """(command, Config) from the command line; no command means train."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["train", *arguments]
    named = re.findall(r"--preset[= ](\w+)", " ".join(arguments))       # read first: it changes the others' defaults
    preset = PRESETS.get(named[-1], {}) if named else {}
    parser = Parser(prog="envace_mini.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    for command, (flags, defaults, help) in COMMANDS.items():
        sub = commands.add_parser(command, help=help, description=help, allow_abbrev=False)
        for f in [f for f in fields(Config) if f.name in flags.split()]:
            default = {**preset, **defaults}.get(f.name, f.default)
            choices, flag = f.metadata["choices"], argparse.BooleanOptionalAction
            kind = {"action": flag} if f.type is bool else {"type": f.type, "choices": choices}
            about = f"{f.metadata['help']} (default: {'none' if default == '' else default})"
            sub.add_argument("--" + f.name.replace("_", "-"), default=default, help=about, **kind)
    flags = vars(parser.parse_args(arguments))
    return flags.pop("command"), Config(**flags)

def join_processes():
    """Let this process know the others that torchrun started; only the first one prints."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=datetime.timedelta(days=1))
    sys.stdout = open(os.devnull, "w") if RANK else sys.stdout

def main(arguments=None):
    """Run a command; returns the exit status: 0, 2 for a mistake of the user's, 130 after Ctrl-C."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        command, cfg = parse_flags(sys.argv[1:] if arguments is None else arguments)
        check_config(cfg, command)
        if PROCESSES > 1:
            join_processes()
        torch.set_num_threads(cfg.threads)
        torch.manual_seed(cfg.seed)                     # for new adapters; all else has generators of its own
        getattr(reports(), f"command_{command}")(cfg)
        return 0
    except (UserError, OSError, torch.OutOfMemoryError) as error:           # OSError: a full disk, a closed pipe
        memory = "out of GPU memory: lower --token-budget (the run goes on) or, with a new --out, --tasks-per-round"
        print(f"error: {memory if isinstance(error, torch.OutOfMemoryError) else error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; train goes on from its last checkpoint when the same command is given", file=sys.stderr)
        return 130

if __name__ == "__main__":
    sys.exit(main())
