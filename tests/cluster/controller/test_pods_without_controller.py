"""Pods that start while the controller is lost: each loads its code in the end."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import conftest, faults
from cluster.conftest import Installed, Kubectl
from shared import WHOLE

ROUNDS = 20 if WHOLE else 2
#: Seconds until all pods of a round serve, on a machine that has other work.
PATIENCE = 150.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.faults,
    pytest.mark.timeout(ROUNDS * 180 + 300),
]

PROGRAM = """
    import sys
    import kubetorch as kt

    def echo(value):
        return value

    if __name__ == "__main__":
        name, pods = sys.argv[1], int(sys.argv[2])
        compute = kt.Compute(cpus="10m", replicas=pods, launch_timeout=120)
        print("result", kt.fn(echo, name=name).to(compute)(7))
"""
#: Seconds from the end of the controller to that of the pod; negative: the pod ends first.
GAPS = itertools.cycle((0.0, 0.4, -0.4, 0.9))


@pytest.fixture(params=[False, True] if WHOLE else [False], ids=lambda on: f"volume={on}")
def persistence(request: pytest.FixtureRequest, controller: str) -> Iterator[bool]:
    """Whether the controller keeps blobs on a volume."""
    is_on: bool = request.param
    option = "--set=blobs.persistence.enabled={}"
    if is_on:
        conftest._install(option.format("true"))
    yield is_on
    if is_on:
        conftest._install(option.format("false"))


def kill(kubectl: Kubectl, controller: str, namespace: str, pod: str, gap: float) -> None:
    """End a pod of a service, and all controllers, within a second of each other."""

    def end_pod() -> None:
        kubectl("delete", "pod", pod, "-n", namespace, "--grace-period=1", "--wait=false")

    if gap < 0.0:
        end_pod()
        time.sleep(-gap)
    selector = "--selector=app.kubernetes.io/component=controller"
    kubectl("delete", "pods", "-n", controller, selector, "--force", "--grace-period=0")
    if gap >= 0.0:
        time.sleep(gap)
        end_pod()


def serving(installed: Installed, name: str, ended_pod: str) -> tuple[list[str], list[str]]:
    """The pods that serve the wanted generation, and what the others say."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        view: dict[str, Any] = json.loads(installed.run("kt", "describe", name, "--json"))
        pods = [pod for pod in view["pods"] if pod["name"] != ended_pod]
        serving_pods = [pod["name"] for pod in pods if pod["generation"] == view["generation"]]
        return serving_pods, [
            str(pod.get("reason")) for pod in pods if pod["name"] not in serving_pods
        ]
    return [], ["no answer"]


def test_pods_that_start_while_the_controller_is_lost_load_their_code(
    controller: str, persistence: bool, installed: Installed, kubectl: Kubectl, tmp_path: Path
) -> None:
    started, loaded, sent_again = 0, 0, 0
    rounds = ROUNDS // 2 if WHOLE else ROUNDS
    for number, gap in zip(range(rounds), GAPS, strict=False):
        name, count = f"lost-{number}", 1 + number % 3
        program = (PROGRAM, tmp_path, name, str(count))
        assert "result" in installed.python(*program, timeout=200)
        victim, *_ = faults.pods(kubectl, installed.namespace, name)
        kill(kubectl, controller, installed.namespace, victim, gap)
        rollout = ("rollout", "status", "deployment/kubetorch-controller", "--timeout=80s")
        kubectl(*rollout, "-n", controller)

        def are_here(
            count_of_pods: int, name: str = name, ended_pod: str = victim
        ) -> Callable[[], bool]:
            return lambda: len(serving(installed, name, ended_pod)[0]) >= count_of_pods

        nobody_has_it = count == 1 and not persistence
        if nobody_has_it:
            faults.until(
                lambda name=name, ended_pod=victim: any(
                    "fetching waits" in reason for reason in serving(installed, name, ended_pod)[1]
                ),
                seconds=PATIENCE,
            )
            sent_again += 1
            assert "result" in installed.python(*program, timeout=200)
        faults.until(are_here(count), seconds=PATIENCE)
        started += 1
        loaded += 1
        print(
            f"round {number}: replicas={count} volume={persistence} gap={gap}: "
            f"{'sent again; ' if nobody_has_it else ''}loaded",
            file=sys.stderr,
        )
        installed.run("kt", "teardown", name, "-y")
    print(f"{loaded} of {started} rounds: all pods load; {sent_again} after the next .to()")
    assert loaded == started
