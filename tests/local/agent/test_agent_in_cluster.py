"""An agent as it runs in a container: its controller has a URL, and gives it its key."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent_harness import (
    NAMESPACE,
    POD,
    SECRET,
    TIMEOUT,
    WORKLOAD,
    CallFailed,
    FakeController,
    StreamClient,
    wait_until,
)
from kubetorch.lib.http_client import HttpClient
from kubetorch.pod.tuning import TIMING
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.wire import messages, tokens
from kubetorch.wire.frames import Kind
from kubetorch.wire.podenv import PodEnv
from tests.free_ports import free_port

AUDIENCE = tokens.audience(NAMESPACE, WORKLOAD)
KEY = tokens.workload_key(SECRET, AUDIENCE)
SOURCE = "import os\ndef f(*a): return [*a, os.environ['KT_BACKEND'], os.environ.get('LD_PRELOAD')]"


class Container:
    """The agent's process, with the environment that a container gets."""

    def __init__(self, folder: Path, controller: FakeController, **more: str) -> None:
        self.port = free_port()
        self.token_file = folder / "token"
        self.token_file.write_text("first\n")
        self.log = folder / "agent.log"
        pod = PodEnv(
            namespace=NAMESPACE,
            workload=WORKLOAD,
            pod=POD,
            host="127.0.0.1",
            port=self.port,
            root=str(folder / "pod"),
            working_dir=str(folder / "pod" / "work"),
            environments=str(folder / "environments"),
            backend="kubernetes",
            controller_url=controller.url,
            token_file=str(self.token_file),
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("KT_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kubetorch.pod"],
                env={**env, **pod.write(), **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, method: str, path: str, token: str, body: bytes | None = None) -> tuple[int, str]:
        with (
            HttpClient(f"http://127.0.0.1:{self.port}", token, timeout=TIMEOUT) as client,
            client.request(method, path, body=body) as answer,
        ):
            return answer.status, answer.read().decode()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(TIMEOUT) == 0, self.log.read_text()


Start = Callable[..., Container]


@pytest.fixture
def known_tokens() -> set[str]:
    """The tokens that the controller knows."""
    return {"first"}


@pytest.fixture
def controller(tmp_path: Path, known_tokens: set[str]) -> Iterator[FakeController]:
    fake = FakeController(tmp_path, is_known=known_tokens.__contains__)
    yield fake
    fake.close()


@pytest.fixture
def start(tmp_path: Path, controller: FakeController) -> Iterator[Start]:
    started: list[Container] = []

    def begin(**more: str) -> Container:
        started.append(Container(tmp_path, controller, **more))
        controller.wait_for(messages.Hello)
        return started[-1]

    yield begin
    for container in started:
        container.stop()


def signed(*verbs: str) -> str:
    claims = tokens.Claims(AUDIENCE, time.time() + 60, verbs=verbs or (tokens.CALL,))
    return tokens.sign(KEY, claims)


def welcome(controller: FakeController) -> None:
    controller.send(messages.Welcome(key=KEY.hex(), version="1", protocol=1))


CALL = json.dumps({"args": [1], "kwargs": {}}).encode()


def test_nobody_is_let_in_until_the_key_came(controller: FakeController, start: Start) -> None:
    container = start()
    assert container.ask("GET", "/health", "")[0] == 200
    status, text = container.ask("POST", "/f", signed(), CALL)
    assert status == 503
    assert "not ready" in text
    assert StreamClient(container.port, token=signed()).status == 503

    welcome(controller)
    assert controller.deploy(1, SOURCE, "f").failure is None
    status, text = container.ask("POST", "/f", signed(), CALL)
    assert (status, json.loads(text)[:2]) == (200, [1, "kubernetes"])
    client = StreamClient(container.port, token=signed())
    assert client.call(1, 2)[:2] == [2, "kubernetes"]
    client.close()


def test_a_token_opens_what_its_verbs_say(controller: FakeController, start: Start) -> None:
    container = start()
    welcome(controller)
    assert controller.deploy(1, SOURCE, "f").failure is None
    order = b'{"step":{"command":"echo ran"}}'
    assert container.ask("POST", "/v1/run", signed(), order)[0] == 401
    assert container.ask("POST", "/v1/run", signed("exec"), order)[0] in (200, 400)
    assert container.ask("POST", "/f", signed("exec"), CALL)[0] == 401
    assert container.ask("POST", "/f", signed("logs"), CALL)[0] == 401
    assert container.ask("GET", "/v1/logs", signed("logs"))[0] == 200
    assert container.ask("GET", "/v1/logs", signed())[0] == 200
    assert container.ask("GET", "/v1/logs", signed("exec"))[0] == 401


def test_calls_go_on_without_a_controller_which_gets_the_token_of_the_day(
    controller: FakeController, start: Start, known_tokens: set[str]
) -> None:
    container = start()
    welcome(controller)
    assert controller.deploy(1, SOURCE, "f").failure is None
    known_tokens.clear()
    known_tokens.add("second")
    container.token_file.write_text("second\n")
    controller.refuse_status = 503
    controller.cut()
    time.sleep(0.5)
    assert container.ask("POST", "/f", signed(), CALL)[0] == 200
    controller.refuse_status = None
    assert controller.wait_for(messages.Hello).generation == 1


def test_a_controller_that_only_closes_is_asked_less_and_less(
    controller: FakeController, start: Start
) -> None:
    start()
    began = time.monotonic()
    for _ in range(4):
        controller.cut()
        controller.wait_for(messages.Hello)
    # At least half of 0.1, 0.2, 0.4 and 0.8 s.
    assert time.monotonic() - began >= 0.75


def test_blobs_that_the_controller_lost_come_back(controller: FakeController, start: Start) -> None:
    start()
    welcome(controller)
    assert controller.deploy(1, SOURCE, "f").failure is None
    lost = dict(controller.blobs)
    controller.blobs.clear()
    controller.send(messages.SendBlobs(blobs=(*lost, "0" * 64)))
    wait_until(lambda: controller.blobs == lost)
    controller.blobs.clear()
    controller.send(messages.SendBlobs(trees=tuple(lost)[-1:]))
    wait_until(lambda: controller.blobs == lost)


def test_a_pod_waits_for_its_code_and_says_so_to_each_controller_until_it_comes(
    controller: FakeController, start: Start
) -> None:
    container = start()
    welcome(controller)
    spec = controller.spec(SOURCE, "f")
    code, controller.blobs = controller.blobs, {}
    controller.send(messages.Reload(generation=1, spec=spec))

    def waits(report: messages.StageReport) -> bool:
        return report.stage == "fetching" and "does not have" in report.message

    controller.wait_for(messages.StageReport, waits)
    controller.cut()
    controller.wait_for(messages.Hello)
    controller.wait_for(messages.StageReport, waits)
    welcome(controller)
    controller.blobs = code
    assert controller.wait_for(messages.Observed).failure is None
    assert container.ask("POST", "/f", signed(), CALL)[0] == 200


def test_what_the_runtime_put_aside_is_the_users_again(
    controller: FakeController, start: Start
) -> None:
    container = start(KT_POD_KEPT_LD_PRELOAD="/nowhere/lib.so")
    welcome(controller)
    assert controller.deploy(1, SOURCE, "f").failure is None
    assert json.loads(container.ask("POST", "/f", signed(), CALL)[1])[2] == "/nowhere/lib.so"


def test_a_container_without_python_says_so_at_once(
    controller: FakeController, start: Start, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'kubetorch [\"/usr/bin/old\", [3, 9, 2], []]'\n")
    old.chmod(0o755)
    start()
    welcome(controller)
    begun = time.monotonic()
    spec = controller.spec(SOURCE, "f")
    image = ImageSpec(image_id="org/app:1", python_path=str(old))
    spec = replace(spec, compute=replace(spec.compute, image=image))
    controller.send(messages.Reload(generation=1, spec=spec))
    failure = controller.wait_for(messages.Observed).failure
    assert time.monotonic() - begun < 30  # before the time to launch is over
    assert failure is not None
    assert failure["code"] == "pod_container"
    assert f"org/app:1 has no Python 3.10 or newer at {old}" in failure["message"]
    assert "/usr/bin/old" not in failure["message"]
    assert f"found: {old} (3.9.2)" in failure["message"]


def test_calls_end_before_their_pod_does(
    controller: FakeController, start: Start, tmp_path: Path
) -> None:
    container = start(KT_POD_GRACE="65")
    welcome(controller)
    source = "import os, time\ndef f(path):\n    print('on')\n"
    source += "    while not os.path.exists(path): time.sleep(0.02)\n    return path"
    assert controller.deploy(1, source, "f").failure is None
    client = StreamClient(container.port, token=signed())
    end = tmp_path / "end"
    client.open(1, str(end))
    client.until(1, Kind.LOG)
    container.process.send_signal(signal.SIGTERM)
    client.until(0, Kind.GOAWAY)
    end.touch()
    assert client.result(1) == str(end)
    client.close()
    container.process.wait(TIMEOUT)
    # The rest of the pod's time is for all that comes after the calls.
    stop = re.search(r"reason=SIGTERM grace=([\d.]+)", container.log.read_text())
    assert stop is not None
    assert 0 < float(stop[1]) <= 60


def test_a_call_that_runs_longer_than_the_pod_has_time_ends_with_the_signal(
    controller: FakeController, start: Start
) -> None:
    container = start(KT_POD_GRACE="1")
    welcome(controller)
    source = "import time\ndef f():\n    print('on')\n    time.sleep(600)"
    assert controller.deploy(1, source, "f").failure is None
    client = StreamClient(container.port, token=signed())
    client.open(1)
    client.until(1, Kind.LOG)
    container.process.send_signal(signal.SIGTERM)
    with pytest.raises(CallFailed, match="SIGTERM"):
        client.result(1)
    client.close()


def test_kt_server_start_joins_with_the_token_of_the_namespace(
    controller: FakeController, tmp_path: Path
) -> None:
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KT_", "POD_"))}
    pod_environ = {
        "POD_NAMESPACE": NAMESPACE,
        "KT_POD_TOKEN": "first",
        "KT_POD_ROOT": str(tmp_path / "root"),
        "KT_CONTROLLER_URL": controller.url,
    }
    command = [sys.executable, "-m", "kubetorch", "server", "start"]
    options = ["--workload", WORKLOAD, "-p", str(port), "-h", "127.0.0.1"]
    with (tmp_path / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *options], env={**env, **pod_environ}, stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        hello = controller.wait_for(messages.Hello)
        # The address is the one that leads to the controller.
        assert (hello.pod, hello.url) == (socket.gethostname(), f"http://127.0.0.1:{port}")
        assert (hello.namespace, hello.workload) == (NAMESPACE, WORKLOAD)
        welcome(controller)
        result = "[sys.executable, os.getcwd(), os.environ['KT_SERVICE']]"
        source = f"import os, sys\ndef f(): return {result}"
        assert controller.deploy(1, source, "f").failure is None
        client = StreamClient(port, token=signed())
        assert client.call(1) == [sys.executable, str(tmp_path), WORKLOAD]
        client.close()
        # Its service is torn down; the pod is not the controller's to end.
        controller.send(messages.Terminate(grace=1.0, reason="torn down"))
        second_hello = controller.wait_for(messages.Hello)
        assert (second_hello.generation, process.poll()) == (0, None)
        assert second_hello.incarnation != hello.incarnation
        welcome(controller)
        assert controller.deploy(2, source, "f").failure is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()


def test_the_pod_of_a_service_that_is_torn_down_waits_for_its_kubelet(
    controller: FakeController, start: Start
) -> None:
    container = start()
    welcome(controller)
    controller.send(messages.Terminate(grace=0.1, reason=messages.TORN_DOWN))
    wait_until(lambda: "agent stops" in container.log.read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        container.process.wait(2.0)


@pytest.mark.parametrize("mask", [(), (signal.SIGTERM,)], ids=["by the shell", "by start.c"])
def test_a_signal_ends_the_first_process_of_a_container_while_its_agent_is_imported(
    tmp_path: Path, mask: tuple[signal.Signals, ...]
) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"]).returncode:
        pytest.skip("no namespaces of processes")
    # The import of this module comes first, and does not end.
    (tmp_path / "uvloop.py").write_text(
        "import os, signal\nos.kill(1, signal.SIGTERM)\nsignal.pause()\n"
    )
    completed = subprocess.run(
        [*unshare, sys.executable, "-m", "kubetorch.pod"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=TIMEOUT,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, mask),
    )
    assert completed.returncode == 128 + signal.SIGTERM


def test_kt_server_start_says_what_is_missing(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KT_", "POD_"))}
    for module in (["kubetorch"], ["kubetorch.pod.server_start"]):
        completed = subprocess.run(
            [sys.executable, "-m", *module, "server", "start", "-n", "train"],
            env={**env, "POD_NAMESPACE": "team", "POD_IP": "10.0.0.7"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert completed.returncode == 1
        assert "no token for the controller" in completed.stderr
        assert "kubetorch-pod-token" in completed.stderr


def test_a_leaving_pod_of_an_autoscaled_service_serves_whom_the_service_still_leads_to_it(
    controller: FakeController, start: Start
) -> None:
    def ask_leaving_pod() -> tuple[int, str]:
        container = start()
        welcome(controller)
        spec = controller.spec(SOURCE, "f")
        scaled = replace(spec, compute=replace(spec.compute, autoscaling=AutoscalingSpec()))
        controller.send(messages.Reload(generation=1, spec=scaled))
        assert controller.wait_for(messages.Observed).failure is None
        client = StreamClient(container.port, token=signed())
        begun = time.monotonic()
        container.process.send_signal(signal.SIGTERM)
        client.until(0, Kind.GOAWAY)
        try:
            return container.ask("POST", "/f", signed(), CALL)
        except OSError as error:
            return 0, str(error)
        finally:
            seconds.append(time.monotonic() - begun)
            client.close()
            assert container.process.wait(TIMEOUT) == 0

    seconds: list[float] = []
    status, text = ask_leaving_pod()
    # A request that came too late, as this program stood, proves nothing.
    while status != 200 and seconds[-1] >= TIMING.service_update_seconds:
        status, text = ask_leaving_pod()
    assert (status, json.loads(text)[:2]) == (200, [1, "kubernetes"])
