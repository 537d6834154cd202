"""Calls on the stream of a real agent with a real worker, frame by frame."""

import time

import numpy as np
import pytest

from agent_harness import AgentProcess, CallFailed, FakeController, StreamClient, wait_until
from kubetorch.wire import frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import Returned, unpack_outcome, value_of
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import CallReport, CancelCall

SOURCE = """
import asyncio, logging, os, sys, threading, time
from kubetorch.pod.user_process.current_call import progress

LOG = logging.getLogger("user")

class Broken(Exception):
    def __init__(self, text, number):
        super().__init__(text, number)
        self.number = number

class Service:
    def __init__(self, start=0):
        self.n = start
        self.go_on = threading.Event()
        self.met = []

    def add(self, k):
        self.n += k
        return self.n

    def echo(self, value):
        return value

    def size(self, value):
        return len(value)

    def double(self, array):
        return array * 2

    def blob(self, size):
        return bytearray(size)

    def speak(self, count):
        for i in range(count):
            print("line", i)
        LOG.info("info")
        LOG.debug("debug")
        os.system("echo from a shell")
        return "done"

    def release(self):
        self.go_on.set()

    def hold(self):
        is_released = self.go_on.wait(60)
        self.go_on.clear()
        return "held" if is_released else "forgotten"

    def shout(self, count, width, portion=None):
        for i in range(count):
            if portion and i and i % portion == 0:
                self.go_on.wait(60)
                self.go_on.clear()
            print(str(i).rjust(width, "."))
        return "done"

    def fail(self):
        raise Broken("user says no", 7)

    def steps(self):
        for i in range(3):
            progress(i, 3, f"step {i}")
        return "done"

    def numbers(self, count):
        for i in range(count):
            yield i
        return "end"

    async def numbers_async(self, count):
        for i in range(count):
            yield i

    def produced(self):
        return self.n

    def produce(self, count):
        for i in range(count):
            self.n = i
            yield i

    def meet(self, count):
        self.met.append(None)
        while len(self.met) < count:
            time.sleep(0.01)
        return "met"

    async def meet_async(self, count):
        self.met.append(None)
        while len(self.met) < count:
            await asyncio.sleep(0.01)
        return "met"

    def sleep(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return "slept"

    async def sleep_async(self, seconds):
        await asyncio.sleep(seconds)
        return "slept"
"""


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    controller = FakeController(tmp_path_factory.mktemp("controller"))
    yield controller
    controller.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory, controller):
    agent = AgentProcess(tmp_path_factory.mktemp("agent"), controller)
    try:
        observed = controller.deploy(1, SOURCE, "Service", kind="cls", init_args={"start": 10})
        assert observed.failure is None, observed.failure
        yield agent
    finally:
        agent.stop()


_clients = iter(range(1_000_000))


@pytest.fixture
def client(agent):
    client = agent.client(client=f"client-{next(_clients)}")
    yield client
    client.close()


def call(client: StreamClient, number: int, method: str, *args, **more):
    return client.call(number, *args, name="Service", method=method, **more)


def test_a_method_is_called_on_the_one_instance_and_keeps_state(client):
    before = call(client, 1, "add", 0)
    assert call(client, 2, "add", 5) == before + 5
    assert call(client, 3, "add", 1) == before + 6


def test_the_welcome_says_who_the_agent_is(client, agent):
    welcome = client.welcome
    assert (welcome.pod, welcome.generation, welcome.resumed) == ("demo-0", 1, False)
    assert welcome.max_payload >= 200 * 1024 * 1024


def test_values_travel_in_each_codec(client):
    value = {"a": [1, 2.5, None, "ü"]}
    assert call(client, 1, "echo", value) == value
    assert call(client, 2, "echo", value, codec="none") == value
    assert call(client, 3, "echo", (1, b"x"), codec="pickle") == (1, b"x")


def test_large_arrays_come_back_through_shared_memory(client):
    array = np.arange(5_000_000, dtype=np.int64)
    doubled = call(client, 1, "double", array, codec="pickle")
    assert np.array_equal(doubled, array * 2)


def test_arguments_of_200_mb_arrive(client):
    client.sock.settimeout(60)
    data = bytes(200 * 1024 * 1024)
    assert call(client, 1, "size", data, codec="pickle") == len(data)


