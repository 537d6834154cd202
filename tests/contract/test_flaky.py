"""`tests/flaky.txt` has the names of tests that exist, each with the traceback of its failure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.tier import flaky_names

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "tests" / "flaky.txt").read_text()
COMMENT = re.compile(r"^#.*\n", re.MULTILINE)
#: A name, and its traceback, in which lines may be empty.
ENTRY = re.compile(r"^(?P<name>[^ \n].*)\n(?P<traceback>(?:(?:    .*)?\n)+)", re.MULTILINE)


def _problems(text: str) -> list[str]:
    entries = COMMENT.sub("", text)
    rest = ENTRY.sub("", entries).splitlines()
    problems = [f"neither a name nor its traceback: {line}" for line in rest if line]
    for entry in ENTRY.finditer(entries):
        file, _, function = entry["name"].partition("::")
        function = function.partition("[")[0].rpartition("::")[2]
        if not (ROOT / file).is_file() or f"def {function}(" not in (ROOT / file).read_text():
            problems.append(f"no test has the name: {entry['name']}")
        if not entry["traceback"].strip():
            problems.append(f"no traceback: {entry['name']}")
    names = flaky_names(text)
    return problems + [f"twice: {name}" for name in set(names) if names.count(name) > 1]


def test_the_file_names_tests_with_their_tracebacks() -> None:
    assert not _problems(TEXT)


def test_every_tier_of_ci_runs_once_more_what_failed() -> None:
    lines = [
        line.partition("#")[0]
        for line in (ROOT / ".ci" / "run").read_text().splitlines()
        if "example_tests=" not in line  # packages that are installed
    ]
    assert not [line for line in lines if "pytest" in line]


NAME = "tests/contract/test_flaky.py::test_an_entry_that_breaks_the_format_is_recognised"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"# A comment.\n\n{NAME}[x: y]\n    def f():\n\n    >   assert 0\n", None),
        (f"{NAME}\n", "neither a name"),
        (f"{NAME}\n    \n", "no traceback"),
        (f"{NAME}\nassert 0\n", "neither a name"),
        (f"{NAME}\n  assert 0\n", "neither a name"),
        ("tests/unit/test_not_there.py::test_it\n    assert 0\n", "no test"),
        (f"{NAME}_by_nobody\n    assert 0\n", "no test"),
        (f"{NAME}\n    assert 0\n" * 2, "twice"),
    ],
)
def test_an_entry_that_breaks_the_format_is_recognised(text: str, problem: str | None) -> None:
    problems = _problems(text)
    assert not problems if problem is None else problems and problem in problems[0]
