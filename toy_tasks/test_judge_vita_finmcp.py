"""Tests of the endpoint client, the judge, the report, VitaBench and FinMCP-Bench; all data here are made up."""
import concurrent.futures
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

import envace_mini as E
from envace_mini import tool_call
from toy_tasks import benchmarks, demonstrations, reports, own_tasks

torch.set_num_threads(1)
HERE = Path(__file__).resolve().parents[1]

# ---- an endpoint that replies as it is told --------------------------------------------------------------------------

class Endpoint:
    """A local server; each reply is (status, body) or (status, body, seconds before it), or a function of the request.
    The last one is repeated. `seen` has (path, headers, JSON body) of every request."""
    def __init__(self, *replies):
        seen, lock = [], threading.Lock()
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size) or b"null")
                with lock:
                    reply = replies[min(len(seen), len(replies) - 1)]
                    seen.append((self.path, dict(self.headers), body))
                status, text, *wait = reply(body) if callable(reply) else reply
                time.sleep(*(wait or [0]))
                try:
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", text)
                    self.end_headers()
                    self.wfile.write(text.encode())
                except OSError:
                    pass                                # the client did not wait
            do_GET = do_POST
            def log_message(self, *args):
                pass
        kind = type("Server", (http.server.ThreadingHTTPServer,), {"request_queue_size": 64})
        self.seen, self.server = seen, kind(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

def said(text):
    """A good reply that says text."""
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})

def verdicts(*values):
    return said(json.dumps({"verdicts": values}))

HELLO = [{"role": "user", "content": "Hello."}]

@pytest.fixture
def pauses(monkeypatch):
    """No waiting between attempts; the pauses asked for."""
    asked = []
    monkeypatch.setattr(own_tasks, "time", SimpleNamespace(sleep=asked.append))
    return asked

@pytest.fixture
def news(monkeypatch):
    """What is said once a process, as if for the first time."""
    monkeypatch.setattr(own_tasks, "NEWS", dict(NEWS))

NEWS = dict(own_tasks.NEWS)