def test_arguments_beyond_the_limit_are_refused_before_they_are_sent(client):
    total = client.welcome.max_payload + 1
    body = frames.Body("pickle", (total,), total)
    client.send(Kind.OPEN, 1, frames.Open(id="x", callable="Service", method="size", body=body))
    with pytest.raises(CallFailed, match="1073741825 bytes; 1073741824 are allowed") as caught:
        client.result(1)
    assert caught.value.failure["started"] is False
    assert call(client, 2, "echo", 1) == 1


def test_lines_come_before_the_result_in_order_and_once(client):
    client.open(1, 3, name="Service", method="speak")
    call_frames = client.until(1, Kind.RESULT)
    lines = [(f[2].text, f[2].source, f[2].level) for f in call_frames if f[0] == Kind.LOG]
    assert lines == [
        ("line 0", "stdout", None),
        ("line 1", "stdout", None),
        ("line 2", "stdout", None),
        ("info", "logger", "INFO"),
        ("from a shell", "stdout", None),
    ]
    assert all(f[2].pod == "demo-0" for f in call_frames if f[0] == Kind.LOG)


def test_lines_are_not_sent_to_callers_that_do_not_want_them(client):
    client.open(1, 3, name="Service", method="speak", stream_logs=False)
    assert [frame[0] for frame in client.until(1, Kind.RESULT)] == [Kind.RESULT]


def test_loggers_below_the_callers_level_are_left_out(client):
    client.open(1, 0, name="Service", method="speak", log_level="warning")
    call_frames = client.until(1, Kind.RESULT)
    assert [f[2].text for f in call_frames if f[0] == Kind.LOG] == ["from a shell"]


def test_lines_beyond_the_window_are_dropped_with_one_line_that_says_how_many(client):
    count, width = 30_000, 400
    client.open(1, count, width, name="Service", method="shout")
    call_frames = client.until(1, Kind.RESULT)
    lines = [f[2].text for f in call_frames if f[0] == Kind.LOG]
    *delivered_lines, last = lines
    assert "lines left out" in last
    assert len(delivered_lines) + int(last.split()[1]) == count
    assert delivered_lines == [str(i).rjust(width, ".") for i in range(len(delivered_lines))]
    assert (
        7 * 1024 * 1024
        < sum(len(text) for text in delivered_lines)
        < wire_tuning.LIMITS.window_bytes
    )


def test_lines_are_not_dropped_when_the_caller_takes_them(client):
    count, width, portion = 30_000, 400, 5_000
    client.open(1, count, width, portion, name="Service", method="shout")
    texts, granting = [], 0
    while True:
        kind, number, meta, _ = client.next()
        if number != 1:
            continue
        if kind == Kind.RESULT:
            break
        texts.append(meta.text)
        granting += len(meta.text) + 30
        if len(texts) % portion == 0 and len(texts) < count:
            client.send(Kind.CREDIT, 1, frames.Credit(granting))
            granting = 0
            client.open(2 + len(texts), name="Service", method="release")
    assert texts == [str(i).rjust(width, ".") for i in range(count)]


def test_progress_is_passed_on(client):
    client.open(1, name="Service", method="steps")
    call_frames = client.until(1, Kind.RESULT)
    reports = [f[2] for f in call_frames if f[0] == Kind.PROGRESS]
    assert reports[-1] == frames.Progress(2, 3, "step 2")


def test_the_users_exception_comes_with_class_arguments_and_traceback(client):
    with pytest.raises(CallFailed) as caught:
        call(client, 1, "fail")
    failure = caught.value.failure
    assert (failure["error_type"], failure["module"]) == ("Broken", "program")
    assert failure["args"] == ["user says no", 7]
    assert failure["state"] == {"number": 7}
    assert failure["pod_name"] == "demo-0"
    assert 'raise Broken("user says no", 7)' in failure["traceback"]
    assert "kubetorch/pod" not in failure["traceback"]


def test_a_generator_streams_its_values_and_then_what_it_returns(client):
    client.open(1, 40, name="Service", method="numbers")
    call_frames = client.until(1, Kind.RESULT)
    assert [f[3] for f in call_frames[:-1]] == [str(i).encode() for i in range(40)]
    assert call_frames[-1][2].streamed is True
    assert call_frames[-1][3] == b'"end"'


def test_an_async_generator_streams_its_values(client):
    client.open(1, 40, name="Service", method="numbers_async")
    call_frames = client.until(1, Kind.RESULT)
    assert [f[0] for f in call_frames] == [Kind.YIELD] * 40 + [Kind.RESULT]


