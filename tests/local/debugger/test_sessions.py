"""The agent's end of debuggers: who may attach, and what programs of the pod may send."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from types import SimpleNamespace

import pytest

from kubetorch.lib.http_server import Refusal
from kubetorch.pod.debug_sessions import DebugSessions, StoppedProgram
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.logs import Line
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import debugger, exceptions, routes, tokens
from tests.local.debugger.other_users import STRANGER, another_user, as_root

KEY = tokens.workload_key(b"secret", "ns/price")
HELLO = {"worker": "", "pid": 1, "call": 0, "why": "breakpoint", "mode": "pdb", "port": 5678}


@pytest.fixture
def sessions(tmp_path):
    """Runs a scenario with the sessions of a pod, their lines, and a dialler of programs."""

    def run(scenario, workers=()):
        async def main():
            lines = []
            sessions = DebugSessions(
                pod_name="price-0",
                namespace="ns",
                host="",
                path=tmp_path / "debugger",
                guard=Guard(
                    Credentials(KEY), audience="ns/price", host="10.0.0.1", clock=time.time
                ),
                workers=lambda: workers,
                on_line=lines.append,
                on_change=lambda: None,
            )
            await sessions.start()

            async def dial(*messages):
                reader, writer = await asyncio.open_unix_connection(str(sessions.path))
                writer.write(b"".join(messages))
                return reader, writer

            try:
                await scenario(sessions, lines, dial)
            finally:
                await sessions.close()

        asyncio.run(main())

    return run


def authorization(*verbs):
    claims = tokens.Claims(
        audience="ns/price", expires=time.time() + 60, subject="ann", verbs=verbs
    )
    return {"authorization": f"Bearer {tokens.sign(KEY, claims)}"}


async def stopped(sessions, dial, **about):
    """A program that waits for a terminal."""
    reader, writer = await dial(
        debugger.pack(debugger.HELLO, {**HELLO, **about}),
        debugger.pack(debugger.STOPPED, {"where": "price.py:3 in price"}),
    )
    while not any(view.since for view in sessions.views):
        await asyncio.sleep(0)
    return reader, writer


class FakeWorker:
    """The worker `w1`, which runs call 7."""

    rank = None

    def __init__(self):
        self.process = SimpleNamespace(marker="KT_WORKER=w1")
        self.listeners = []

    def call_number(self, number):
        return number

    def label_of(self, number):
        return str(number)

    def drain_output(self):
        pass

    def note_debugger(self, line, number):
        pass


class FakeConnection:
    """A terminal's connection; `is_congested` while the terminal does not read."""

    def __init__(self):
        self.is_congested = False
        self.sent = []

    def send(self, *parts):
        self.sent.append(b"".join(parts))

    def close(self, code=1000, reason=""):
        pass


def refusal_of(sessions, path, headers):
    with pytest.raises(Refusal) as caught:
        sessions.accept(path, headers)
    return exceptions.parse_json(caught.value.body)


def test_to_attach_takes_the_right_of_a_shell(sessions):
    async def scenario(sessions, lines, dial):
        _, writer = await stopped(sessions, dial)
        (view,) = sessions.views
        for path in (
            routes.debug_terminal(view.session, is_caller=True),
            routes.debug_terminal(view.session, is_caller=False),
            routes.debug_call("some-call", None),
        ):
            for headers in (authorization("call"), authorization("logs"), {}):
                assert refusal_of(sessions, path, headers).error_type == "UnauthorizedError"
        path = routes.debug_terminal(view.session, is_caller=False)
        assert sessions.accept(path, authorization("exec")) is not None
        writer.close()

    sessions(scenario)


def test_the_socket_is_of_the_pods_user_alone(sessions):
    async def scenario(sessions, lines, dial):
        assert stat.S_IMODE(sessions.path.stat().st_mode) == 0o600

    sessions(scenario)


def test_a_stop_says_how_to_attach_and_a_program_that_ends_is_forgotten(sessions):
    async def scenario(sessions, lines, dial):
        _, writer = await stopped(sessions, dial, port=6000)
        assert [line.text for line in lines] == [
            debugger.ACTIVATED,
            "kt debug price-0 --port 6000 --namespace ns --mode pdb",
            "stopped at price.py:3 in price; waits 300 s for a debugger from another terminal",
        ]
        writer.close()
        while sessions.views:
            await asyncio.sleep(0)
        assert lines[-1].text == "the stopped program has ended"

    sessions(scenario)


def test_a_stop_that_no_terminal_comes_to_is_told_to_go_on(sessions):
    async def scenario(sessions, lines, dial):
        reader, writer = await stopped(sessions, dial, wait="0.01")
        data = await reader.read()
        assert list(debugger.Messages().feed(data)) == [(debugger.LEFT, b"")]
        assert lines[-1].text == "no debugger was attached within 0.01 s: the call goes on"
        writer.close()

    sessions(scenario)


