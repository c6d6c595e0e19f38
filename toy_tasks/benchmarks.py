"""What only some commands need: task files of one's own, every field checked (`load_files`), and `bench` (`speed`)."""
import json, math, time
from pathlib import Path
import torch, torch.utils.benchmark
from envace_mini import (CONTEXT, JSON_TYPES, WORLDS, Task, UserError, World, load_policy, load_tasks, misfit,
                         peak_memory, pick_device, require, rollout, seeded, training_samples, update)

TEXT, LIST, MAP, NUMBER = ({"type": name} for name in ("string", "array", "object", "number"))

def list_of(items):
    return {"type": "array", "items": items}

def object_of(required, more=True, /, **properties):
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": more}

# What a task file holds, as JSON Schemas: tools, calls, the value of each kind of check (see `grade`), a task
ARGUMENT = object_of([], type={"enum": list(JSON_TYPES)}, enum=LIST, minimum=NUMBER, required=list_of(TEXT))
ARGUMENT["properties"].update(items=ARGUMENT, properties={**MAP, "additionalProperties": ARGUMENT})      # nested alike
PARAMETERS = object_of([], properties={**MAP, "additionalProperties": ARGUMENT}, required=list_of(TEXT))
TOOL = object_of(["function"], function=object_of(["name"], name=TEXT, description=TEXT, parameters=PARAMETERS))
CALL = object_of(["name", "arguments"], name=TEXT, arguments=MAP)
CHECKS = {"calls": ("calls", list_of(CALL)), "max_calls": ("calls", {"type": "integer"}), "answer": ("equals", TEXT),
          "state": ("equals", MAP)}
TASK = object_of(["id", "system", "tools", "user", "checks"], False, id=TEXT, system=TEXT, tools=list_of(TOOL),
                 user=list_of(TEXT), checks=list_of(MAP), domain=TEXT, split={"enum": ["train", "eval"]}, world=TEXT,
                 secret=TEXT, memory=TEXT, reference=list_of(CALL), facts={**MAP, "additionalProperties": MAP},
                 start=MAP, goal=list_of(LIST), stale={**MAP, "additionalProperties": MAP}, shuffle=list_of(TEXT))

def load_files(where):
    """The tasks of a JSON file or a folder of them. Raises UserError naming file, task and field."""
    path = Path(where)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    require(path.exists() and files, f"--tasks {where}: no such file, or a folder without .json files")
    tasks = {}
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            json.dumps(data, ensure_ascii=False).encode()   # a lone surrogate can stand in JSON, but in no file
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file}: cannot be read as JSON ({error})")
        require(isinstance(data, dict) and isinstance(data.get("tasks"), list) and data["tasks"],
                f"{file}: field 'tasks' must be a list with at least one task")
        for number, entry in enumerate(data.pop("tasks")):
            require(isinstance(entry, dict), f"{file}: task number {number} must be an object")
            where = f"{file}: task {entry.get('id', f'number {number}')!r}"
            task = make_task(where, {"domain": file.stem, **data, **entry})
            require(task.id not in tasks, f"{where}: field 'id' occurs twice")
            tasks[task.id] = task
    return list(tasks.values())

