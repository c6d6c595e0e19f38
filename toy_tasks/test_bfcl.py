"""BFCL-v4 in toy_tasks/benchmarks.py; skipped without its package. Counts are those of the published data."""
import collections
import concurrent.futures
import copy
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import sys

import pytest

pytest.importorskip("bfcl_eval")
pytest.importorskip("mpmath")

import envace_mini as E
from test_envace_mini import CPU, call_text, play, tiny                                   # noqa: F401 (a fixture)
from toy_tasks import benchmarks

# ---- BFCL-v4 multi-turn ---------------------------------------------------------------------------------------------

BFCL_COUNTS = {"base": (734, 1142), "miss_func": (934, 1140), "miss_param": (934, 1140), "long_context": (734, 1203)}

def bfcl(category="base", **settings):
    return E.load_tasks(f"bfcl:{category}", E.Config(**settings))

@pytest.fixture(scope="session")
def bfcl_tasks():
    """All 800 tasks, by id."""
    return {task.id: task for task in bfcl("all")}

def bfcl_episode(task, turns, single=False):
    """An episode that makes these calls, a list a user turn; as one step a turn, or in single steps."""
    ends = list(itertools.accumulate(map(len, turns)))
    steps = range(1, ends[-1] + 1) if single else [end for calls, end in zip(turns, ends) if calls]
    answers = ["ok"] * len(turns)
    return E.Episode(task, 0, calls=sum(turns, []), ends=ends, steps=list(steps), answers=answers, over="done")

def bfcl_valid(task, turns, kind="bfcl_official", **more):
    return E.VERDICTS[kind](bfcl_episode(task, turns, **more), {"kind": kind})

def bfcl_talk(policy, task, texts):
    """An episode of these act turns, with the real world as responder."""
    e = E.Episode(task, 0)
    e.row.extend(policy.chat.opening(task))
    e.world = E.WORLDS["bfcl"](task, "test")
    for text in texts:
        E.act(policy.chat, e, text)
        E.answer_known(policy.chat, e, "inline")
    return e

def schema_types(part):
    """All types in a schema, at any depth."""
    inner = [*part.get("properties", {}).values(), *([part["items"]] if "items" in part else [])]
    return {part.get("type")}.union(*map(schema_types, inner))

def test_bfcl_counts(bfcl_tasks):
    by_category = collections.defaultdict(list)
    for task in bfcl_tasks.values():
        by_category[task.domain].append(task)
    assert {name: (sum(len(t.user) for t in part), sum(len(t.reference) for t in part))
            for name, part in by_category.items()} == BFCL_COUNTS
    assert all(len(part) == 200 for part in by_category.values())
    tools = {tool["function"]["name"]: tool for t in bfcl_tasks.values() for tool in sum(t.later.values(), t.tools)}
    assert len(tools) == 128
    assert {len(sum(t.later.values(), t.tools)) for t in bfcl_tasks.values()} <= {*range(18, 40)}
    assert all(text for t in bfcl_tasks.values() for text in [t.system, *t.user])
    data = pathlib.Path(importlib.util.find_spec("bfcl_eval").origin).parent / "data"
    for line in (data / "BFCL_v4_multi_turn_miss_param.json").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        task = bfcl_tasks[entry["id"]]
        assert {key: task.hidden["entry"][key] for key in entry} == entry
        assert json.loads(task.secret) == entry["initial_config"]
        assert task.user == [messages[0]["content"] for messages in entry["question"]]

def test_bfcl_split(bfcl_tasks):
    """Numbers 3, 7, ... are held out: 50 of each category, 12 or 13 of each block of 50."""
    held_out = {task.id for task in bfcl_tasks.values() if task.split == "eval"}
    assert held_out == {f"multi_turn_{name}_{n}" for name in BFCL_COUNTS for n in range(3, 200, 4)}
    assert {task.split for task in bfcl_tasks.values()} == {"train", "eval"} and len(held_out) == 200

