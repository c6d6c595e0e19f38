"""Task files of one's own, every field of which is checked."""
import json, math
from pathlib import Path
from envace_mini import JSON_TYPES, WORLDS, Task, UserError, World, misfit, require

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
                 history=list_of(MAP), later={**MAP, "additionalProperties": list_of(TOOL)}, speaker=TEXT, hidden=MAP,
                 start=MAP, goal=list_of(LIST), stale={**MAP, "additionalProperties": MAP}, shuffle=list_of(TEXT))

def load(where, cfg):
    """The tasks that --tasks names: a benchmark's, or a file's or folder's."""
    if where.partition(":")[0] in ("bfcl", "tau2", "vita", "finmcp"):
        from toy_tasks import benchmarks
        return benchmarks.load(where, cfg)
    return load_files(where)

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
