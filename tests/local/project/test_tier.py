"""A tier of CI over small suites of tests: what is run again, and what makes it red."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tools.tier import flaky_names

ROOT = Path(__file__).parents[3]
SUITE = "tests/test_suite.py"
CONFIGURATION = """
[pytest]
timeout = 60
markers =
    security
    faults
"""
#: Other plugins of this environment take long to be loaded.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin,pytest_timeout",
}
#: What the tests of a suite are made of: `is_first(name)` once, and no longer when they run again.
BASE = """
import os, signal, time
from pathlib import Path

import pytest

def is_first(name="run"):
    file = Path(__file__).with_name(name)
    is_new = not file.exists()
    file.touch()
    return is_new

"""
FLAKY = """
def test_flaky():
    value = 3
    assert not is_first(), f"the first time, {value=}"
"""


class Tier:
    """A folder with a suite, and what `tools.tier` made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reports = folder, folder / "reports"
        self.reports.mkdir()
        (folder / "pytest.ini").write_text(CONFIGURATION)
        (folder / "tests").mkdir()
        self.output = ""

    def run(self, suite: str, *options: str, name: str = "tier") -> int:
        """The exit status of a suite, given as text."""
        (self.folder / "tests" / "test_suite.py").write_text(BASE + textwrap.dedent(suite))
        command = [sys.executable, "-m", "tools.tier", name, str(self.reports), *options]
        completed = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
        )
        self.output = completed.stdout
        return completed.returncode

    @property
    def why_red(self) -> str:
        """What the tier wrote of why it failed."""
        file = self.reports / "tier.failed"
        return file.read_text() if file.exists() else ""

    @property
    def final(self) -> dict[str, str]:
        """Why tests were not run again."""
        lines = re.findall(f": not run again: {SUITE}::(.*?): (.*)", self.output)
        return dict(lines)

    @property
    def flaky(self) -> list[str]:
        """The names of tests that are noted as flaky."""
        return [name.removeprefix(f"{SUITE}::") for name in flaky_names(self.notes)]

    @property
    def notes(self) -> str:
        """What is noted of the tests that are flaky."""
        return "".join(file.read_text() for file in sorted(self.reports.glob("*.txt")))


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_passes_alone_is_green_and_is_noted_with_its_first_traceback(
    tier: Tier, workers: str
) -> None:
    suite = f"""
{FLAKY}
def test_sound():
    assert is_first("sound"), "what passed is not run again"

@pytest.fixture
def leak_check():
    yield
    assert not is_first("leak")

def test_leaks(leak_check): pass
"""
    assert tier.run(suite, "-n", workers) == 0, tier.output
    assert set(tier.flaky) == {"test_flaky", "test_leaks"}
    assert not tier.why_red
    traceback = tier.notes.splitlines()
    assert any("the first time, value=3" in line for line in traceback)
    assert sum(not line.startswith("    ") for line in traceback if line) == 2


def test_what_is_no_bad_luck_is_red_at_once(tier: Tier) -> None:
    suite = """
    @pytest.mark.timeout(1)
    def test_hangs():
        try:
            time.sleep(50)
        finally:
            assert not is_first("hung")

    @pytest.mark.security
    def test_attack():
        assert not is_first("attacked")

    class TestFaults:
        pytestmark = pytest.mark.faults

        def test_kill(self):
            assert not is_first("killed")

    @pytest.fixture
    def setup():
        assert not is_first("set up")

    def test_is_not_reached(setup): pass
    """
    assert tier.run(suite, "-n", "0") == 1
    assert tier.final == {
        "test_hangs": "a timeout of pytest-timeout",
        "test_attack": "it is marked security",
        "TestFaults::test_kill": "it is marked faults",
        "test_is_not_reached": "an error before the test",
    }
    assert "once more" not in tier.output
    assert all(f"::{name}: {reason}\n    " in tier.why_red for name, reason in tier.final.items())


