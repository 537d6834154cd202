"""Faults injected for real: broken frames, broken connections, killed and stopped processes."""

import os
import resource
import shutil
import signal
import struct
import threading
import time

import psutil
import pytest

from agent_harness import TIMEOUT, AgentProcess, CallFailed, FakeController, wait_until
from kubetorch.lib import websocket_protocol
from kubetorch.wire import frames
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.calls import Raised, unpack_outcome
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import (
    CallReport,
    Hello,
    LogReport,
    Observed,
    Reload,
    Terminate,
)

pytestmark = pytest.mark.faults

SOURCE = """
import os, time, asyncio

class Service:
    def pid(self):
        return os.getpid()

    def echo(self, value):
        return value

    def sleep(self, seconds):
        print("begun")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return "slept"

    def hold(self, path):
        print("begun")
        while not os.path.exists(path):
            time.sleep(0.01)
        return "held"

    def stuck(self, seconds):
        try:
            print("begun")
            time.sleep(seconds)
        except BaseException:
            time.sleep(seconds)

    def blob(self, size):
        return "x" * size

    def count(self, n, path):
        for i in range(n):
            while i == n // 2 and not os.path.exists(path):
                time.sleep(0.01)
            yield i
            time.sleep(0.01)

    def leave(self, status):
        os._exit(status)

    def orphan(self):
        return int(os.popen("sleep 60 >/dev/null & echo $!").read())

    def say(self, text):
        print(text)
        return text
"""


