"""Lines from pods in this program's output: how they look, and how they get there.

    print              (pod) text                                            stdout, cyan
    logger             (pod) 2026-01-31 12:00:00 | INFO | message            stdout, cyan
    while deploying    (service) INFO | 2026-01-31 12:00:00 | message        stdout, cyan
    warning of ours    (service) WARNING | 2026-01-31 12:00:00 | message     stderr, cyan
    event of a pod     (service events) 2026-01-31 12:00:00 | reason: text   stderr, green or yellow

Standard output has what the program and its functions print, and no line of ours.

The thread that waits for a call prints its lines, so they are in order, before its result, and with
the output of the calling code: in the notebook's cell, in a redirected `sys.stdout`. Colour is for
terminals.

In a pod, lines of a nested call are printed with colour: that is how the caller outside recognises
a line that has its pod's name already.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
import warnings
from typing import TYPE_CHECKING, TextIO

from kubetorch.errors import InstanceReplacedWarning
from kubetorch.lib import terminal
from kubetorch.sdk import bars, inpod, parameters
from kubetorch.sdk.bars import Bar
from kubetorch.sdk.calls.options import OnProgress
from kubetorch.specs.logging import LEVELS, LoggingConfig
from kubetorch.wire import frames

if TYPE_CHECKING:
    from kubetorch.wire.messages import DeployLog

_RESET = "\x1b[0m"
_CYAN, _GREEN, _YELLOW = "\x1b[36m", "\x1b[32m", "\x1b[33m"
_FORMATTED = re.compile(r"\x1b\[3[236]m(\([\w.-]+(?: events)?\) .*)\x1b\[0m", re.DOTALL)
_SEVERITY: dict[str, int] = {level: number for number, level in enumerate(LEVELS)}


def moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def is_wanted(level: str | None, lowest: str) -> bool:
    """True if a line of this level is shown; lines without a standard level are always shown."""
    severity = _SEVERITY.get((level or "").lower())
    return severity is None or severity >= _SEVERITY[lowest]


def text(line: frames.Log | DeployLog) -> str:
    """A line as people read it, without the name of its pod."""
    if line.source == "logger" or (line.source == frames.KUBETORCH and line.level is not None):
        return f"{moment(line.time)} | {line.level} | {line.text}"
    return line.text


def of_call(line: frames.Log, *, include_name: bool = True) -> str:
    return _labelled(pod_label(line.pod, line.rank), text(line)) if include_name else text(line)


def of_launch(
    service: str,
    text: str,
    *,
    level: str | None = None,
    timestamp: float = 0.0,
    include_name: bool = True,
) -> str:
    """A line that was written while a service started; one without a level is shown as it is."""
    if level is not None:
        text = f"{level} | {moment(timestamp)} | {text}"
    return _labelled(service, text) if include_name else text


def pod_label(pod: str, rank: int | None) -> str:
    return pod if rank is None else f"{pod} rank {rank}"


def _labelled(name: str, text: str) -> str:
    """A record with its name before each line: one of a logger may have several."""
    return f"({name}) " + text.replace("\n", f"\n({name}) ")


def of_event(service: str, reason: str, message: str, timestamp: float) -> str:
    return f"({service} events) {moment(timestamp)} | {reason}: {message}"


class Screen:
    """Standard output and standard error, as they are at the time of writing.

    An error of these streams is reported once, as a warning, and never disturbs a call.
    """

    def __init__(self) -> None:
        self._is_broken = False

    def line(self, text: str) -> None:
        """Print a line of the user's code."""
        self._print(sys.stdout, text, _CYAN)

    def notice(self, text: str) -> None:
        """Print a line of ours."""
        self._print(sys.stderr, text, _CYAN)

    def event(self, text: str, *, warning: bool) -> None:
        self._print(sys.stderr, text, _YELLOW if warning else _GREEN)

    def _print(self, stream: TextIO | None, text: str, colour: str) -> None:
        if stream is None:
            return
        text = terminal.shown(text, stream)
        formatted = _FORMATTED.fullmatch(text)
        if _is_coloured(stream):
            # Each line is coloured by itself, for programs that read line by line.
            lines = text.replace("\n", f"{_RESET}\n{colour}")
            text = text if formatted else f"{colour}{lines}{_RESET}"
        elif formatted:
            text = formatted[1]
        with bars.above(stream):
            self._write(stream, f"{text}\n")

    def _write(self, stream: TextIO, text: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except (OSError, ValueError) as error:  # a broken pipe, a closed file
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._is_broken:
            self._is_broken = True
            warnings.warn(f"lines from pods cannot be written: {error}", stacklevel=2)


class CallLines:
    """The lines and the progress of one call, or of several calls of one service."""

    __slots__ = ("_bar", "_config", "_on_progress", "_screen")

    def __init__(
        self, screen: Screen, config: LoggingConfig, on_progress: OnProgress | None = None
    ) -> None:
        self._screen = screen
        self._config = config
        self._on_progress = on_progress
        self._bar: Bar | None = None

    def log(self, line: frames.Log) -> None:
        """A call wrote a line, or the line says that its instance was made anew."""
        if line.instance is not None:
            parameters.warn(line.text, InstanceReplacedWarning)
        elif line.debug is not None and not line.text:
            pass  # a stop whose prompt another terminal has
        elif is_wanted(line.level, self._config.level):
            text = line.text
            if not (line.source != "logger" and _FORMATTED.fullmatch(text)):
                text = of_call(line, include_name=self._config.include_name)
            show = self._screen.notice if line.source in frames.NOT_USERS else self._screen.line
            show(text)

    def progress(self, pod: str, report: frames.Progress) -> None:
        if self._on_progress is not None:
            self._on_progress(report.current, report.total, report.message)
            return
        where, share, words = pod_label(pod, report.rank), None, f"{report.current:g}"
        if report.total and math.isfinite(report.current):
            share = report.current / report.total
            words = f"{share:.0%} {words}/{report.total:g}"
        if self._bar is None:
            self._bar = Bar(where, patience=0.0)
            self._bar.show()
        self._bar.label = where
        self._bar.update(f"{words} {report.message or ''}".rstrip(), share)

    def end(self) -> None:
        """Hide the bar: the call ended, or the waiting thread goes on with other work."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.hide()


def _is_coloured(stream: TextIO) -> bool:
    if inpod.runs_calls():
        return True
    environ = os.environ
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return terminal.is_terminal(stream) and environ.get("TERM") != "dumb"
