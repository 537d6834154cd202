"""Plain HTTP requests to a real agent: what curl and other languages see."""

import base64
import gzip
import http.client
import json
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from agent_harness import POD, USER_TOKEN, AgentProcess, FakeController, wait_until

SOURCE = '''
import threading
from pathlib import Path

def helper(): pass

class Answer:
    """Computes things."""

    def __init__(self):
        self.begun, self.cancelled, self.met = [], [], []
        self.over = threading.Event()

    def add(self, a: int, b: float = 2.5, *, note: str | None = None) -> float:
        """Add two numbers."""
        return a + b

    def echo(self, value):
        return value

    def array(self, n):
        import numpy
        return numpy.arange(n)

    def raises(self, name):
        raise {
            "TypeError": TypeError("t"), "ValueError": ValueError("v"), "KeyError": KeyError("k"),
            "PermissionError": PermissionError("p"), "TimeoutError": TimeoutError("o"),
            "NotImplementedError": NotImplementedError("n"), "MemoryError": MemoryError("m"),
            "Own": Own("mine"), "Teapot": Teapot("tea"),
        }[name]

    def nothing(self): return None

    def not_json(self): return {1, 2}

    def numbers(self, count, fail=False):
        for i in range(count):
            yield i
        if fail:
            raise ValueError("at the end")
        return "end"

    async def nap(self, seconds):
        import asyncio
        self.begun.append(seconds)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled.append(seconds)
            raise
        return "slept"

    async def meet(self, count):
        import asyncio
        self.met.append(None)
        while len(self.met) < count:
            await asyncio.sleep(0.01)
        return "met"

    def dwell(self): self.over.wait(60)

    def leave(self): self.over.set()

    def naps_begun(self): return self.begun

    def naps_cancelled(self): return self.cancelled

    def raw(self):
        print("a line")
        return "text"

class Own(ValueError): pass

class Teapot(Exception):
    status_code = 418
'''


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    controller = FakeController(tmp_path_factory.mktemp("controller"))
    yield controller
    controller.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory, controller):
    agent = AgentProcess(tmp_path_factory.mktemp("agent"), controller)
    try:
        observed = controller.deploy(1, SOURCE, "Answer", kind="cls")
        assert observed.failure is None, observed.failure
        yield agent
    finally:
        agent.stop()


def test_a_probe_of_a_pod_that_starts_is_answered_when_it_serves_or_when_it_cannot(tmp_path):
    controller = FakeController(tmp_path)
    agent = AgentProcess(tmp_path / "agent", controller)
    try:
        assert agent.http("GET", "/health/serving")[0] == 503
        assert agent.http("GET", "/health/serving?wait=1")[0] == 503
        with ThreadPoolExecutor(1) as pool:
            probe = pool.submit(agent.http, "GET", "/health/serving?wait=60")
            assert controller.deploy(1, "raise ValueError", "f").failure is not None
            assert probe.result(60)[0] == 503
            assert controller.deploy(2, "def f(): pass", "f").failure is None
            assert agent.http("GET", "/health/serving?wait=60")[0] == 200
    finally:
        agent.stop()
        controller.close()


def test_a_method_is_called_with_a_json_body(agent):
    assert agent.post("/Answer/add", 1, b=2) == (200, 3)
    assert agent.post("/Answer/echo", {"ü": [None, 1.5]}) == (200, {"ü": [None, 1.5]})
    assert agent.post("/Answer/nothing") == (200, None)


def test_a_missing_body_means_no_arguments(agent):
    status, _, body = agent.http("POST", "/Answer/nothing")
    assert (status, json.loads(body)) == (200, None)
    status, _, body = agent.http("POST", "/Answer/nothing", b"{}")
    assert (status, json.loads(body)) == (200, None)


def test_the_request_id_comes_back_or_is_made(agent):
    _, headers, _ = agent.http("POST", "/Answer/nothing", headers={"X-Request-ID": "0123456789"})
    assert headers["x-request-id"] == "0123456789"
    _, headers, _ = agent.http("POST", "/Answer/nothing")
    assert len(headers["x-request-id"]) == 10
    assert int(headers["x-request-id"], 16) >= 0