def test_bfcl_schemas_fit_every_ground_truth_call(bfcl_tasks):
    """Five calls contradict their own task: a ticket's number is a text (task 173), a tool is not there yet (49)."""
    types, misfits = set(), []
    for task in bfcl_tasks.values():
        for turn, calls in enumerate(task.hidden["calls"]):
            tools = E.Episode(task, 0, answers=["ok"] * turn).tools
            misfits += [(task.id, reason) for call in calls if (reason := E.check_call(tools, call))]
            types.update(*(schema_types(tool["function"]["parameters"]) for tool in tools))
    assert sorted(misfits) == sorted([("multi_turn_miss_func_49", "unknown tool")] + [
        (f"multi_turn_{category}_173", "wrong type of ticket_id") for category in BFCL_COUNTS])
    assert types == {"object", "string", "number", "integer", "array", "boolean"}
    tools = bfcl_tasks["multi_turn_base_50"].tools + bfcl_tasks["multi_turn_base_100"].tools
    fits = lambda name, **arguments: E.check_call(tools, E.tool_call(name, **arguments))
    assert fits("fillFuelTank", fuelAmount=10) is None and fits("fillFuelTank", fuelAmount=10.5) is None
    assert fits("fillFuelTank", fuelAmount="10") and fits("fillFuelTank") and fits("fillFuelTank", fuelAmount=1, x=1)
    assert fits("adjustClimateControl", temperature=20) is None     # three more are optional
    assert fits("adjustClimateControl", temperature=20, fanSpeed=40, unit="celsius", mode="auto") is None

def test_bfcl_positional_arguments_follow_the_signature():
    """Five arguments by position: the signature has booking_id third, the document insurance_cost."""
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.travel_booking import TravelAPI
    text = "purchase_insurance('tok', 'trip', '77', insurance_cost=9, card_id='c')"
    assert benchmarks.bfcl_parse(text, vars(TravelAPI)) == {"name": "purchase_insurance", "arguments": {
        "access_token": "tok", "insurance_type": "trip", "booking_id": "77", "insurance_cost": 9, "card_id": "c"}}

@pytest.mark.parametrize("kind", ["bfcl_official", "bfcl_static"])
def test_bfcl_oracle_and_floor(bfcl_tasks, kind):
    """Ground truth solves everything, doing nothing solves nothing, and no last call can be left out."""
    tasks = bfcl_tasks.values()
    assert sum(bfcl_valid(t, t.hidden["calls"], kind) for t in tasks) == 800
    assert sum(bfcl_valid(t, [[] for _ in t.user], kind) for t in tasks) == 0
    dropped = 0
    for task in (t for t in tasks if t.domain == "base"):
        turns = copy.deepcopy(task.hidden["calls"])
        [calls for calls in turns if calls][-1].pop()
        dropped += bfcl_valid(task, turns, kind)
    assert dropped == 0

def test_bfcl_each_call_doubled(bfcl_tasks):
    """Officially 72 of 200 stay valid, as most second calls change a state; the static verdict takes repeats as one."""
    base = [task for task in bfcl_tasks.values() if task.domain == "base"]
    doubled = [[[call for call in calls for _ in range(2)] for calls in task.hidden["calls"]] for task in base]
    assert sum(bfcl_valid(task, turns) for task, turns in zip(base, doubled)) == 72
    assert all(bfcl_valid(task, turns, "bfcl_static") for task, turns in zip(base, doubled))

def test_bfcl_static_verdict(bfcl_tasks):
    """By hand: task 0 calls cd, mkdir, mv in its first turn."""
    task = bfcl_tasks["multi_turn_base_0"]
    first, *rest = task.hidden["calls"]
    assert [call["name"] for call in first] == ["cd", "mkdir", "mv"]
    static = lambda *calls: bfcl_valid(task, [list(calls), *rest], "bfcl_static")
    extra = E.tool_call("ls", a=True)
    assert static(*first) and static(extra, first[0], extra, *first[1:], extra)
    assert not static(first[1], first[0], first[2]) and not static(*first[:2]) and not static()
    assert not bfcl_valid(task, [[], first + rest[0], *rest[1:]], "bfcl_static")        # in the wrong turn

def test_bfcl_unfinished_episodes_fail(bfcl_tasks):
    task = bfcl_tasks["multi_turn_base_0"]
    e = bfcl_episode(task, task.hidden["calls"])
    for kind in ("bfcl_official", "bfcl_static"):
        assert E.VERDICTS[kind](e, {"kind": kind})
        assert not E.VERDICTS[kind](dataclasses.replace(e, ends=e.ends[:-1], answers=e.answers[:-1]), {"kind": kind})

