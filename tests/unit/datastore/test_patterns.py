"""Each line of the table is what `git check-ignore` says of the same pattern and path."""

from __future__ import annotations

import pytest

from kubetorch.datastore.ignore_rules import Patterns, parse


def is_ignored(lines: list[str], path: str) -> bool | None:
    """What the patterns say of a path; a `/` at its end makes it a folder."""
    pattern = Patterns(lines).decide(path.rstrip("/"), is_folder=path.endswith("/"))
    return None if pattern is None else pattern.is_excluding


@pytest.mark.parametrize(
    ("pattern", "matching", "unmatched"),
    [
        ("a", ["a", "a/", "d/a", "d/e/a/"], ["ab", "a.b", "a/b"]),
        ("a/", ["a/", "d/a/"], ["a", "d/a"]),
        ("/a", ["a", "a/"], ["d/a"]),
        ("d/a", ["d/a"], ["a", "e/d/a"]),
        ("d/a/", ["d/a/"], ["d/a", "e/d/a/"]),
        ("*.log", ["x.log", ".log", "d/x.log"], ["x.logs", "log"]),
        ("d/*.log", ["d/x.log"], ["x.log", "d/e/x.log"]),
        ("**/a", ["a", "d/a", "d/e/a"], ["ba"]),
        ("**/d/a", ["d/a", "e/d/a"], ["a"]),
        ("d/**", ["d/a", "d/e/a"], ["d/", "d", "e/d/a"]),
        ("d/**/a", ["d/a", "d/e/a", "d/e/f/a"], ["a", "d/ba"]),
        ("a**b", ["ab", "axb"], ["a/b"]),
        ("d/a**b", ["d/ab", "d/axb"], ["d/a/b"]),
        ("?", ["a", "ä"], ["ab", ""]),
        ("d?a", ["dxa"], ["d/a"]),
        ("[ab].py", ["a.py", "x/b.py"], ["c.py", "ab.py"]),
        ("[!ab].py", ["c.py"], ["a.py"]),
        ("[^ab].py", ["c.py"], ["b.py"]),
        ("[a-c]", ["b"], ["d", "-"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[]a]", ["]", "a"], ["b"]),
        ("[!]a]", ["b"], ["]"]),
        ("[[:digit:]x]", ["7", "x"], ["a", "["]),
        (r"[\]]", ["]"], ["\\"]),
        ("d[/]a", [], ["d/a"]),
        ("d/[!x]a", ["d/ba"], ["d//a"]),
        (r"\#a", ["#a"], ["a"]),
        (r"\!a", ["!a"], ["a"]),
        (r"\*", ["*"], ["a"]),
        ("a ", ["a"], ["a "]),
        ("a\\ ", ["a "], ["a"]),
        ("a\r\n", ["a"], ["a\r"]),
        (" a", [" a"], ["a"]),
        ("a.b", ["a.b"], ["axb"]),
        ("(a|b)+", ["(a|b)+"], ["a"]),
        ("*", ["a", "d/a", ".x", "d/"], []),
        ("/*", ["a", "d/"], ["d/a"]),
        ("ä*", ["äö"], ["aö"]),
    ],
)
def test_a_pattern_matches_as_in_git(
    pattern: str, matching: list[str], unmatched: list[str]
) -> None:
    assert [path for path in matching if not is_ignored([pattern], path)] == []
    assert [path for path in unmatched if is_ignored([pattern], path)] == []


@pytest.mark.parametrize("line", ["", "  ", "# a", "/", "//", "!", "a\\", "[a", "[", "!/"])
def test_a_line_that_can_match_nothing_is_no_pattern(line: str) -> None:
    assert parse(line) is None


def test_the_last_pattern_that_matches_decides() -> None:
    lines = ["*.py", "!keep.py", "d/keep.py"]
    assert is_ignored(lines, "a.py") is True
    assert is_ignored(lines, "keep.py") is False
    assert is_ignored(lines, "d/keep.py") is True
    assert is_ignored(lines, "a.txt") is None


def test_a_white_list_opens_folders_and_the_named_files() -> None:
    lines = ["*", "!*/", "!*.py"]
    assert [is_ignored(lines, path) for path in ("a.txt", "d/", "d/a.py", "d/a.txt")] == [
        True,
        False,
        False,
        True,
    ]