def test_pickled_arguments_and_results_travel_in_base64(agent):
    data = base64.b64encode(pickle.dumps({"args": [(1, 2)], "kwargs": {}})).decode()
    for body in ({"data": data}, data):
        status, _, answer = agent.http(
            "POST", "/Answer/echo", json.dumps(body).encode(), {"X-Serialization": "pickle"}
        )
        assert status == 200
        assert pickle.loads(base64.b64decode(json.loads(answer)["data"])) == (1, 2)


def test_a_pickled_array_comes_back_in_one_ordinary_pickle(agent):
    data = base64.b64encode(pickle.dumps({"args": [5], "kwargs": {}})).decode()
    _, _, answer = agent.http(
        "POST", "/Answer/array", json.dumps({"data": data}).encode(), {"X-Serialization": "pickle"}
    )
    array = pickle.loads(base64.b64decode(json.loads(answer)["data"]))
    assert np.array_equal(array, np.arange(5))
    array[0] = 7  # it can be changed, as every array


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[1]", 400),
        (b"1", 400),
        (b'"text"', 400),
        (b"null", 400),
        (b'{"args": [', 400),
        (b'{"args": 1}', 400),
        (b'{"kwargs": []}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"args": [1], "kwargs": {"nothing": 2}}', 422),
        (b'{"args": []}', 422),
    ],
)
def test_bodies_are_checked(agent, body, status):
    answer_status, _, answer = agent.http("POST", "/Answer/echo", body)
    assert answer_status == status
    if status != 200:
        envelope = json.loads(answer)
        assert {"error_type", "message", "traceback", "pod_name"} <= set(envelope)
        assert envelope["pod_name"] == POD


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"arg": [1]}, "arg"),
        ({"args": [1], "value": 2}, "value"),
        ({"args": [1], "workers": "ready"}, "workers"),  # of distributed services alone
        ({"args": [1], "restart_procs": True}, "restart_procs"),
    ],
)
def test_a_key_without_effect_is_an_error_that_names_it(agent, body, key):
    status, _, answer = agent.http("POST", "/Answer/echo", json.dumps(body).encode())
    assert status == 400
    assert key in json.loads(answer)["message"]


@pytest.mark.parametrize("data", ["", "?", "YQ"])
def test_pickle_that_is_not_base64_is_a_bad_request(agent, data):
    body = json.dumps({"data": data}).encode()
    status, _, answer = agent.http("POST", "/Answer/echo", body, {"X-Serialization": "pickle"})
    assert status == 400
    assert json.loads(answer)["error_type"] in ("ProtocolError", "SerializationError")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("TypeError", 422),
        ("ValueError", 400),
        ("Own", 400),
        ("KeyError", 404),
        ("PermissionError", 403),
        ("TimeoutError", 504),
        ("NotImplementedError", 501),
        ("MemoryError", 500),
        ("Teapot", 418),
    ],
)
def test_the_users_exceptions_have_the_status_of_their_class(agent, name, status):
    answer_status, body = agent.post("/Answer/raises", name)
    assert answer_status == status
    assert body["error_type"] == name
    assert "raise {" in body["traceback"]


def test_unknown_names_are_not_found_and_say_what_there_is(agent):
    status, body = agent.post("/Other")
    assert status == 404
    assert body["message"].startswith(
        "Callable 'Other' not found in metadata configuration. Found 'Answer' instead"
    )
    assert agent.post("/Answer/missing")[0] == 404
    assert agent.post("/helper")[0] == 404
    assert agent.post("/a/b/c")[0] == 404
    assert agent.post("/")[0] == 404
    assert agent.http("GET", "/nothing/here")[0] == 404


def test_a_callable_is_called_with_post_only(agent):
    assert agent.http("GET", "/Answer/add")[0] == 405
    assert agent.http("PUT", "/health")[0] == 405


