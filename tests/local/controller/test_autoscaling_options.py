"""The command that tries options of `autoscale()`, on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "tools.autoscaling_options", "--engine", "local", "--only")


def test_the_command_says_what_an_option_did_and_that_it_should() -> None:
    completed = subprocess.run(
        [*COMMAND, "concurrency=1"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert re.search(r"ok local concurrency=1 · \d+\.\d s", completed.stdout)


def test_the_command_refuses_an_option_that_is_not_there() -> None:
    completed = subprocess.run(
        [*COMMAND, "concurrency=2"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 1
    assert "no option concurrency=2" in completed.stderr