def test_bfcl_step_limit(bfcl_tasks):
    """The official loop leaves a turn after its 21st step; unless it was the last turn, the task has failed."""
    from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT
    assert MAXIMUM_STEP_LIMIT == 20
    task, look = bfcl_tasks["multi_turn_base_0"], E.tool_call("pwd")
    first, *middle, last = task.hidden["calls"]
    spare = 20 - len(first)
    assert bfcl_valid(task, [[look] * spare + first, *middle, last], single=True)
    assert not bfcl_valid(task, [[look] * (spare + 1) + first, *middle, last], single=True)
    assert bfcl_valid(task, [[look] * 40 + first, *middle, last])                        # one step of many calls
    spare = 21 - len(last)
    assert bfcl_valid(task, [first, *middle, [look] * spare + last], single=True)
    assert not bfcl_valid(task, [first, *middle, [look] * (spare + 1) + last], single=True)
    assert bfcl_valid(task, [first, *middle, last + [look] * 40], single=True)
    long = bfcl_tasks["multi_turn_long_context_38"]     # 34 ground-truth calls in a turn
    assert bfcl_valid(long, long.hidden["calls"]) and not bfcl_valid(long, long.hidden["calls"], single=True)

def test_bfcl_rollouts_of_one_task_do_not_meet(bfcl_tasks):
    """Right and wrong attempts at 50 tasks in turn, then from 16 threads; the package keeps nothing of them."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    kept, jobs = set(vars(multi_turn_utils)), []
    for n in range(0, 200, 4):
        task = bfcl_tasks[f"multi_turn_base_{n}"]
        turns = task.hidden["calls"]
        jobs += [(task, turns, True), (task, [calls[:-1] for calls in turns], False), (task, turns, True),
                 (task, [[] for _ in turns], False)]
    assert [bfcl_valid(task, turns) for task, turns, _ in jobs] == [valid for _, _, valid in jobs]
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda job: bfcl_valid(*job[:2]), jobs))
    assert found == [valid for _, _, valid in jobs]
    assert set(vars(multi_turn_utils)) == kept

def test_bfcl_world_answers_as_the_package_does(bfcl_tasks):
    """All ground-truth calls of every eighth task, against the executor with the published call strings."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call
    compared = 0
    for n, (task, category) in enumerate(itertools.product(range(0, 200, 8), BFCL_COUNTS)):
        task = bfcl_tasks[f"multi_turn_{category}_{task}"]
        entry, world = task.hidden["entry"], E.WORLDS["bfcl"](task, "test")
        texts, instances = execute_multi_turn_func_call(
            sum(entry["ground_truth"], []), entry["initial_config"], entry["involved_classes"], f"theirs{n}", task.id,
            long_context=category == "long_context")
        for call, text in zip(task.reference, texts):
            answer = world.call(call)
            assert answer == text if isinstance(answer, str) else answer == json.loads(text)
            compared += 1
        for name, instance in instances.items():
            public = lambda one: {key: value for key, value in vars(one).items() if not key.startswith("_")}
            assert public(world.state[name]) == public(instance)
    assert compared > 500

def test_bfcl_world_counts_and_refuses(bfcl_tasks):
    task = bfcl_tasks["multi_turn_base_1"]
    world, before = E.WORLDS["bfcl"](task, "bfcl test"), E.LEDGER["bfcl test"]
    assert world.call(E.tool_call("pwd")) == {"current_working_directory": "/alex"}
    assert world.call(E.tool_call("nosuch")) == {"error": "unknown tool"}
    assert world.call(E.tool_call("cd", folder=3)) == {"error": "wrong type of folder"}
    assert world.call(E.tool_call("cd", folder="nosuch"))["error"].startswith("cd")
    assert E.LEDGER["bfcl test"] == before + 4
    assert world.call(E.tool_call("echo", content="sort (it) (2) 'now' \\ é \U0001f600\n")) == {
        "terminal_output": "sort (it) (2) 'now' \\ é \U0001f600\n"}         # the package alone would write "sort(it)"

def test_bfcl_calls_that_would_never_return(bfcl_tasks):
    task = next(t for t in bfcl_tasks.values() if "MathAPI" in t.hidden["entry"]["involved_classes"])
    world = E.WORLDS["bfcl"](task, "test")
    first, *rest = task.hidden["calls"]
    for call in (E.tool_call("power", base=9, exponent=10 ** 9),
                 E.tool_call("square_root", number=2, precision=10 ** 9),
                 E.tool_call("logarithm", value=3, base=2, precision=10 ** 9),
                 E.tool_call("round_number", number=5, decimal_places=-10 ** 9)):
        assert world.call(call) == {"error": "too large"}
        assert not bfcl_valid(task, [[call], *rest]) and bfcl_valid(task, [[call, *first], *rest])
    assert world.call(E.tool_call("power", base=2, exponent=10)) == {"result": 1024}