def test_a_codec_that_does_not_exist_is_refused(agent):
    status, _, body = agent.http("POST", "/Answer/echo", b"{}", {"X-Serialization": "yaml"})
    assert status == 400
    assert "Serialization format 'yaml'" in json.loads(body)["message"]


def test_a_result_that_json_cannot_carry_is_an_error(agent):
    status, body = agent.post("/Answer/not_json")
    assert status == 400
    assert body["error_type"] == "SerializationError"


def test_a_timeout_header_ends_the_call(agent):
    begin = time.monotonic()
    status, body = agent.post("/Answer/nap", 600, headers={"X-Kubetorch-Timeout": "0.2"})
    assert (status, body["error_type"]) == (504, "CallTimeoutError")
    assert time.monotonic() - begin < 60
    for impossible in ("soon", "-1", "nan", "inf", "1e9"):
        status, body = agent.post("/Answer/nap", 30, headers={"X-Kubetorch-Timeout": impossible})
        assert (status, body["error_type"]) == (400, "ProtocolError")
        assert "from 0 to 100000000" in body["message"]


def test_an_idempotency_key_runs_a_call_once(agent):
    headers = {"Idempotency-Key": "k"}
    before = agent.post("/Answer/naps_cancelled", headers=headers)
    agent.post("/Answer/nap", 30, headers={"X-Kubetorch-Timeout": "0.1"})
    assert agent.post("/Answer/naps_cancelled", headers=headers) == before


def test_a_client_that_disconnects_cancels_its_call(agent):
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=60)
    headers = {"Authorization": f"Bearer {USER_TOKEN}"}
    connection.request("POST", "/Answer/nap", body=b'{"args": [31]}', headers=headers)
    wait_until(lambda: 31 in agent.post("/Answer/naps_begun")[1])
    connection.close()
    wait_until(lambda: 31 in agent.post("/Answer/naps_cancelled")[1])


def test_a_generator_streams_lines_as_they_are_made(agent):
    status, headers, body = agent.http("POST", "/Answer/numbers", b'{"args": [30]}')
    lines = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    assert headers["content-type"] == "application/x-ndjson"
    assert lines == [*({"yield": i} for i in range(30)), {"return": "end"}]


def test_an_error_in_a_generator_is_its_last_line(agent):
    _, _, body = agent.http("POST", "/Answer/numbers", b'{"args": [2, true]}')
    *values, last = [json.loads(line) for line in body.splitlines()]
    assert values == [{"yield": 0}, {"yield": 1}]
    assert (last["error_type"], last["message"]) == ("ValueError", "at the end")


def test_many_requests_on_one_connection(agent):
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=60)
    headers = {"Authorization": f"Bearer {USER_TOKEN}"}
    for i in range(50):
        connection.request("POST", "/Answer/echo", body=b'{"args": [%d]}' % i, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, str(i).encode())
    connection.close()


def test_requests_run_at_the_same_time(agent):
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(agent.post, "/Answer/meet", 8) for _ in range(8)]
    assert [answer.result() for answer in answers] == [(200, "met")] * 8


# ------------------------------------------------------------------------------ other routes


def test_health_needs_no_token(agent):
    for path in ("/", "/health"):
        status, _, body = agent.http("GET", path, token=None)
        assert (status, json.loads(body)) == (200, {"status": "healthy"})


def test_ready_names_the_generation_that_is_served(agent):
    status, _, body = agent.http("GET", "/ready")
    assert status == 200
    assert json.loads(body)["generation"] == 1
    assert json.loads(body)["callable"] == "Answer"
    assert agent.http("GET", "/ready?launch_id=1")[0] == 200
    assert agent.http("GET", "/ready?launch_id=2")[0] == 503


def test_metrics_count_calls(agent):
    agent.post("/Answer/raises", "ValueError")
    # Those of other tests may end still.
    wait_until(lambda: b"kubetorch_calls_running 0\n" in agent.http("GET", "/metrics")[2])
    status, headers, body = agent.http("GET", "/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#")
    )
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert float(values["kubetorch_calls_total"]) >= 1
    assert float(values["kubetorch_calls_failed_total"]) >= 1
    assert float(values["kubetorch_generation"]) == 1