def make_task(where, entry):
    """A Task from its JSON fields, every one of them checked; `where` opens each message."""
    for name in dict.fromkeys([*TASK["required"], *entry]):
        require(name in entry, f"{where}: field '{name}' is missing")
        reason = misfit({name: entry[name]}, {**TASK, "required": []}, "it", "entry")
        require(not reason, f"{where}: field '{name}': {reason}")
    task, tools = Task(**entry), {tool["function"]["name"]: tool["function"] for tool in entry["tools"]}
    schemas = [function.get("parameters", {}) for function in tools.values()]
    world, facts, called = WORLDS.get(task.world, World), {*task.facts}, {call["name"] for call in task.reference}
    for fits, name, message in [
            (task.user, "user", "must not be empty"), (task.checks, "checks", "must not be empty"),
            (len(tools) == len(task.tools) and "" not in tools, "tools", "must have names, each its own"),
            (all({*s.get("required", [])} <= {*s.get("properties", {})} for s in schemas), "tools", "wrong 'required'"),
            (task.world in ("", *WORLDS), "world", f"must be one of {', '.join(WORLDS)}"),
            (not task.world or {*tools} <= {*world.tools}, "tools", f"this world has {world.tools}"),
            (facts >= {*world.categories}, "facts", f"must map {world.categories}"),
            (facts >= {*task.stale}, "stale", "must name categories of 'facts'"),
            (facts >= {*task.shuffle}, "shuffle", "must name categories of 'facts'"),
            (len(task.goal) in (0, len(task.user)) and all(task.goal), "goal", "must have a list for each user turn"),
            (called <= {*tools}, "reference", "calls an unknown tool")]:
        require(fits, f"{where}: field '{name}': {message}")
    for number, check in enumerate(task.checks):
        key, value = CHECKS.get(str(check.get("kind")), ("kind", {"enum": [*CHECKS]}))
        turn = {"type": "integer", "enum": [*range(len(task.user))]}
        reason = misfit(check, object_of(["kind", key], **{key: value, "turn": turn, "weight": NUMBER}), "it", "entry")
        called = {call["name"] for call in check["calls"]} if check.get("kind") == "calls" and not reason else set()
        for wrong, message in [(reason, reason), (called - {*tools}, f"unknown tool in {sorted(called)}"),
                               (check.get("kind") == "state" and not task.world, "no world has this state"),
                               (not reason and not 0 < check.get("weight", 1) < math.inf, "'weight' must be above 0")]:
            require(not wrong, f"{where}: field 'checks', entry {number}: {message}")
    return task

def speed(cfg):
    """Speed, memory and precision of a rollout (sampled tokens) and an update (all tokens), with random weights. Such a
    model hardly ever ends a turn: an episode is one turn of --max-act-tokens. Speeds compare, but are not a run's."""
    device, tasks = pick_device(cfg), load_tasks("toy")[:cfg.tasks_per_round]
    policy = load_policy(f"random:{cfg.model.split('/')[-1].removeprefix('random:')}", device, cfg)
    optimizer, groups = torch.optim.AdamW(policy.model.parameters(), lr=cfg.lr), [*range(len(tasks))] * cfg.group
    for name in ("warm-up", "timed"):                   # the first pass pays for allocations and kernels
        start = time.time()
        episodes = rollout(policy, tasks * cfg.group, cfg, "rehearsal", seeded(device, name), 1.0, groups)
        middle = time.time()
        for n, e in enumerate(episodes):                # it solves nothing: made-up rewards give something to learn
            e.reward = n // len(tasks) % 2
        samples = training_samples(episodes, cfg)
        require(samples, "nothing to time: --group must be at least 2, and --max-tokens must exceed the prompts")
        _, error, _ = update(policy, optimizer, samples, cfg) or require(False, "the loss is not finite: lower --lr")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.time()
    sampled = sum(tag != CONTEXT for e in episodes for tag in e.row.tags)
    shape, lengths = policy.model.config, [len(s.row.ids) for s in samples]
    parameters = sum(p.numel() for p in policy.model.parameters())
    attention = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    flops = sum(6 * parameters * n + 6 * attention * n * n for n in lengths)    # forward and backward, causal attention
    a = torch.randn(2, 2048, 2048, device=device, dtype=torch.bfloat16 if policy.bfloat16 else torch.float32)
    timer = torch.utils.benchmark.Timer("a @ a", globals={"a": a}, num_threads=cfg.threads)
    peak = 4 * 2048 ** 3 / timer.blocked_autorange().median     # operations a second in a large matrix product
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "model": cfg.model,
        "parameters": parameters, "update_tokens_per_second": round(sum(lengths) / (end - middle)),
        "rollout_tokens_per_second": round(sampled / (middle - start)),
        "matmul_tflops": round(peak / 1e12, 2), "model_flops_utilisation": round(flops / (end - middle) / peak, 3),
        "peak_memory_gib": peak_memory(), "first_ratio_error": error}
