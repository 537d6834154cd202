"""Reloads: from an edit to the first line of the new code, and a deploy of nothing new."""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks import ours, peers, processes
from benchmarks.figures import Figure, Limit, Row
from benchmarks.processes import ROOT
from benchmarks.programs import driving
from benchmarks.rounds import OURS, Measure, Side, compare
from benchmarks.venvs import Environment, UnavailableError

RUN_AGAIN = "run the file again"
LIST = "list and stat the tree"
RSYNC = "rsync"
REPLICAS = (1, 4)
FILES = 5000
PLAIN = ("import os", "plain")
TORCH = ("import torch", "torch")
SOURCE = '{imports}\n\nprint("edit {edit}", flush=True)\n'
DEADLINE = 120.0

FIGURES = (
    Figure(
        "edit to first line, 1 worker",
        "plain-1",
        "ms",
        {RUN_AGAIN: Limit(18.0), peers.EARLIER: Limit(0.107)},
        scale=1e3,
    ),
    Figure("edit to first line, 4 workers", "plain-4", "ms", {RUN_AGAIN: Limit(18.0)}, scale=1e3),
    Figure("same with torch, 1 worker", "torch-1", "ms", {RUN_AGAIN: Limit(0.38)}, scale=1e3),
    Figure("same with torch, 4 workers", "torch-4", "ms", {RUN_AGAIN: Limit(0.38)}, scale=1e3),
    Figure(
        f"deploy of nothing new, {FILES:,} files",
        "unchanged",
        "ms",
        {RSYNC: Limit(0.5), LIST: None},
        scale=1e3,
    ),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    sides = [
        Side(OURS, "ours", _ours),
        Side(RUN_AGAIN, "floor", _run_again),
        Side(peers.EARLIER, "peer", _earlier),
        Side(RSYNC, "peer", _rsync),
        Side(LIST, "floor", _list),
    ]
    return compare(FIGURES, sides, rounds)


def torch_python() -> Path:
    """An interpreter that has torch and this checkout.

    `+cpu`: the other build is some gigabytes. It comes from where `PIP_FIND_LINKS` or
    `PIP_EXTRA_INDEX_URL` points, https://download.pytorch.org/whl/cpu for one.
    """
    version = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"
    stamp = (ROOT / "pyproject.toml").read_text()
    return Environment("torch", (version, "numpy>=1.26", "-e", str(ROOT)), stamp).python()


@contextmanager
def _ours() -> Iterator[Measure]:
    with ExitStack() as stack:
        measures = {
            "plain": stack.enter_context(_edits(PLAIN[0], Path(sys.executable))),
            "unchanged": stack.enter_context(_unchanged()),
        }
        try:
            measures["torch"] = stack.enter_context(_edits(TORCH[0], torch_python()))
        except UnavailableError as error:
            print(f"without torch: {error}", file=sys.stderr)

        def measure() -> dict[str, float]:
            return {
                f"{name}{suffix}": value
                for name, found in measures.items()
                for suffix, value in found().items()
            }

        yield measure


@contextmanager
def _edits(imports: str, python: Path) -> Iterator[Measure]:
    """Seconds by number of replicas."""
    with ours.program("kubetorch_reload", imports, python=python) as client:
        yield lambda: {
            f"-{replicas}": client.ask("reload", replicas=replicas)["seconds"]
            for replicas in REPLICAS
        }


@contextmanager
def _unchanged() -> Iterator[Measure]:
    with (
        ours.project() as root,
        ours.home() as env,
        processes.program("kubetorch_reload", str(root), PLAIN[0], env=env) as client,
    ):
        fill(root)
        yield lambda: {"": client.ask("unchanged", replicas=1, times=5)["seconds"]}


@contextmanager
def _run_again() -> Iterator[Measure]:
    """What one has without any of this: running the edited program again."""
    interpreters = {"plain": (Path(sys.executable), PLAIN[0])}
    with suppress(UnavailableError):  # `_ours` has said so
        interpreters["torch"] = (torch_python(), TORCH[0])
    edits = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "edited.py"

        def first_line(python: Path, imports: str) -> float:
            began = time.perf_counter()
            path.write_text(SOURCE.format(imports=imports, edit=next(edits)))
            with subprocess.Popen([python, path], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                return time.perf_counter() - began

        def measure() -> dict[str, float]:
            seconds = {name: first_line(*options) for name, options in interpreters.items()}
            return {f"{name}-{n}": value for name, value in seconds.items() for n in REPLICAS}

        yield measure


@contextmanager
def _earlier() -> Iterator[Measure]:
    """The reload that its controller would ask a pod for, when the code is there already."""
    with ours.project() as root, peers.earlier_server(root, "first_line") as port:
        path = root / "service.py"
        edits = itertools.count()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)

        def post(target: str, body: object) -> object:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", target, json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {content!r}")
            return json.loads(content)

        def measure() -> dict[str, float]:
            began = time.perf_counter()
            edit = next(edits)
            path.write_text(f"def first_line():\n    return {edit}\n")
            post("/_test_reload", {})
            assert post("/first_line", {"args": [], "kwargs": {}}) == edit
            return {"plain-1": time.perf_counter() - began}

        yield measure


@contextmanager
def _rsync() -> Iterator[Measure]:
    if not shutil.which("rsync"):
        raise UnavailableError("rsync is not installed")
    with ours.project() as root:
        fill(root)
        command = ["rsync", "-a", "--delete", f"{root}/", f"{root.parent}/copy/"]
        processes.run(command)
        yield lambda: {"unchanged": driving.median(lambda: processes.run(command), 5)}


@contextmanager
def _list() -> Iterator[Measure]:
    with ours.project() as root:
        fill(root)

        def walk() -> None:
            for path in root.rglob("*"):
                path.stat()

        yield lambda: {"unchanged": driving.median(walk, 5)}


def fill(root: Path) -> None:
    """A tree of the size that a project with its data and notebooks has."""
    for number in range(FILES):
        folder = root / f"part_{number // 100}"
        folder.mkdir(exist_ok=True)
        (folder / f"module_{number}.py").write_text(f"value = {number}\n" * 50)