def test_openapi_describes_the_methods_of_the_callable(agent):
    _, _, body = agent.http("GET", "/openapi.json")
    document = json.loads(body)
    operation = document["paths"]["/Answer/add"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    properties = schema["properties"]["kwargs"]["properties"]
    assert operation["description"] == "Add two numbers."
    assert properties["a"] == {"type": "integer"}
    assert properties["b"] == {"type": "number", "description": "default: 2.5"}
    assert properties["note"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert "/Answer/__init__" not in document["paths"]


def test_docs_are_a_page_that_loads_nothing_from_elsewhere(agent):
    status, headers, body = agent.http("GET", "/docs")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"def add(self, a: int" in body
    assert b"src=" not in body
    assert b"href=" not in body


def test_the_log_has_the_lines_with_their_request(agent):
    agent.post("/Answer/raw", headers={"X-Request-ID": "find-me"})
    _, headers, body = agent.http("GET", "/v1/logs?tail=5")
    assert headers["content-type"] == "application/x-ndjson"
    last = [json.loads(line) for line in body.splitlines()][-1]
    assert (last["text"], last["request"], last["pod"]) == ("a line", "find-me", POD)
    assert agent.http("GET", "/v1/logs?tail=x")[0] == 400
    assert "a line" in agent.log_file.read_text()


def test_the_log_is_followed(agent):
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=60)
    headers = {"Authorization": f"Bearer {USER_TOKEN}"}
    connection.request("GET", "/v1/logs?tail=0&follow=1", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 200
    for i in range(3):
        agent.post("/Answer/raw", headers={"X-Request-ID": f"request-{i}"})
        assert json.loads(answer.readline())["request"] == f"request-{i}"
    connection.close()


def test_what_the_workers_do_can_be_read(agent):
    call = threading.Thread(target=agent.post, args=["/Answer/dwell"])
    call.start()
    wait_until(lambda: "in dwell" in stacks(agent)["text"])
    assert (stacks(agent)["pod"], stacks(agent)["generation"]) == (POD, 1)
    agent.post("/Answer/leave")
    call.join()
    assert json.loads(agent.http("GET", "/v1/stacks?rank=3")[2]) == []
    assert agent.http("GET", "/v1/stacks?rank=x")[0] == 400


def stacks(agent):
    (process_stacks,) = json.loads(agent.http("GET", "/v1/stacks")[2])
    return process_stacks


# ------------------------------------------------------------------------- what is refused

ROUTES = [
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/v1/logs"),
    ("GET", "/v1/stacks"),
    ("GET", "/nothing"),
    ("POST", "/Answer/nothing"),
    ("POST", "/Other"),
    # Open to be read by probes; a callable may have the same name.
    ("POST", "/"),
    ("POST", "/health"),
    ("POST", "/health/serving"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("kind", ["missing", "wrong", "expired", "foreign", "malformed", "basic"])
def test_every_route_needs_a_token(agent, method, path, kind):
    authorization = {
        "missing": None,
        "wrong": "Bearer wrong",
        "expired": f"Bearer {agent.token(ttl=-1)}",
        "foreign": f"Bearer {agent.token(audience='default/other')}",
        "malformed": "Bearer kt1.e30.x",
        "basic": f"Basic {USER_TOKEN}",
    }[kind]
    headers = {} if authorization is None else {"Authorization": authorization}
    status, answer_headers, body = agent.http(method, path, None, headers, token=None)
    assert status == 401
    assert answer_headers["www-authenticate"].startswith("Bearer")
    envelope = json.loads(body)
    assert envelope["error_type"] == "UnauthorizedError"
    assert envelope["traceback"] == ""
    assert USER_TOKEN not in envelope["message"]


def test_a_signed_token_for_this_workload_is_accepted(agent):
    headers = {"Authorization": f"Bearer {agent.token()}"}
    assert agent.post("/Answer/add", 1, headers=headers) == (200, 3.5)


@pytest.mark.parametrize("kind", ["missing", "wrong", "expired", "foreign"])
def test_a_stream_needs_a_token(agent, kind):
    token = {
        "missing": "",
        "wrong": "wrong",
        "expired": agent.token(ttl=-1),
        "foreign": agent.token(audience="default/other"),
    }[kind]
    assert agent.client(token=token).status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "a b"]
)
@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_foreign_host_is_refused_although_the_token_is_right(agent, host, path):
    status, _, body = agent.http("GET", path, headers={"Host": host})
    assert status in (400, 403)
    if status == 403:
        assert json.loads(body)["error_type"] == "ForeignOriginError"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "localhost:1234", "LOCALHOST"])
