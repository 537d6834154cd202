"""Services that scale on a cluster, beside bare Knative services of the same image and load.

The cluster that `KUBECONFIG` leads to has Knative, and Kubetorch that scales by itself
(`kt install --set autoscaling.engine=kubetorch`). `KT_BENCHMARK_INGRESS` is the address of
Knative's ingress, `http://198.18.0.1` unless it is set.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from benchmarks import kubectl, processes, scale
from benchmarks.cluster import program
from benchmarks.figures import Figure, Limit, Margin, Row, measured
from benchmarks.programs import driving
from benchmarks.rounds import OURS, Measure, Side, compare
from benchmarks.venvs import UnavailableError

KNATIVE, POD = "bare Knative", "a bare pod"
INGRESS = os.environ.get("KT_BENCHMARK_INGRESS") or "http://198.18.0.1"
WAKE = Figure(
    "from zero to the first answer", "seconds", "s", {POD: Margin(0.5), KNATIVE: Limit(1.0)}
)


def run(rounds: int) -> list[Row]:
    """Measure each group, whatever becomes of the others.

    Raises:
        UnavailableError: There is no cluster with Kubetorch and Knative.
        GroupsFailedError: Some could not be measured; it has the rows of the others.
    """
    kubectl.check()
    if "services" not in kubectl.run("api-resources", "--api-group", "serving.knative.dev"):
        raise UnavailableError("the cluster has no Knative")
    with kubectl.namespace() as namespace:
        return measured(
            {
                "wakes": lambda: _wakes(namespace, rounds),
                "steps": lambda: _steps(namespace, rounds),
            }
        )


def _wakes(namespace: str, rounds: int) -> list[Row]:
    numbers, image = itertools.count(), kubectl.default_image()

    @contextmanager
    def ours() -> Iterator[Measure]:
        with program(namespace, "kubetorch_scale", modules=["naps.py"]) as client:
            client.ask("sleep", count=rounds)
            yield lambda: client.ask("wake")

    @contextmanager
    def knative() -> Iterator[Measure]:
        with _bare_knative(namespace) as client:
            client.ask("sleep", count=rounds)
            yield lambda: client.ask("wake")

    def pod() -> dict[str, float]:
        name = f"bare-{next(numbers)}"
        seconds = driving.clock(lambda: kubectl.start(namespace, name, image))
        kubectl.delete(namespace, name)
        return {"seconds": seconds}

    sides = [
        Side(OURS, "ours", ours),
        Side(KNATIVE, "peer", knative),
        Side(POD, "floor", lambda: nullcontext(pod)),
    ]
    return compare([WAKE], sides, rounds)


def _steps(namespace: str, rounds: int) -> list[Row]:
    @contextmanager
    def knative() -> Iterator[Measure]:
        with _bare_knative(namespace) as client:
            yield lambda: client.ask("step")

    return scale.steps(
        rounds,
        lambda: program(namespace, "kubetorch_scale", modules=["naps.py"]),
        Side(KNATIVE, "peer", knative),
        has_ledger=False,
    )


@contextmanager
def _bare_knative(namespace: str) -> Iterator[processes.Program]:
    arguments = (namespace, kubectl.default_image(), INGRESS)
    with processes.program("knative_scale", *arguments) as client:
        yield client
