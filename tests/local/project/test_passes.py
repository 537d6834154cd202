"""A test that is run many times, to see whether it is mended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.local.project.test_tier import ENVIRONMENT

SUITE = """
from pathlib import Path

import pytest

RUNS = Path(__file__).with_name("runs")

@pytest.mark.parametrize("case", ["sound", "flaky"])
def test_it(case):
    with RUNS.open("a") as file:
        file.write(f"{case}\\n")
    assert case == "sound" or RUNS.read_text().count(case) != 4
"""


@pytest.mark.parametrize(("case", "status"), [("sound", 0), ("flaky", 1)])
def test_a_test_is_run_as_often_as_asked_and_alone_of_its_function(
    tmp_path: Path, case: str, status: int
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "tools.passes", f"test_suite.py::test_it[{case}]", "--runs=4"]
    completed = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert completed.returncode == status, completed.stdout + completed.stderr
    assert (tmp_path / "runs").read_text().split() == [case] * 4
