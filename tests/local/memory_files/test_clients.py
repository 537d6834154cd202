"""Large values between a client and a pod of one machine: in memory files beside the stream."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from array import array as integers
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from agent_harness import AgentProcess, CallFailed, StreamClient
from kubetorch.errors import CallTimeoutError
from kubetorch.lib import memory_files, private_sockets
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.sdk.calls.route import Location, Route
from kubetorch.wire import codecs, frames
from kubetorch.wire.frames import Kind
from tests.local.calling import InThread, until
from tests.local.memory_files.conftest import method_of
from tests.local.tcp_relay import Relay

pytestmark = [
    pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files"),
    # Tests kill workers.
    pytest.mark.filterwarnings("ignore::kubetorch.errors.InstanceReplacedWarning"),
]

SIZE = 100_000  # numbers of 8 bytes
Method = Callable[..., Any]


@pytest.fixture(autouse=True)
def _leaves_nothing(census: Any) -> Iterator[None]:
    before = census()
    yield
    assert census.falls_to(before)


def test_an_array_goes_to_the_worker_and_comes_back_without_a_copy_in_between(
    method: Callable[..., Method], census: Any, agent: AgentProcess
) -> None:
    array = numpy.arange(float(SIZE))
    assert method("sealed")(array)
    result = method("bump")(array)
    assert census() == 1
    assert (result == array + 1).all()
    assert array[-1] == SIZE - 1
    result[:] = 0  # the caller's own, as a local result would be
    part = result[5:6]
    del result
    assert census() == 1
    del part
    assert census() == 0
    assert census.falls_to(0, agent.pid)


def test_small_values_need_no_file(method: Callable[..., Method], census: Any) -> None:
    assert not method("sealed")(numpy.ones(100))
    result = method("ones")(100)
    assert (result == 1).all()
    assert census() == 0


def test_coroutines_and_threads_pass_files_too(method: Callable[..., Method]) -> None:
    array = numpy.arange(float(SIZE))
    large = numpy.arange(1_000_000.0)
    threads = [InThread(method("bump"), array) for _ in range(8)]

    async def main() -> None:
        bump = method("bump_async", async_=True)
        results = await asyncio.gather(*(bump(value) for value in [array, large] * 4))
        for value, result in zip([array, large] * 4, results, strict=True):
            assert (result == value + 1).all()
        assert await method("sealed", async_=True)(large)

    asyncio.run(main())
    for thread in threads:
        assert (thread.join().value == array + 1).all()


def test_a_generator_yields_files_and_waits_for_a_slow_reader(
    method: Callable[..., Method], census: Any
) -> None:
    size = 2_000_000
    values = method("each")(size, 60)
    assert int(next(values)[0]) == 0
    produced = method("count_produced")
    count = 0
    while count != (count := produced()):
        time.sleep(0.3)
    assert count < 40
    assert [int(value[-1]) for value in values] == list(range(1, 60))
    assert census() == 0


def test_a_connection_that_breaks_at_any_moment_costs_no_value_and_no_second_run(
    method: Callable[..., Method], agent: AgentProcess
) -> None:
    array, count_runs = numpy.arange(float(SIZE)), method("count_runs")
    before = count_runs()
    is_over = threading.Event()

    def cut(relay: Relay) -> None:
        for pause in itertools.count(2):
            if is_over.wait(pause / 100):
                return
            relay.cut()

    with Relay(agent.port) as relay:
        route = Route("demo", lambda: Location((relay.url,), agent.token()))
        bump, sealed = method_of(route, "bump"), method_of(route, "sealed")
        cutter = threading.Thread(target=cut, args=[relay])
        cutter.start()
        try:
            for _ in range(40):
                assert (bump(array) == array + 1).all()
        finally:
            is_over.set()
            cutter.join()
        assert count_runs() - before == 40
        assert sealed(array)
        route.close()


def test_a_call_that_is_cancelled_or_times_out_leaves_no_file(
    method: Callable[..., Method], census: Any, agent: AgentProcess
) -> None:
    array = numpy.ones(SIZE)
    with pytest.raises(CallTimeoutError):
        method("sleep", timeout=0.3)(array, 60)

    async def main() -> None:
        task = asyncio.ensure_future(method("sleep", async_=True)(array, 60))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert census.falls_to(0)
    assert census.falls_to(0, agent.pid)


CLIENT = """
import sys, numpy
from kubetorch.sdk.calls.attempts import Target
from kubetorch.sdk.calls.caller import Caller
from kubetorch.sdk.calls.options import CallOptions
from kubetorch.sdk.calls.route import Location, Route
from pathlib import Path
import os

url, token, method, user = sys.argv[1:]
def result():
    route = Route("demo", lambda: Location((url,), token))
    caller = Caller(Target("default", "demo", "Service", method), route, CallOptions())
    value = caller(numpy.ones(100_000))
    route.close()
    return value
if user:
    assert result()  # that user could not import anything
    os.seteuid(int(user))
