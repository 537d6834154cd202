"""`working_dir="/app"` is that path for the program, without a container too."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from tests.local.namespaced import skip_without_namespaces
from tests.local.user_project import UserProject

SOURCE = """
import os
from pathlib import Path

def look(path):
    Path("made.txt").write_text("5")
    absolute = Path(path, "made.txt").read_text()
    return os.getcwd(), absolute, Path("notes.txt").read_text(), sorted(os.listdir(path))
"""


@pytest.fixture
def path() -> Iterator[str]:
    """A path at the top of the machine that nobody has."""
    path = f"/kt-app-{secrets.token_hex(3)}"
    yield path
    assert not Path(path).exists() or shutil.rmtree(path) is None


def test_a_program_is_where_it_was_declared_to_be(
    emptied_home: Path, project: UserProject, tmp_path: Path, path: str
) -> None:
    skip_without_namespaces(tmp_path)
    project.write("notes.txt", "of the project")
    jobs = project.module(SOURCE)
    volume = kt.Volume("kept", size="1Gi", mount_path=f"{path}/kept")
    compute = kt.Compute(cpus="0.1", working_dir=path, volumes=[volume])
    look = kt.fn(jobs.look).to(compute)
    where, made_text, notes, names = look(path)
    assert (where, made_text, notes) == (path, "5", "of the project")
    assert {"kept", "made.txt", "notes.txt", "shop"} <= set(names)
    assert not Path(path).exists()
    ((status, output, _),) = compute.run_bash("pwd; cat made.txt")
    assert (status, output) == (0, f"{path}\n5\n")


def test_what_the_machine_has_there_is_seen_and_not_changed(
    emptied_home: Path, project: UserProject, tmp_path: Path
) -> None:
    skip_without_namespaces(tmp_path)
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "machine.txt").write_text("m")
    project.write("notes.txt", "of the project")
    jobs = project.module(SOURCE)
    look = kt.fn(jobs.look).to(kt.Compute(cpus="0.1", working_dir=str(folder)))
    where, made_text, _, names = look(str(folder))
    assert (where, made_text) == (str(folder), "5")
    assert "machine.txt" in names
    assert [file.name for file in folder.iterdir()] == ["machine.txt"]


PROGRAM = """
import os
import kubetorch as kt

def where():
    return os.getcwd()

if __name__ == "__main__":
    print("found", kt.fn(where).to(kt.Compute(cpus="0.1", working_dir="{path}"))())
"""


def test_a_machine_without_mount_namespaces_has_a_warning(
    service_home: Path, tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "shop"
    project = UserProject(folder)
    program = project.write("program.py", textwrap.dedent(PROGRAM.format(path=path)))
    without = Path(__file__).parents[1] / "without_namespaces.py"
    completed = subprocess.run(
        [sys.executable, str(without), sys.executable, str(program)],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.returncode == 0, completed.stderr
    assert f"found {path}" not in completed.stdout
    assert f"and not {path}: pods of this machine cannot have absolute paths" in (
        completed.stdout + completed.stderr
    )
