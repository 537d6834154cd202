"""The load that a real agent reports to its controller, and `kt.metric` in its processes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from agent_harness import AgentProcess, FakeController
from kubetorch.pod.load import Usage
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import AppSpec
from kubetorch.wire.frames import Kind
from kubetorch.wire.messages import Activity, Hello, Observed, PodLoad, Reload
from tests.free_ports import free_port

SOURCE = """
import asyncio, multiprocessing, os, subprocess, sys, threading, time
import kubetorch as kt


class Service:
    def hold(self, path):
        while not os.path.exists(path):
            time.sleep(0.01)
        return "held"

    def values(self, path):
        while not os.path.exists(path):
            yield 1
            time.sleep(0.05)

    def report(self, value):
        kt.metric("queue", value)
        return os.getpid()

    def report_and_hold(self, value, path):
        kt.metric("queue", value)
        self.hold(path)
        return os.getpid()

    async def report_async(self, value):
        kt.metric("queue", value)

    def report_in_thread(self, value):
        thread = threading.Thread(target=kt.metric, args=("queue", value))
        thread.start()
        thread.join()

    def fork(self, value):
        pid = os.fork()
        if pid == 0:
            kt.metric("queue", value)
            time.sleep(600)
            os._exit(0)
        self.child = pid

    def start(self, value):
        code = f"import time, kubetorch as kt; kt.metric('queue', {value}); time.sleep(600)"
        self.child = subprocess.Popen([sys.executable, "-c", code]).pid

    def end_child(self):
        os.kill(self.child, 9)
        os.waitpid(self.child, 0)

    def report_nonsense(self):
        try:
            kt.metric("rps", 1)
        except kt.SpecError as error:
            return str(error)
