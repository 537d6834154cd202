"""A pod that ends: what it refuses, and what it finishes."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import signal
import socket
import time
from dataclasses import replace

import pytest

from agent_harness import (
    TIMEOUT,
    USER_TOKEN,
    AgentProcess,
    CallFailed,
    FakeController,
    wait_until,
)
from kubetorch.pod.agent import bind
from kubetorch.pod.tuning import TIMING
from kubetorch.specs.callable import AppSpec
from kubetorch.wire import frames, routes
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import Activity, Observed, Reload, Terminate
from tests.free_ports import free_port

MIB = 1024 * 1024
SOURCE = """
import os, time


class Service:
    def hold(self, path):
        print("begun")
        while not os.path.exists(path):
            time.sleep(0.01)
        return "held"

    def count(self, path):
        yield 1
        while not os.path.exists(path):
            time.sleep(0.01)
        yield 2
        yield 3

    def blob(self, size):
        return "x" * size
"""
APP = """
import http.server, os, sys, time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/":
            open(os.environ["FOLDER"] + "/held", "w").close()
        while self.path != "/" and not os.path.exists(os.environ["FOLDER"] + "/go"):
            time.sleep(0.01)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")


http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.fixture
def controller(tmp_path):
    controller = FakeController(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def agent(tmp_path, controller):
    agent = AgentProcess(tmp_path, controller)
    yield agent
    agent.stop()


@pytest.fixture
def go(tmp_path):
    """The file that lets calls end."""
    return tmp_path / "go"


def leave(agent, controller):
    agent.process.send_signal(signal.SIGTERM)
    controller.wait_for(Activity, lambda m: m.is_stopping)


def connect(agent, method, path, body=None):
    """A connection of HTTP on which a request is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=TIMEOUT)
    connection.request(method, path, body, {"Authorization": f"Bearer {USER_TOKEN}"})
    return connection


def arguments(*args):
    return json.dumps({"args": [str(arg) for arg in args]}).encode()


def refused(agent, method, path, body=None):
    """The failure with which a new request is refused."""
    connection = connect(agent, method, path, body)
    answer = connection.getresponse()
    failure = json.loads(answer.read())
    assert (answer.status, answer.headers["Connection"]) == (503, "close")
    assert connection.sock is None
    assert (failure["code"], failure["started"]) == ("call_refused", False)
    return failure


def test_new_calls_are_refused_on_all_ways_and_those_that_run_are_finished(agent, controller, go):
    controller.deploy(1, SOURCE, "Service", kind="cls")
    idle = connect(agent, "GET", routes.HEALTH)
    assert idle.getresponse().read()
    client = agent.client()
    client.open(1, str(go), name="Service", method="count")
    assert client.until(1, Kind.YIELD)
    generating = connect(agent, "POST", "/Service/count", arguments(go))
    streamed = generating.getresponse()
    assert json.loads(streamed.readline()) == {"yield": 1}
    leave(agent, controller)
    # An idle connection ends, so that its client opens one to another pod.
    assert idle.sock.recv(1) == b""
    idle.close()
    assert "being stopped" in refused(agent, "POST", "/Service/hold", arguments(go))["message"]
    refused(agent, "POST", "/Service/hold", b"no json")
    client.open(2, str(go), name="Service", method="hold")
    with pytest.raises(CallFailed) as caught:
        client.result(2)
    failure = caught.value.failure
    assert (failure["code"], failure["started"]) == ("call_refused", False)
    assert agent.http("GET", routes.SERVING)[0] == 503
    assert agent.http("GET", routes.HEALTH)[0] == 200
    go.touch()
    rest = client.until(1, Kind.RESULT)
    assert [kind for kind, *_ in rest] == [Kind.YIELD, Kind.YIELD, Kind.RESULT]
    lines = [json.loads(line) for line in streamed]
    assert lines == [{"yield": 2}, {"yield": 3}, {"return": None}]
    generating.close()
    assert agent.process.wait(TIMEOUT) == 0
    client.close(None)


def test_a_result_is_handed_over_however_slowly_its_client_reads(agent, controller):
    controller.deploy(1, SOURCE, "Service", kind="cls")
    client = agent.client()
    client.open(1, 40 * MIB, name="Service", method="blob")
    client.until(1, Kind.RESULT)
    controller.wait_for(Activity, lambda m: m.calls == 0)
    leave(agent, controller)
    time.sleep(TIMING.server_close_seconds + TIMING.closing_seconds / 2)
    received = 0
    while received < 40 * MIB:
        _, _, _, payload = client.until(1, Kind.DATA)[-1]
        received += len(payload)
        with contextlib.suppress(ConnectionError):  # the agent is done when it has sent the rest
            client.send(Kind.CREDIT, 1, frames.Credit(len(payload)))
            client.ack()
    assert agent.process.wait(TIMEOUT) == 0
    client.close(None)


def test_a_later_and_shorter_grace_counts(agent, controller, go):
    controller.deploy(1, SOURCE, "Service", kind="cls")
    client = agent.client()
    client.open(1, str(go), name="Service", method="hold")
    client.until(1, Kind.LOG)
    controller.send(Terminate(grace=3600.0, reason="scaled down"))
    controller.wait_for(Activity, lambda m: m.is_stopping)
    controller.send(Terminate(grace=0.2, reason="torn down"))
    with pytest.raises(CallFailed, match="PodTerminatedError"):
        client.result(1)
    assert agent.process.wait(TIMEOUT) == 0
    client.close(None)


@pytest.fixture
def app(agent, controller, tmp_path):
    """An agent with an app that gets one request at a time."""
    spec = controller.spec(APP, "web", env=(("FOLDER", str(tmp_path)),))
    command = f"python {agent.work}/proj/program.py"
    callable_ = replace(spec.callable, kind="app", app=AppSpec(command, port=free_port()))
    compute = replace(spec.compute, concurrency=1)
    controller.send(Reload(generation=1, spec=replace(spec, callable=callable_, compute=compute)))
    assert controller.wait_for(Observed).failure is None
    return agent


def test_requests_of_an_app_are_finished_and_new_ones_and_waiting_ones_refused(
    app, controller, go, tmp_path
):
    held = connect(app, "GET", "/http/held")
    wait_until((tmp_path / "held").exists)
    waiting = connect(app, "GET", "/http/waiting")
    controller.wait_for(Activity, lambda m: m.queue is not None and m.queue.waiting == 1)
    leave(app, controller)
    answer = waiting.getresponse()
    assert answer.status == 503
    assert json.loads(answer.read())["code"] == "call_refused"
    refused(app, "GET", "/http/")
    time.sleep(TIMING.server_close_seconds + TIMING.closing_seconds / 2)
    go.touch()
    assert held.getresponse().read() == b"ok"
    assert app.process.wait(TIMEOUT) == 0


def test_a_request_of_an_app_that_outlasts_the_grace_ends_with_the_reason(
    app, controller, tmp_path
):
    held = connect(app, "GET", "/http/held")
    wait_until((tmp_path / "held").exists)
    controller.send(Terminate(grace=0.5, reason="Evicted"))
    answer = held.getresponse()
    failure = json.loads(answer.read())
    assert (answer.status, failure["code"]) == (503, "pod_terminated")
    assert failure["state"]["reason"] == "Evicted"
    assert app.process.wait(TIMEOUT) == 0


def test_a_websocket_of_an_app_does_not_hold_its_pod(tmp_path, agent, controller):
    source = APP.replace(
        "    def do_GET(self):\n",
        "    def do_GET(self):\n"
        "        if self.path == '/socket':\n"
        "            self.send_response_only(101)\n"
        "            self.send_header('Connection', 'Upgrade')\n"
        "            self.send_header('Upgrade', 'websocket')\n"
        "            self.end_headers()\n"
        "            self.rfile.read()\n",
    )
    spec = controller.spec(source, "web", env=(("FOLDER", str(tmp_path)),))
    app = AppSpec(f"python {agent.work}/proj/program.py", port=free_port())
    controller.send(
        Reload(
            generation=1, spec=replace(spec, callable=replace(spec.callable, kind="app", app=app))
        )
    )
    assert controller.wait_for(Observed).failure is None
    with socket.create_connection(("127.0.0.1", agent.port), TIMEOUT) as sock:
        head = (
            "GET /http/socket HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
            "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nAuthorization: Bearer {USER_TOKEN}"
            "\r\n\r\n"
        )
        sock.sendall(head.encode())
        assert b" 101 " in sock.recv(100)
        controller.send(Terminate(grace=3600.0, reason="scaled down"))
        assert agent.process.wait(TIMEOUT) == 0


def test_connections_to_an_agent_notice_a_client_that_vanished():
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname(), TIMEOUT),
    ):
        wait_until(lambda: select.select([listener], [], [], 0)[0])
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
