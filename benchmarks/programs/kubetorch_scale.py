"""Services that scale: from zero, under a step of load, warm, mapped over, and very many.

kubetorch_scale PROJECT
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.stepping import CONCURRENCY, DEADLINE, step
from benchmarks.programs.stepping import PODS as STEP_PODS

Service = kt.Fn[..., int]
#: Seconds between two looks at the pods of a service.
LOOK_PAUSE_SECONDS = 0.02
#: Deploys at the same time: each is mostly a wait for the service.
DEPLOYERS = 4


class Services:
    """Deploys services of one function, and measures them."""

    def __init__(self, nap: Callable[..., int]) -> None:
        self._nap = nap
        self._numbers = itertools.count()
        self._at_zero: list[Service] = []
        self._kept: dict[str, Service] = {}

    def sleep(self, count: int) -> dict[str, float]:
        """Have so many services at zero, each of which had a pod."""
        self._at_zero = [self._deploy(_quick_to_zero()) for _ in range(count)]
        for service in self._at_zero:
            _wait_for(service, pods=0)
        return {}

    def wake(self) -> dict[str, float]:
        """Call a service that has no pod."""
        service = self._at_zero.pop()
        assert service.stats().pods == 0
        seconds = driving.clock(lambda: service(1, 0.0))
        service.teardown()
        return {"seconds": seconds}

    def start(self, pods: int) -> dict[str, float]:
        """Deploy a fixed service that never was."""
        began = time.perf_counter()
        service = self._deploy(_compute(pods))
        seconds = time.perf_counter() - began
        service.teardown()
        return {"seconds": seconds}

    def step(self, *, has_ledger: bool = True) -> dict[str, float]:
        """Call a service of one pod from ever more threads."""
        scaled = _compute().autoscale(min_scale=1, max_scale=STEP_PODS, concurrency=CONCURRENCY)
        service = self._deploy(scaled)
        seconds = _step(service, has_ledger=has_ledger)
        service.teardown()
        return {"seconds": seconds}

    def scaled(self, seconds: float) -> dict[str, float]:
        """Call a service that scales, and has a pod."""
        return self._latency("scaled", _compute().autoscale(min_scale=1, max_scale=4), seconds)

    def fixed(self, seconds: float) -> dict[str, float]:
        """Call a service of one pod."""
        return self._latency("fixed", _compute(), seconds)

    def map(self, pods: int, items: int, seconds: float) -> dict[str, float]:
        """Map over so many pods, each of which runs one item at a time."""
        scaled = _compute().autoscale(min_scale=pods, max_scale=pods, concurrency=1)
        service = self._keep("map", scaled)
        _wait_for(service, pods=pods)
        arguments = range(items), [seconds] * items
        return {"seconds": driving.clock(lambda: list(service.map(*arguments)))}

    def many(self, count: int) -> dict[str, float]:
        """Have so many services that never had a pod."""
        at_zero = _compute().autoscale(min_scale=0, initial_scale=0, max_scale=1)
        with ThreadPoolExecutor(DEPLOYERS) as deployers:
            list(deployers.map(self._deploy, [at_zero] * count))
        return {}

    def _latency(self, name: str, compute: kt.Compute, seconds: float) -> dict[str, float]:
        service = self._keep(name, compute)
        return driving.latency(lambda: service(1, 0.0), seconds)

    def _keep(self, name: str, compute: kt.Compute) -> Service:
        """A service for all measurements of a name."""
        if name not in self._kept:
            self._kept[name] = self._deploy(compute)
        return self._kept[name]

    def _deploy(self, compute: kt.Compute) -> Service:
        return kt.fn(self._nap, name=f"nap-{next(self._numbers)}").to(compute)


def main() -> None:
    """Answer; each measurement deploys the services that it needs."""
    [project] = arguments()
    sys.path.insert(0, project)
    services = Services(importlib.import_module("naps").nap)
    questions = ("sleep", "wake", "start", "step", "scaled", "fixed", "map", "many")
    answer({question: getattr(services, question) for question in questions})


def _compute(pods: int = 1) -> kt.Compute:
    return kt.Compute(cpus="0.01", replicas=pods)


def _quick_to_zero() -> kt.Compute:
    return _compute().autoscale(
        min_scale=0,
        max_scale=1,
        window="6s",
        scale_down_delay="0s",
        scale_to_zero_pod_retention_period="0s",
    )


def _step(service: Service, *, has_ledger: bool) -> float:
    """Seconds from one caller, who becomes all of them, until all pods are ready.

    With a ledger, which takes pods of this machine, every call has to have run once.
    """
    options = service.options(timeout=DEADLINE)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger" if has_ledger else None

        def call(number: int, seconds: float) -> int:
            return options(number, seconds, str(ledger or ""))

        seconds, calls = step(lambda: call, lambda: _wait_for(service, pods=STEP_PODS))
        if ledger is not None:
            runs = Counter(map(int, ledger.read_text().split()))
            unlike = {number: runs[number] for number in range(calls) if runs[number] != 1}
            assert not unlike, f"calls, and how often they ran: {unlike}"
    return seconds


def _wait_for(service: Service, *, pods: int) -> None:
    """Wait until a service has so many pods, and all are ready."""
    end = time.monotonic() + DEADLINE
    while True:
        stats = service.stats()
        if stats.pods_ready == stats.pods == pods:
            return
        assert time.monotonic() < end, f"no {pods} pods: {stats!r}"
        time.sleep(LOOK_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