def test_ask_sends_the_openai_form_and_the_key_only_as_a_header(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with Endpoint(said("Hi.")) as server:
        assert own_tasks.ask(server.url + "/", "some/model", HELLO, temperature=0) == "Hi."
        monkeypatch.delenv("OPENAI_API_KEY")
        assert own_tasks.ask(server.url, "some/model", HELLO) == "Hi."
    (path, headers, body), (_, bare, short) = server.seen
    assert path == "/v1/chat/completions" and headers["Content-Type"] == "application/json"
    assert body == {"model": "some/model", "messages": HELLO, "temperature": 0}
    assert short == {"model": "some/model", "messages": HELLO}
    assert headers["Authorization"] == "Bearer sk-very-secret" and "Authorization" not in bare

@pytest.mark.parametrize("fault", [(500, "down"), (503, ""), (429, "slow down"), (200, "no JSON"), (200, "[]"),
                                   (200, '{"choices": []}'), (200, '{"choices": [{"message": {"content": null}}]}'),
                                   (200, '{"choices": [{"message": {"content": [1]}}]}'), (200, "")])
def test_ask_tries_again_after_a_fault(fault, pauses):
    with Endpoint(fault, fault, said("at last")) as server:
        assert own_tasks.ask(server.url, "m", HELLO) == "at last"
        assert len(server.seen) == 3

def test_ask_gives_up_with_doubling_pauses(pauses):
    with Endpoint((500, "down")) as server:
        assert own_tasks.ask(server.url, "m", HELLO, tries=5, pause=8.0) is None
        assert len(server.seen) == 5
    first, *rest = pauses
    assert first == 0.0 and len(rest) == 4
    for n, pause in enumerate(rest, 1):                 # half of it is jitter
        assert 8.0 * 2 ** n / 2 <= pause <= 8.0 * 2 ** n
    assert len({pause / 2 ** n for n, pause in enumerate(rest)}) == 4

def test_ask_does_not_wait_for_a_silent_endpoint(pauses):
    with Endpoint((200, "", 0.15), said("late, but here")) as server:
        start = time.time()
        assert own_tasks.ask(server.url, "m", HELLO, timeout=0.05) == "late, but here"
        assert len(server.seen) == 2 and time.time() - start < 2

def test_ask_nobody_there(pauses):
    with Endpoint((200, "")) as server:
        pass                                            # closed again: its port refuses connections
    assert own_tasks.ask(server.url, "m", HELLO) is None
    assert len(pauses) == 4

@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_ask_tells_the_users_mistake_and_never_the_key(status, monkeypatch, pauses):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with Endpoint((status, "Incorrect API key provided: sk-very-secret")) as server:
        for flag in ("--judge", "--user"):
            with pytest.raises(E.UserError, match=rf"^{flag}: the endpoint answers {status}.*{flag}-model") as error:
                own_tasks.ask(server.url, "m", HELLO, flag)
            assert "secret" not in str(error.value) and server.url not in str(error.value)
        assert len(server.seen) == 2                    # not tried again

def test_ask_does_not_carry_the_key_to_another_host(monkeypatch, pauses):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with Endpoint(said("from elsewhere")) as other, Endpoint((302, other.url)) as server:
        assert own_tasks.ask(server.url, "m", HELLO) == "from elsewhere"
    assert "Authorization" in server.seen[0][1] and "Authorization" not in other.seen[0][1]

@pytest.mark.parametrize("url, model", [("localhost:8000/v1", "m"), ("", "m"), ("http://localhost:8000/v1", "")])
def test_ask_refuses_what_is_no_endpoint(url, model):
    with pytest.raises(E.UserError, match="^--judge must be like http://localhost:8000/v1, with --judge-model"):
        own_tasks.ask(url, model, HELLO)

# ---- the judge -------------------------------------------------------------------------------------------------------

QUESTIONS = [{"question": "Is it bought?", "weight": 3}, {"question": "Is it polite?", "weight": 1}]

def judged(url, **more):
    """An episode of a task that a model judges."""
    task = E.Task("t", "S", [], ["Buy a pen."], [{"kind": "judge", "questions": QUESTIONS}],
                  history=[{"role": "user", "content": "EARLIER"}], reference=[tool_call("buy", item="SENTINEL")],
                  secret="SENTINEL", hidden={"judge": (url, "m"), "more": "SENTINEL"})
    lines = ['call: {"name":"buy","arguments":{"item":"pen"}}', 'response: {"bought":"pen"}',
             "assistant: Here you are."]
    return E.Episode(task, 0, calls=[tool_call("buy", item="pen")], answers=["Here you are."], history=lines,
                     **{"over": "done", **more})

def grade(e):
    return E.grade(e.task, e.calls, e.answers, e)

@pytest.mark.parametrize("values, reward", [((True, True), 1.0), ((True, False), 0.75), ((False, True), 0.25),
                                            ((False, False), 0.0)])
def test_judge_scores_the_weighted_share(values, reward):
    with Endpoint(verdicts(*values)) as server:
        e = judged(server.url)
        e.reward, e.verdicts = grade(e)
        assert (e.reward, e.verdicts) == (reward, [reward]) and e.success == (reward == 1.0)

def test_judge_reads_the_transcript_and_nothing_hidden():
    with Endpoint(verdicts(True, True)) as server:
        grade(judged(server.url))
    (_, _, body), = server.seen
    system, user = body["messages"]
    shown, rest = json.JSONDecoder().raw_decode(user["content"])
    assert shown == {"transcript": ['{"role":"user","content":"EARLIER"}', "user: Buy a pen.",
                                    'call: {"name":"buy","arguments":{"item":"pen"}}', 'response: {"bought":"pen"}',
                                    "assistant: Here you are."], "questions": ["Is it bought?", "Is it polite?"]}
    assert system["role"] == "system" and "SENTINEL" not in json.dumps(body) and body["temperature"] == 0

BAD = ["", "yes, yes", "[true, false]", '{"verdicts": [true]}', '{"verdicts": [true, "false"]}', '{"verdicts": true}',
       '{"verdicts": [true, true, true]}',
       '{"verdicts": [1, 0]}', '{"verdicts": ["true", "false"]}', '{"verdicts": [true, null]}', '{"verdicts": {}}',
       '{"verdict": [true, false]}', 'Sure! {"verdicts": [true, false]}', '{"verdicts": [true, false]', "null",
       "[" * 9999]

@pytest.mark.parametrize("bad", BAD)
def test_judge_asks_again_for_another_form(bad, news, capsys):
    with Endpoint(said(bad), said(bad), verdicts(True, False)) as server:
        assert grade(judged(server.url))[0] == 0.75
        third = server.seen[2][2]["messages"]
    assert [m["role"] for m in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert third[2]["content"] == bad and "2 truth values" in third[5]["content"] and not capsys.readouterr().out

@pytest.mark.parametrize("form", ['```json\n{}\n```', "```\n{}\n```", "<think>Hm.</think>\n{}", " {} \n"])
def test_judge_takes_a_fence_and_a_thought(form):
    with Endpoint(said(form.replace("{}", '{"verdicts": [true, false]}'))) as server:
        assert grade(judged(server.url))[0] == 0.75 and len(server.seen) == 1

def test_judge_without_a_verdict_leaves_episodes_unscored_and_says_so_once(news, capsys, pauses):
    with Endpoint(said("I cannot say.")) as server:
        assert grade(judged(server.url)) == (None, [None])
        assert len(server.seen) == 3
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            assert [*threads.map(grade, [judged(server.url)] * 20)] == [(None, [None])] * 20
    assert grade(judged(server.url)) == (None, [None])  # nobody there any more
    assert capsys.readouterr().out.count("judge") == 1

def test_judge_is_not_asked_about_malformed_episodes():
    with Endpoint((500, "")) as server:
        assert grade(judged(server.url, over="malformed")) == (0.0, [0.0]) and not server.seen

def test_sixteen_threads_get_each_its_own_verdict():
    def reply(body):
        number = int(re.search(r"number (\d+)", body["messages"][1]["content"])[1])
        return *verdicts(number % 2 == 0, number % 3 == 0), 0.01
    with Endpoint(reply) as server, concurrent.futures.ThreadPoolExecutor(16) as threads:
        episodes = [judged(server.url) for _ in range(48)]
        for n, e in enumerate(episodes):
            e.history = [f"assistant: number {n}"]
        rewards = [reward for reward, _ in threads.map(grade, episodes)]
    assert rewards == [0.75 * (n % 2 == 0) + 0.25 * (n % 3 == 0) for n in range(48)]

OWN = {"id": "own", "system": "S", "tools": [], "user": ["Hi."], "checks": [{"kind": "judge", "questions": QUESTIONS}]}

def own_file(folder, **changes):
    path = folder / "own.json"
    path.write_text(json.dumps({"tasks": [{**OWN, **changes}]}))
    return str(path)

def test_own_task_files_can_have_a_judge(tmp_path):
    where = own_file(tmp_path)
    cfg = E.Config(tasks=where, judge="http://user:password@localhost:1/v1", judge_model="m")
    task, = E.load_tasks(where, cfg)
    assert task.hidden["judge"] == ("http://user:password@localhost:1/v1", "m") and task.hidden["verdict"] == "judge"
    assert "password" not in E.compact(task.checks)     # which `show` prints
    for lacking in ({"judge": ""}, {"judge_model": ""}):
        with pytest.raises(E.UserError, match="own: .* needs --judge and --judge-model"):
            E.load_tasks(where, E.replace(cfg, **lacking))

@pytest.mark.parametrize("check, words", [
    ({}, "missing entry questions"), ({"questions": []}, "must not be empty"), ({"questions": ["Good?"]}, "wrong type"),
    ({"questions": [{"question": "Good?"}]}, "missing entry weight"),
    ({"questions": [{"question": 1, "weight": 1}]}, "wrong type of question"),
    ({"questions": [{"question": "Good?", "weight": "1"}]}, "wrong type of weight"),
    ({"questions": [{"question": "Good?", "weight": 0}]}, "above 0"),
    ({"questions": [{"question": "Good?", "weight": -1}]}, "above 0"),
    ({"questions": [{"question": "Good?", "weight": 1, "url": "x"}]}, "unknown entry")])
def test_own_judge_checks_are_checked(check, words, tmp_path):
    where = own_file(tmp_path, checks=[{"kind": "judge", **check}])
    with pytest.raises(E.UserError, match=f"'checks', entry 0: .*{words}"):
        E.load_tasks(where, E.Config(judge="http://localhost:1", judge_model="m"))

# ---- tool schemas ----------------------------------------------------------------------------------------------------

def schema(name, /, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}

def simple_task(name, tools, **more):
    return E.Task(name, "S", tools, ["Hi."], [{"kind": "max_calls", "calls": 9}], **more)

def test_usable_drops_tasks_with_invalid_schemas_and_names_them(monkeypatch, capsys):
    text, good = {"type": "string"}, schema("f", properties={"a": {"type": "string"}}, required=["a"])
    bad = {"no-name": [{"type": "function", "function": {"parameters": {}}}], "empty-name": [schema("")],
           "twice": [good, good], "no-object": [schema("f", type="array")], "two-types": [schema("f", type=["object"])],
           "no-mapping": [schema("f", properties=[text])], "no-schema": [schema("f", properties={"a": "string"})],
           "nullable": [schema("f", properties={"a": {"type": ["string", "null"]}})], "no-function": [{"name": "f"}],
           "required": [schema("f", properties={"a": text}, required=["a", "b"])], "not-a-tool": ["f"],
           "deep": [schema("f", properties={"a": {"type": "array", "items": {"type": "text"}}})],
           "flag": [schema("f", properties={"a": {**text, "required": True}})], "later": [good]}
    fine = [simple_task("fine", [good]), simple_task("none", []), simple_task("later-fine", [], later={"1": [good]}),
            simple_task("bare", [{"type": "function", "function": {"name": "f"}}]),
            simple_task("choice", [schema("f", properties={"a": {"anyOf": [text, {"type": "null"}]}, "b": {}})])]
    tasks = [simple_task(name, tools, later={"1": [good]} if name == "later" else {}) for name, tools in bad.items()]
    monkeypatch.setattr(benchmarks, "load", lambda where, cfg: [*tasks, *fine])
    assert E.load_tasks("bfcl:all") == fine
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and told.startswith("14 of 19 tasks are left out")
    assert all(f"{name} (" in told for name in bad) and "fine (" not in told
    assert own_tasks.usable(fine) == fine and not capsys.readouterr().out
    for task in fine:                                   # what is left can be read by the checker of calls
        assert E.check_call(sum(task.later.values(), task.tools), tool_call("g", a=None)) == "unknown tool"
        E.check_call(sum(task.later.values(), task.tools), tool_call("f", a=None))

# ---- VitaBench: a clone in miniature ---------------------------------------------------------------------------------

NEVER = "raise RuntimeError('VitaBench code must not run')\n"
DELIVERY = """
class DeliveryTools(ToolKitBase):
    def _secret_helper(self, x: str) -> bool: ...
    @is_tool(ToolType.WRITE)
    def create_delivery_order(self, user_id: str, store_id: str, product_ids: List[str], product_cnts: List[int],
                              address: str, dispatch_time: str, attributes: Optional[List[str]] = None,
                              note: Optional[str] = "") -> str: ...
    @is_tool(tool_type=ToolType.WRITE)
    def pay_delivery_order(self, order_id: str) -> str: ...
    @is_tool(ToolType.WRITE)
    def cancel_delivery_order(self, order_id: str) -> str: ...
    @is_tool(ToolType.READ)
    def search_delivery_orders(self, user_id: str, status: Optional[OrderStatus] = "unpaid") -> str: ...
    @is_tool(ToolType.GENERIC)
    def delivery_distance_to_time(self, distance: float) -> float: ...
"""
INSTORE = """
class InStoreTools(ToolKitBase):
    @is_tool(ToolType.WRITE)
    def create_instore_product_order(self, user_id: str, shop_id: str, product_id: str, quantity: int = 1) -> str: ...
    @is_tool(ToolType.WRITE)
    def pay_instore_order(self, order_id: str) -> str: ...
    @is_tool(ToolType.WRITE)
    def instore_cancel_order(self, order_id: str) -> str: ...
    @is_tool(ToolType.WRITE)
    def instore_book(self, user_id: str, shop_id: str, time: str, customer_count: int = 1) -> str: ...
    @is_tool(ToolType.WRITE)
    def pay_instore_book(self, book_id: str) -> str: ...
    @is_tool(ToolType.WRITE)
    def instore_cancel_book(self, book_id: str) -> str: ...
    @is_tool(ToolType.WRITE)
    def instore_reservation(self, user_id: str, shop_id: str, time: str, customer_count: int = 1) -> str: ...
"""
OTA = "class OTATools(ToolKitBase):\n" + """    @is_tool(ToolType.WRITE)
    def create_hotel_order(self, hotel_id: str, room_id: str, user_id: str) -> str: ...
""" + "".join(f"""    @is_tool(ToolType.WRITE)
    def create_{kind}_order(self, {kind}_id: str, {thing}_id: str, user_id: str, date: str, quantity: int) -> str: ...
""" for kind, thing in (("attraction", "ticket"), ("flight", "seat"), ("train", "seat"))) + "".join(
    f"""    @is_tool(tool_type=ToolType.WRITE)
    def {act}_{kind}_order(self, order_id: str{', user_id: str' * (act == 'cancel')}) -> str: ...
""" for kind in ("hotel", "attraction", "flight", "train") for act in ("pay", "cancel"))
TOOLKIT = """
def is_tool(tool_type=None):
    def decorator(func):
        @wraps(func)
        def wrapper(*args, **kwargs): ...
        return wrapper
    return decorator
class ToolKitBase:
    @property
    def tools(self) -> dict: ...
    @is_tool(ToolType.READ)
    def get_user_all_orders(self) -> str: ...
    @is_tool(ToolType.GENERIC)
    def weather(self, address: str, date_start: str, date_end: str) -> str: ...
"""

def described(code, prefix=""):
    """A module of descriptions for the tools of this code; one argument is not described, another does not exist."""
    words = {}
    for name, args in re.findall(r"is_tool\(.*\)\n    def (\w+)\(self,?([^)]*)\)", code):
        known = [a.split(":")[0].strip() for a in args.split(",") if ":" in a and "store_id" not in a]
        words[name] = {"description": f"EN {name}.", "preconditions": "PRE.", "postconditions": "POST.", "returns": "X",
                       "args": {**{a: f"EN {a}" for a in known}, "food_ids": "gone"}}
    chinese = json.loads(json.dumps(words).replace("EN ", "ZH "))
    return f"{NEVER}{prefix}TOOL_DESCRIPTIONS_ZH = {chinese!r}\n{prefix}TOOL_DESCRIPTIONS_EN = {words!r}\nX = f()\n"

def delivery(key, store, *things, status="paid", address="Hill 1", **more):
    return {"order_id": key, "order_type": "delivery", "user_id": "U1", "store_id": store, "note": "", "status": status,
            "location": {"address": address, "longitude": 1.5, "latitude": 2.5}, "dispatch_time": "",
            "products": [{"product_id": p, "price": 3, "quantity": n, "attributes": ""} for p, n in things], **more}

def order(key, kind, store, product, n=1, status="paid", **more):
    return {"order_id": key, "order_type": kind, "user_id": "U1", "store_id": store, "location": None, "status": status,
            "products": [{"product_id": product, "price": 3, "quantity": n, **more}]}

def table(kind, key, shop, time, n, status="paid", **more):
    return {f"{kind}_id": key, "shop_id": shop, f"{kind}_time": time, "customer_count": n, "customer_id": "U1",
            "status": status, **more}

NOON = "2025-06-21 12:00:00"
OLD = {"O1": delivery("O1", "S1", ("P1", 1)), "O2": delivery("O2", "S1", ("P1", 1), status="unpaid"),
       "O3": delivery("O3", "S1", ("P1", 1), status="cancelled"),
       "O4": delivery("O4", "S1", ("P1", 1), status="delivered")}
VITA_TASKS = {  # domain: [(orders known, orders required, calls that do it)]
    "delivery": [
        ({}, [delivery("T1", "S1", ("P1", 2), ("P2", 1), status="processed")],
         [tool_call("create_delivery_order", user_id="U1", store_id="S1", product_ids=["P2", "P1"], product_cnts=[1, 2],
                    address="Hill 1", dispatch_time=NOON, note="mild", attributes=["", "hot"]),
          tool_call("pay_delivery_order", order_id="imagined")]),
        (OLD, [{**OLD["O1"], "status": "cancelled"}, {**OLD["O2"], "status": "paid"}, OLD["O3"], OLD["O4"]],
         [tool_call("cancel_delivery_order", order_id="O1"), tool_call("pay_delivery_order", order_id="O2")]),
        ({}, [delivery("T1", "S1", ("P1", 1), status="unpaid")],
         [tool_call("create_delivery_order", user_id="U1", store_id="S1", product_ids=["P1"], product_cnts=[1],
                    address="Hill 1", dispatch_time=NOON)]),
        ({}, [delivery("T1", "S1", ("P1", 1)), delivery("T2", "S1", ("P1", 1)), delivery("T3", "S2", ("P1", 1))],
         [call for store in ("S1", "S2", "S1") for call in (
             tool_call("create_delivery_order", user_id="U1", store_id=store, product_ids=["P1"], product_cnts=[1],
                       address="Hill 1", dispatch_time=NOON), tool_call("pay_delivery_order", order_id=f"x{store}"))])],
    "instore": [
        ({}, [order("T1", "instore", "S1", "P1"), order("T2", "instore", "S1", "P2", 3)],
         [tool_call("create_instore_product_order", user_id="U1", shop_id="S1", product_id="P1"),
          tool_call("create_instore_product_order", user_id="U1", shop_id="S1", product_id="P2", quantity=3),
          tool_call("pay_instore_order", order_id="a"), tool_call("pay_instore_order", order_id="b")]),
        ({}, [table("book", "T1", "S1", NOON, 2, book_price=30), table("reservation", "T2", "S1", NOON, 1)],
         [tool_call("instore_book", user_id="U1", shop_id="S1", time=NOON, customer_count=2),
          tool_call("pay_instore_book", book_id="a"),
          tool_call("instore_reservation", user_id="U1", shop_id="S1", time=NOON)]),
        ({"B1": table("book", "B1", "S1", NOON, 2)}, [table("book", "B1", "S1", NOON, 2, status="cancelled")],
         [tool_call("instore_cancel_book", book_id="B1")])],
    "ota": [
        ({}, [order("T1", "hotel", "H1", "R1", date="2025-06-22"),
              order("T2", "flight", "F1", "E1", 2, date="2025-06-22")],
         [tool_call("create_hotel_order", hotel_id="H1", room_id="R1", user_id="U1"),
          tool_call("pay_hotel_order", order_id="a"),
          tool_call("create_flight_order", flight_id="F1", seat_id="E1", user_id="U1", date="2025-06-22", quantity=2),
          tool_call("pay_flight_order", order_id="b")]),
        ({"O1": order("O1", "train", "N1", "E1", date="2025-06-22")},
         [order("O1", "train", "N1", "E1", date="2025-06-22", status="cancelled"),
          order("T1", "attraction", "A1", "K1", 1, "consumed", date="2025-06-23")],
         [tool_call("cancel_train_order", order_id="O1", user_id="U1"),
          tool_call("create_attraction_order", attraction_id="A1", ticket_id="K1", user_id="U1", date="2025-06-23",
                    quantity=1),
          tool_call("pay_attraction_order", order_id="?")])]}
VITA_TASKS["cross_domain"] = [VITA_TASKS["delivery"][0], VITA_TASKS["ota"][0]]

def vita_row(n, domain, known, required, **more):
    parts = {"orders": {}, "books": {}, "reservations": {}}
    for key, value in known.items():
        parts["books" if "book_id" in value else "orders"][key] = value
    states = [{"required_orders": required, "optional_orders": [], "state_rubrics": [f"Rubric {n}", "Shared"]},
              {"required_orders": required, "optional_orders": [], "state_rubrics": ["Second state"]}]
    return {"id": f"{domain}-{n}", "domain": domain, "message_history": [], "instructions": f"You want {domain} {n}.",
            "environment": {"time": "2025-06-21 11:20:00", "user_id": "U1", **parts, "weather": "WORLD SENTINEL"},
            "user_scenario": {"user_profile": {}}, "evaluation_criteria": {
                "expected_states": states, "overall_rubrics": ["Shared", "Overall"]}, **more}

@pytest.fixture
def clone(tmp_path):
    """A miniature of a clone: modules of which no line may run, and tasks."""
    for stem, code, prefix in [("domains/delivery/tools", DELIVERY, ""), ("domains/instore/tools", INSTORE, ""),
                               ("domains/ota/tools", OTA, ""), ("environment/toolkit", TOOLKIT, "TOOLKIT_")]:
        path = tmp_path / "src/vita" / stem
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{path}.py").write_text(NEVER + code)
        Path(f"{path}_schema.py").write_text(described(code, prefix))
    for domain, tasks in VITA_TASKS.items():
        path = tmp_path / "data/vita/domains" / domain
        path.mkdir(parents=True)
        rows = [vita_row(n, domain, known, required) for n, (known, required, _) in enumerate(tasks)]
        (path / "tasks_en.json").write_text(json.dumps(rows))
        (path / "tasks.json").write_text("Chinese, never read")
    return tmp_path

def load_vita(clone, domain="delivery", **more):
    return E.load_tasks(f"vita:{domain}", E.Config(tasks=f"vita:{domain}", tasks_dir=str(clone), **more))

def test_vita_tools_come_from_signatures_and_descriptions(clone):
    tools = {tool["function"]["name"]: tool["function"] for tool in load_vita(clone)[0].tools}
    assert sorted(tools) == ["cancel_delivery_order", "create_delivery_order", "delivery_distance_to_time",
                             "get_user_all_orders", "pay_delivery_order", "search_delivery_orders", "weather"]
    create = tools["create_delivery_order"]
    assert create["description"] == "EN create_delivery_order.\nPRE.\nPOST."
    assert create["parameters"] == {"type": "object", "properties": {
        "user_id": {"type": "string", "description": "EN user_id"}, "store_id": {"type": "string", "description": ""},
        "product_ids": {"type": "array", "items": {"type": "string"}, "description": "EN product_ids"},
        "product_cnts": {"type": "array", "items": {"type": "integer"}, "description": "EN product_cnts"},
        "address": {"type": "string", "description": "EN address"},
        "dispatch_time": {"type": "string", "description": "EN dispatch_time"},
        "attributes": {"type": "array", "items": {"type": "string"}, "description": "EN attributes"},
        "note": {"type": "string", "description": "EN note"}},
        "required": ["user_id", "store_id", "product_ids", "product_cnts", "address", "dispatch_time"]}
    assert tools["search_delivery_orders"]["parameters"]["properties"]["status"]["type"] == "string"
    assert tools["search_delivery_orders"]["parameters"]["required"] == ["user_id"]
    assert tools["delivery_distance_to_time"]["parameters"]["properties"]["distance"]["type"] == "number"
    assert tools["get_user_all_orders"]["parameters"] == {"type": "object", "properties": {}, "required": []}
    count = {domain: len(load_vita(clone, domain)[0].tools) for domain in VITA_TASKS}
    assert count == {"delivery": 5 + 2, "instore": 7 + 2, "ota": 12 + 2, "cross_domain": 5 + 7 + 12 + 2}

def test_vita_tasks_show_the_world_to_the_rehearse_role_only(clone):
    tasks = load_vita(clone)
    assert [task.split for task in tasks] == ["train", "train", "train", "eval"]
    assert [task.id for task in tasks] == [f"delivery-{n}" for n in range(4)]
    assert {task.domain for task in tasks} == {"delivery"}
    task = tasks[0]
    assert task.user == ["You want delivery 0."] and "Saturday, 2025-06-21 11:20:00" in task.system
    assert "WORLD SENTINEL" in task.secret and json.loads(task.secret)["user_id"] == "U1"
    assert not any("SENTINEL" in text for text in [task.system, *task.user, json.dumps(task.tools), task.memory])
    assert task.hidden["verdict"] == "static" and "in place of a simulated user" in task.hidden["label"]
    assert not task.world and not task.reference

def attempt(task, calls, over="done"):
    e = E.Episode(task, 0, calls=calls, answers=["done"], ends=[len(calls)], over=over)
    e.reward, e.verdicts = grade(e)
    return e

@pytest.mark.parametrize("domain", VITA_TASKS)
def test_vita_static_verdict_on_oracle_and_on_single_edits(domain, clone):
    for task, (_, _, calls) in zip(load_vita(clone, domain), VITA_TASKS[domain]):
        assert all(E.check_call(task.tools, call) is None for call in calls)
        assert attempt(task, calls).success and attempt(task, calls).reward == 1
        looks = tool_call("get_user_all_orders")
        assert attempt(task, [looks, *(x for call in calls for x in (call, looks))]).success
        assert not attempt(task, []).success and attempt(task, []).reward == 0
        for n, call in enumerate(calls):
            seat = call["name"] == "pay_instore_book"   # whether seats are paid is not checked
            assert attempt(task, calls[:n] + calls[n + 1:]).success == seat, call
            assert attempt(task, calls[:n] + [call, call] + calls[n + 1:]).success == (seat or "O1" in str(call)
                                                                                      or "B1" in str(call)), call
            for key, value in call["arguments"].items():
                if key in ("user_id", "dispatch_time", "note", "attributes") or seat:
                    continue
                other = value[::-1] + [7] if isinstance(value, list) else value + (1 if isinstance(value, int) else "x")
                edited = {**call, "arguments": {**call["arguments"], key: other}}
                known = value in ("O1", "O2", "B1")     # a new order's id can be any
                wrong = attempt(task, calls[:n] + [edited] + calls[n + 1:])
                assert wrong.success == (key in ("order_id", "book_id") and not known), (call, key)

def test_vita_static_verdict_details(clone):
    task, calls = load_vita(clone)[0], VITA_TASKS["delivery"][0][2]
    swapped = tool_call("create_delivery_order", **{**calls[0]["arguments"], "product_cnts": [2, 1]})
    assert not attempt(task, [swapped, calls[1]]).success                           # two of the other
    invalid = tool_call("create_delivery_order", store_id="S9")
    assert attempt(task, [invalid, tool_call("nosuch"), *calls]).success            # was refused: nothing happened
    assert not attempt(task, [*calls, tool_call("cancel_delivery_order", order_id="imagined")]).success
    known = load_vita(clone)[1]
    assert attempt(known, [*VITA_TASKS["delivery"][1][2], tool_call("cancel_delivery_order", order_id="O2")]).success
    assert attempt(task, calls, "truncated").success is False

def test_vita_judge_asks_every_rubric_once(clone):
    with Endpoint(verdicts(True, True, True, True), verdicts(True, True, False, True)) as server:
        task = load_vita(clone, reward="judge", judge=server.url, judge_model="m")[0]
        assert [q["question"] for q in task.checks[0]["questions"]] == ["Rubric 0", "Shared", "Second state", "Overall"]
        assert task.hidden["verdict"] == "judge" and "rubrics" in task.hidden["label"]
        assert attempt(task, []).success is True
        half = attempt(task, [])
        assert half.success is False and half.reward == 0.75
    with pytest.raises(E.UserError, match="needs --judge and --judge-model"):
        load_vita(clone, reward="judge")

def test_vita_leaves_out_what_it_cannot_check(clone, capsys):
    path = clone / "data/vita/domains/delivery/tasks_en.json"
    rows = json.loads(path.read_text())
    rows[1]["evaluation_criteria"] = {"expected_states": [{"required_orders": [], "state_rubrics": ["Only said"]}]}
    rows[2]["evaluation_criteria"] = {"expected_states": None, "overall_rubrics": None}
    path.write_text(json.dumps(rows))
    assert [task.id for task in load_vita(clone)] == ["delivery-0", "delivery-3"]
    assert "2 of 4 tasks have what a static verdict needs" in capsys.readouterr().out
    tasks = load_vita(clone, reward="judge", judge="http://localhost:1", judge_model="m")
    assert [task.id for task in tasks] == ["delivery-0", "delivery-1", "delivery-3"]

def test_vita_mistakes_are_one_sentence(clone, tmp_path):
    path = clone / "data/vita/domains/delivery/tasks_en.json"
    for where, cfg, words in [("vita:taxi", {}, "vita:taxi: the domains are delivery, instore, ota, cross_domain"),
                              ("vita:", {}, "the domains are"),
                              ("vita:ota", {"reward": "official"}, "--reward is static or judge"),
                              ("vita:ota", {"user": "policy"}, "--user is script"),
                              ("vita:ota", {"tasks_dir": str(tmp_path / "no")},
                               "--tasks-dir FOLDER.*git clone https://github.com/meituan-longcat/vitabench"),
                              ("vita:ota", {"tasks_dir": ""}, "git clone")]:
        with pytest.raises(E.UserError, match=words):
            E.load_tasks(where, E.Config(**{"tasks_dir": str(clone), **cfg}))
    whole = path.read_text()
    for text, words in [(whole[:len(whole) // 2], "tasks_en.json: missing, cut off"), ("{}", "must hold a JSON array"),
                        ("[]", "at least one"), (json.dumps([{"id": 1}]), "task number 0: .*environment"),
                        (json.dumps([json.loads(whole)[0], {**json.loads(whole)[1], "instructions": 1, "environment": {
                            "time": "noon"}}]), "task number 1: .*noon")]:
        path.write_text(text)
        with pytest.raises(E.UserError, match=words):
            load_vita(clone)
    path.unlink()
    with pytest.raises(E.UserError, match="tasks_en.json: missing"):
        load_vita(clone)
    (clone / "src/vita/domains/ota/tools_schema.py").write_text("X = 1\n")
    with pytest.raises(E.UserError, match="tools_schema.py: missing"):
        load_vita(clone, "ota")
    (clone / "src/vita/domains/ota/tools.py").write_text("def f(:\n")
    with pytest.raises(E.UserError, match="tools.py"):
        load_vita(clone, "ota")

@pytest.mark.skipif(not os.environ.get("VITABENCH"), reason="VITABENCH names no clone of VitaBench")
@pytest.mark.parametrize("domain, tools", [("delivery", 20), ("instore", 24), ("ota", 38), ("cross_domain", 66)])
def test_vita_counts(domain, tools):
    """Facts of the benchmark itself: tools a domain, 100 tasks, and nothing for doing nothing."""
    root = Path(os.environ["VITABENCH"])
    assert len(json.loads((root / f"data/vita/domains/{domain}/tasks_en.json").read_text("utf-8"))) == 100
    tasks = load_vita(root, domain)
    assert {len(task.tools) for task in tasks} == {tools} and not any(attempt(task, []).success for task in tasks)

# ---- FinMCP-Bench: two conversations that nobody had -----------------------------------------------------------------

def calling(*calls, **more):
    """An assistant's message with calls [(name, arguments as JSON text)], without content."""
    return {"role": "assistant", **more, "tool_calls": [
        {"id": f"c{n}", "type": "function", "index": n, "function": {"name": name, "arguments": text}}
        for n, (name, text) in enumerate(calls)]}

def heard(text, key="c0"):
    return {"role": "tool", "content": text, "tool_call_id": key}

TALKS = [
    {"id": 7, "task": "multi_turn", "tool_list": ["Quote", "Rate"], "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "What are A and B worth?"},
        calling(("Quote", '{"code": "A"}'), ("Quote", '{"code": "B"}')),
        heard('{"worth": 3}'), heard("FOUR B", "c1"),
        {"role": "assistant", "content": "3 and 4.", "reasoning_content": "THOUGHT"},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome.", "tool_calls": None},
        {"role": "user", "content": "And the rate, and A again?"},
        calling(("Rate", '{"day": "today", "bank": "X"}'), content=None), heard('[1.5, "GOLD RATE"]'),
        calling(("Quote", '{"code": "A"')), heard('{"worth": 5}'),
        {"role": "assistant", "content": [{"type": "text", "text": "1.5"}]}]},
    *({"id": f"r{n}", "messages": [{"role": "user", "content": f"Risk {n}?"}, calling(("Risk", "")), heard("low"),
                                   {"role": "assistant", "content": "Low."}]} for n in range(1, 6))]

def finmcp(folder, rows=TALKS, **more):
    path = folder / "talks.json"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return E.load_tasks(f"finmcp:{path}", E.Config(tasks=f"finmcp:{path}", **more))

def test_finmcp_makes_a_task_of_every_user_turn_with_calls(tmp_path, capsys):
    tasks = finmcp(tmp_path)
    told = capsys.readouterr().out
    assert "3 tools have but names and argument keys" in told
    assert "7 user turns with calls in 6 conversations; 1 broken arguments" in told
    assert [task.id for task in tasks] == ["7.0", "7.2", "r1.0", "r2.0", "r3.0", "r4.0", "r5.0"]
    assert [task.split for task in tasks] == ["train"] * 4 + ["eval"] + ["train"] * 2   # by row
    first, third = tasks[:2]
    assert first.system == "You help." and first.user == ["What are A and B worth?"] and first.history == []
    assert third.user == ["And the rate, and A again?"] and tasks[2].system == "You are a financial assistant."
    call = lambda n, code: {"id": f"c{n}", "type": "function", "index": n,
                            "function": tool_call("Quote", code=code)}
    assert third.history == [
        {"role": "user", "content": "What are A and B worth?"},
        {"role": "assistant", "content": "", "tool_calls": [call(0, "A"), call(1, "B")]},
        {"role": "tool", "content": '{"worth": 3}', "tool_call_id": "c0"},
        {"role": "tool", "content": "FOUR B", "tool_call_id": "c1"}, {"role": "assistant", "content": "3 and 4."},
        {"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}]
    assert third.reference == [tool_call("Rate", day="today", bank="X"), tool_call("Quote")]    # the broken one: {}
    assert [task.checks[0]["names"] for task in tasks[:3]] == [["Quote", "Quote"], ["Rate", "Quote"], ["Risk"]]
    assert [tool["function"]["name"] for tool in third.tools] == ["Quote", "Rate", "Risk"]      # all, not tool_list
    assert third.tools[1]["function"]["parameters"]["properties"] == {"day": {}, "bank": {}}
    assert E.check_call(third.tools, tool_call("Rate", day=3)) is None
    assert E.check_call(third.tools, tool_call("Rate", hour=3)) == "unknown argument"
    assert all(task.world == "finmcp" and task.hidden["verdict"] == "static" for task in tasks)

def test_finmcp_takes_schemas_from_a_file(tmp_path, capsys):
    tools = [schema(name, properties={"code": {"type": "string"}}) for name in ("Quote", "Rate", "Risk", "More")]
    (tmp_path / "schema.json").write_text(json.dumps(tools))
    assert finmcp(tmp_path, tasks_dir=str(tmp_path / "schema.json"))[0].tools == tools
    assert "argument keys" not in capsys.readouterr().out
    for where in ("nosuch.json", "."):
        with pytest.raises(E.UserError, match="missing, cut off"):
            finmcp(tmp_path, tasks_dir=str(tmp_path / where))

def test_finmcp_shows_true_responses_to_the_rehearse_role_but_never_to_the_same_call(tmp_path):
    third = finmcp(tmp_path)[1]
    for pending, seen, unseen in [(tool_call("Rate", day="today", bank="X"), "worth", "GOLD RATE"),
                                  (tool_call("Rate", day="today", bank="Y"), "GOLD RATE", "nothing"),
                                  (tool_call("Quote"), "GOLD RATE", "worth"), (tool_call("Risk"), "GOLD RATE", "low")]:
        told = third.secret(pending)
        assert seen in told and unseen not in told and "FOUR B" not in told

def finmcp_world(task):
    return E.WORLDS["finmcp"](task, "evaluation")

def test_finmcp_world_replays(tmp_path):
    first, third = finmcp(tmp_path)[:2]
    before, world = E.LEDGER["evaluation"], finmcp_world(first)
    assert world.call(tool_call("Quote", code="A")) == {"worth": 3}
    assert world.call(tool_call("Quote", code="B")) == "FOUR B"
    assert world.call(tool_call("Quote", code="C")) == {"worth": 3}         # the same tool's
    assert world.call(tool_call("Rate")) == {"error": "nothing recorded"}
    assert finmcp_world(third).call(tool_call("Rate", day="x")) == [1.5, "GOLD RATE"]
    assert E.LEDGER["evaluation"] == before + 5 and world.state == {}

@pytest.mark.parametrize("names, f1", [
    (["Rate", "Quote"], 1), (["Quote", "Rate"], 1), ([], 0), (["Risk"], 0), (["Rate"], 2 / 3), (["Rate", "Rate"], 0.5),
    (["Quote", "Rate", "Risk"], 0.8), (["Quote"] * 4, 1 / 3)])
def test_finmcp_f1_by_hand(names, f1, tmp_path):
    e = attempt(finmcp(tmp_path)[1], [tool_call(name, any=1) for name in names])
    assert e.reward == pytest.approx(f1) and e.success == (f1 == 1)

def official(pairs):
    """Micro precision, recall, F1 as FinMCP-Bench's evaluation defines them: (predicted, true) names a conversation."""
    tp = sum(min(p.count(name), g.count(name)) for p, g in pairs for name in {*p, *g})
    fp, fn = sum(len(p) for p, _ in pairs) - tp, sum(len(g) for _, g in pairs) - tp
    p, r = tp / (tp + fp) if tp + fp else 0.0, tp / (tp + fn)
    return p, r, 2 * p * r / (p + r) if p + r else 0.0

def test_finmcp_micro_pools_a_conversation(tmp_path):
    tasks = finmcp(tmp_path)[:3]                        # two turns of one conversation, one of another; two samples
    made = [["Quote", "Quote"], ["Rate"], ["Quote", "Quote"], ["Quote"], ["Risk"], ["Quote", "Risk"]]
    episodes = [attempt(tasks[i // 2], [tool_call(name) for name in names]) for i, names in enumerate(made)]
    gold = ["Quote", "Quote", "Rate", "Quote"]
    wanted = official([(made[0] + made[2], gold), (made[1] + made[3], gold), (made[4], ["Risk"]), (made[5], ["Risk"])])
    assert wanted == (7 / 9, 7 / 10, pytest.approx(14 / 19))    # 6 hits turn by turn, 8 if samples were mixed
    text = benchmarks.BENCHMARKS["finmcp"].__globals__["finmcp_micro"](episodes, 2)
    assert [float(x) for x in re.findall(r"\d\.\d+", text)] == [pytest.approx(x, abs=6e-4) for x in wanted]
    idle = [attempt(task, []) for task in tasks for _ in range(2)]
    assert re.findall(r"\d\.\d+", tasks[0].hidden["metric"](idle, 2)) == ["0.000"] * 3

def test_finmcp_mistakes_are_one_sentence(tmp_path):
    whole, row = json.dumps(TALKS), TALKS[1]
    for text, words in [(whole[:200], "talks.json: missing, cut off"), ("{}", "JSON array"), ("[]", "JSON array"),
                        ([row, {"id": 1}], "row number 1: .*messages"), ([{"messages": []}], "row number 0: .*id"),
                        ([{"id": 1, "messages": 5}], "row number 0"), ([5], "row number 0"),
                        ([{"id": 1, "messages": [{"content": "x"}]}], "row number 0: .*role"),
                        ([{"id": 1, "messages": [calling(("f", "{}")), {"role": "assistant", "tool_calls": [{}]}]}],
                         "row number 0: .*function")]:
        with pytest.raises(E.UserError, match=words):
            finmcp(tmp_path, text)
    with pytest.raises(E.UserError, match="finmcp:nosuch: no such file; hf download DianJin/FinMCP-Bench"):
        E.load_tasks("finmcp:nosuch", E.Config())
    with pytest.raises(E.UserError, match="--reward is static"):
        finmcp(tmp_path, reward="judge")

@pytest.mark.skipif(not os.environ.get("FINMCP"), reason="FINMCP names no file of FinMCP-Bench")
def test_finmcp_counts():
    """Facts of the benchmark itself: 613 rows, 65 tools, nothing for doing nothing, all for the true calls."""
    path = os.environ["FINMCP"]
    assert len(json.loads(Path(path).read_text("utf-8"))) == 613
    tasks = E.load_tasks(f"finmcp:{path}", E.Config())
    assert len(tasks[0].tools) <= 65 and not any(attempt(task, []).reward for task in tasks)
    assert all(attempt(task, task.reference).success for task in tasks)

# ---- histories in prompts, the report --------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tiny():
    """A small untrained policy."""
    cfg = E.Config(hidden=32, layers=2, heads=4, warm_steps=1, warm_batch=2)
    return demonstrations.warm_start(E.load_tasks("toy")[:8], cfg, torch.device("cpu"))

def test_histories_reach_both_roles_and_secrets_one(tiny, tmp_path):
    third = finmcp(tmp_path)[1]
    e = E.Episode(third, 0, pending=[tool_call("Rate", day="today", bank="X")])
    tiny.chat.open_aside(e)
    act, aside = (tiny.chat.decode(ids) for ids in (tiny.chat.opening(third), e.aside.ids))
    for text in (act, aside):
        assert text.index("What are A and B worth?") < text.index("FOUR B") < text.index("And the rate")
        assert "GOLD RATE" not in text
    assert '{"worth": 5}' not in act and "worth" in third.secret(e.pending[0])
    e.pending = [tool_call("Risk")]
    tiny.chat.open_aside(e)
    assert "GOLD RATE" in tiny.chat.decode(e.aside.ids)

def test_calls_of_a_history_are_kept_by_templates_that_drop_them(tiny, monkeypatch, tmp_path):
    third = finmcp(tmp_path)[1]
    plain = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
             "<|im_start|>assistant\n")
    monkeypatch.setattr(tiny.tokenizer, "chat_template", plain)
    chat = E.ChatFormat(tiny.tokenizer, tiny.chat.stop_ids)
    assert {"calls", "tools"} <= chat.missing
    messages = [{"role": "system", "content": "S"}, *third.history, {"role": "user", "content": "U"}]
    text = chat.render(messages)
    assert text.count("<tool_call>") == 2 and '{"name":"Quote","arguments":{"code":"A"}}' in text
    assert third.history[1]["tool_calls"]               # and nobody's history is changed

def one_sided(name, *answers, **hidden):
    """Episodes of one task: whose checks an answer passes, with rewards as given."""
    task = E.Task(name, "S", [], ["Hi."], [{"kind": "answer", "equals": "yes"}], hidden=hidden)
    episodes = [E.Episode(task, 0, answers=[answer], over="done") for answer in answers]
    for e in episodes:
        e.reward, e.verdicts = (None, [None]) if e.answers == ["?"] else grade(e)
    return episodes

def test_report_by_hand():
    """Three tasks, three samples: 2, 1 and 0 of 3 successes in samples 1, 2, 3, so 1/3 +- 1/3."""
    episodes = [*one_sided("a", "yes", "yes", "no", verdict="static", label="LABEL"),
                *one_sided("b", "yes", "no", "no", verdict="static", label="LABEL"),
                *one_sided("c", "no", "no", "no", verdict="static", metric=lambda found, n: f"METRIC {len(found)} {n}")]
    assert reports.report(episodes, 3, "eval") == [
        "static verdicts, split eval, 3 tasks; doing nothing: success 0.000, reward 0.000", "  LABEL",
        "  success 0.333 +- 0.333 (deviation over samples), reward 0.333; 3 samples a task, 0 episodes unscored",
        "  METRIC 3 3"]

def test_report_leaves_unscored_episodes_out_and_does_not_ask_the_judge(monkeypatch):
    monkeypatch.setitem(E.VERDICTS, "judge", lambda e, check: pytest.fail("the judge was asked"))
    episodes = [*one_sided("a", "yes", "?", verdict="judge"), *one_sided("b", "no", "no", verdict="judge")]
    assert reports.report(episodes, 2, "train") == [    # sample 1: 1 and 0 of two, sample 2: 0 of one
        "judge verdicts, split train, 2 tasks; doing nothing: the judge is not asked",
        "  success 0.333 +- 0.354 (deviation over samples), reward 0.333; 2 samples a task, 1 episodes unscored"]
    nobody = reports.report(one_sided("a", "?", "?", verdict="judge"), 2, "eval")
    assert "success -" in nobody[1] and "2 episodes unscored" in nobody[1]
    once = reports.report(one_sided("a", "yes", verdict="static"), 1, "eval")
    assert "success 1.000, reward 1.000; 1 samples a task, 0 episodes" in once[1] and "+-" not in once[1]
    assert reports.report(one_sided("a", "yes", other="field"), 1, "eval") == []

def test_report_grades_nothing_done_in_every_user_turn(monkeypatch):
    task, seen = E.Task("t", "S", [], ["One.", "Two."], [{"kind": "probe"}], hidden={"verdict": "official"}), []
    monkeypatch.setitem(E.VERDICTS, "probe",
                        lambda e, check: seen.append((e.calls, e.answers, e.ends, e.over)) or 0.5)
    e = E.Episode(task, 0, reward=1.0, verdicts=[1], over="done")
    lines = reports.report([e, e], 2, "eval")
    assert seen == [([], ["", ""], [0, 0], "done")] and "doing nothing: success 0.000, reward 0.500" in lines[0]

def run(*arguments):
    return E.main([str(a) for a in arguments])

def test_eval_and_train_say_whose_verdict_it_is(tiny, tmp_path, capsys):
    """The commands themselves, on made-up conversations."""
    finmcp(tmp_path)
    tiny.save(tmp_path / "model")
    common = ["--tasks", f"finmcp:{tmp_path / 'talks.json'}", "--threads", 1, "--max-tokens", 700,
              "--max-act-tokens", 4]
    assert run("eval", *common, "--model", tmp_path / "model", "--eval-samples", 2) == 0
    out = capsys.readouterr().out
    assert "static verdicts, split eval, 1 tasks; " in out and "success 0.000 +- 0.000" in out
    assert "doing nothing: success 0.000, reward 0.000" in out and "recorded responses replace the live servers" in out
    assert "micro precision 0.000, recall 0.000, F1 0.000" in out
    assert run("train", *common, "--model", tmp_path / "model", "--rounds", 1, "--group", 2, "--tasks-per-round", 2,
               "--minibatches", 1, "--eval-samples", 1, "--out", tmp_path / "run", "--rehearsal", "prompted",
               "--max-response-tokens", 4, "--probe-every", 0) == 0
    told = capsys.readouterr().out
    for when in ("base", "trained"):
        for where in ("world", "imagined"):
            assert f"{when}, {where}: static verdicts, split eval, 1 tasks; doing nothing: success 0.000" in told

def test_finmcp_pairs_responses_by_their_ids(tmp_path):
    """In the order of the ids; ids that come again belong to the next call; a response too few leaves one empty."""
    talk = [{"role": "user", "content": "Both?"}, calling(("Quote", "{}"), ("Rate", "{}")), heard("RATE", "c1"),
            heard("QUOTE", "c0"), calling(("News", "{}"), ("Risk", "{}")), heard("NEWS", "c0")]
    plain = [{key: value for key, value in m.items() if key != "tool_call_id"} for m in talk]
    for messages, names in [(talk, ["QUOTE", "RATE", "NEWS", ""]), (plain, ["RATE", "QUOTE", "NEWS", ""])]:
        (task,) = finmcp(tmp_path, [{"id": 1, "messages": messages}])
        assert [call["response"] for call in task.hidden["gold"]] == names
        assert [{*call} for call in task.hidden["gold"]] == [{"name", "arguments", "response"}] * 4

@pytest.mark.parametrize("text", ["[]", "{}", "0", "false", '"x"', "null", "no JSON"])
def test_finmcp_replays_what_was_recorded(tmp_path, text):
    talk = [{"role": "user", "content": "A?"}, calling(("Quote", "{}")), heard(text)]
    (task,) = finmcp(tmp_path, [{"id": 1, "messages": talk}])
    said = E.WORLDS["finmcp"](task, "evaluation").call(tool_call("Quote"))
    assert said == (text if text in ("null", "no JSON") else json.loads(text))

def test_finmcp_refuses_what_would_mislead(tmp_path):
    (tmp_path / "other.json").write_text(json.dumps([schema("Other")]))
    for settings, words in [({"tasks_dir": str(tmp_path / "other.json")}, "no schema of Quote"),
                            ({"reward": "official"}, "--reward is static"), ({"user": "policy"}, "--user is script")]:
        with pytest.raises(E.UserError, match=words):
            finmcp(tmp_path, **settings)
    for text in ("[" * 200_000, json.dumps([{"id": 1, "messages": [{"role": "user", "content": "\ud800"}]}])):
        with pytest.raises(E.UserError, match="talks.json: missing, cut off or of another form"):
            finmcp(tmp_path, text)

def test_thoughts_of_a_model_that_plays_the_user_stay_its_own():
    cfg = E.Config(user_model="m")
    told = [("<think>###STOP###, 42</think>\n My id is 7. ", "My id is 7."), ("<think>for ever", ""), ("Hi.", "Hi.")]
    for text, said in told:
        with Endpoint((200, json.dumps({"choices": [{"message": {"content": text}}]}))) as server:
            assert own_tasks.replies(None, [HELLO], E.replace(cfg, user=server.url), None) == [said]

@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://a b/v1", "http://localhost:abc/v1", "ftp://x/v1"])
def test_an_endpoint_is_checked_before_anything_is_loaded(tmp_path, url):
    where = own_file(tmp_path)
    with pytest.raises(E.UserError, match="--judge must be like"):
        E.load_tasks(where, E.Config(tasks=where, judge=url, judge_model="m"))

def test_flags_of_benchmarks_are_refused_elsewhere(tmp_path):
    where = own_file(tmp_path, checks=[{"kind": "answer", "equals": "x"}])
    for settings in ({"reward": "official"}, {"user": "policy"}):
        with pytest.raises(E.UserError, match="--reward and --user"):
            E.load_tasks(where, E.Config(tasks=where, **settings))

def test_memories_do_not_multiply_tasks():
    """Each execution has a task of its own, with another memory."""
    episodes = one_sided("a", "yes", "no", verdict="static") + one_sided("b", "yes", "no", verdict="static")
    for n, e in enumerate(episodes):
        e.task = E.replace(e.task, memory=str(n))
    found = reports.report(episodes, 2, "eval")
    assert "2 tasks" in found[0] and "success 0.500 +- 0.707" in found[1] and "2 samples a task" in found[1]

README = (HERE / "README.md").read_text(encoding="utf-8")
MODELS = re.findall(r'^MODEL="(.*?)"', README, re.M)
COMMANDS = re.findall(r"^(?:.*torchrun --nproc-per-node \d |python )(envace_mini.py .*--preset gpu.*)$", README, re.M)
RECIPES = [command.replace("$MODEL", model) for command in COMMANDS     # a dry run of 1.7B would be that of 0.6B
           for model in (MODELS[::2] if "$MODEL" in command else [""])]

def test_the_readme_has_recipes():
    assert len(MODELS) == 3 and sum("$MODEL" in command for command in COMMANDS) == 9
    assert {name for command in COMMANDS for name in re.findall("--tasks ([a-z0-9]+):", command)} == {
        "bfcl", "tau2", "vita", "finmcp"}
    for command in [command for command in COMMANDS if "$MODEL" in command]:        # "the same with eval"
        words = command.replace("$MODEL", "").split()[2:]
        words = words[:words.index("--out")] + ["--responder", "rehearsal"]
        assert E.parse_flags(["eval", "--model", "runs/NAME/model", *words])[0] == "eval"

@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_the_readme_runs(tiny, tmp_path, clone, monkeypatch, recipe):       # noqa: F811
    """Each command, for one round, with a tiny random model, one short task a split, and stubs for servers."""
    for name, package in (("bfcl:", "bfcl_eval"), ("tau2:", "tau2")):
        if name in recipe:
            pytest.importorskip(package)
    words = recipe.partition("#")[0].split()[1:]
    if not E.importlib.util.find_spec("peft") and "--lora" in words:
        words[words.index("--lora") + 1] = "0"
    finmcp(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps([schema(name) for name in ("Quote", "Rate", "Risk")]))
    own = own_file(tmp_path)
    named = {"vitabench": clone, "finmcp:FILE.json": f"finmcp:{tmp_path / 'talks.json'}", "my_tasks.json": own,
             "SCHEMAS.json": tmp_path / "schema.json", "FOLDER": tmp_path / "model"}
    load = E.load_tasks
    def short(where, cfg=None):
        tasks = [task for task in load(where, cfg) if task.checks][:2] * 2
        return [E.replace(task, split=split, system=task.system[:200], tools=task.tools[:3],
                          secret=str(task.secret)[:200]) for task, split in zip(tasks, ("train", "eval"))]
    monkeypatch.setattr(E, "load_tasks", short)
    def reply(url, model, messages, *rest, **more):
        asked = re.search(r"a list of (\d+) truth values", messages[-1]["content"])
        return json.dumps({"verdicts": [True] * int(asked[1])}) if asked else "###STOP###"
    monkeypatch.setattr(own_tasks, "ask", reply)
    tiny.save(tmp_path / "model")
    after = dict(model=tmp_path / "model", device="cpu", dtype="float32", threads=1, max_act_tokens=4, max_tokens=20000)
    if words[0] == "eval" or words[0] == "train":
        after.update(max_response_tokens=4, tasks_per_round=1)
    if words[0] == "eval":
        after.update(eval_samples=1)
    if words[0] == "train" or words[0].startswith("--"):
        after.update(rounds=1, eval_samples=1, group=2, probe_every=0, minibatches=1, tasks_per_round=1,
                     out=tmp_path / "run")
    if words[0] == "bench":
        after.update(model="tiny", group=2, tasks_per_round=1)
    assert run(*(named.get(word, word) for word in words),
               *(part for key, value in after.items() for part in (f"--{key.replace('_', '-')}", value))) == 0

def test_show_prints_no_judge(tmp_path, tiny, capsys):
    tiny.save(tmp_path / "model")
    where = own_file(tmp_path)
    with Endpoint(verdicts(True, False)) as server:
        url = server.url
        assert run("show", "--tasks", where, "--split", "train", "--judge", url, "--judge-model", "the-model",
                   "--model", tmp_path / "model", "--max-act-tokens", 4, "--group", 2, "--threads", 1) == 0
        out = capsys.readouterr().out
    assert "Is it bought?" in out and url not in out and "the-model" not in out

# ---- a real server ---------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not os.environ.get("RUN_SLOW"), reason="set RUN_SLOW=1 for the slow tests")
def test_judge_at_a_real_openai_compatible_server(tiny, tmp_path, news, capsys):
    """`transformers serve` (pip install "transformers[serving]") with the chat model in the folder JUDGE_FOLDER, else
    with a tiny random one, whose garbage is no verdict. Needs no network."""
    for package in ("fastapi", "uvicorn", "openai", "rich"):
        pytest.importorskip(package)
    folder = os.environ.get("JUDGE_FOLDER") or str(tmp_path / "model")
    if not os.environ.get("JUDGE_FOLDER"):
        tiny.save(folder)
    with Endpoint((200, "")) as free:
        port = free.server.server_address[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", folder, "--port", str(port),
               "--device", "cpu"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://localhost:{port}/v1"
    try:
        for _ in range(120):
            if own_tasks.ask(url, folder, HELLO, tries=1, timeout=30, max_tokens=2) is not None:
                break
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(1)
        text = own_tasks.ask(url, folder, HELLO, temperature=0, max_tokens=8)
        assert isinstance(text, str) and own_tasks.ask(url, folder, HELLO, temperature=0, max_tokens=8) == text
        with pytest.raises(E.UserError, match="--judge: the endpoint answers 4.*--judge-model"):
            own_tasks.ask(url, "another/model", HELLO)
        with pytest.raises(E.UserError, match="--judge: the endpoint answers 404"):
            own_tasks.ask(url + "/nosuch", folder, HELLO)
        e = judged(url)
        e.task.hidden["judge"] = (url, folder)
        reward, values = grade(e)
        assert reward is None or 0 <= reward <= 1
        assert ("unscored" in capsys.readouterr().out) == (reward is None)
    finally:
        server.terminate()
        server.wait(30)
