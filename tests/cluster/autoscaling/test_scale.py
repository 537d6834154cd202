"""Autoscaled services that the controller scales: without Knative, or where its chart says so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster import faults
from cluster.conftest import Installed, Kubectl
from cluster.controller.test_faults_storage import install

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

#: One call at a time in each pod, and none is kept for long.
SERVICE = """
import os, time
import kubetorch as kt

def work(seconds=0.0):
    time.sleep(seconds)
    return os.environ["POD_NAME"]

def count(seconds):
    for second in range(seconds):
        time.sleep(1)
        yield os.environ["POD_NAME"]

compute = kt.Compute(cpus="0.01", launch_timeout=150).autoscale(
    concurrency=1,
    min_scale=0,
    max_scale=3,
    window="6s",
    scale_down_delay="0s",
    scale_to_zero_pod_retention_period="0s",
)
"""
DEPLOY = SERVICE + 'print("result", kt.fn(work, name="busy").to(compute)())\n'
#: Four callers at one time.
LOAD = """
import kubetorch as kt

busy = kt.Fn.from_name("busy")
print("result", *busy.map([4.0] * 8, window=4))
"""
#: A call that is longer than the load beside it.
LONG = (
    SERVICE
    + """
long = kt.fn(count, name="long").to(compute)
stream = long(30)
first = next(stream)
further_calls = [long.spawn(3) for _ in range(2)]
print("result", first, *stream)
"""
)


@pytest.fixture(scope="module", autouse=True)
def _engine(controller: str) -> Iterator[None]:
    install("autoscaling.engine=kubetorch")
    yield
    install("autoscaling.engine=auto")


def _result(printed: str) -> list[str]:
    return next(line for line in printed.splitlines() if line.startswith("result ")).split()[1:]


def _wait_for_zero(kubectl: Kubectl, namespace: str, name: str) -> None:
    deadline = time.monotonic() + 120
    while faults.pods(kubectl, namespace, name):
        assert time.monotonic() < deadline, "it was not scaled to zero"
        time.sleep(0.5)


def _doors(kubectl: Kubectl, namespace: str) -> list[str]:
    """The EndpointSlices that lead to the controller."""
    chosen = ("-l", "endpointslice.kubernetes.io/managed-by=kubetorch.com", "-o", "name")
    return kubectl("get", "endpointslices", "-n", namespace, *chosen).split()


def _post(kubectl: Kubectl, installed: Installed, name: str) -> str:
    """The answer to a request at the address of the Service, as any pod may make it."""
    namespace = installed.namespace
    service = json.loads(kubectl("get", "service", name, "-n", namespace, "-o", "json"))
    token = installed.run("kt", "token", name, "-n", namespace).strip()
    host = ("-H", f"Host: {name}.{namespace}.svc.cluster.local")
    head = ("-sS", "-m", "90", "-X", "POST", *host, "-H", f"Authorization: Bearer {token}")
    url = f"http://{service['spec']['clusterIP']}/work"
    return installed.run("curl", *head, "-d", '{"args": [0.0]}', url)


def test_a_service_grows_with_its_load_goes_and_comes_back(
    tmp_path: Path, installed: Installed, kubectl: Kubectl
) -> None:
    namespace = installed.namespace
    installed.python(DEPLOY, tmp_path, timeout=200)
    deployment = json.loads(kubectl("get", "deployment", "busy", "-n", namespace, "-o", "json"))
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300
    pods = _result(installed.python(LOAD, tmp_path, timeout=150))
    assert 1 < len({*pods}) <= 3

    _wait_for_zero(kubectl, namespace, "busy")
    assert len(_doors(kubectl, namespace)) == 1
    assert _post(kubectl, installed, "busy").strip('"').startswith("busy-")
    # The Service leads to the pod alone, from where the next answer comes.
    faults.until(lambda: not _doors(kubectl, namespace))
    assert _post(kubectl, installed, "busy").strip('"').startswith("busy-")

    _wait_for_zero(kubectl, namespace, "busy")
    assert len(_result(installed.python(LOAD.replace("* 8", "* 1"), tmp_path))) == 1


def test_a_pod_with_a_call_stays_while_those_without_go(
    tmp_path: Path, installed: Installed
) -> None:
    pods = _result(installed.python(LONG, tmp_path, timeout=200))
    assert len(pods) == 30
    assert len({*pods}) == 1


def test_a_controller_that_starts_goes_on_with_a_service_without_pods(
    tmp_path: Path, installed: Installed, kubectl: Kubectl, kill_controllers: Callable[[], None]
) -> None:
    namespace = installed.namespace
    installed.python(DEPLOY, tmp_path, timeout=200)
    _wait_for_zero(kubectl, namespace, "busy")
    kill_controllers()
    faults.until(lambda: "busy" in installed.run("kt", "list", "-n", namespace))
    assert not faults.pods(kubectl, namespace, "busy")
    assert _post(kubectl, installed, "busy").strip('"').startswith("busy-")