def test_a_generator_runs_no_further_ahead_than_its_caller_reads(client, agent):
    reader = agent.client(client="slow", receive_buffer=4096)
    body = b'{"args":[100000],"kwargs":{}}'
    meta = frames.Open(
        id="slow", callable="Service", method="produce", body=frames.Body("json", (29,), 29)
    )
    call(client, 1, "add", -call(client, 2, "produced"))
    reader.send(Kind.OPEN, 1, meta, body)
    deadline = time.monotonic() + 30
    last = 0
    while time.monotonic() < deadline:
        now = call(client, int(time.monotonic() * 1e6), "produced")
        if now == last > 0:
            break
        last = now
        time.sleep(0.3)
    assert 0 < last < 99_999, "the generator did not wait for its reader"
    reader.close()
    assert call(client, 3, "add", -call(client, 2, "produced")) == 0


def test_calls_run_at_the_same_time(client):
    for number in range(1, 9):
        method = "meet" if number % 2 else "meet_async"
        client.open(number, 8, name="Service", method=method)
    frames_seen = [client.next() for _ in range(8)]
    assert {kind for kind, *_ in frames_seen} == {Kind.RESULT}
    assert {number for _, number, *_ in frames_seen} == set(range(1, 9))


@pytest.mark.parametrize("method", ["sleep", "sleep_async"])
def test_a_cancelled_call_ends_with_a_typed_error_soon(client, method):
    client.open(1, 600.0, name="Service", method=method)
    time.sleep(0.1)
    client.send(Kind.CANCEL, 1, frames.Cancel("not wanted"))
    begin = time.monotonic()
    with pytest.raises(CallFailed, match="CallCancelledError"):
        client.result(1)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("method", ["sleep", "sleep_async"])
def test_a_call_is_over_for_its_caller_at_its_timeout(client, method):
    begin = time.monotonic()
    client.open(1, 600.0, name="Service", method=method, timeout=0.3)
    with pytest.raises(CallFailed, match=r"CallTimeoutError: .*timeout of 0.3 s") as caught:
        client.result(1)
    assert 0.25 < time.monotonic() - begin < 60
    assert caught.value.failure["status"] == 504
    assert call(client, 2, "echo", 1) == 1


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"name": "Other"},
            "CallableNotFoundError: Callable 'Other' not found in metadata configuration. "
            "Found 'Service' instead",
        ),
        ({"name": "Service", "method": "nothing"}, "CallableNotFoundError: .*no method 'nothing'"),
        ({"name": "Service", "timeout": -1.0}, "ProtocolError: a timeout of -1.0 s"),
        ({"name": "Service", "timeout": float("nan")}, "ProtocolError: a timeout of nan s"),
        ({"name": "Service", "codec": "json", "detached": True, "id": "../../x"}, "id of a call"),
    ],
)
def test_what_cannot_run_is_refused_and_says_that_nothing_ran(client, meta, message):
    with pytest.raises(CallFailed, match=message) as caught:
        client.call(1, **meta)
    assert caught.value.failure["started"] is False


def test_arguments_that_do_not_bind_are_an_error_that_ran_nothing(client):
    with pytest.raises(CallFailed, match=r"TypeError: .*add") as caught:
        call(client, 1, "add", 1, 2, 3)
    assert caught.value.failure["started"] is False
    assert caught.value.failure["status"] == 422


def test_a_result_that_json_cannot_carry_is_a_serialization_error(client):
    with pytest.raises(CallFailed, match="SerializationError: JSON cannot carry") as caught:
        call(client, 1, "blob", 3)
    # A client of HTTP reads its own mistake, not the encoder's traceback.
    assert caught.value.failure["cause"] is None


def test_segments_that_do_not_fit_the_payload_are_refused(client):
    body = frames.Body("json", (1, 2), 2)
    opening = frames.Open(id="x", callable="Service", method="echo", body=body)
    client.send(Kind.OPEN, 1, opening, b"[]")
    with pytest.raises(CallFailed, match="SerializationError") as caught:
        client.result(1)
    assert caught.value.failure["started"] is False


def test_a_repeated_idempotency_key_gets_the_first_outcome(client):
    first = call(client, 1, "add", 1, idempotency_key="k1")
    assert call(client, 2, "add", 1, idempotency_key="k1") == first
    assert call(client, 3, "add", 1, idempotency_key="k2") == first + 1


def test_a_call_with_the_key_of_a_running_one_waits_for_it(client, agent):
    second_client = agent.client(client="other")
    client.open(1, 0.4, name="Service", method="sleep", idempotency_key="k3")
    time.sleep(0.1)
    second_client.open(7, 0.4, name="Service", method="sleep", idempotency_key="k3")
    assert client.result(1) == "slept"
    assert second_client.result(7) == "slept"
    second_client.close()


