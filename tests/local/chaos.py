"""Calls of which some end their process, and what becomes of each.

    python -m tests.local.chaos             # all: 40 items, in each of twelve ways; minutes
    python -m tests.local.chaos map 8 3     # one way: by map, concurrency 8, retries 3

Of the items one kills its process, one leaves it with status 0, one takes memory up to the limit,
and one hangs until its timeout. A service of its own runs each way; `KT_LOCAL_DIR` says where.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import kubetorch as kt

MODULE = """
import os, signal, time

LIMIT = 300  # MiB

def item(i, kill, leave, eat, hang):
    time.sleep(0.02)
    if i == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if i == leave:
        os._exit(0)
    if i == eat:  # twice the limit, and no more where nothing limits it
        eaten = []
        for _ in range(2 * LIMIT // 50):
            eaten.append(b"x" * (50 << 20))
            time.sleep(0.01)
        time.sleep(600)
    if i == hang:
        time.sleep(600)
    return i * i
"""

#: Seconds that the item may run that hangs.
TIMEOUT = 6.0
#: Seconds that the other items may run.
LONG_TIMEOUT = 60.0
LIMIT = {"name": "kubetorch", "resources": {"limits": {"memory": "300Mi"}}}
CALL_FORMS = ("call", "map", "spawn")
#: The errors of the items that are the cause.
CAUSES = ("kill", "leave", "eat", "hang")
ERRORS = {
    "kill": kt.WorkerDiedError,
    "leave": kt.WorkerDiedError,
    "eat": kt.OutOfMemoryError,
    "hang": kt.CallTimeoutError,
}


class Course(NamedTuple):
    """The course that one way took.

    Attributes:
        outcomes: The result or exception of each item, in order.
        causes: The items that are meant to fail, by what they do.
        seconds: Time that all took together.
    """

    outcomes: list[Any]
    causes: dict[str, int]
    seconds: float

    @property
    def lost(self) -> dict[int, Exception]:
        """The items that failed although they did nothing."""
        causes = set(self.causes.values())
        failed = {
            i: outcome for i, outcome in enumerate(self.outcomes) if isinstance(outcome, Exception)
        }
        return {i: error for i, error in failed.items() if i not in causes}

    @property
    def wrong(self) -> list[int]:
        """The items whose result is that of another."""
        return [
            i
            for i, outcome in enumerate(self.outcomes)
            if not isinstance(outcome, Exception) and outcome != i * i
        ]

    def cause(self, name: str) -> Any:
        return self.outcomes[self.causes[name]]


def project(folder: Path) -> Any:
    """The function, in a project of its own."""
    (folder / "pyproject.toml").touch()
    (folder / "chaotic.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    return importlib.import_module("chaotic").item


def run(
    function: Any,
    call_form: str,
    concurrency: int,
    retries: int,
    *,
    items: int = 40,
    timeout: float = TIMEOUT,
) -> Course:
    """Call the function with each item; the service is torn down."""
    handle = kt.fn(function, name=f"chaos-{call_form}-{concurrency}-{retries}")
    step = max(1, items // 5)
    causes = {name: step * (number + 1) - 1 for number, name in enumerate(CAUSES)}
    template = {"spec": {"template": {"spec": {"containers": [LIMIT]}}}}
    compute = kt.Compute(cpus="0.1", concurrency=concurrency, service_template=template)
    remote = handle.to(compute)
    impatient = remote.options(retries=retries, timeout=timeout, backoff=0.01, stream_logs=False)
    began = time.monotonic()
    try:
        outcomes = _outcomes(impatient, call_form, concurrency, items, causes)
    finally:
        handle.teardown()
    return Course(outcomes, causes, time.monotonic() - began)


def _outcomes(
    impatient: Any,
    call_form: str,
    concurrency: int,
    items: int,
    causes: dict[str, int],
) -> list[Any]:
    patient, hang = impatient.options(timeout=LONG_TIMEOUT), causes["hang"]
    if call_form == "map":  # all items of a map have one timeout: the item that hangs has its own
        calls = [(i, *causes.values()) for i in range(items)]
        hanging_call = calls.pop(hang)
        with ThreadPoolExecutor(1) as threads:
            job = threads.submit(_map, impatient, [hanging_call])
            outcomes = _map(patient, calls)
            return [*outcomes[:hang], *job.result(), *outcomes[hang:]]
    callables = [impatient if i == hang else patient for i in range(items)]
    if call_form == "spawn":
        handles = [called.spawn(i, **causes) for i, called in enumerate(callables)]
        return [_outcome(lambda handle=handle: handle.get(timeout=120)) for handle in handles]
    with ThreadPoolExecutor(concurrency) as threads:
        jobs = [threads.submit(called, i, **causes) for i, called in enumerate(callables)]
        return [_outcome(job.result) for job in jobs]


def _map(called: Any, calls: list[Any]) -> list[Any]:
    return list(called.starmap(calls, return_exceptions=True))


def _outcome(get: Any) -> Any:
    try:
        return get()
    except Exception as error:
        return error


def _report(course: Course, call_form: str, concurrency: int, retries: int) -> None:
    print(f"\n{call_form}, concurrency {concurrency}, retries {retries}: {course.seconds:.1f} s")
    for name, i in course.causes.items():
        print(f"  {name:<5} {i:>2}  {_described(course.cause(name))}")
    for i, error in course.lost.items():
        print(f"  lost  {i:>2}  {_described(error)}")
    print(f"  well: {len(course.outcomes) - len(CAUSES) - len(course.lost)}, wrong: {course.wrong}")


def _described(outcome: Any) -> str:
    if not isinstance(outcome, Exception):
        return f"returned {outcome!r}"
    attempts = getattr(outcome, "attempts", 1)
    return f"{type(outcome).__name__} after {attempts}: {str(outcome).splitlines()[0]}"


def main(arguments: list[str]) -> None:
    call_forms = CALL_FORMS if not arguments else (arguments[0],)
    bounds = (1, 8) if not arguments else (int(arguments[1]),)
    retries = (0, 3) if not arguments else (int(arguments[2]),)
    with tempfile.TemporaryDirectory() as folder:
        function = project(Path(folder))
        for call_form, concurrency, retry_count in itertools.product(call_forms, bounds, retries):
            _report(
                run(function, call_form, concurrency, retry_count),
                call_form,
                concurrency,
                retry_count,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