def test_loopback_names_are_accepted(agent, host):
    assert agent.http("GET", "/ready", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example"]
)
def test_a_foreign_origin_is_refused_although_the_token_is_right(agent, origin):
    assert agent.http("POST", "/Answer/nothing", headers={"Origin": origin})[0] == 403
    assert agent.client(headers={"Origin": origin}).status == 403


def test_an_origin_of_this_machine_is_accepted(agent):
    headers = {"Origin": "http://localhost:3000"}
    assert agent.http("POST", "/Answer/nothing", headers=headers)[0] == 200


def test_a_body_bomb_is_refused_by_its_announced_length(agent):
    request = (
        "POST /Answer/echo HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {USER_TOKEN}\r\nContent-Length: 99999999999\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", agent.port), timeout=60) as sock:
        sock.sendall(request.encode())
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_bomb_is_refused_while_it_comes(agent):
    request = (
        "POST /Answer/echo HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {USER_TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"100000\r\n" + bytes(0x100000) + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", agent.port), timeout=60) as sock:
        sock.sendall(request.encode())
        try:
            while sent < 1000:
                sock.sendall(chunk)
                sent += 1
        except OSError:
            pass
    assert sent < 200


def test_a_compressed_body_bomb_is_refused_while_it_is_decompressed(agent):
    bomb = gzip.compress(bytes(300 * 1024 * 1024))
    assert len(bomb) < 1024 * 1024
    status, _, body = agent.http("POST", "/Answer/echo", bomb, {"Content-Encoding": "gzip"})
    assert status == 413
    assert "allowed" in json.loads(body)["message"]
    memory = Path(f"/proc/{agent.pid}/status").read_text().split("VmRSS:")[1].split()[0]
    assert int(memory) < 300 * 1024


def test_a_compressed_body_is_read(agent):
    body = gzip.compress(b'{"args": [1]}')
    status, _, answer = agent.http("POST", "/Answer/echo", body, {"Content-Encoding": "gzip"})
    assert (status, answer) == (200, b"1")
    assert agent.http("POST", "/Answer/echo", b"x", {"Content-Encoding": "gzip"})[0] == 400
    members = gzip.compress(b'{"args": ') + gzip.compress(b"") + gzip.compress(b"[2]}")
    status, _, answer = agent.http("POST", "/Answer/echo", members, {"Content-Encoding": "gzip"})
    assert (status, answer) == (200, b"2")
    status, _, answer = agent.http(
        "POST", "/Answer/echo", body + b"not gzip", {"Content-Encoding": "gzip"}
    )
    assert (status, b"what follows gzip in the body is not gzip" in answer) == (400, True)
    cut = (body + members[:20], {"Content-Encoding": "gzip"})
    assert agent.http("POST", "/Answer/echo", *cut)[0] == 400
    assert agent.http("POST", "/Answer/echo", b"x", {"Content-Encoding": "br"})[0] == 415


def test_an_endless_head_of_a_request_is_refused(agent):
    sent = 0
    with socket.create_connection(("127.0.0.1", agent.port), timeout=60) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        try:
            while sent < 1000:
                sock.sendall(b"x" * 65536)
                sent += 1
        except OSError:
            pass
    assert sent < 200
    assert agent.http("GET", "/health")[0] == 200
