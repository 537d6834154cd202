"""Calls of distributed services, their faults and reloads.

kubetorch_ranks PROJECT WHAT
"""

from __future__ import annotations

import importlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubetorch as kt
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.output import watched

#: Calls of one measurement, and those before it.
CALLS, FIRST = 200, 20
SIZE = 10_000_000
EDITS = 3


def main() -> None:
    """Deploy what is asked for, then answer."""
    project, measurement = arguments()
    sys.path.insert(0, project)
    {"ranks": ranks, "single": single, "copies": copies, "faults": faults, "torch": torch}[
        measurement
    ](Path(project))


def deployed(name: str, workers: int, processes: int) -> tuple[Any, kt.Compute]:
    """A service on so many ranks, and what it runs on."""
    compute = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
    compute.distribute("spmd", workers=workers, num_proc=processes)
    function = getattr(importlib.import_module("service"), name)
    return kt.fn(function, name=f"{name}-{workers}-{processes}").to(compute), compute


def p50(call: Callable[[], object], count: int = CALLS) -> float:
    """Seconds that a call takes."""
    for _ in range(FIRST):
        call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def ranks(_project: Path) -> None:
    """Calls on all ranks."""
    few, many, single_pod = (
        deployed(*of)[0] for of in (("add", 2, 4), ("add", 8, 8), ("size", 1, 8))
    )
    data = os.urandom(SIZE)

    def measure() -> dict[str, float]:
        return {
            "8": p50(lambda: few(1)),
            "64": p50(lambda: many(1), CALLS // 4),
            "10MB": p50(lambda: single_pod(data, serialization="pickle"), FIRST),
        }

    answer({"ranks": measure})
    for service in (few, many, single_pod):
        service.teardown()


def single(_project: Path) -> None:
    """The same on a service that is not distributed."""
    service = kt.fn(importlib.import_module("service").add, name="single")
    service.to(kt.Compute(cpus="0.1"))

    def measure() -> dict[str, float]:
        seconds = p50(lambda: service(1))
        return {"8": seconds, "64": seconds}

    answer({"single": measure})
    service.teardown()


def copies(_project: Path) -> None:
    """The argument copied once for each rank."""
    data = os.urandom(SIZE)
    answer({"copies": lambda: {"10MB": p50(lambda: [bytearray(data) for _ in range(8)], FIRST)}})


def faults(_project: Path) -> None:
    """From the kill of a pod, and from when one is frozen, to the error at the caller."""
    from benchmarks.programs.kubetorch_faults import agent_of  # noqa: PLC0415  # needs psutil

    with watched() as output:
        service, compute = deployed("hold", 2, 2)

        def after(sent: signal.Signals) -> float:
            began: list[float] = []
            agents: list[int] = []

            def tell() -> None:
                _, line = output.wait_for("holding")
                agents.append(agent_of(int(line.split()[-1])))
                began.append(time.monotonic())
                os.kill(agents[0], sent)

            teller = threading.Thread(target=tell)
            teller.start()
            try:
                service.options(timeout=60.0)()
            except kt.WorkerMembershipChanged:
                ended = time.monotonic()
            else:
                raise AssertionError("the call ended without an error")
            teller.join()
            if sent == signal.SIGSTOP:
                os.kill(agents[0], signal.SIGCONT)
            service.to(compute)
            output.take()
            return ended - began[0]

        def measure() -> dict[str, float]:
            return {"killed": after(signal.SIGKILL), "frozen": after(signal.SIGSTOP)}

        answer({"faults": measure})
        service.teardown()


def torch(project: Path) -> None:
    """An all-reduce, and reloads of workers that import torch."""
    (project / "reducing.py").write_text(REDUCE)
    function = importlib.import_module("reducing").reduce
    compute = kt.Compute(cpus="0.1").distribute("pytorch", workers=1, num_proc=2)
    service = kt.fn(function).to(compute)
    edited = project / "edited.py"
    edited.write_text("import torch\n\ndef number():\n    return 0\n")
    workers = kt.Compute(cpus="0.1").distribute("pytorch", workers=1, num_proc=4)
    number = kt.fn(importlib.import_module("edited").number).to(workers)
    edits = iter(range(1, 1_000_000))

    def measure() -> dict[str, float]:
        times = []
        for _ in range(EDITS):
            edit = next(edits)
            edited.write_text(f"import torch\n\ndef number():\n    return {edit}\n")
            began = time.perf_counter()
            number.to(workers)
            assert number() == [edit] * 4
            times.append(time.perf_counter() - began)
        return {"reduce": max(service()), "reload": statistics.median(times)}

    answer({"torch": measure})
    service.teardown()
    number.teardown()


#: What both sides run.
REDUCE = """
import time

import torch
import torch.distributed as dist

TENSOR = torch.ones(16 * 1024**2)


def reduce():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        dist.all_reduce(TENSOR.clone())
    times = []
    for _ in range(5):
        tensor = TENSOR.clone()
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    assert tensor[0] == dist.get_world_size()
    return sorted(times)[2]
"""


if __name__ == "__main__":
    main()
