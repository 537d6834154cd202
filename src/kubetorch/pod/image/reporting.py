"""Telling the deploy that waits, and the pod's log, what steps do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from kubetorch.wire.messages import LogReport, StageReport

#: Told of a line that a step wrote, and of the generation that it was run for.
OnStepLine = Callable[[str, int], None]


class Reporter(Protocol):
    """Tells the controller."""

    def stage(self, message: StageReport) -> None:
        """How far it is."""

    def log(self, message: LogReport) -> None:
        """A line that was written."""


class StepReports:
    """The `running.Progress` of one generation.

    Args:
        generation: The generation.
        reporter: Tells the deploy.
        on_line: Keeps lines.
    """

    def __init__(self, generation: int, reporter: Reporter, on_line: OnStepLine) -> None:
        self._generation = generation
        self._reporter = reporter
        self._on_line = on_line

    def on_step(self, message: str, *, warning: bool = False) -> None:
        """A step begins, or is not run."""
        report = StageReport(
            generation=self._generation, stage="image", message=message, warning=warning
        )
        self._reporter.stage(report)
        self._on_line(message, self._generation)

    def on_output(self, text: str) -> None:
        """A step wrote a line."""
        self._reporter.log(LogReport(generation=self._generation, text=text, time=time.time()))
        self._on_line(text, self._generation)