print("result", result(), flush=True)
"""


def program(agent: AgentProcess, method: str, user: str = "") -> subprocess.Popen[str]:
    url = f"http://127.0.0.1:{agent.port}"
    command = [sys.executable, "-c", CLIENT, url, agent.token(), method, user]
    env = {**os.environ, "KT_CONFIG_FILE": os.devnull}  # which any user can read
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def test_a_killed_client_leaves_no_file_in_the_agent(
    method: Callable[..., Method], agent: AgentProcess, census: Any
) -> None:
    worker = method("pid")()
    client = program(agent, "nap")  # its call runs on: the client may come back
    until(lambda: census(worker))
    client.kill()
    client.communicate()
    assert census.falls_to(0, agent.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_uses_the_stream(agent: AgentProcess) -> None:
    assert program(agent, "sealed").communicate()[0] == "result True\n"
    assert program(agent, "sealed", "65534").communicate()[0] == "result False\n"


def test_a_folder_that_others_can_enter_is_not_used(
    method: Callable[..., Method], agent: AgentProcess
) -> None:
    folder = agent.root / "memory"
    folder.chmod(0o755)
    try:
        assert not method("sealed")(numpy.ones(SIZE))
        assert (method("bump")(numpy.ones(SIZE)) == 2).all()
    finally:
        folder.chmod(0o700)


def test_a_forked_child_makes_calls_of_its_own_and_leaves_those_of_its_parent_alone(
    method: Callable[..., Method],
) -> None:
    array = numpy.ones(SIZE)
    sealed = method("sealed")
    assert sealed(array)
    child = os.fork()
    if child == 0:
        os._exit(0 if (method("bump")(array) == 2).all() else 1)
    assert (method("bump")(array) == 2).all()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sealed(array)


# ------------------------------------------------------------------------- hostile clients


def proven(client: StreamClient, *, token: str | None = None, name: str = "hostile") -> Any:
    """A connection for memory files, as a client of the stream makes it."""
    connection = private_sockets.connect(Path(client.welcome.memory_socket))
    proof = frames.StreamProof(token or client.token, name, client.welcome.incarnation)
    connection.send(frames.encode_proof(proof))
    connection.setblocking(True)
    connection.settimeout(60)
    return connection


@pytest.fixture
def client(agent: AgentProcess) -> Iterator[StreamClient]:
    client = agent.client(client="hostile", token=agent.token())
    client.token = f"Bearer {agent.token()}"  # type: ignore[attr-defined]
    yield client
    client.sock.close()


def open_with_file(client: StreamClient, number: int, file: int, size: int) -> None:
    body = frames.Body("values", (size,), size)
    opening = frames.Open(f"call-{number}", "Service", body, "bump", file=file)
    client.send(Kind.OPEN, number, opening)


def announce(connection: socket.socket, number: int, size: int, descriptor: int | None) -> None:
    data = memory_files._ANNOUNCEMENT.pack(number, size)
    rights = integers("i", [] if descriptor is None else [descriptor])
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def short() -> int:
    file = MemoryFile.write([bytes(10)], 10)
    return os.dup(file.descriptor)


def unsealed(size: int) -> int:
    descriptor = os.memfd_create(memory_files.NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    return descriptor


@pytest.mark.security
@pytest.mark.parametrize(
    ("make", "announced", "problem"),
    [
        (lambda: unsealed(500_000), 500_000, "not sealed"),
        (lambda: unsealed(10), 500_000, "not sealed"),
        (short, 500_000, "of 10 bytes"),
        (lambda: os.open(os.devnull, os.O_RDWR), 500_000, "no file in memory"),
        (short, 10, "instead of 500000"),
    ],
    ids=["unsealed", "unsealed and short", "short", "no file in memory", "other size"],
)
def test_a_client_that_sends_what_is_no_sealed_file_is_sent_away(
    client: StreamClient,
    agent: AgentProcess,
    census: Any,
    make: Callable[[], int],
    announced: int,
    problem: str,
) -> None:
    with proven(client) as connection:
        descriptor = make()
        announce(connection, 1, announced, descriptor)
        os.close(descriptor)
        open_with_file(client, 1, 1, 500_000)
        with pytest.raises(EOFError):
            client.result(1)
        assert problem in client.close_reason
        assert connection.recv(1) == b""
    assert census.falls_to(0, agent.pid)


@pytest.mark.security
def test_arguments_in_a_file_that_never_came_end_the_stream(client: StreamClient) -> None:
    with proven(client):
        open_with_file(client, 1, 7, 500_000)
        with pytest.raises(EOFError):
            client.result(1)
    assert "missing" in client.close_reason


@pytest.mark.security
def test_a_connection_needs_the_token_and_the_identity_of_a_stream(
    client: StreamClient, agent: AgentProcess
) -> None:
    for changed in ({"token": "Bearer wrong"}, {"token": " "}, {"name": "unknown"}):
        with proven(client, **changed) as connection:
            assert connection.recv(1) == b""
    connection = private_sockets.connect(Path(client.welcome.memory_socket))
    with connection:
        connection.send(b"\xff" * 100)
        connection.setblocking(True)
        connection.settimeout(60)
        assert connection.recv(1) == b""
    open_with_file(client, 1, 1, 500_000)
    with pytest.raises(CallFailed, match="no connection for such files"):
        client.result(1)


@pytest.mark.security
def test_silent_connections_do_not_keep_others_out(
    client: StreamClient, agent: AgentProcess, method: Callable[..., Method]
) -> None:
    path = Path(client.welcome.memory_socket)
    silent = [private_sockets.connect(path) for _ in range(100)]
    assert method("sealed")(numpy.ones(SIZE))
    for connection in silent:
        connection.close()


@pytest.mark.security
def test_files_of_one_client_are_bounded(
    client: StreamClient, agent: AgentProcess, census: Any
) -> None:
    segments = codecs.encode("values", {"args": [numpy.ones(SIZE)], "kwargs": {}})
    size = len(b"".join(codecs.join(segments)))
    with proven(client) as connection:
        file = MemoryFile.write(codecs.join(segments), size)
        for number in range(1, 1000):
            body = frames.Body("values", tuple(map(len, segments)), size)
            opening = frames.Open(f"c-{number}", "Service", body, "sleep", file=number)
            try:
                announce(connection, number, size, file.descriptor)
                client.send(Kind.OPEN, number, opening)
            except OSError:
                break
        else:
            pytest.fail("the agent takes any number of files")
        file.release()
        with pytest.raises((EOFError, OSError)):
            client.result(1)
    assert census.falls_to(0, agent.pid)
