"""What type checkers know of a user's program."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "typing"


def errors_in(name):
    """The errors that pyright finds in a file: their lines, counted from 1, and messages."""
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, name],
        cwd=PROGRAMS,
        capture_output=True,
        text=True,
        timeout=110,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {
        item["range"]["start"]["line"] + 1: item["message"]
        for item in found
        if item["severity"] == "error"
    }


def test_a_users_program_keeps_the_types_of_its_functions_and_classes():
    assert errors_in("user_program.py") == {}


def test_a_users_mistakes_are_found_where_they_are():
    lines = (PROGRAMS / "user_mistakes.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert set(errors_in("user_mistakes.py")) == wrong
