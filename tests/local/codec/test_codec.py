"""The default codec between a program and its pods: lossless, safe, and JSON for everybody else."""

from __future__ import annotations

import asyncio
import json
import pickle
import urllib.error
import urllib.request
from typing import Any

import numpy
import pandas
import pytest

import kubetorch as kt
from agent_harness import AgentProcess, FakeController
from kubetorch.errors import SerializationError
from kubetorch.sdk.calls import blocking
from kubetorch.sdk.calls.attempts import Invocation
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.wire import codecs, frames
from kubetorch.wire.frames import Kind
from tests.local.calling import caller, route_to, target
from tests.local.scripted_agent import Call, ScriptedAgent
from tests.local.user_project import UserProject

SOURCE = """
import dataclasses, datetime, enum, socket, sys

class Color(enum.Enum):
    RED = 1

class Level(enum.IntEnum):
    LOW = 1

@dataclasses.dataclass
class Point:
    x: object
    y: object = ()

def echo(value):
    return value

def seen(*args, **kwargs):
    return [repr([type(one).__name__ for one in args]), args, kwargs]

def opened():
    return {"rows": [1, 2, 3, Point(socket.socket())]}

def numbers(count):
    for i in range(count):
        yield {i: Point((i,))}

def report():
    import numpy
    import kubetorch as kt
    kt.progress(numpy.int64(1), numpy.float32(2), "half")
    kt.progress(float("nan"), 2)

def where():
    import os
    return {os.environ.get("RANK", os.environ["POD_NAME"]): {1, 2}}

def work(name, *args, **kwargs):
    return globals()[name](*args, **kwargs)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    project_of_user = UserProject(tmp_path_factory.mktemp("codec") / "shop")
    yield project_of_user
    project_of_user.forget()


@pytest.fixture(scope="module")
def jobs(project):
    return project.module(SOURCE)


@pytest.fixture(scope="module")
def work(jobs):
    remote = kt.fn(jobs.work).to(kt.Compute(cpus="0.1"))
    yield remote
    remote.teardown()


def test_values_arrive_as_they_were_sent_both_ways(work, jobs):
    value = {
        1: "int",
        True + 1: "two",
        None: float("inf"),
        (1, "a"): {1, 2},
        "point": jobs.Point(jobs.Color.RED, (1, (2,))),
        b"k": [jobs.Level.LOW, 2**20000],
    }
    assert work("echo", value) == value
    kinds, args, kwargs = work("seen", {1: 2}, float("nan"), (1, 2), b"x", flag=jobs.Color.RED)
    assert kinds == "['dict', 'float', 'list', 'bytes']"
    assert args[0] == {1: 2}
    assert kwargs == {"flag": jobs.Color.RED}


def test_arrays_and_frames_arrive_without_a_setting(work):
    array = numpy.arange(1_000_000.0).reshape(1000, 1000)
    frame = pandas.DataFrame({"a": [1, 2], "s": ["x", None]}, index=["p", "q"])
    echoed = work("echo", {"array": array, "frame": frame})
    assert numpy.array_equal(echoed["array"], array)
    assert echoed["array"].flags.writeable
    pandas.testing.assert_frame_equal(echoed["frame"], frame)


def test_a_torch_tensor_arrives_without_a_setting(work):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(100, 100, requires_grad=True)
    echoed = work("echo", [tensor])[0]
    assert torch.equal(echoed, tensor)
    assert echoed.requires_grad


def test_what_cannot_travel_is_named_with_its_path(work, jobs):
    with pytest.raises(
        SerializationError, match=r'^result\["rows"\]\[3\]\.x is a socket'
    ) as caught:
        work("opened")
    assert caught.value.hint
    with pytest.raises(SerializationError, match=r'^args\[1\]\["a"\] is a function'):
        work("echo", {"a": lambda: 1})


@pytest.mark.parametrize(
    "call_form", ["generator", "map", "async", "spawn", "found again", "options"]
)
def test_every_way_to_call_is_exact(work, jobs, call_form):
    value = {1: jobs.Point((1,)), "a": numpy.arange(3)}

    async def call() -> Any:
        return await work("echo", value, async_=True)

    if call_form == "generator":
        assert list(work("numbers", 2)) == [{0: jobs.Point((0,))}, {1: jobs.Point((1,))}]
        return
    handle = work.spawn("echo", value) if call_form in ("spawn", "found again") else None
    echoed = {
        "map": lambda: next(iter(work.map(["echo"], [value]))),
        "async": lambda: asyncio.run(call()),
        "spawn": lambda: handle.get(),
        "found again": lambda: kt.CallHandle.from_id(handle.id).get(),
        "options": lambda: work.options(serialization="json", timeout=20)("echo", value),
    }[call_form]()
    assert echoed[1] == jobs.Point((1,))
    assert echoed["a"].tolist() == [0, 1, 2]


def test_a_service_with_replicas_and_one_with_ranks_are_exact(jobs):
    for compute in (
        kt.Compute(cpus="0.1", replicas=2),
        kt.Compute(cpus="0.1").distribute("spmd", workers=2, num_proc=1),
    ):
        remote = kt.fn(jobs.where).to(compute)
        answers = remote()
        assert [list(answer.values()) for answer in answers] == [[{1, 2}]] * 2
        remote.teardown()


def test_a_script_has_its_classes_as_main_and_its_pod_under_another_name(project):
    source = SOURCE + (
        "if __name__ == '__main__':\n"
        "    import kubetorch as kt\n"
        "    remote = kt.fn(echo).to(kt.Compute(cpus='0.1'))\n"
        "    found = remote({1: [Color.RED, Point(Level.LOW, (1,))]})\n"
        "    assert found[1][0] is Color.RED and type(found[1][1]) is Point, found\n"
        "    print(found, type(found[1][1].x).__module__)\n"
        "    remote.teardown()\n"
    )
    completed = project.run(project.write("script.py", source))
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "{1: [<Color.RED: 1>, Point(x=<Level.LOW: 1>, y=(1,))]} __main__\n"


def test_a_class_that_this_program_lacks_is_plain_json_or_named(project):
    calls = (
        "import kubetorch as kt\n"
        "level = kt.fn(name='level')\n"
        "print(level('Level'))\n"
        "try: level('Color')\n"
        "except kt.SerializationError as error: print(error)\n"
    )
    module = project.module(SOURCE + "\ndef level(name): return list(globals()[name])\n", "levels")
    remote = kt.fn(module.level).to(kt.Compute(cpus="0.1"))
    completed = project.run(project.write("other.py", calls))
    remote.teardown()
    assert completed.returncode == 0, completed.stderr
    first, second, *_ = completed.stdout.splitlines()
    assert first == "[1]"
    assert f"Color.RED is not in the module {module.__name__} here" in second


def test_a_pod_without_numpy_says_what_it_lacks(project):
    module = project.module(
        """
        import os, sys
        if "POD_NAME" in os.environ:
            sys.modules["numpy"] = None
        def echo(value):
            return value
        """,
        "bare",
    )
    remote = kt.fn(module.echo).to(kt.Compute(cpus="0.1"))
    assert remote({1: {2.5}}) == {1: {2.5}}
    assert type(remote(numpy.float64(1.5))) is float
    with pytest.raises(SerializationError, match="numpy cannot be imported here"):
        remote(numpy.ones(3))
    remote.teardown()


def test_reports_of_progress_may_have_numbers_of_numpy(work):
    reports = []
    work.options(on_progress=lambda *report: reports.append(report))("report")
    assert reports[0] == (1.0, 2.0, "half")
    assert str(reports[-1]) == "(nan, 2.0, None)"


# ------------------------------------------------------------------------------- what is allowed


def test_allowed_serialization_names_it_json(jobs):
    remote = kt.fn(jobs.echo).to(kt.Compute(cpus="0.1", allowed_serialization=["json"]))
    assert remote({1: 2}) == {1: 2}
    remote.teardown()
    remote = kt.fn(jobs.echo).to(kt.Compute(cpus="0.1", allowed_serialization=["pickle"]))
    with pytest.raises(SerializationError, match="'json' not allowed"):
        remote({1: 2}, serialization="json")
    assert remote({1: (2,)}) == {1: (2,)}
    remote.teardown()


# --------------------------------------------------------------------------- everybody else: JSON


def _post(endpoint: str, body: object, headers: dict[str, str]) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(endpoint, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


TAG = {"$": ["int", "0x1"]}


def test_plain_http_stays_strict_json_where_tags_mean_nothing(work):
    headers = dict(work.request_headers)

    def ask(*args: Any, **more: str) -> tuple[int, Any]:
        return _post(work.endpoint(), {"args": args, "kwargs": {}}, headers | more)

    assert ask("echo", {"a": TAG}) == (200, {"a": TAG})
    assert ask("seen", TAG)[1][0] == "['dict']"
    assert ask("echo", [1], **{"X-Serialization": "json"}) == (200, [1])
    status, failure = ask("opened")
    assert (status, failure["error_type"]) == (400, "SerializationError")
    status, failure = ask("echo", 1, **{"X-Serialization": "values"})
    assert (status, failure["error_type"]) == (400, "SerializationError")


def test_what_a_program_has_called_first_is_json_for_plain_http_or_refused(work):
    headers = work.request_headers | {"Idempotency-Key": "one"}
    work.options(idempotency_key="one")("echo", {1: 2})
    status, failure = _post(work.endpoint(), {"args": ["echo", 1]}, headers)
    assert (status, failure["error_type"]) == (400, "SerializationError")
    work.options(idempotency_key="two")("echo", {"a": 2})
    headers["Idempotency-Key"] = "two"
    assert _post(work.endpoint(), {"args": ["echo", 1]}, headers) == (200, {"a": 2})


AGENT_SOURCE = """
class Service:
    def __init__(self, start=0):
        self.n = start

    def kind(self, value):
        return [type(value).__name__, value, {1: 2}]

    def bytes_of(self, array):
        return array["a"].tobytes().hex()

    def text_of(self, array):
        return str(array)