def test_a_file_that_cannot_be_collected_is_red_at_once(tier: Tier) -> None:
    assert tier.run("assert not is_first()\ndef test_it(): pass", "-n", "0") == 2
    assert f"{SUITE}: an error of the collection" in tier.output
    assert "once more" not in tier.output


def test_a_crash_is_red_and_the_flaky_test_beside_it_is_still_noted(tier: Tier) -> None:
    suite = f"""
{FLAKY}
def test_crashes():
    if is_first("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert tier.run(suite, "-n", "2") == 1, tier.output
    assert tier.final == {"test_crashes": "a crash"}
    assert tier.flaky == ["test_flaky"]


def test_an_interpreter_that_ends_without_a_report_is_red(tier: Tier) -> None:
    assert tier.run("def test_ends(): os._exit(0)", "-n", "0") == 1
    assert "without a report" in tier.why_red


def test_what_does_not_pass_the_second_time_is_red(tier: Tier) -> None:
    suite = f"""
{FLAKY}
def test_fails_twice():
    assert False

def test_is_skipped_then():
    if not is_first("skipped"):
        pytest.skip("not now")
    assert False

if is_first("collected"):
    def test_is_not_there_then():
        assert False
"""
    assert tier.run(suite, "-n", "0") == 1, tier.output
    assert "failed twice, or was not run" in tier.output
    assert tier.flaky == ["test_flaky"]
    assert "::test_fails_twice: failed twice\n    " in tier.why_red
    assert "test_flaky" not in tier.why_red


def test_a_failure_of_none_that_is_collected_again_is_red(tier: Tier) -> None:
    suite = """
    if is_first():
        def test_is_not_there_then():
            assert False
    """
    assert tier.run(suite, "-n", "0") == 1, tier.output
    assert not tier.notes


def test_a_name_that_the_file_has_already_is_red(tier: Tier) -> None:
    listed = f"# Names.\n\n{SUITE}::test_flaky\n    assert False\n"
    (tier.folder / "tests" / "flaky.txt").write_text(listed)
    assert tier.run(FLAKY, "-n", "0") == 1
    assert tier.final == {"test_flaky": "tests/flaky.txt names it"}


def test_at_most_five_are_flaky_in_all_tiers_together(tier: Tier) -> None:
    suite = """
    @pytest.mark.parametrize("number", range(COUNT))
    def test_flaky(number):
        assert not is_first(f"{COUNT}-{number}")
    """
    assert tier.run(suite.replace("COUNT", "6"), "-n", "0", name="first") == 1
    assert not tier.notes
    assert tier.run(suite.replace("COUNT", "4"), "-n", "0", name="second") == 0, tier.output
    assert tier.run(suite.replace("COUNT", "2"), "-n", "0", name="third") == 1
    assert "2 tests failed, 4 of this run are flaky already" in tier.output


def test_what_pytest_says_of_no_tests_stays(tier: Tier) -> None:
    assert tier.run("", "-n", "0") == 5


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_tier_that_is_interrupted_says_what_failed_and_what_ran(tier: Tier, workers: str) -> None:
    # Workers of pytest-xdist are children of the process that reports.
    reporter = "os.getpid()" if workers == "0" else "os.getppid()"
    suite = f"""
    def test_fails(): assert not "a reason"

    def test_hangs():
        time.sleep(1)
        os.kill({reporter}, signal.SIGINT)
        time.sleep(50)
    """
    assert tier.run(suite, "-n", workers) == 2, tier.output
    assert "a reason" in tier.why_red
    assert f"interrupted while it ran {SUITE}::test_hangs" in tier.why_red


def test_a_tier_ends_when_many_of_its_tests_failed(tier: Tier) -> None:
    suite = """
    @pytest.mark.parametrize("number", range(50))
    def test_fails(number): assert number < 0
    """
    assert tier.run(suite, "-n", "0") == 1, tier.output
    assert tier.why_red.count("assert number < 0") < 20