@pytest.fixture
def controller(tmp_path):
    controller = FakeController(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def agent(tmp_path, controller):
    agent = AgentProcess(tmp_path, controller)
    try:
        observed = controller.deploy(1, SOURCE, "Service", kind="cls")
        assert observed.failure is None, observed.failure
        yield agent
    finally:
        if agent.process.poll() is None:
            if psutil.Process(agent.pid).status() == psutil.STATUS_STOPPED:
                agent.process.send_signal(signal.SIGCONT)
            agent.stop()


@pytest.fixture(scope="module")
def shared_agent(tmp_path_factory):
    """An agent for all tests that leave it and its worker as they are."""
    folder = tmp_path_factory.mktemp("shared")
    controller = FakeController(folder)
    agent = AgentProcess(folder, controller)
    try:
        observed = controller.deploy(1, SOURCE, "Service", kind="cls")
        assert observed.failure is None, observed.failure
        yield agent
    finally:
        agent.stop()
        controller.close()


def call(client, number, method, *args, **more):
    return client.call(number, *args, name="Service", method=method, **more)


def begin(client, number, method, *args):
    """Begin a call, and wait until it runs."""
    client.open(number, *args, name="Service", method=method)
    client.until(number, Kind.LOG)


def worker_pid(agent) -> int:
    status, pid = agent.post("/Service/pid")
    assert status == 200
    return pid


# ------------------------------------------------------------------------------- broken frames


def binary(payload: bytes) -> bytes:
    return (
        websocket_protocol.frame_header(websocket_protocol.BINARY, len(payload), masked=True)
        + payload
    )


BROKEN = {
    # Not random: that is a proper close frame, with a code of its own, once in a while.
    "garbage": bytes(range(64)),
    "no_frame": binary(b"abc"),
    "unknown_kind": binary(struct.pack("!BBHIQ", 99, 0, 0, 0, 1)),
    "kind_of_the_agent": binary(struct.pack("!BBHIQ", Kind.RESULT, 0, 0, 0, 1)),
    "meta_beyond_the_end": binary(struct.pack("!BBHIQ", Kind.OPEN, 0, 0, 1000, 1) + b"x"),
    "meta_that_is_no_msgpack": binary(struct.pack("!BBHIQ", Kind.OPEN, 0, 0, 4, 1) + b"\xc1" * 4),
    "meta_of_another_kind": binary(frames.encode(Kind.OPEN, 1, frames.Credit(7))),
    "text": websocket_protocol.frame_header(websocket_protocol.TEXT, 2, masked=True) + b"hi",
    "unmasked": websocket_protocol.frame_header(websocket_protocol.BINARY, 2, masked=False) + b"hi",
    "oversized": struct.pack("!BBQ", 0x82, 0xFF, 1 << 40) + bytes(4),
    "reserved_bits": b"\xf2\x80\0\0\0\0",
    "acknowledges_what_was_not_sent": binary(frames.encode(Kind.ACK, 0, frames.Ack(999))),
    "negative_credit": binary(frames.encode(Kind.CREDIT, 1, frames.Credit(-5))),
    "number_that_is_taken": binary(
        frames.encode(
            Kind.OPEN, 1, frames.Open(id="x", callable="Service", body=frames.Body("json", (0,), 0))
        )
    ),
    "payload_beyond_its_size": binary(
        frames.encode(
            Kind.OPEN, 2, frames.Open(id="x", callable="Service", body=frames.Body("json", (1,), 1))
        )
        + b"12"
    ),
}


def test_a_broken_frame_ends_its_connection_and_its_calls_and_nothing_else(shared_agent, tmp_path):
    good = shared_agent.client(client="good")
    for number, (name, data) in enumerate(BROKEN.items(), start=1):
        end = tmp_path / name
        begin(good, number, "hold", str(end))
        bad = shared_agent.client(client=f"bad-{name}")
        bad.open(1, 30.0, name="Service", method="sleep")
        bad.send_raw(data)
        try:
            with pytest.raises(EOFError):
                while True:
                    bad.next()
            assert bad.close_code in (
                websocket_protocol.PROTOCOL_ERROR,
                websocket_protocol.TOO_BIG,
            ), name
        except ConnectionResetError:
            pass
        bad.close(None)
        resumed_client = shared_agent.client(
            client=f"bad-{name}", resume=f"{bad.welcome.incarnation}:0"
        )
        assert not resumed_client.welcome.resumed, name
        resumed_client.close()
        end.touch()
        assert good.result(number) == "held"
    wait_until(lambda: b"kubetorch_calls_running 0" in shared_agent.http("GET", "/metrics")[2])
    good.close()


def test_data_beyond_what_was_announced_is_refused(shared_agent):
    client = shared_agent.client()
    total = wire_tuning.LIMITS.chunk_bytes + 10
    opening = frames.Open(
        id="x", callable="Service", method="echo", body=frames.Body("json", (total,), total)
    )
    client.send(Kind.OPEN, 1, opening)
    client.send(Kind.DATA, 1, None, bytes(wire_tuning.LIMITS.chunk_bytes))
    client.send(Kind.DATA, 1, None, bytes(wire_tuning.LIMITS.chunk_bytes))
    with pytest.raises((EOFError, ConnectionResetError)):
        while True:
            client.next()
    client.close(None)
    assert worker_pid(shared_agent)


def test_a_truncated_upload_holds_nobody_up(shared_agent):
    client = shared_agent.client(client="truncated")
    total = 10 * wire_tuning.LIMITS.chunk_bytes
    opening = frames.Open(
        id="x", callable="Service", method="echo", body=frames.Body("json", (total,), total)
    )
    client.send(Kind.OPEN, 1, opening)
    client.send(Kind.DATA, 1, None, bytes(wire_tuning.LIMITS.chunk_bytes))
    client.send_raw(
        websocket_protocol.frame_header(websocket_protocol.BINARY, 1000, masked=True) + b"xyz"
    )
    client.sock.close()
    second_client = shared_agent.client(client="other")
    assert call(second_client, 1, "echo", 1) == 1
    second_client.close()


# -------------------------------------------------------------------------- broken connections


def test_a_call_survives_its_connection(shared_agent, tmp_path):
    client = shared_agent.client(client="moving")
    client.open(1, str(tmp_path / "end"), name="Service", method="hold")
    client.open(2, "hello", name="Service", method="say")
    assert client.until(2, Kind.RESULT)[-1][3] == b'"hello"'
    client.sock.close()
    resumed_client = shared_agent.client(
        client="moving", resume=f"{client.welcome.incarnation}:{client.received}"
    )
    assert resumed_client.welcome.resumed
    assert resumed_client.welcome.received == 2
    (tmp_path / "end").touch()
    assert resumed_client.result(1) == "held"
    resumed_client.close()


def test_frames_that_were_lost_with_a_connection_are_sent_again_and_no_others(
    shared_agent, tmp_path
):
    client = shared_agent.client(client="lossy")
    client.open(1, 60, str(tmp_path / "end"), name="Service", method="count")
    payloads = [client.next()[3] for _ in range(5)]
    payloads += [payload for *_, payload in client.frames]  # that came with the fifth
    received = client.received
    time.sleep(0.1)
    client.sock.close()  # what is on its way is lost
    time.sleep(0.2)
    resumed_client = shared_agent.client(
        client="lossy", resume=f"{client.welcome.incarnation}:{received}"
    )
    (tmp_path / "end").touch()
    remaining_frames = resumed_client.until(1, Kind.RESULT)
    assert payloads + [f[3] for f in remaining_frames[:-1]] == [str(i).encode() for i in range(60)]
    resumed_client.close()


def test_an_upload_goes_on_where_the_connection_broke(shared_agent):
    client = shared_agent.client(client="uploader")
    text = "y" * (4 * wire_tuning.LIMITS.chunk_bytes)
    payload = b'{"args":["%b"],"kwargs":{}}' % text.encode()
    body = frames.Body("json", (len(payload),), len(payload))
    opening = frames.Open(id="up", callable="Service", method="echo", body=body)
    client.send(Kind.OPEN, 1, opening)
    client.send(Kind.DATA, 1, None, payload[: wire_tuning.LIMITS.chunk_bytes])
    assert call(client, 2, "echo", 1) == 1  # what was sent before has arrived
    half = (
        frames.encode(Kind.DATA, 1)
        + payload[wire_tuning.LIMITS.chunk_bytes : 2 * wire_tuning.LIMITS.chunk_bytes]
    )
    header = websocket_protocol.frame_header(websocket_protocol.BINARY, len(half), masked=True)
    client.send_raw(header + half[: len(half) // 2])
    time.sleep(0.2)
    client.sock.close()
    resumed_client = shared_agent.client(
        client="uploader", resume=f"{client.welcome.incarnation}:0"
    )
    assert resumed_client.welcome.received == 3
    for start in range(
        wire_tuning.LIMITS.chunk_bytes, len(payload), wire_tuning.LIMITS.chunk_bytes
    ):
        resumed_client.send(
            Kind.DATA, 1, None, payload[start : start + wire_tuning.LIMITS.chunk_bytes]
        )
    assert resumed_client.result(1) == text
    resumed_client.close()


def test_a_client_that_comes_back_before_its_end_was_noticed_takes_its_stream_over(
    shared_agent, tmp_path
):
    client = shared_agent.client(client="double")
    begin(client, 1, "hold", str(tmp_path / "end"))
    resumed_client = shared_agent.client(client="double", resume=f"{client.welcome.incarnation}:0")
    assert resumed_client.welcome.resumed
    (tmp_path / "end").touch()
    assert resumed_client.result(1) == "held"
    with pytest.raises((EOFError, ConnectionResetError)):
        client.next()
    client.close(None)
    resumed_client.close()


def test_a_client_of_another_incarnation_starts_from_scratch(shared_agent):
    client = shared_agent.client(client="old", resume="another:17")
    assert not client.welcome.resumed
    assert call(client, 1, "echo", 1) == 1
    client.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Kubetorch-Resume": "garbage"},
        {"X-Kubetorch-Client": "no/name"},
        {"X-Kubetorch-Client": ""},
        {"X-Kubetorch-Protocol": "99"},
        {"X-Kubetorch-Protocol": "x"},
        {"Sec-WebSocket-Version": "12"},
    ],
)
def test_an_upgrade_that_makes_no_sense_is_refused(shared_agent, headers):
    assert shared_agent.client(headers=headers).status in (400, 409)


def test_500_calls_of_a_slow_reader_are_all_answered_and_stop_nobody(shared_agent):
    slow = shared_agent.client(client="slow", receive_buffer=4096)
    size = 20_000
    for number in range(1, 501):
        slow.open(number, size, name="Service", method="blob")
    quick = shared_agent.client(client="quick")
    for number in range(1, 51):
        assert call(quick, number, "echo", number) == number
    memory = psutil.Process(shared_agent.pid).memory_info().rss
    assert memory < 400 * 1024 * 1024
    answered_calls = set()
    while len(answered_calls) < 500:
        kind, number, meta, _ = slow.next()
        assert kind in (Kind.RESULT, Kind.ACK)
        if kind == Kind.RESULT:
            assert meta.body.total == size + 2
            assert number not in answered_calls
            answered_calls.add(number)
            if len(answered_calls) % 50 == 0:
                slow.ack()
    slow.close()
    quick.close()


def test_a_client_that_never_acknowledges_gets_no_more_than_the_limit(shared_agent):
    client = shared_agent.client(client="mute")
    for number in range(1, 101):
        client.open(number, 1_000_000, name="Service", method="blob")
    got, is_silent = 0, False
    client.sock.settimeout(1.0)
    deadline = time.monotonic() + 60
    while not is_silent and time.monotonic() < deadline:
        try:
            got += len(client.next()[3])
        except TimeoutError:
            is_silent = got > 32 * 1024 * 1024
    assert 32 * 1024 * 1024 < got < 80 * 1024 * 1024
    client.sock.settimeout(60)
    client.ack()
    assert client.next()
    client.close()


# --------------------------------------------------------------------------- killed processes


def test_a_worker_killed_in_a_call_fails_that_call_at_once_and_is_replaced(agent):
    client = agent.client()
    pid = call(client, 1, "pid")
    begin(client, 2, "sleep", 30.0)
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CallFailed, match=r"WorkerDiedError: .*SIGKILL") as caught:
        client.result(2)
    assert time.monotonic() - begun < 29
    assert caught.value.failure["state"]["exit_code"] == -9
    assert caught.value.failure["started"] is True
    assert caught.value.failure["pod_name"] == "demo-0"
    assert call(client, 3, "pid") != pid
    client.close()