"""


@pytest.fixture
def agent(tmp_path):
    controller = FakeController(tmp_path)
    process = AgentProcess(tmp_path, controller)
    try:
        observed = controller.deploy(1, AGENT_SOURCE, "Service", kind="cls")
        assert observed.failure is None, observed.failure
        yield process
    finally:
        process.stop()
        controller.close()


def test_a_client_gets_the_codec_that_it_sends(agent):
    client = agent.client()
    client.open(1, TAG, name="Service", method="kind")
    assert client.result(1) == ["dict", TAG, {"1": 2}]
    client.open(2, {1: 2}, name="Service", method="kind", codec="values")
    assert client.result(2) == ["dict", {1: 2}, {1: 2}]


def test_a_codec_that_nobody_knows_is_refused(agent):
    client = agent.client()
    body = frames.Body("values2", (1,), 1)
    client.send(Kind.OPEN, 1, frames.Open("x" * 32, "Service", body, "kind"), b"1")
    kind, _, _, payload = client.next()
    assert kind == Kind.ERROR
    assert b"is unknown" in payload


#: An array of 16 bytes whose field has 2 GiB, and one whose field lies 2 GiB behind it.
_BEYOND = [
    {"formats": [["|u1", [2**31 - 1]]], "offsets": [1]},
    {"formats": ["<i4"], "offsets": [2**31 - 1]},
]


def _beyond(lying: dict[str, Any]) -> dict[str, Any]:
    dtype = {"names": ["a"], "titles": [None], **lying, "itemsize": 16}
    return {"$": ["np.array", dtype, [1], "C", [0, 16]]}


@pytest.mark.security
@pytest.mark.parametrize("method", ["bytes_of", "text_of"])
def test_a_caller_does_not_read_the_memory_of_a_worker_or_end_it(agent, method):
    client = agent.client()
    for number, lying in enumerate(_BEYOND, 1):
        text = b"$" + json.dumps({"args": [_beyond(lying)], "kwargs": {}}).encode()
        payload = text + bytes(-len(text) % codecs.ALIGNMENT) + bytes(16)
        body = frames.Body("values", (len(text), 16), len(payload))
        opened = frames.Open(f"{number}" * 32, "Service", body, method)
        client.send(Kind.OPEN, number, opened, payload)
        kind, _, _, answer = client.until(number, Kind.RESULT, Kind.ERROR)[-1]
        assert kind == Kind.ERROR
        assert b"whose fields do not lie in it" in answer
    client.open(9, 5, name="Service", method="kind")
    assert client.result(9) == ["int", 5, {"1": 2}]


@pytest.mark.security
def test_a_pod_does_not_reach_the_memory_of_a_program():
    async def lie(call: Call) -> None:
        text = b"$" + json.dumps(_beyond(_BEYOND[call.args[0]])).encode()
        payload = text + bytes(-len(text) % codecs.ALIGNMENT) + bytes(16)
        body = frames.Body("values", (len(text), 16), len(payload))
        call.send(Kind.RESULT, frames.Result(body), memoryview(payload))

    with ScriptedAgent(lie=lie) as agent, route_to(agent.locate) as route:
        for number in range(len(_BEYOND)):
            with pytest.raises(SerializationError, match="whose fields do not lie in it"):
                caller(route, "lie")(number)


class _Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("what a pod pickled was read",)


def test_a_pod_that_answers_with_a_pickle_is_not_believed():
    async def bomb(call: Call) -> None:
        data = pickle.dumps(_Bomb())
        body = frames.Body("pickle", (len(data),), len(data))
        call.send(Kind.RESULT, frames.Result(body), memoryview(data))

    with ScriptedAgent(bomb=bomb) as agent, route_to(agent.locate) as route:
        for codec in ("json", "none"):
            with pytest.raises(SerializationError, match="has not asked for"):
                caller(route, "bomb", serialization=codec)()
        invocation = Invocation(target("bomb"), route, CallOptions(), (), {})
        invocation.replace_arguments("pickle", codecs.encode("pickle", {"args": (), "kwargs": {}}))
        invocation.takes_pickle = False
        refusal = blocking.run(invocation).error
        assert isinstance(refusal, SerializationError)
        assert "has not asked for" in str(refusal)
        assert "kt replay --trust" in str(refusal)
