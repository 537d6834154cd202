"""Deploys of a function whose source was edited, and of one that was not.

    kubetorch_reload PROJECT IMPORTS

The project gets a module for each number of replicas; `IMPORTS` is its first line.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kubetorch as kt
from benchmarks.programs import driving
from benchmarks.programs.answering import answer, arguments
from benchmarks.programs.output import Lines, watched

SOURCE = """{imports}


def first_line():
    print("edit {edit}")
"""


class Edited:
    """A function that is deployed again after each edit of its module."""

    def __init__(self, project: Path, imports: str, replicas: int, lines: Lines) -> None:
        name = f"replicated_{replicas}"
        self._path = project / f"{name}.py"
        self._imports = imports
        self._lines = lines
        self._edits = itertools.count(1)
        self._edit()
        function = importlib.import_module(name).first_line
        self._compute = kt.Compute(cpus="0.1", replicas=replicas)
        self._service = kt.fn(function, name=name.replace("_", "-")).to(self._compute)

    def _edit(self) -> str:
        text = f"edit {next(self._edits)}"
        self._path.write_text(SOURCE.format(imports=self._imports, edit=text.split()[1]))
        return text

    def reload(self) -> dict[str, float]:
        """From the edit to the first line of the new code."""
        began = time.monotonic()
        text = self._edit()
        self._service.to(self._compute)
        self._service()
        came, _ = self._lines.wait_for(text)
        self._lines.take()
        return {"seconds": came - began}

    def unchanged(self, times: int) -> dict[str, float]:
        """A deploy of what is deployed."""
        return {"seconds": driving.median(lambda: self._service.to(self._compute), times)}

    def teardown(self) -> None:
        """End it."""
        self._service.teardown()


def main() -> None:
    """Deploy for each number of replicas when it is first asked for, and answer."""
    project, imports = arguments()
    sys.path.insert(0, project)
    sys.dont_write_bytecode = True
    services: dict[int, Edited] = {}
    with watched() as lines:

        def service(replicas: int) -> Edited:
            if replicas not in services:
                services[replicas] = Edited(Path(project), imports, replicas, lines)
            return services[replicas]

        def measuring(measure: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
            return lambda replicas, **options: measure(service(replicas), **options)

        answer({"reload": measuring(Edited.reload), "unchanged": measuring(Edited.unchanged)})
        for deployed in services.values():
            deployed.teardown()


if __name__ == "__main__":
    main()