def test_bfcl_nothing_injected_is_run(bfcl_tasks, tmp_path):
    """The package evaluates calls as Python. Code in a name, an argument's name or a text must stay what it is."""
    task, proof = bfcl_tasks["multi_turn_base_1"], tmp_path / "proof"
    code = f"__import__('os').system('touch {proof}')"
    calls = [{"name": code, "arguments": {}}, {"name": f"{code} or pwd", "arguments": {}},
             {"name": "pwd", "arguments": {f"x={code},y": 1}},
             {"name": "ls", "arguments": {f"a={code} or False, a": True}},
             {"name": "echo", "arguments": {"content": f"') or {code} or ('"}},
             {"name": "echo", "arguments": {"content": "x", f"file_name=None) or {code} #": "y"}}]
    first, *rest = task.hidden["calls"]
    valid, world = bfcl_valid(task, [calls + first, *rest]), E.WORLDS["bfcl"](task, "test")
    answers = [world.call(call) for call in calls]
    assert not proof.exists() and valid                 # they change nothing
    assert [list(answer) for answer in answers] == [["error"]] * 4 + [["terminal_output"], ["error"]]
    benchmarks.bfcl_run("execute_multi_turn_func_call", [f"{code} or pwd()"], task.hidden["entry"]["initial_config"],
                       task.hidden["entry"]["involved_classes"], test_entry_id=task.id)
    assert proof.exists()                               # what the package does with such a name

def test_bfcl_later_tools(bfcl_tasks, tiny):
    """Task 0 withholds `sort` until turn 3: refused before, with the state untouched, and carried out from then on."""
    task = bfcl_tasks["multi_turn_miss_func_0"]
    names = lambda tools: [tool["function"]["name"] for tool in tools]
    assert "sort" not in names(task.tools) and {turn: names(new) for turn, new in task.later.items()} == {3: ["sort"]}
    schemas, sentence = task.user[3].split("\n")
    assert json.loads(schemas) == [tool["function"] for tool in task.later[3]]
    assert sentence == "I have updated some more functions you can choose from. What about now?"
    turns = [list(map(E.call_text, calls)) for calls in task.hidden["calls"]]
    sort = call_text("sort", file_name="final_report.pdf")
    says = [*turns[0], "ok", *turns[1], "ok", sort, "ok", *turns[3], "ok", *turns[4], "ok"]
    e = bfcl_talk(tiny, task, says)
    assert e.over == "done" and e.ends == [3, 5, 6, 7, 11] and len(e.responses) == len(e.calls) == 11
    assert e.responses[5] == '{"error":"unknown tool"}' and '"sorted_content"' in e.responses[6]
    assert E.grade(task, e.calls, e.answers, e) == (1.0, [True])
    e = bfcl_talk(tiny, task, [*turns[0], "ok", *turns[1], "ok", sort, "ok", call_text("ls"), "ok", *turns[4], "ok"])
    assert E.grade(task, e.calls, e.answers, e) == (0.0, [False])           # what was refused does not count later
    for task in (task for task in bfcl_tasks.values() if task.later):
        [(turn, added)] = task.later.items()
        assert task.hidden["entry"]["missed_function"] == {str(turn): names(added)}
        assert not {*names(added)} & {*names(task.tools)} and task.user[turn].endswith(sentence)

def test_bfcl_rollout(bfcl_tasks, tiny):
    """Steps are act turns with calls, here one for all calls of a turn; the world answers, the verdict is official."""
    task = bfcl_tasks["multi_turn_base_1"]
    texts = [["".join(map(E.call_text, calls)), "ok"] for calls in task.hidden["calls"]]
    policy = E.Policy(tiny.model, tiny.tokenizer, CPU)
    policy.positions = 10 ** 9
    script = [(E.ACT, text) for turn in texts for text in turn]
    [e], _ = play(policy, [task], [script], "world", max_tokens=10 ** 6)
    assert e.reward == 1.0 and e.success
    assert e.steps == e.ends == list(itertools.accumulate(map(len, task.hidden["calls"])))