def test_an_idle_worker_that_is_killed_is_replaced_and_the_next_call_waits_for_it(agent):
    pid = worker_pid(agent)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    assert worker_pid(agent) != pid
    assert b"kubetorch_worker_restarts_total 1" in agent.http("GET", "/metrics")[2]


def test_a_call_that_ends_its_process_fails_with_the_exit_code(agent):
    client = agent.client()
    begun = time.monotonic()
    for number in range(1, 8):
        with pytest.raises(CallFailed, match="exit code 3") as caught:
            call(client, number, "leave", 3)
        assert caught.value.failure["state"]["exit_code"] == 3
    assert call(client, 8, "echo", 1) == 1
    # The calls ended it, not the worker itself: there is no back-off, which would take 31 s.
    assert time.monotonic() - begun < 31
    client.close()


def test_a_stopped_worker_is_replaced_after_a_timeout(agent):
    client = agent.client()
    pid = call(client, 1, "pid")
    os.kill(pid, signal.SIGSTOP)
    client.open(3, 2, name="Service", method="echo")
    client.open(2, 1, name="Service", method="echo", timeout=0.3)
    with pytest.raises(CallFailed, match="CallTimeoutError"):
        client.result(2)
    with pytest.raises(CallFailed, match="WorkerRecycledError"):
        client.result(3)
    assert call(client, 4, "pid") != pid
    client.close()


