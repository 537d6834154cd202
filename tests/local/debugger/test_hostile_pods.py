"""What a pod, or a program beside the user's, can do to a machine that debugs: nothing."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any, cast

import pytest

from kubetorch.pod.user_process import dap
from kubetorch.sdk.debugger import adapter, local_peers
from kubetorch.sdk.debugger.adapter import AdapterServer
from kubetorch.sdk.tuning import Timing
from tests.local.debugger.adapters import ProtocolClient
from tests.local.debugger.fake_pods import FakeDebugpy
from tests.local.debugger.other_users import another_user, as_root
from tests.local.debugger.sessions import DEADLINE

pytestmark = pytest.mark.security
FORGED = (
    {"type": "event", "event": "debugpyAttach", "body": {"request": "launch", "program": "/tmp/x"}},
    {"type": "event", "event": "debugpySockets", "body": {"sockets": []}},
    {"type": "request", "command": "runInTerminal", "arguments": {"args": ["touch", "/tmp/x"]}},
    {"type": "request", "command": "startDebugging", "arguments": {"request": "launch"}},
)


@pytest.fixture
def debugpy():
    debugpy = FakeDebugpy()
    yield debugpy
    debugpy.close()


@pytest.fixture
def port(debugpy, tmp_path, monkeypatch):
    """The port of a debug adapter whose pod is a fake."""
    timing = Timing(debug_client_begin_seconds=60.0, debug_adapter_seconds=60.0)
    monkeypatch.setattr("kubetorch.sdk.debugger.adapter.TIMING", timing)
    ports: list[int] = []
    has_port = threading.Event()

    def report(text: str) -> None:
        ports.append(int(text.rpartition(":")[2]))
        has_port.set()

    server = AdapterServer(debugpy.terminal, tmp_path, "")
    thread = threading.Thread(target=server.run, args=(0, report))
    thread.start()
    assert has_port.wait(60)
    yield ports[0]
    debugpy.terminal.end("the test ends")
    thread.join()


@pytest.fixture
def client(port):
    client = ProtocolClient(port)
    yield client
    client.leave()


def test_vs_code_gets_no_event_or_request_that_starts_a_program(debugpy, client):
    client.attach({})
    for message in FORGED:
        debugpy.speak(**message)
    debugpy.speak(type="event", event="stopped", body={"threadId": 1, "reason": "step"})

    messages = client.messages_until("stopped")

    assert {message["type"] for message in messages} == {"event"}
    names = {message["event"] for message in messages}
    assert not names & {message.get("event") for message in FORGED}


def test_no_port_of_this_machine_is_dialled_because_the_pod_says_so(debugpy, client):
    client.attach({})
    with socket.create_server(("127.0.0.1", 0)) as docker:
        docker.settimeout(0)
        body = {"host": "127.0.0.1", "port": docker.getsockname()[1]}
        debugpy.speak(type="event", event="debugpyWaitingForServer", body=body)
        debugpy.speak(type="event", event="stopped", body={"threadId": 1, "reason": "step"})
        assert "debugpyWaitingForServer" not in str(client.messages_until("stopped"))
        with pytest.raises(BlockingIOError):
            docker.accept()


# --------------------------------------------------------------------------------- who dials a pod

STRANGER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as dialled:
    print("dialled", flush=True)
    print("got", dialled.recv(1), flush=True)
"""


class DialledPydevd:
    """Dials the port of the worker after another process of the pod."""

    def settrace(self, *, port: int, **_: object) -> None:
        command = [sys.executable, "-c", STRANGER, str(port)]
        self.stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.stranger.stdout is not None
        assert self.stranger.stdout.readline() == "dialled\n"
        self.dialled = socket.create_connection(("127.0.0.1", port))


def test_a_process_of_the_pod_that_dials_before_debugpy_gets_no_terminal():
    session, pydevd = dap.AdapterSession(cast("Any", None)), DialledPydevd()
    session._pydevd, session._debugpy = pydevd, adapter
    with session._connect("token") as accepted, pydevd.dialled:
        assert accepted.getpeername() == pydevd.dialled.getsockname()
        assert pydevd.stranger.communicate(timeout=DEADLINE)[0] == "got b''\n"


# ------------------------------------------------------------------------- who dials this machine


def test_a_page_in_a_browser_gets_no_debugger_and_takes_nobodys_place(debugpy, client, capfd):
    message = '{"seq": 1, "type": "request", "command": "initialize", "arguments": {}}'
    request = urllib.request.Request(f"http://127.0.0.1:{client.port}/", message.encode())
    for _ in range(2):
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(request, timeout=DEADLINE)
    client.attach({})
    assert debugpy.is_attached.is_set()
    assert capfd.readouterr().err.count("refused a program that is no client") <= 1


@pytest.fixture
def connections():
    """Makes connections of this user from an address of loopback; returns both ends."""
    with contextlib.ExitStack() as stack:

        def connect(address: str = "127.0.0.1", *, is_same_port: bool = False):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            dialled = stack.enter_context(socket.socket())
            dialled.bind((address, server.getsockname()[1] if is_same_port else 0))
            dialled.connect(server.getsockname())
            return dialled, stack.enter_context(server.accept()[0])

        yield connect


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_program_of_this_user_is_known_by_its_connection(family):
    prefix = "::ffff:" if family == socket.AF_INET6 else ""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as dialled:
        dialled.connect((f"{prefix}127.0.0.1", server.getsockname()[1]))
        with server.accept()[0] as accepted:
            assert local_peers.is_of_this_user(accepted)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address of loopback")
def test_the_own_end_of_a_connection_does_not_vouch_for_the_other_end(connections):
    dialled, accepted = connections("127.0.0.2", is_same_port=True)
    dialled.setblocking(False)
    with contextlib.suppress(BlockingIOError):  # until its end waits behind what is not read
        while True:
            dialled.send(bytes(1 << 20))
    dialled.shutdown(socket.SHUT_WR)
    assert not local_peers.is_of_this_user(accepted)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has one address of loopback")
def test_a_connection_from_another_address_of_loopback_is_refused(connections):
    _, accepted = connections("127.0.0.2")
    assert not local_peers.is_of_this_user(accepted)


@as_root
def test_a_program_of_another_user_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with another_user():
            dialled = socket.create_connection(server.getsockname())
        with dialled, server.accept()[0] as accepted:
            assert not local_peers.is_of_this_user(accepted)


def test_lsof_names_the_other_end_by_both_addresses():
    this_pid = os.getpid()

    def users(shown: str) -> list[int]:
        return list(local_peers.by_lsof(shown, 50001, 5678))

    assert users("p7\nf3\nn127.0.0.1:50001->127.0.0.1:5678\n") == [os.getuid()]
    assert not users(f"p{this_pid}\nf3\nn127.0.0.1:50001->127.0.0.1:5678\n")
    assert not users("p7\nf3\nn127.0.0.1:5678->127.0.0.1:50001\n")
    assert not users("p7\nf3\nn127.0.0.1:50001->10.0.0.1:5678\n")
