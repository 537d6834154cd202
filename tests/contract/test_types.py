"""What type checkers know of a user's program."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shared

#: A type checker takes seconds, and minutes on a busy machine.
pytestmark = pytest.mark.timeout(400)

PROGRAMS = Path(__file__).parent / "typing"


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=PROGRAMS, capture_output=True, text=True, timeout=380
    ).stdout


def pyright_reports():
    """What pyright says of all files, which it reads at once."""
    names = sorted(path.name for path in PROGRAMS.glob("*.py"))
    report = json.loads(run("pyright", "--outputjson", "--pythonpath", sys.executable, *names))
    return report["generalDiagnostics"]


@pytest.fixture(scope="module")
def reports():
    with shared.made_once("pyright", pyright_reports, lambda _: None) as reports:
        yield reports


def errors_in(name, reports):
    """The errors that pyright finds in a file: their lines, counted from 1, and messages."""
    return {
        item["range"]["start"]["line"] + 1: item["message"]
        for item in reports
        if item["severity"] == "error" and Path(item["file"]).name == name
    }


def lines_that_mypy_refuses(name):
    output = run("mypy", "--config-file=", "--strict", "--no-incremental", name)
    return {int(number) for number in re.findall(rf"^{name}:(\d+): error", output, re.MULTILINE)}


def wrong_lines(name):
    lines = (PROGRAMS / name).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}


def test_a_users_program_keeps_the_types_of_its_functions_and_classes(reports):
    assert errors_in("user_program.py", reports) == {}


def test_a_users_mistakes_are_found_where_they_are(reports):
    assert set(errors_in("user_mistakes.py", reports)) == wrong_lines("user_mistakes.py")


def test_pyright_refuses_to_await_a_call_without_async(reports):
    assert set(errors_in("awaiting.py", reports)) == wrong_lines("awaiting.py")


@pytest.mark.skipif(not shared.WHOLE, reason="needs KT_TEST_WHOLE=1")
def test_mypy_refuses_to_await_a_call_without_async():
    assert lines_that_mypy_refuses("awaiting.py") == wrong_lines("awaiting.py")