def test_a_call_that_does_not_yield_is_ended_with_its_worker(agent):
    client = agent.client()
    pid = call(client, 1, "pid")
    begin(client, 2, "stuck", 60.0)
    client.send(Kind.CANCEL, 2, frames.Cancel("enough"))
    begun = time.monotonic()
    with pytest.raises(CallFailed, match="CallCancelledError"):
        client.result(2)
    assert time.monotonic() - begun < 59
    assert call(client, 3, "pid") != pid
    client.close()


def test_sigterm_lets_running_calls_end_refuses_new_ones_and_exits_with_0(agent, tmp_path):
    client = agent.client()
    begin(client, 1, "hold", str(tmp_path / "end"))
    agent.process.send_signal(signal.SIGTERM)
    assert client.next()[0] == Kind.GOAWAY
    client.open(2, 1, name="Service", method="echo")
    with pytest.raises(CallFailed, match=r"CallRefusedError: .*stopped") as caught:
        client.result(2)
    assert caught.value.failure["started"] is False
    assert agent.http("POST", "/Service/echo", b'{"args":[1]}')[0] == 503
    (tmp_path / "end").touch()
    assert client.result(1) == "held"
    with pytest.raises(EOFError):
        client.next()
    assert client.close_code == websocket_protocol.GOING_AWAY
    assert agent.process.wait(TIMEOUT) == 0
    client.close(None)


