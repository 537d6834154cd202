"""What type checkers know of a user's program."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

#: A type checker takes seconds, and minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)

PROGRAMS = Path(__file__).parent / "typing"


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=PROGRAMS, capture_output=True, text=True, timeout=380
    ).stdout


def errors_in(name):
    """The errors that pyright finds in a file: their lines, counted from 1, and messages."""
    report = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, name))
    diagnostics = report["generalDiagnostics"]
    return {
        item["range"]["start"]["line"] + 1: item["message"]
        for item in diagnostics
        if item["severity"] == "error"
    }


def lines_that_mypy_refuses(name):
    output = run("mypy", "--config-file=", "--strict", "--no-incremental", name)
    return {int(number) for number in re.findall(rf"^{name}:(\d+): error", output, re.MULTILINE)}


def wrong_lines(name):
    lines = (PROGRAMS / name).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_a_users_program_keeps_the_types_of_its_functions_and_classes():
    assert errors_in("user_program.py") == {}


def test_a_users_mistakes_are_found_where_they_are():
    assert set(errors_in("user_mistakes.py")) == wrong_lines("user_mistakes.py")


@pytest.mark.parametrize("checked", [errors_in, lines_that_mypy_refuses])
def test_type_checkers_refuse_to_await_a_call_without_async(checked):
    assert set(checked("awaiting.py")) == wrong_lines("awaiting.py")
