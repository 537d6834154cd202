"""Kubetorch, as its users have it: a project, a program, and a local service of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks import processes

PROJECTS = Path(__file__).parent / "projects"
SERVICE = PROJECTS / "service.py"
STOP_DEADLINE = 60.0


@contextmanager
def project() -> Iterator[Path]:
    """A folder of its own with `service.py`."""
    with tempfile.TemporaryDirectory(prefix="kt-benchmark-") as folder:
        root = Path(folder).resolve() / "project"
        root.mkdir()
        (root / "pyproject.toml").touch()
        shutil.copy(SERVICE, root)
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
    """Stop the local service of `home`, with its pods."""
    subprocess.run(
        [sys.executable, "-m", "kubetorch", "local", "stop"],
        env={**os.environ, **env},
        capture_output=True,
        timeout=STOP_DEADLINE,
        check=True,
    )


@contextmanager
def program(
    name: str, *arguments: str, python: str | Path = sys.executable
) -> Iterator[processes.Program]:
    """A program of `benchmarks.programs` that is given a project, with a home of its own."""
    with (
        project() as root,
        home() as env,
        processes.program(name, str(root), *arguments, python=python, env=env) as client,
    ):
        yield client