def test_calls_that_outlast_the_grace_end_with_the_pods_end_as_reason(agent, controller):
    client = agent.client()
    begin(client, 1, "sleep", 60.0)
    begun = time.monotonic()
    controller.send(Terminate(grace=0.5, reason="Evicted"))
    with pytest.raises(CallFailed, match=r"PodTerminatedError: .*Evicted") as caught:
        client.result(1)
    assert caught.value.failure["state"]["reason"] == "Evicted"
    assert time.monotonic() - begun < 59
    assert agent.process.wait(TIMEOUT) == 0
    client.close(None)


def test_a_controller_that_hangs_does_not_hold_up_the_end_of_an_agent(agent, controller):
    controller.hangs = True
    client = agent.client()
    client.open(1, "x", name="Service", method="say", detached=True, id="spawned-4")
    client.result(1)
    controller.send(Reload(generation=2, spec=controller.spec("def f(): return 1\n", "f")))
    time.sleep(0.3)
    begun = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - begun < 59


def test_a_killed_agent_leaves_no_processes_behind(agent):
    pid = worker_pid(agent)
    agent.kill()
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_spawned_call_that_ran_when_the_agent_was_killed_is_reported_as_failed(
    agent, controller, tmp_path
):
    client = agent.client()
    client.open(1, 60.0, name="Service", method="sleep", detached=True, id="spawned-1")
    controller.wait_for(CallReport, lambda m: m.id == "spawned-1")
    agent.kill()
    client.close(None)
    restarted_agent = AgentProcess(tmp_path, controller, port=agent.port)
    try:
        report = controller.wait_for(CallReport, lambda m: m.id == "spawned-1" and bool(m.ended))
        assert report.state == "failed"
        outcome = unpack_outcome(controller.blobs[report.result])
        assert isinstance(outcome, Raised)
        assert outcome.failure.error_type == "AgentDiedError"
    finally:
        restarted_agent.stop()


def test_the_log_outlives_a_killed_agent(agent, controller, tmp_path):
    agent.post("/Service/say", "before")
    log = agent.root / "log" / "current.jsonl"
    wait_until(lambda: log.exists() and b"before" in log.read_bytes())
    agent.kill()
    restarted_agent = AgentProcess(tmp_path, controller, port=agent.port)
    try:
        assert b'"text":"before"' in restarted_agent.http("GET", "/v1/logs")[2]
    finally:
        restarted_agent.stop()


