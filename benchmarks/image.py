"""Images on this machine: steps that are there already, one step more, a shared environment."""

from __future__ import annotations

import subprocess
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from benchmarks import ours, wheels
from benchmarks.figures import Figure, Limit, Row
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated

PIP = "pip install of the same"

FIGURES = (
    Figure("deploy, all steps run already", "unchanged", "ms", {STATED: Limit(1.0)}, scale=1e3),
    Figure("deploy with one more pip step", "added", "ms", {PIP: Limit(1.1)}, scale=1e3),
    Figure(
        "another service with the same steps, above one without image",
        "cached",
        "ms",
        {STATED: Limit(1.0)},
        scale=1e3,
        difference=True,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="kt-wheels-") as folder:
        index = Path(folder)
        for number in range(rounds + 1):  # each round adds another one
            wheels.build(index, f"tiny{number}", "1.0", "VALUE = 1\n")
        sides = [
            Side(OURS, "ours", lambda: _ours(index)),
            Side(PIP, "peer", lambda: _pip(index)),
            stated({"unchanged": 0.05, "cached": 0.1}),
        ]
        return compare(FIGURES, sides, rounds)


@contextmanager
def _ours(index: Path) -> Iterator[Measure]:
    with ours.program("kubetorch_image", str(index)) as client:
        numbers = count(1)
        yield lambda: client.ask("deploys", number=next(numbers))


@contextmanager
def _pip(index: Path) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory(prefix="kt-venv-") as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        numbers = count(1)

        def measure() -> dict[str, float]:
            options = ["--quiet", "--no-index", "--find-links", str(index)]
            command = [f"{folder}/bin/python", "-m", "pip", "install", *options]
            began = time.perf_counter()
            subprocess.run([*command, f"tiny{next(numbers)}"], check=True, timeout=60)
            return {"added": time.perf_counter() - began}

        yield measure
