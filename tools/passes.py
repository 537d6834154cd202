"""Runs one test many times, two at once and beside load, to see whether a flaky test is mended.

python -m tools.passes tests/local/calls/test_retries.py::NAME

A name leaves `tests/flaky.txt` when this command has passed: 50 runs under `pytest -n 2`, while as
many processes as the machine has processors do nothing but compute.

pytest loads this file as the plugin that repeats the test.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

RUNS = 50
_SPIN = "while True: pass"


@contextlib.contextmanager
def _load(processes: int) -> Iterator[None]:
    """Processes that compute."""
    busy = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """The exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", help="of the test, as pytest prints it")
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    function = arguments.name.partition("[")[0]
    options = ("-p", "tools.passes", f"--runs={arguments.runs}", f"--only={arguments.name}")
    command = [sys.executable, "-m", "pytest", *options, "-n", "2", "--dist", "load", function]
    with _load(len(os.sched_getaffinity(0))):
        return subprocess.run(command).returncode


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which test is repeated, and how often."""
    parser.addoption("--runs", type=int, help="how often `tools.passes` repeats its test")
    parser.addoption("--only", help="the name of that test")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each run."""
    metafunc.fixturenames.append("run_of_test")
    runs = range(metafunc.config.getoption("runs"))
    metafunc.parametrize("run_of_test", runs, ids=[f"run-{run}" for run in runs])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the same function with other parameters."""
    items[:] = [item for item in items if _name(item) == config.getoption("only")]


def _name(item: pytest.Item) -> str:
    """The name that a test has where it is not repeated."""
    return re.sub(r"\[run-\d+\]$|(?<=\[)run-\d+-|-run-\d+(?=\]$)", "", item.nodeid)


if __name__ == "__main__":
    sys.exit(main())