"""


SCALED = AutoscalingSpec(metric="queue")


class Pod:
    """A real agent, the controller that it reports to, and what is deployed on it."""

    def __init__(self, folder) -> None:
        self.controller = FakeController(folder)
        self.agent = AgentProcess(folder, self.controller)
        self._generation = 0

    def close(self) -> None:
        self.agent.stop()
        self.controller.close()

    def deploy(self, *, autoscaling=None, **compute) -> None:
        self._generation += 1
        generation = self._generation
        spec = self.controller.spec(SOURCE, "Service", kind="cls")
        spec = replace(spec, compute=replace(spec.compute, autoscaling=autoscaling, **compute))
        self.controller.send(Reload(generation=generation, spec=spec))
        observed = self.controller.wait_for(Observed, lambda m: m.generation == generation)
        assert observed.failure is None


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("pod"))
    pod.deploy(autoscaling=SCALED, concurrency=1)
    yield pod
    pod.close()


@pytest.fixture
def fresh_pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    pod.close()


@pytest.fixture
def agent(pod):
    return pod.agent


@pytest.fixture
def controller(pod):
    return pod.controller


def load(controller, condition):
    return controller.wait_for(PodLoad, condition)


def test_running_and_waiting_calls_of_streams_and_of_plain_http_are_load(
    agent, controller, tmp_path
):
    client = agent.client()
    path = tmp_path / "go"
    client.open(1, str(path), name="Service", method="hold")
    first = load(controller, lambda m: m.calls == 1)
    assert first.waiting == 0
    client.open(2, str(path), name="Service", method="values")
    both = load(controller, lambda m: m.calls == 2)
    assert both.waiting == 1
    assert both.started == first.started + 1
    # It is repeated while it stays, and its integral grows.
    later = load(controller, lambda m: m.calls == 2)
    assert later.call_seconds > both.call_seconds
    path.touch()
    client.result(1)
    client.until(2, Kind.RESULT)
    ended = load(controller, lambda m: m.calls == 0)
    assert ended.started == both.started
    client.close()
    agent.post("/Service/report_nonsense")
    assert load(controller, lambda m: m.calls == 0).started == both.started + 1


def loads_of_next_session(controller):
    """The reports that a session begins with, before the first activity."""
    controller.cut()
    controller.wait_for(Hello)
    loads = []
    while not isinstance(message := controller.messages.get(timeout=60), Activity):
        loads += [message] if isinstance(message, PodLoad) else []
    return loads


def test_the_load_is_reported_to_each_controller_that_connects(agent, controller):
    for _ in range(2):
        (report,) = loads_of_next_session(controller)
        assert report.calls == 0


def test_a_deploy_switches_the_reports_on_and_off(fresh_pod):
    controller = fresh_pod.controller
    fresh_pod.deploy()
    fresh_pod.agent.post("/Service/report", 1)
    assert loads_of_next_session(controller) == []
    fresh_pod.deploy(autoscaling=AutoscalingSpec(metric="cpu"))
    # The process that reported a value ends with its generation.
    report = load(controller, lambda m: m.memory_bytes > 0 and not m.metrics)
    assert report.calls == 0
    assert report.cpu_seconds > 0
    assert load(controller, lambda m: True).cpu_seconds >= report.cpu_seconds
    fresh_pod.deploy(autoscaling=AutoscalingSpec(metric="rps"))
    assert load(controller, lambda m: not m.memory_bytes).cpu_seconds == 0
    fresh_pod.deploy()
    fresh_pod.agent.post("/Service/report", 2)
    assert loads_of_next_session(controller) == []


def is_value(value):
    return lambda m: m.metrics.get("queue", (None,))[0] == value


@pytest.mark.parametrize("method", ["report", "report_async", "report_in_thread"])
def test_a_metric_of_user_code_is_reported_with_its_time(agent, controller, method):
    begin = time.time()
    assert agent.post(f"/Service/{method}", 7)[0] == 200
    _, reported = load(controller, is_value(7.0)).metrics["queue"]
    assert begin <= reported <= time.time()
    # A change is reported without any call, and a value that stays is not.
    agent.post(f"/Service/{method}", -2.5)
    load(controller, is_value(-2.5))


@pytest.mark.parametrize("method", ["fork", "start"])
def test_processes_that_user_code_starts_count_until_they_end(agent, controller, method):
    agent.post("/Service/report", 1)
    load(controller, is_value(1.0))
    agent.post(f"/Service/{method}", 10)
    load(controller, is_value(11.0))
    agent.post("/Service/end_child")
    load(controller, is_value(1.0))


def test_the_value_of_a_pod_is_the_sum_over_its_processes(fresh_pod):
    controller, agent = fresh_pod.controller, fresh_pod.agent
    fresh_pod.deploy(autoscaling=SCALED, num_proc=2, concurrency=1)
    clients = [agent.client(client="first"), agent.client(client="second")]
    for client in clients:
        client.open(1, 3, str(agent.work / "go"), name="Service", method="report_and_hold")
    load(controller, is_value(6.0))
    (agent.work / "go").touch()
    pids = {client.result(1) for client in clients}
    for client in clients:
        client.close()
    os.kill(pids.pop(), signal.SIGKILL)
    load(controller, is_value(3.0))


def test_names_that_are_measured_anyway_are_refused_in_pods_too(agent):
    assert "measures itself" in agent.post("/Service/report_nonsense")[1]


def test_an_app_reports_metrics_and_its_requests_are_load(tmp_path):
    source = """
import http.server, os, sys, time
import kubetorch as kt

kt.metric("queue", 5)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while self.path == "/hold" and not os.path.exists("go"):
            time.sleep(0.01)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")


http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
    controller = FakeController(tmp_path)
    agent = AgentProcess(tmp_path, controller)
    try:
        spec = controller.spec(source, "web", kind="app")
        app = AppSpec(f"python {agent.work}/proj/program.py", port=free_port())
        callable_ = replace(spec.callable, kind="app", app=app)
        compute = replace(spec.compute, autoscaling=AutoscalingSpec(metric="queue"))
        spec = replace(spec, callable=callable_, compute=compute)
        controller.send(Reload(generation=1, spec=spec))
        assert controller.wait_for(Observed).failure is None
        load(controller, is_value(5.0))
        assert agent.http("GET", "/http/")[2] == b"ok"
        load(controller, lambda m: m.started == 1 and m.calls == 0)
    finally:
        agent.stop()
        controller.close()


def test_cpu_time_and_memory_are_those_of_all_processes():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        block, end = b"x" * 50_000_000, os.times().user + 0.3
        while os.times().user < end:
            pass
        os.write(writer, block[:1])
        signal.pause()
    os.read(reader, 1)
    try:
        cpu_seconds, memory_bytes = Usage(is_container=False, pid=child).measure()
        assert cpu_seconds >= 0.2
        assert memory_bytes >= 50_000_000
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
