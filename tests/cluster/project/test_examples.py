"""Every example runs on a cluster as it does without one: the same files, the same output."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from cluster.conftest import Installed
from example_programs import EDITS, EXAMPLES, EXPECTED


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new copy of the examples in the folder of the one before: what they write stays there.

    Another folder would be another project, whose services are not its own.
    """
    folder = tmp_path_factory.getbasetemp() / "examples"
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(EXAMPLES, folder)


#: What has a test of its own, in `data/test_buckets.py`: its controller needs another value.
ELSEWHERE = ("bucket_folder.py",)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ELSEWHERE])
def test_an_example_prints_what_it_should(name: str, folder: Path, installed: Installed) -> None:
    printed = installed.run(sys.executable, f"examples/{name}", cwd=folder.parent)

    # What a cluster says on the way, such as that a volume is being made, depends on the cluster.
    assert re.sub(r"^\([a-z]+ events\).*\n", "", printed, flags=re.M) == EXPECTED[name]


def test_an_example_shows_its_new_code_after_an_edit(folder: Path, installed: Installed) -> None:
    program = folder / "hello_world.py"
    assert "{'loss': 0.05}" in installed.run(sys.executable, "hello_world.py", cwd=folder)
    program.write_text(program.read_text().replace("lr / steps", "lr * steps"))

    assert "{'loss': 5.0}" in installed.run(sys.executable, "hello_world.py", cwd=folder)


def test_twenty_edits_are_live_one_after_the_other(folder: Path, installed: Installed) -> None:
    printed = installed.run(sys.executable, "edit_loop.py", cwd=folder)

    assert EDITS.fullmatch(printed.splitlines(keepends=True)[-1])


def test_curl_calls_what_was_deployed(folder: Path, installed: Installed) -> None:
    installed.run(sys.executable, "hello_world.py", cwd=folder)

    assert "0.05" in installed.run("bash", "curl.sh", cwd=folder)