def test_one_of_two_callers_that_cancels_does_not_end_the_call_of_the_other(client, agent):
    second_client = agent.client(client="other")
    client.open(1, name="Service", method="hold", idempotency_key="k4")
    call(client, 2, "echo", 1)  # it came after the other, which is known now
    second_client.open(7, name="Service", method="hold", idempotency_key="k4")
    call(second_client, 8, "echo", 1)
    client.send(Kind.CANCEL, 1, frames.Cancel())
    with pytest.raises(CallFailed, match="CallCancelledError"):
        client.result(1)
    call(client, 3, "release")
    assert second_client.result(7) == "held"
    second_client.close()


def test_a_detached_call_outlives_its_client_and_its_outcome_is_uploaded(agent, controller):
    client = agent.client(client="spawner")
    client.open(1, 0.4, name="Service", method="sleep", detached=True, id="detached-1")
    begun = controller.wait_for(CallReport, lambda m: m.id == "detached-1")
    assert (begun.state, begun.callable, begun.ended) == ("running", "Service.sleep", None)
    client.close()
    ended = controller.wait_for(CallReport, lambda m: m.id == "detached-1" and bool(m.ended))
    assert ended.state == "succeeded"
    blob = controller.blobs[ended.result]
    assert len(blob) == ended.result_bytes
    outcome = unpack_outcome(blob)
    assert isinstance(outcome, Returned)
    assert value_of(outcome) == "slept"


def test_a_detached_call_is_awaited_by_its_id_from_another_client(agent, client, controller):
    controller.hangs = True  # the agent keeps an outcome until the controller has it
    spawner = agent.client(client="spawner")
    spawner.open(1, name="Service", method="hold", detached=True, id="detached-2")
    call(spawner, 2, "echo", 1)  # it came after the other, which is known now
    spawner.close()
    client.send(Kind.ATTACH, 5, frames.Attach("detached-2"))
    agent.post("/Service/release")
    assert client.result(5) == "held"
    client.send(Kind.ATTACH, 6, frames.Attach("detached-2"))
    assert client.result(6) == "held"
    controller.hangs = False


def test_a_detached_call_is_cancelled_through_an_attached_one(agent, client, controller):
    client.open(1, 30.0, name="Service", method="sleep", detached=True, id="detached-3")
    time.sleep(0.1)
    client.send(Kind.ATTACH, 5, frames.Attach("detached-3"))
    client.send(Kind.CANCEL, 5, frames.Cancel("enough"))
    with pytest.raises(CallFailed, match="CallCancelledError"):
        client.result(5)
    ended = controller.wait_for(CallReport, lambda m: m.id == "detached-3" and bool(m.ended))
    assert ended.state == "cancelled"


def test_a_detached_call_is_cancelled_by_its_id_through_the_controller(client, controller):
    client.open(1, 30.0, name="Service", method="sleep", detached=True, id="detached-5")
    controller.wait_for(CallReport, lambda m: m.id == "detached-5")
    controller.send(CancelCall(id="detached-5", reason="from elsewhere"))
    with pytest.raises(CallFailed, match="CallCancelledError: from elsewhere"):
        client.result(1)
    ended = controller.wait_for(CallReport, lambda m: m.id == "detached-5" and bool(m.ended))
    assert ended.state == "cancelled"


def test_a_call_that_nobody_knows_cannot_be_attached_to(client):
    client.send(Kind.ATTACH, 5, frames.Attach("never-was"))
    with pytest.raises(CallFailed, match="ResultExpiredError"):
        client.result(5)


def test_a_generator_cannot_be_spawned(client):
    with pytest.raises(CallFailed, match="is a generator"):
        call(client, 1, "numbers", 3, detached=True, id="detached-4")


def test_a_client_that_says_goodbye_leaves_no_calls_behind(agent):
    def is_running(count: int) -> bool:
        return b"kubetorch_calls_running %d\n" % count in agent.http("GET", "/metrics")[2]

    client = agent.client(client="leaver")
    client.open(1, 30.0, name="Service", method="sleep")
    wait_until(lambda: is_running(1))
    client.close()
    wait_until(lambda: is_running(0))


def test_a_class_without_a_call_method_is_not_callable_itself(client):
    with pytest.raises(CallFailed, match="CallableNotFoundError"):
        client.call(1, name="Service")
