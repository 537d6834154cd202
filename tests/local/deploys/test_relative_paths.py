"""A function that was started in its project's folder finds there what it does on the laptop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from tests.local.user_project import UserProject

SOURCE = """
import os
from pathlib import Path

AT_IMPORT = Path("data/x.csv").read_text()
VERSION = 1

def read(path):
    return Path(path).read_text()

def write(path, text):
    Path(path).write_text(text)

def names(path="."):
    return sorted(n for n in os.listdir(path) if n != "__pycache__")

def version():
    return VERSION
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


Deploy = Callable[..., kt.Fn]


@pytest.fixture
def deploy(
    project: UserProject, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], kt.Fn]]:
    """Deploys a function of the project, with its source as it is then."""
    monkeypatch.chdir(project.folder)
    project.write("data/x.csv", "1,2")
    handles: dict[str, kt.Fn] = {}

    def deploy(function: str, source: str = SOURCE, name: str | None = None) -> kt.Fn:
        module = project.module(source)
        handle = kt.fn(getattr(module, function), name=name or function)
        handles[handle.service_name] = handle.to(kt.Compute(cpus="0.1"))
        return handles[handle.service_name]

    yield deploy
    for handle in handles.values():
        handle.teardown()


def test_data_of_the_project_is_found_also_while_code_is_imported(
    deploy: Deploy, project: UserProject
) -> None:
    read = deploy("read")
    assert read("data/x.csv") == "1,2"
    assert read("shop/data/x.csv") == "1,2"  # as before: the project by its name

    project.write("data/x.csv", "3,4")
    project.write("new.txt", "5")
    (project.folder / "data" / "y.csv").write_text("6")
    read = deploy("read", SOURCE.replace("VERSION = 1", "VERSION = 2"))
    assert [read("data/x.csv"), read("new.txt"), read("data/y.csv")] == ["3,4", "5", "6"]

    (project.folder / "new.txt").unlink()
    read = deploy("read", SOURCE.replace("VERSION = 1", "VERSION = 3"))
    with pytest.raises(FileNotFoundError):
        read("new.txt")


def test_what_a_program_creates_there_stays_over_reloads(deploy: Deploy) -> None:
    write = deploy("write")
    write("result.txt", "kept")
    write("data/result.txt", "of this generation")
    read = deploy("read", SOURCE.replace("VERSION = 1", "VERSION = 2"), name="write")
    assert read("result.txt") == "kept"
    with pytest.raises(FileNotFoundError):
        read("data/result.txt")


def test_a_file_in_the_way_stays_and_the_deploy_says_so(
    deploy: Deploy, project: UserProject, capfd: pytest.CaptureFixture[str]
) -> None:
    write = deploy("write")
    write("notes.txt", "mine")
    project.write("notes.txt", "the project's")
    capfd.readouterr()
    deploy("write", SOURCE.replace("VERSION = 1", "VERSION = 2"))
    printed = capfd.readouterr()
    assert "has notes.txt of its own: relative paths find these" in printed.out + printed.err


def test_a_package_of_the_projects_own_name_is_found_too(
    deploy: Deploy, project: UserProject
) -> None:
    project.write("shop/settings.txt", "inner")
    project.write("shop/data/z.csv", "hidden by the project's own data")
    names = deploy("names")
    assert {"data", "settings.txt", "pyproject.toml"} <= set(names("shop"))
    assert names("data") == ["x.csv"]


def test_a_program_of_a_single_file_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "alone" / "script.py"
    file.parent.mkdir()
    file.write_text(
        "import sys\n"
        "import kubetorch as kt\n"
        "def f(): pass\n"
        "if sys.argv[1:] == ['deploy']:\n"
        "    compute = kt.Compute(cpus='0.1')\n"
        "    kt.fn(f, name='single').to(compute)\n"
        "    [(status, output, _)] = compute.run_bash('python script.py')\n"
        "    print(status, output)\n"
        "elif __name__ == '__main__':\n"
        "    print('started')\n"
    )
    completed = UserProject(tmp_path / "shop").run(file, "deploy")
    assert completed.stdout == "0 started\n\n", completed.stderr
    kt.fn(name="single").teardown()


def test_what_an_image_copies_there_is_not_written_into_the_project(
    deploy: Deploy, project: UserProject, tmp_path: Path
) -> None:
    """Steps that were run are not run again, and what they made stays."""
    assets = tmp_path / "data"
    assets.mkdir()
    (assets / "weights.bin").write_text("w")
    module = project.module(SOURCE.replace("AT_IMPORT =", "# "))
    compute = kt.Compute(cpus="0.1", image=kt.Image().copy(str(assets)))
    names = kt.fn(module.names).to(compute)
    assert names("data") == ["weights.bin"]
    module = project.module(SOURCE.replace("AT_IMPORT =", "# 2"))
    names = kt.fn(module.names).to(compute)
    assert names("data") == ["weights.bin"]
    names.teardown()


def test_a_file_that_was_left_out_is_named(deploy: Deploy, project: UserProject) -> None:
    project.write(".gitignore", "weights/")
    project.write("weights/last.bin", "w")
    read = deploy("read")

    with pytest.raises(FileNotFoundError) as raised:
        read("weights/last.bin")
    (note,) = raised.value.__notes__
    assert "/.gitignore, weights/ leaves weights/ out" in note
    project.write(".ktignore", "!weights/")
    assert deploy("read")("weights/last.bin") == "w"
    # A deploy whose import needs it says so, too.
    (project.folder / ".ktignore").unlink()
    with pytest.raises(FileNotFoundError) as raised:
        deploy("read", SOURCE.replace("data/x.csv", "weights/last.bin"))
    assert "leaves weights/ out" in raised.value.__notes__[0]
