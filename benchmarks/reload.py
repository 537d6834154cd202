"""Reloads: from an edit to the first line of the new code, and a deploy of nothing new."""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.processes import ROOT
from benchmarks.programs import driving, posting
from benchmarks.rounds import OURS, Measure, Side, compare
from benchmarks.venvs import Environment, UnavailableError

RUN_AGAIN = "run the file again"
LIST = "list and stat the tree"
RSYNC = "rsync"
REPLICAS = (1, 4)
FILES = 5000
#: First lines of the edited modules.
PLAIN, TORCH = "import os", "import torch"
TIMES = 5
SOURCE = '{imports}\n\nprint("edit {edit}", flush=True)\n'

EDITS = (
    Figure(
        "edit to first line, 1 worker",
        "1",
        "ms",
        {RUN_AGAIN: Limit(18.0), peers.EARLIER: Limit(0.107)},
        scale=1e3,
    ),
    Figure("edit to first line, 4 workers", "4", "ms", {RUN_AGAIN: Limit(18.0)}, scale=1e3),
)
TORCH_EDITS = (
    Figure("same with torch, 1 worker", "1", "ms", {RUN_AGAIN: Limit(0.38)}, scale=1e3),
    Figure("same with torch, 4 workers", "4", "ms", {RUN_AGAIN: Limit(0.38)}, scale=1e3),
)
UNCHANGED = (
    Figure(
        f"deploy of nothing new, {FILES:,} files",
        "seconds",
        "ms",
        {RSYNC: Limit(0.5), LIST: None},
        scale=1e3,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure, each group by itself: reloads with torch keep a machine busy for a while."""
    return [*_edits(rounds), *_torch_edits(rounds), *_unchanged(rounds)]


def _edits(rounds: int) -> list[Row]:
    python = Path(sys.executable)
    sides = [
        Side(OURS, "ours", lambda: _reload(PLAIN, python)),
        Side(RUN_AGAIN, "floor", lambda: _run_again(PLAIN, python)),
        Side(peers.EARLIER, "peer", _earlier),
    ]
    return compare(EDITS, sides, rounds)


def _torch_edits(rounds: int) -> list[Row]:
    """With an interpreter that has torch and this checkout.

    `+cpu`: the other build is some gigabytes. It comes from where `PIP_FIND_LINKS` or
    `PIP_EXTRA_INDEX_URL` points, https://download.pytorch.org/whl/cpu for one.
    """
    version = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
    stamp = (ROOT / "pyproject.toml").read_text()
    torch = Environment("torch", (version, "numpy>=1.26", "-e", str(ROOT)), stamp)
    sides = [
        Side(OURS, "ours", lambda: _reload(TORCH, torch.python())),
        Side(RUN_AGAIN, "floor", lambda: _run_again(TORCH, torch.python())),
    ]
    return compare(TORCH_EDITS, sides, rounds)


def _unchanged(rounds: int) -> list[Row]:
    sides = [
        Side(OURS, "ours", _deploy),
        Side(RSYNC, "peer", _rsync),
        Side(LIST, "floor", _list),
    ]
    return compare(UNCHANGED, sides, rounds)


@contextmanager
def _reload(imports: str, python: Path) -> Iterator[Measure]:
    """Seconds by number of replicas."""
    with (
        ours.project() as root,
        ours.home() as env,
        processes.program("kubetorch_reload", str(root), imports, python=python, env=env) as client,
    ):

        def measure() -> dict[str, float]:
            times = {}
            for replicas in REPLICAS:
                times[str(replicas)] = client.ask("reload", replicas=replicas)["seconds"]
                ours.settle(env)
            return times

        yield measure


@contextmanager
def _deploy() -> Iterator[Measure]:
    with (
        ours.project() as root,
        ours.home() as env,
        processes.program("kubetorch_reload", str(root), PLAIN, env=env) as client,
    ):
        fill(root)
        yield lambda: client.ask("unchanged", replicas=1, times=TIMES)


@contextmanager
def _run_again(imports: str, python: Path) -> Iterator[Measure]:
    """What one has without any of this: running the edited program again."""
    edits = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edited.py"

        def first_line() -> float:
            began = time.perf_counter()
            path.write_text(SOURCE.format(imports=imports, edit=next(edits)))
            with processes.speaking([python, path]):
                return time.perf_counter() - began

        def measure() -> dict[str, float]:
            seconds = statistics.median(first_line() for _ in range(TIMES))
            return {str(replicas): seconds for replicas in REPLICAS}

        yield measure


@contextmanager
def _earlier() -> Iterator[Measure]:
    """The reload that its controller would ask a pod for, when the code is there already."""
    with ours.project() as root, peers.earlier_server(root, "first_line") as port:
        path = root / "service.py"
        edits = itertools.count()
        post = posting.connect(port)

        def ask(target: str, body: object) -> object:
            return json.loads(post(target, json.dumps(body).encode(), posting.JSON))

        def measure() -> dict[str, float]:
            began = time.perf_counter()
            edit = next(edits)
            # Byte code of the same second would be taken for that of a file of the same size.
            path.write_text(f"def first_line():\n    return {edit}\n{'#' * edit}\n")
            ask("/_test_reload", {})
            assert ask("/first_line", {"args": [], "kwargs": {}}) == edit
            return {"1": time.perf_counter() - began}

        yield measure


@contextmanager
def _rsync() -> Iterator[Measure]:
    if not shutil.which("rsync"):
        raise UnavailableError("rsync is not installed")
    with ours.project() as root:
        fill(root)
        command = ["rsync", "-a", "--delete", f"{root}/", f"{root.parent}/copy/"]
        processes.run(command)
        yield lambda: {"seconds": driving.median(lambda: processes.run(command), TIMES)}


@contextmanager
def _list() -> Iterator[Measure]:
    with ours.project() as root:
        fill(root)

        def walk() -> None:
            for path in root.rglob("*"):
                path.stat()

        yield lambda: {"seconds": driving.median(walk, TIMES)}


def fill(root: Path) -> None:
    """A tree of the size that a project with its data and notebooks has."""
    for number in range(FILES):
        folder = root / f"part_{number // 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"module_{number}.py").write_text(f"value = {number}\n" * 50)
