"""The plugin by which pytest writes a report for `tools.tier`, with the failures that are final.

A test that fails by an assertion, or by an exception that it did not expect, may pass the next
time. These failures are final: a crash, an error before a test or of the collection, a timeout of
pytest-timeout, and the failure of a test that is marked `security` or `faults`, or that
`tests/flaky.txt` names.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tools.tier import Report, flaky_names

#: Marks of tests whose failure is never bad luck.
STRICT_MARKS = ("security", "faults")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where the report goes."""
    parser.addoption("--report-to", type=Path, help="file that gets the report of `tools.tier`")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the process that starts the workers, or runs the tests itself."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure why it is final; the report goes from a worker to the recorder."""
    report = yield
    if report.failed:
        report.final = _why_final(item, call)
    return report


def _why_final(item: pytest.Item, call: pytest.CallInfo[Any]) -> str | None:
    marks = [mark for mark in STRICT_MARKS if item.get_closest_marker(mark) is not None]
    if marks:
        return f"it is marked {marks[0]}"
    if call.excinfo is not None and _is_timeout(call.excinfo.value, set()):
        return "a timeout of pytest-timeout"
    return "an error before the test" if call.when == "setup" else None


def _is_timeout(error: BaseException | None, visited_ids: set[int]) -> bool:
    """Whether pytest-timeout raised an error, or one that this error replaced or groups."""
    if error is None or id(error) in visited_ids:
        return False
    visited_ids.add(id(error))
    if isinstance(error, pytest.fail.Exception) and "from pytest-timeout" in str(error):
        return True
    parts = (error.__cause__, error.__context__, *getattr(error, "exceptions", ()))
    return any(_is_timeout(part, visited_ids) for part in parts)


class _Recorder:
    """Records the results of the tests of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._report = config, Report()
        file = config.rootpath / "tests" / "flaky.txt"
        self._listed = flaky_names(file.read_text()) if file.exists() else []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name, traceback = report.nodeid, report.longreprtext
            self._report.add_failure(name, traceback, "an error of the collection")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report.running.append(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._report.running.remove(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            # The report of a crash is made by pytest-xdist.
            final = getattr(report, "final", "a crash")
            if report.nodeid in self._listed:
                final = "tests/flaky.txt names it"
            self._report.add_failure(report.nodeid, report.longreprtext, final)
        elif report.when == "call" and report.passed:
            self._report.passed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the report, and have `--lf` mean the tests that are run again."""
        report, cache = self._report, self._config.cache
        report.passed = [name for name in report.passed if name not in report.tracebacks]
        assert cache is not None
        cache.set("cache/lastfailed", dict.fromkeys(report.repeatable, True))
        self._config.getoption("report_to").write_text(json.dumps(vars(report)))