def test_bfcl_initial_state_is_in_no_prompt_of_the_actor(tiny, monkeypatch):
    """A sentinel in every initial state; only the rehearse role may read it, and only in a prompt of its own."""
    read = benchmarks.bfcl_lines
    def marked(path, *args):
        lines = read(path, *args)
        for line in lines:
            line.get("initial_config", {})["SENTINEL"] = "zebra-77"
        return lines
    monkeypatch.setattr(benchmarks, "bfcl_lines", marked)
    for category in ("base", "miss_func"):
        tasks = bfcl(category)
        assert all(json.loads(task.secret)["SENTINEL"] == "zebra-77" for task in tasks)
        shown = [{key: value for key, value in vars(task).items() if key not in ("secret", "hidden")} for task in tasks]
        assert "zebra-77" not in json.dumps(shown)
        for task in tasks[:3]:
            e = bfcl_talk(tiny, task, [E.call_text(task.reference[0]), *["ok"] * len(task.user)])
            assert "zebra-77" not in tiny.tokenizer.decode(e.row.ids) and e.over == "done"
            e.pending = [task.reference[0]]
            tiny.chat.open_aside(e)
            assert "zebra-77" in tiny.tokenizer.decode(e.aside.ids)

def test_bfcl_choice_of_verdict():
    kinds = {reward: {check["kind"] for task in bfcl(reward=reward) for check in task.checks}
             for reward in ("auto", "official", "static")}
    assert kinds == {"auto": {"bfcl_official"}, "official": {"bfcl_official"}, "static": {"bfcl_static"}}

def bfcl_refused(category="base", **settings):
    with pytest.raises(E.UserError) as error:
        bfcl(category, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)

def test_bfcl_mistakes_of_the_user(monkeypatch):
    assert "--reward judge" in bfcl_refused(reward="judge")
    for category in ("", "nosuch", "Base", "base:1"):
        assert f"--tasks bfcl:{category}: " in bfcl_refused(category) and "long_context" in bfcl_refused(category)
    install = "pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *_: None)
        assert install in bfcl_refused() and "mpmath" in bfcl_refused()
    for versions, said in (([], "missing"), (["2025.12.17"], "2025.12.17")):
        found = [type("Package", (), {"version": version}) for version in versions]
        monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(found))
        assert install in bfcl_refused() and said in bfcl_refused()

@pytest.mark.parametrize("broken", ["question", "answer", "tools"])
def test_bfcl_damaged_file(monkeypatch, broken):
    """A file cut in the middle of a line, and between two lines."""
    names = {"question": "data/BFCL_v4_multi_turn_base.json", "answer": "possible_answer/BFCL_v4_multi_turn_base.json",
             "tools": "multi_turn_func_doc/math_api.json"}
    real = pathlib.Path.read_text
    for lines in (True, False) if broken != "tools" else (False,):
        def cut(path, *args, **kwargs):
            text = real(path, *args, **kwargs)
            return text[:text.rindex("\n", 0, -1) if lines else -9] if str(path).endswith(names[broken]) else text
        monkeypatch.setattr(pathlib.Path, "read_text", cut)
        assert names[broken].partition("/")[2] in bfcl_refused()

def test_bfcl_writes_nothing_into_the_package(bfcl_tasks):
    import bfcl_eval
    folder = pathlib.Path(bfcl_eval.__file__).parent
    assert "bfcl_eval.utils" not in sys.modules and "bfcl_eval.eval_checker.eval_runner" not in sys.modules
    assert not {"result", "score", ".env"} & {*os.listdir(folder), *os.listdir(folder.parent)}

def test_bfcl_eval_end_to_end(tiny, tmp_path, monkeypatch, capsys):
    """Two held-out tasks, an untrained model: it solves none of them."""
    model = copy.deepcopy(tiny.model)
    model.config.max_position_embeddings = 40000
    E.Policy(model, tiny.tokenizer, CPU).save(tmp_path / "model")
    load = benchmarks.BENCHMARKS["bfcl"]
    monkeypatch.setitem(benchmarks.BENCHMARKS, "bfcl", lambda *args: [t for t in load(*args) if t.split == "eval"][:2])
    assert E.main(["eval", "--tasks", "bfcl:base", "--model", str(tmp_path / "model"), "--threads", "1", "--max-tokens",
                   "30000", "--max-act-tokens", "4", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert "2 eval tasks x 1 episodes" in out and "base       success 0.000" in out
