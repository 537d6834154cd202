"""Kubetorch, as its users have it: a project, a program, and a local service of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import processes

PROJECTS = Path(__file__).parent / "projects"
SERVICE = PROJECTS / "service.py"
STOP_DEADLINE = 60.0
# 10 s: four workers with torch end within one.
SETTLE_DEADLINE, SETTLE_PAUSE = 10.0, 0.3


@contextmanager
def project(modules: Sequence[str] = ()) -> Iterator[Path]:
    """A folder of its own with `service.py`, and with these files of `projects`.

    A pod imports from there: it knows no checkout.
    """
    with tempfile.TemporaryDirectory(prefix="kt-benchmark-") as folder:
        root = Path(folder).resolve() / "project"
        root.mkdir()
        (root / "pyproject.toml").touch()
        for module in ("service.py", *modules):
            shutil.copy(PROJECTS / module, root)
        yield root


@contextmanager
def home() -> Iterator[dict[str, str]]:
    """The environment of a local service that nothing else uses; it is stopped afterwards."""
    with tempfile.TemporaryDirectory(prefix="kt-home-") as folder:
        env = {
            "HOME": folder,
            "KT_BACKEND": "local",
            "KT_CONFIG_FILE": f"{folder}/config.yaml",
            "KT_LOCAL_DIR": f"{folder}/local",
        }
        try:
            yield env
        finally:
            stop(env)


def stop(env: Mapping[str, str]) -> None:
    """Stop the local service of `home`, with its pods; by force if it does not stop by itself.

    That is said and not raised: it would hide why the benchmark ended.
    """
    try:
        subprocess.run(
            [sys.executable, "-m", "kubetorch", "local", "stop"],
            env=processes.environment(env),
            capture_output=True,
            text=True,
            timeout=STOP_DEADLINE,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        processes.complain(error)
        processes.kill(of(env))


def of(env: Mapping[str, str]) -> list[psutil.Process]:
    """All processes of a home: programs, its local service, and the pods of that service."""
    home_processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            if process.environ().get("KT_LOCAL_DIR") == env["KT_LOCAL_DIR"]:
                home_processes.append(process)
    return home_processes


def services(env: Mapping[str, str]) -> list[psutil.Process]:
    """The processes of a home that are its local service."""
    return [process for process in of(env) if "kubetorch.local" in _command(process)]


def settle(env: Mapping[str, str]) -> None:
    """Wait until no process of a home ends, begins or works any more.

    A reload ends the processes of the generation before after its first line is there; what is
    measured next would share the processor with them.
    """
    end, before = time.monotonic() + SETTLE_DEADLINE, None
    while (now := {process.pid: _worked(process) for process in of(env)}) != before:
        if time.monotonic() > end:
            return
        before = now
        time.sleep(SETTLE_PAUSE)


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def _worked(process: psutil.Process) -> float:
    """Seconds of processor time, in tenths: an idle agent needs some, too."""
    with suppress(psutil.Error):
        used = process.cpu_times()
        return round(used.user + used.system, 1)
    return 0.0


@contextmanager
def program(
    name: str,
    *arguments: str,
    modules: Sequence[str] = (),
    python: str | Path = sys.executable,
) -> Iterator[processes.Program]:
    """A program of `benchmarks.programs` that is given a `project`, with a home of its own."""
    with (
        project(modules) as root,
        home() as env,
        processes.program(name, str(root), *arguments, python=python, env=env) as client,
    ):
        yield client
