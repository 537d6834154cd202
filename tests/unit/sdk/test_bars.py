"""Bars as they are drawn."""

import io
import sys

import pytest

from kubetorch.lib import terminal
from kubetorch.sdk import backend, bars
from kubetorch.sdk.bars import Bar


def drawn(monkeypatch, *shown, width=80, height=40, **environ):
    variables = {"COLUMNS": str(width), "LINES": str(height), "NO_COLOR": "1", "TERM": "xterm"}
    for name, value in (variables | environ).items():
        monkeypatch.setenv(name, value)
    return bars._drawn(list(shown), io.StringIO()).split("\n")


def bar(label, doing, share=None):
    progress_bar = Bar(label)
    progress_bar.update(doing, share)
    return progress_bar


def test_a_bar_has_a_line_however_narrow_the_terminal_is(monkeypatch):
    shown = [
        bar("train", "uploading 180.2 of 300.0 MiB", 0.5),
        bar("somebody-s-long-name", "0 of 2 pods are ready;\nno node\r\x1b[2Jhas room " * 9),
    ]
    for width in (80, 40, 20):
        lines = drawn(monkeypatch, *shown, width=width)
        assert len(lines) == 2
        # Ctrl-C is written behind it, and must not begin another line.
        assert max(map(len, lines)) <= width - 3
    first, second = drawn(monkeypatch, *shown)
    *words, elapsed = first.split()
    assert words == ["train", "━" * 10 + "─" * 10, "uploading", "180.2", "of", "300.0", "MiB"]
    assert elapsed in ("0s", "1s")
    assert "ready; no node \\x1b[2Jhas room 0 of 2" in drawn(monkeypatch, *shown, width=200)[1]
    assert second.endswith(("… 0s", "… 1s"))


@pytest.mark.parametrize("share", [-1, 0, 0.3, 1, 17])
def test_a_bar_takes_any_share(monkeypatch, share):
    (line,) = drawn(monkeypatch, bar("p", "17/3", share))
    full = {-1: 0, 0: 0, 0.3: 6, 1: 20, 17: 20}[share]
    assert (line.count("━"), line.count("─")) == (full, 20 - full)


def test_of_many_bars_as_many_are_drawn_as_there_is_room_for(monkeypatch):
    lines = drawn(monkeypatch, *(bar(f"pod-{number}", "epoch") for number in range(64)))
    assert (len(lines), lines[-1]) == (9, "… and 56 more")
    assert len(drawn(monkeypatch, *(bar(str(n), "") for n in range(9)), height=5)) == 4


def test_bars_have_colours_where_there_are_colours(monkeypatch):
    plain = drawn(monkeypatch, bar("p", "x", 0.5))
    coloured = drawn(monkeypatch, bar("p", "x", 0.5), NO_COLOR="")
    assert ("\x1b[" in plain[0], "\x1b[" in coloured[0]) == (False, True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_line_about_kept_calls_is_above_the_bars(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where it was not said before
    monkeypatch.setattr(backend.choices, "is_quiet", False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    terminal.say_once.cache_clear()
    bars._foot.text = "price  connecting"
    bars._foot.put(bars._foot.text)
    backend.announce_records()
    bars._foot.erase()
    before, line, after = sys.stderr.getvalue().partition("kubetorch: calls that fail keep ")
    assert (before, line != "") == ("price  connecting\r\x1b[K", True)
    assert after.endswith("turns it off\nprice  connecting\r\x1b[K")
