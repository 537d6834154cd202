"""A tier of the tests as `.ci/run` runs it: what failed is run once more, alone, when it is over.

python -m tools.tier NAME FOLDER [ARGUMENT of pytest]...

What passes then is flaky: its name and its first traceback go to `FOLDER/NAME.txt`, as
`tests/flaky.txt` has them. The exit status is 0 if each test passed or is flaky; else
`FOLDER/NAME.failed` says why not, with the ends of the tracebacks. SIGINT ends the tier in order:
pytest gets it, too, and what failed and what ran is reported.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Tests that may be flaky in all tiers of a run together.
MAX_FLAKY = 5
_ONCE_MORE = ("--lf", "--lfnf=none", "-n", "0")
#: Failures after which a tier ends: what its tests share is broken, and CI's time is bounded.
MAX_FAILED = 10
_INTERRUPTED = 2
#: Lines of a traceback that `FOLDER/NAME.failed` has: its end is what a reader needs first.
_SHOWN_LINES = 25


@dataclass
class Report:
    """What became of the tests of a run.

    Attributes:
        passed: Names of the tests that passed.
        tracebacks: Of each test that failed, by its name.
        final: Why a test that failed is not run again, by its name.
        running: Tests that had begun and not ended.
    """

    passed: list[str] = field(default_factory=list)
    tracebacks: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    @property
    def repeatable(self) -> list[str]:
        """The tests that failed and are run again."""
        return [name for name in self.tracebacks if name not in self.final]

    def add_failure(self, name: str, traceback: str, final: str | None) -> None:
        """Add a failure of a test, or of the check that follows it."""
        earlier = self.tracebacks.get(name)
        self.tracebacks[name] = traceback if earlier is None else f"{earlier}\n{traceback}"
        if final is not None:
            self.final[name] = final


def flaky_names(text: str) -> list[str]:
    """The names in a file like `tests/flaky.txt`: lines that are no comment and not indented."""
    return [line.rstrip() for line in text.splitlines() if line[:1].strip() not in ("", "#")]


def run_tier(name: str, folder: Path, arguments: Sequence[str]) -> int:
    """The exit status of a tier."""
    status, reasons = _run_twice(name, folder, arguments)
    if status:
        reasons.append(f"exit status {status}")
        (folder / f"{name}.failed").write_bytes(_lines(name, reasons))
    return status


def _run_twice(name: str, folder: Path, arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The exit status of a tier, and why it is not 0."""
    status, report = _run_pytest(name, folder, *arguments)
    if report is None:
        return status or 1, [_tell(name, f"pytest ended with {status} and without a report")]
    reasons = []
    for test, reason in report.final.items():
        _tell(name, f"not run again: {test}: {reason}")
        reasons.append(f"{test}: {reason}\n{_end(report.tracebacks[test])}")
    if status == _INTERRUPTED:
        reasons += [f"{test}\n{_end(report.tracebacks[test])}" for test in report.repeatable]
        running = ", ".join(report.running) or "no test"
        return status, [*reasons, _tell(name, f"pytest was interrupted while it ran {running}")]
    repeatable = report.repeatable
    if not repeatable:
        return status, reasons
    flaky_before = sum(len(flaky_names(file.read_text("utf-8"))) for file in folder.glob("*.txt"))
    if len(repeatable) > MAX_FLAKY - flaky_before:
        count = f"{len(repeatable)} tests failed, {flaky_before} of this run are flaky already"
        _tell(name, f"none is run again: {count}, at most {MAX_FLAKY} may be")
        reasons += [f"{test}\n{_end(report.tracebacks[test])}" for test in repeatable]
        return status or 1, [*reasons, f"none is run again: {count}"]
    _write(f"\n=== {name}, once more: {len(repeatable)} failed")
    status_again, report_again = _run_pytest(name, folder, *arguments, *_ONCE_MORE)
    flaky = [test for test in repeatable if report_again and test in report_again.passed]
    notes = [f"{test}\n{textwrap.indent(report.tracebacks[test], '    ')}\n" for test in flaky]
    text = "\n".join(notes).encode(errors="backslashreplace")
    (folder / f"{name}.txt").write_bytes(text)
    if flaky != repeatable:
        _tell(name, "a test failed twice, or was not run the second time")
        red = [test for test in repeatable if test not in flaky]
        reasons += [f"{test}: failed twice\n{_end(report.tracebacks[test])}" for test in red]
        return status or 1, reasons
    if status == 1 and not report.final:
        return status_again, [f"the second time pytest ended with {status_again}"]
    return status, [*reasons, f"the first time pytest ended with {status}"]


def _run_pytest(name: str, folder: Path, *arguments: str) -> tuple[int, Report | None]:
    """Its exit status and its report, which is missing when its interpreter crashed."""
    file = folder / f"{name}.json"
    file.unlink(missing_ok=True)
    # A cache of its own: tiers have tests of the same names, on other versions of Python.
    options = ["-p", "tools.tier_plugin", f"--report-to={file}", "-o", f"cache_dir={folder / name}"]
    options += [f"--maxfail={MAX_FAILED}", "--durations=20"]
    status = subprocess.run([sys.executable, "-m", "pytest", *options, *arguments]).returncode
    return status, Report(**json.loads(file.read_text())) if file.exists() else None


def _end(traceback: str) -> str:
    return textwrap.indent("\n".join(traceback.splitlines()[-_SHOWN_LINES:]), "    ")


def _lines(name: str, reasons: Sequence[str]) -> bytes:
    text = "".join(f"{name}: {reason}\n" for reason in reasons)
    return text.encode(errors="backslashreplace")


def _tell(name: str, reason: str) -> str:
    _write(f"{name}: {reason}")
    return reason


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # The signal goes to the whole group: pytest ends by it, and this program reports then.
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(run_tier(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