def test_what_user_code_leaves_behind_is_reaped_when_it_ends(shared_agent):
    status, pid = shared_agent.post("/Service/orphan")
    assert status == 200
    wait_until(lambda: psutil.Process(pid).ppid() == shared_agent.pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    assert worker_pid(shared_agent)


# --------------------------------------------------------------------------- the controller


def test_a_session_that_breaks_comes_back_and_says_what_is_served(agent, controller):
    controller.cut()
    assert controller.wait_for(Hello).generation == 1
    assert controller.wait_for(Observed).serving == 1
    assert controller.deploy(2, SOURCE, "Service", kind="cls").serving == 2


def test_calls_go_on_without_a_controller(agent, controller):
    controller.refuse_status = 401
    controller.cut()
    wait_until(lambda: "session refused status=401" in agent.log_file.read_text())
    client = agent.client()
    assert call(client, 1, "echo", 1) == 1
    client.open(2, 0.1, name="Service", method="sleep", detached=True, id="spawned-2")
    assert client.result(2) == "slept"
    controller.refuse_status = None
    report = controller.wait_for(CallReport, lambda m: m.id == "spawned-2" and bool(m.ended))
    assert report.state == "succeeded"
    client.close()


def test_an_agent_whose_controller_was_removed_with_its_folder_ends(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    controller = FakeController(home)
    agent = AgentProcess(tmp_path, controller)
    shutil.rmtree(home)
    controller.cut()
    assert agent.process.wait(TIMEOUT) == 0
    controller.close()


def test_a_full_disk_costs_lines_of_the_log_and_calls_that_are_to_be_kept(tmp_path, controller):
    log = tmp_path / "pod" / "log"
    log.mkdir(parents=True)
    (log / "current.jsonl").symlink_to("/dev/full")  # every write to it fails with ENOSPC
    (tmp_path / "pod" / "results").symlink_to("/dev/full")
    agent = AgentProcess(tmp_path, controller)
    try:
        assert controller.deploy(1, SOURCE, "Service", kind="cls").serving == 1
        assert agent.post("/Service/say", "said") == (200, "said")
        client = agent.client()
        client.open(1, "spawned", name="Service", method="say", detached=True, id="spawned-3")
        with pytest.raises(CallFailed, match="cannot write the call to its disk"):
            client.result(1)
        assert agent.post("/Service/say", "goes on") == (200, "goes on")
        none_dropped = b"kubetorch_log_lines_dropped_total 0"
        wait_until(lambda: none_dropped not in agent.http("GET", "/metrics")[2])
        assert agent.http("GET", "/v1/logs")[0] == 200
    finally:
        agent.stop()


def test_threads_that_open_and_cut_connections_leave_nothing_open(shared_agent):
    before = len(psutil.Process(shared_agent.pid).net_connections())

    def churn(name: int) -> None:
        for i in range(20):
            client = shared_agent.client(client=f"churn-{name}-{i}")
            client.open(1, 1, name="Service", method="echo")
            if i % 2:
                client.close()
            else:
                client.sock.close()

    threads = [threading.Thread(target=churn, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(psutil.Process(shared_agent.pid).net_connections()) <= before)
    assert worker_pid(shared_agent)


def test_lines_of_a_failing_import_reach_the_deploy(agent, controller):
    observed = controller.deploy(2, "print('importing')\nraise KeyError('broken')\n", "f")
    assert observed.serving == 1
    assert observed.failure is not None
    assert observed.failure["error_type"] == "KeyError"
    assert "raise KeyError('broken')" in observed.failure["traceback"]
    assert worker_pid(agent)


def test_prints_while_loading_are_reported(agent, controller):
    spec = controller.spec("print('importing')\ndef f(): return 1\n", "f")
    controller.send(Reload(generation=2, spec=spec))
    line = controller.wait_for(LogReport)
    assert (line.generation, line.text, line.source) == (2, "importing", "stdout")
    assert controller.wait_for(Observed).serving == 2


@pytest.mark.faults
def test_an_agent_that_can_open_no_more_files_ends_its_calls_says_so_and_exits(agent):
    client = agent.client()
    begin(client, 1, "sleep", 60.0)
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (4, 4))
    with pytest.raises(CallFailed, match=r"PodTerminatedError: .*may open 4 files"):
        client.result(1)
    assert agent.process.wait(TIMEOUT) == 1
    client.close(None)


@pytest.mark.faults
def test_an_agent_takes_back_the_files_that_it_may_allow_itself(agent):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (4, hard))
    wait_until(lambda: resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)[0] > 4)
    client = agent.client()
    assert call(client, 1, "echo", "x") == "x"
    client.close()
