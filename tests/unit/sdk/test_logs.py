"""How lines from pods look, and how they get to standard output."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kubetorch.sdk import logs
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire import frames

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")


def printed(text: str, level: str | None = None, source: str = "stdout") -> frames.Log:
    return frames.Log(text, "pod-1", source, level, 1_700_000_000.0)


def test_a_print_is_labelled_with_its_pod() -> None:
    assert logs.of_call(printed("hello")) == "(pod-1) hello"
    assert logs.of_call(printed("hello"), include_name=False) == "hello"


def test_a_loggers_line_has_time_and_level() -> None:
    line = logs.of_call(printed("loaded", "INFO", "logger"))
    assert re.fullmatch(rf"\(pod-1\) {MOMENT} \| INFO \| loaded", line)


def test_each_line_of_a_record_is_labelled_and_coloured() -> None:
    line = printed("failed\nTraceback:\nValueError", "ERROR", "logger")
    text = logs.of_call(line)
    first, *further_lines = text.splitlines()
    assert first.startswith("(pod-1) ") and first.endswith("| ERROR | failed")
    assert further_lines == ["(pod-1) Traceback:", "(pod-1) ValueError"]
    assert "(pod-1)" not in logs.of_call(line, include_name=False)
    with redirect_stdout(Terminal()) as terminal:
        logs.Screen().line("(pod-1) a\n(pod-1) b")
    assert terminal.getvalue() == "\x1b[36m(pod-1) a\x1b[0m\n\x1b[36m(pod-1) b\x1b[0m\n"


def test_a_launch_line_has_level_and_time_unless_it_was_printed() -> None:
    line = logs.of_launch("svc", "importing", level="INFO", timestamp=1_700_000_000.0)
    assert re.fullmatch(rf"\(svc\) INFO \| {MOMENT} \| importing", line)
    assert logs.of_launch("svc", "raw") == "(svc) raw"


def test_an_event_names_its_reason() -> None:
    line = logs.of_event("svc", "FailedMount", "no such volume", 1_700_000_000.0)
    assert re.fullmatch(rf"\(svc events\) {MOMENT} \| FailedMount: no such volume", line)


@pytest.mark.parametrize(
    ("level", "lowest", "is_wanted"),
    [
        ("DEBUG", "info", False),
        ("INFO", "info", True),
        ("WARNING", "error", False),
        ("CRITICAL", "error", True),
        ("TRACE", "critical", True),
        (None, "critical", True),
    ],
)
def test_loggers_are_filtered_by_level(level: str | None, lowest: str, is_wanted: bool) -> None:
    assert logs.is_wanted(level, lowest) is is_wanted


def test_prints_are_shown_whatever_the_level() -> None:
    lines = logs.CallLines(logs.Screen(), LoggingConfig(level="critical"))
    with redirect_stdout(io.StringIO()) as out:
        lines.log(printed("shown"))
        lines.log(printed("hidden", "INFO", "logger"))
        lines.log(printed("shown too", source="stderr"))
    assert out.getvalue() == "(pod-1) shown\n(pod-1) shown too\n"


def test_colour_is_for_terminals() -> None:
    screen = logs.Screen()
    with redirect_stdout(Terminal()) as output, redirect_stderr(Terminal()) as errors:
        screen.line("call")
        screen.event("normal", warning=False)
        screen.event("warning", warning=True)
    assert output.getvalue() == "\x1b[36mcall\x1b[0m\n"
    assert errors.getvalue() == "\x1b[32mnormal\x1b[0m\n\x1b[33mwarning\x1b[0m\n"
    with redirect_stdout(io.StringIO()) as file:
        screen.line("call")
    assert file.getvalue() == "call\n"


def test_the_environment_decides_about_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(Terminal()) as terminal:
        logs.Screen().line("plain")
    assert terminal.getvalue() == "plain\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with redirect_stdout(io.StringIO()) as file:
        logs.Screen().line("forced")
    assert file.getvalue() == "\x1b[36mforced\x1b[0m\n"


def test_a_line_of_a_nested_call_keeps_the_name_of_its_own_pod() -> None:
    lines = logs.CallLines(logs.Screen(), LoggingConfig())
    with redirect_stdout(io.StringIO()) as out:
        lines.log(printed("\x1b[36m(inner-0) from inside\x1b[0m"))
        lines.log(printed("\x1b[36mthe user's own colour\x1b[0m"))
    assert out.getvalue() == (
        "(inner-0) from inside\n(pod-1) \x1b[36mthe user's own colour\x1b[0m\n"
    )


def test_characters_that_the_terminal_lacks_are_escaped() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with redirect_stdout(file):
        logs.Screen().line("grüße")
    file.seek(0)
    assert file.read() == "gr\\xfc\\xdfe\n"


def test_no_standard_output_is_no_problem() -> None:
    real, sys.stdout = sys.stdout, None  # type: ignore[assignment]
    try:
        logs.Screen().line("nowhere")
    finally:
        sys.stdout = real