@pytest.mark.parametrize(
    "messages",
    [
        b"\xff" * 100,
        debugger.pack(debugger.STOPPED, {"where": "before hello"}),
        debugger.pack(debugger.HELLO, HELLO) * 2,
        debugger.pack(debugger.HELLO, HELLO) + debugger.pack(debugger.LINE, "from a terminal"),
        debugger.pack(debugger.HELLO, b"no object"),
    ],
)
def test_a_program_that_breaks_the_protocol_is_left(sessions, messages):
    async def scenario(sessions, lines, dial):
        reader, writer = await dial(messages)
        await reader.read()
        assert sessions.views == []
        writer.close()

    sessions(scenario)


def test_odd_words_of_a_program_steer_no_terminal(sessions):
    async def scenario(sessions, lines, dial):
        _, writer = await stopped(
            sessions, dial, why="\x1b[2J", mode="pdb; rm -rf ~", port="x", wait="nan"
        )
        (view,) = sessions.views
        assert (view.why, view.mode, view.port) == ("\\x1b[2J", "pdb", 5678)
        assert view.until == view.since + TIMING.debugger_wait_seconds
        writer.close()

    sessions(scenario)


def test_a_pod_has_a_bounded_number_of_debuggers(sessions):
    async def scenario(sessions, lines, dial):
        hello = debugger.pack(debugger.HELLO, HELLO)
        programs = [await dial(hello) for _ in range(LIMITS.debug_sessions)]
        while len(sessions.views) < LIMITS.debug_sessions:
            await asyncio.sleep(0)
        reader, writer = await dial(hello)
        assert await reader.read()
        for _, program in [*programs, (reader, writer)]:
            program.close()

    sessions(scenario)


@pytest.mark.security
def test_callers_hold_a_bounded_number_of_calls_by_their_options(sessions):
    async def scenario(sessions, lines, dial):
        writers = []
        for number in range(LIMITS.requested_stops):
            why = ("debug=", "post-mortem")[number % 2]
            writers.append((await stopped(sessions, dial, why=why))[1])
            while sessions.requested_stops <= number:
                await asyncio.sleep(0)
        reader, writer = await stopped(sessions, dial, why="debug=")
        assert list(debugger.Messages().feed(await reader.read())) == [(debugger.LEFT, b"")]
        assert "8 calls with debug= or post_mortem= wait" in lines[-1].text
        assert lines[-1].text.endswith("the call goes on")

        writers.append((await stopped(sessions, dial))[1])  # a breakpoint() of the code
        while len(sessions.views) <= LIMITS.requested_stops:
            await asyncio.sleep(0)
        for program in [*writers, writer]:
            program.close()

    sessions(scenario)


@pytest.mark.security
def test_a_program_that_has_ended_says_nothing_more(sessions):
    async def scenario(sessions, lines, dial):
        reader, writer = await dial(
            debugger.pack(debugger.HELLO, HELLO),
            debugger.pack(debugger.ENDED),
            debugger.pack(debugger.STOPPED, {"where": "price.py:3 in price"}),
        )
        await reader.read()
        assert lines == []
        writer.close()

    sessions(scenario)


@pytest.mark.security
def test_a_terminal_that_does_not_read_fills_no_memory_and_learns_what_it_missed(sessions):
    worker = FakeWorker()

    async def scenario(sessions, lines, dial):
        _, writer = await stopped(sessions, dial, worker="w1", call=7)
        (view,) = sessions.views
        path = routes.debug_terminal(view.session, is_caller=False)
        terminal, connection = sessions.accept(path, authorization("exec")), FakeConnection()
        terminal.on_open(connection)
        connection.sent.clear()

        def output(count):
            for number in range(count):
                worker.listeners[0](Line(f"line {number}", "stdout", None, 0.0, 7))

        output(1)
        connection.is_congested = True
        output(1000)
        connection.is_congested = False
        terminal.on_writable()
        output(1)
        note = "… 1000 lines of the call came meanwhile, and are not shown\n"
        assert [data[1:].decode() for data in connection.sent] == ["line 0\n", note, "line 0\n"]
        terminal.on_close("")
        writer.close()

    sessions(scenario, [worker])


@as_root
@pytest.mark.security
def test_a_program_of_another_user_is_left_at_once(sessions):
    async def scenario(sessions, lines, dial):
        with another_user():
            ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: StoppedProgram(sessions), ours)
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        assert await reader.read() == b""
        writer.close()

    sessions(scenario)


@as_root
@pytest.mark.security
def test_a_folder_of_another_user_gets_no_socket(sessions):
    async def scenario(sessions, lines, dial):
        await sessions.close()
        link = sessions.path.parent / "link"
        (sessions.path.parent / "folder").mkdir()
        link.symlink_to("folder")
        os.lchown(link, STRANGER, STRANGER)
        sessions.path = link / "debugger"
        await sessions.start()
        assert not sessions.path.exists()

    sessions(scenario)
