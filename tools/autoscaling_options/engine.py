"""What tries an option: it deploys services, has them called, and watches their pods."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, TextIO, TypeVar

import kubetorch as kt
from kubetorch.errors import WorkloadError

_T = TypeVar("_T")
#: A wait that takes longer fails: metrics-server has figures of a new pod after 30 s.
DEADLINE = 120.0
#: Seconds between two looks at a service.
LOOK_PAUSE = 0.1
#: Numbers that show a change within seconds.
QUICK = {
    "window": "6s",
    "scale_down_delay": "0s",
    "scale_to_zero_pod_retention_period": "0s",
}


class UnlikeError(Exception):
    """An option did something else than it should."""


class _Copy(io.TextIOBase):
    """A stream that remembers what goes through it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


class Engine:
    """What scales the services: Kubetorch or Knative, on this machine or a cluster.

    Attributes:
        functions, edited: The modules of the project.

    Args:
        name: `local`, `deployments` or `knative`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_knative = name == "knative"
        self.is_cluster = name != "local"
        self.functions: ModuleType = importlib.import_module("work")
        self.edited: ModuleType = importlib.import_module("edited")
        self._numbers = itertools.count()
        self._stderr = _Copy(sys.stderr)
        sys.stderr = self._stderr

    # ------------------------------------------------------------------------------- services

    @contextlib.contextmanager
    def service(
        self,
        function: Any = None,  # noqa: ANN401  # a function or class of the project
        resources: dict[str, Any] | None = None,
        **settings: Any,  # noqa: ANN401  # those of `autoscale()`
    ) -> Iterator[Any]:
        """A service with this option; it is torn down at the end."""
        function = function or self.functions.hold
        name = f"option-{next(self._numbers)}"
        make = kt.cls if isinstance(function, type) else kt.fn
        handle = make(function, name=name)
        compute = self.compute(resources, **settings)
        try:
            handle = handle.to(compute)
            engine = handle.stats().engine if hasattr(handle, "stats") else ""
            expected_engine = "knative" if self.is_knative else "kubetorch"
            if engine != expected_engine:
                raise UnlikeError(f"{engine} scales the service, not {expected_engine}")
            yield handle
        finally:
            # Pods that take long to end, as those of Knative, which drain, are no word of options.
            with contextlib.suppress(WorkloadError):
                kt.service(handle).teardown()

    def compute(self, resources: dict[str, Any] | None = None, **settings: Any) -> kt.Compute:  # noqa: ANN401  # those of `autoscale()`
        compute = kt.Compute(**{"cpus": "0.01", "launch_timeout": 150, **(resources or {})})
        return compute.autoscale(**{**QUICK, **settings})

    def lines(self, service: Any) -> str:  # noqa: ANN401  # any handle
        """What was said of a service on stderr."""
        name = service.service_name
        return "\n".join(line for line in self._stderr.text.splitlines() if name in line)

    def kubectl(self, *arguments: str) -> Any:  # noqa: ANN401  # an object of Kubernetes
        command = ["kubectl", *arguments, "-n", kt.config.namespace, "-o", "json"]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


# ------------------------------------------------------------------------------------- watching


def seconds_until(condition: Callable[[], object], expectation: str) -> float:
    """How long it takes until something is so."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > DEADLINE:
            raise UnlikeError(f"not after {DEADLINE:.0f} s: {expectation}")
        time.sleep(LOOK_PAUSE)
    return time.monotonic() - begin


def seconds_until_pods(service: Any, count: int) -> float:  # noqa: ANN401  # any handle
    """How long it takes until a service has so many pods that take calls."""
    begin = time.monotonic()
    counts: list[int] = []
    while (ready := service.stats().pods_ready) != count:
        if not counts or counts[-1] != ready:
            counts.append(ready)
        if time.monotonic() - begin > DEADLINE:
            raise UnlikeError(f"{count} pods expected, there were {counts}: {service.stats()!r}")
        time.sleep(LOOK_PAUSE)
    return time.monotonic() - begin


def pods_for(service: Any, seconds: float) -> list[int]:  # noqa: ANN401  # any handle
    """The numbers of pods that a service has during some time."""
    end = time.monotonic() + seconds
    counts = set()
    while time.monotonic() < end:
        counts.add(service.stats().pods_ready)
        time.sleep(LOOK_PAUSE)
    return sorted(counts)


def expect(condition: object, observation: str) -> str:
    """What was observed, if it is as it should be."""
    if not condition:
        raise UnlikeError(observation)
    return observation


# -------------------------------------------------------------------------------------- calling


@contextlib.contextmanager
def load(service: Any, calls: int) -> Iterator[None]:  # noqa: ANN401  # any handle
    """Have so many calls of `hold` until the end."""
    is_over = threading.Event()

    def call() -> None:
        for _ in service():
            if is_over.is_set():
                break

    with ThreadPoolExecutor(calls) as pool:
        callers = [pool.submit(call) for _ in range(calls)]
        try:
            yield
        finally:
            is_over.set()
        for caller in callers:
            caller.result()


@contextlib.contextmanager
def pace(call: Callable[[], object], rate: float) -> Iterator[None]:
    """Call so many times per second until the end."""
    is_over = threading.Event()

    with ThreadPoolExecutor(int(rate * 4) + 1) as pool:

        def go_on() -> None:
            while not is_over.wait(1 / rate):
                pool.submit(call)

        caller = pool.submit(go_on)
        try:
            yield
        finally:
            is_over.set()
            caller.result()


def together(*functions: Callable[[], _T]) -> list[_T]:
    """The results of functions that run at one time."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures: list[Future[_T]] = [pool.submit(function) for function in functions]
        return [future.result() for future in futures]
