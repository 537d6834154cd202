"""Bars at the foot of the terminal: progress of uploads, image steps, deploys, calls and `.map`.

    train   ━━━━━━━━━━━━━─────── uploading 180.2 of 300.0 MB                               3s
    square  ⠹ 0 of 2 pods are ready: square-0 waits for a node                            12s

A thread draws the bars while an activity is waited for; it is started, and `rich` is imported, only
when the wait takes a while. Lines of Kubetorch go above the bars (`above`), and the bars are gone
while the user's own code runs, so neither garbles the other. Where stderr is no terminal, or a dumb
one, a line names the activity every few seconds. In pods, and with `kt.config.quiet`, there is
nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from kubetorch.config.settings import config
from kubetorch.lib import modules, terminal
from kubetorch.sdk import inpod
from kubetorch.sdk.tuning import TIMING

#: Bars that are drawn at most, and cells of one.
_MOST_BARS, _CELLS = 8, 20
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Bar:
    """The progress of one activity: of a service, a callable, a pod."""

    def __init__(self, label: str, *, patience: float = TIMING.bar_delay_seconds) -> None:
        self.label = label
        self.begun = time.monotonic()
        #: When the bar is shown for the first time, and when its last line was written.
        self.due = self.begun + patience
        self.last_line_time = self.begun
        #: The activity in words, and the part of it that is done, if that is known.
        self.doing = ""
        self.share: float | None = None
        self._is_silent = config.quiet or inpod.is_worker()

    def update(self, doing: str, share: float | None = None) -> None:
        self.doing, self.share = doing, share

    def step(self, doing: str, share: float | None = None) -> None:
        """Begin a step, which has a line of its own where there are no bars."""
        self.update(doing, share)
        if not (self._is_silent or _has_bars()):
            _foot.write_line(self, doing)

    def show(self) -> None:
        if not self._is_silent:
            _foot.show(self)

    def hide(self) -> None:
        """Remove the bar: the activity has ended, or the user's own code runs."""
        _foot.hide(self)

    def __enter__(self) -> Bar:
        self.show()
        return self

    def __exit__(self, *_: object) -> None:
        self.hide()


@contextmanager
def above(stream: TextIO) -> Iterator[None]:
    """Keep the text that is written to the stream meanwhile above the bars."""
    with _foot.lock:
        is_drawn = _foot.erase() if terminal.is_terminal(stream) else False
        yield
        if is_drawn:
            _foot.put(_foot.text)


class _Foot:
    def __init__(self) -> None:
        self.clear()
        # A forked child has not drawn the bars of its parent.
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        self.lock = threading.RLock()
        #: The text on the screen, and the text of the last drawing.
        self.drawn = self.text = ""
        self._shown: dict[Bar, None] = {}
        self._is_needed = threading.Event()
        self._drawer: threading.Thread | None = None

    def show(self, bar: Bar) -> None:
        with self.lock:
            self._shown[bar] = None
            self._is_needed.set()
            if self._drawer is None:
                self._drawer = threading.Thread(
                    target=self._run, name="kubetorch-bars", daemon=True
                )
                self._drawer.start()

    def hide(self, bar: Bar) -> None:
        if bar not in self._shown:
            return
        with self.lock:
            self._shown.pop(bar, None)
            if not self._shown:
                self._is_needed.clear()
                self.erase()

    def erase(self) -> bool:
        """Remove the bars from the screen; true if there were some."""
        lines, self.drawn = self.drawn.count("\n") + bool(self.drawn), ""
        if lines:
            self.put("\r\x1b[K" + "\x1b[A\x1b[K" * (lines - 1), is_drawing=False)
        return bool(lines)

    def put(self, text: str, *, is_drawing: bool = True) -> None:
        """Write on stderr in its encoding; an error of stderr ends no program."""
        stream = sys.stderr
        try:
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, broken, or none
            self._shown.clear()
            return
        if is_drawing:
            self.drawn = text

    def write_line(self, bar: Bar, words: str) -> None:
        with self.lock:
            bar.last_line_time = time.monotonic()
            self.put(f"({bar.label}) {words}\n", is_drawing=False)

    def _run(self) -> None:
        while True:
            # The thread stays for a moment: a program that takes results one by one waits often.
            if not self._is_needed.wait(1.0):
                with self.lock:
                    if not self._is_needed.is_set():
                        self._drawer = None
                        return
            time.sleep(TIMING.bar_drawing_seconds)
            with self.lock:
                self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if not _has_bars():
            for bar in self._shown:
                if now - bar.last_line_time >= TIMING.bar_line_seconds:
                    self.write_line(bar, f"{bar.doing}, {_seconds(bar)}")
            return
        due = [bar for bar in self._shown if now >= bar.due]
        if due:
            self.text = _drawn(due, sys.stderr)
            if self.text != self.drawn:
                self.erase()
                self.put(self.text)


_foot = _Foot()


def _has_bars() -> bool:
    # A pod brings no `rich` along for the user's interpreter.
    is_drawable = os.environ.get("TERM") != "dumb" and modules.find_spec("rich") is not None
    return terminal.is_terminal(sys.stderr) and is_drawable


def _seconds(bar: Bar) -> str:
    seconds = int(time.monotonic() - bar.begun)
    return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m{seconds % 60:02}s"


def _drawn(bars: list[Bar], stream: TextIO) -> str:
    """Bars for a terminal, one a line, none wider than it."""
    from rich.console import Console  # noqa: PLC0415  # 50 ms, when something takes long
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    size = shutil.get_terminal_size()
    most_bars = max(min(_MOST_BARS, size.lines - 2), 1)
    console = Console(
        file=stream,
        width=size.columns - len("^C") - 1,
        force_terminal=True,
        color_system=None if os.environ.get("NO_COLOR") else "standard",
    )
    width = min(max(len(bar.label) for bar in bars[:most_bars]), size.columns // 4)
    cells = min(_CELLS, size.columns // 4)
    spinner = _SPINNER[int(time.monotonic() / TIMING.bar_drawing_seconds) % len(_SPINNER)]
    with console.capture() as captured:
        for bar in bars[:most_bars]:
            indicator = Text(spinner, "cyan")
            if bar.share is not None:
                full = round(min(max(bar.share, 0.0), 1.0) * cells)
                indicator = Text.assemble(("━" * full, "cyan"), ("─" * (cells - full), "dim"))
            row = Table.grid(padding=(0, 1), expand=True)
            row.add_column(width=width, no_wrap=True, overflow="ellipsis")
            row.add_column(width=len(indicator))
            row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            row.add_column(no_wrap=True)
            # A message may have several lines, a row has one.
            doing = Text(terminal.visible(" ".join(bar.doing.split())))
            row.add_row(Text(terminal.visible(bar.label)), indicator, doing, Text(_seconds(bar)))
            console.print(row)
        if len(bars) > most_bars:
            console.print(Text(f"… and {len(bars) - most_bars} more"))
    return captured.get().rstrip("\n")
