"""What a deploy shows: lines of the code that is loaded, events of pods, warnings."""

from __future__ import annotations

import time

from kubetorch.sdk import logs
from kubetorch.sdk.logs import Screen
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire.messages import DeployLog, Stage

#: Levels that leave out events which are no warnings.
_QUIET = ("warning", "error", "critical")


class LaunchLines:
    """The lines of one deploy. Each is shown once, also when the events are told again.

    Args:
        screen: Where they go.
        service: Name of the service.
        config: How it logs.
        stream_logs: Whether more is shown than warnings.
    """

    def __init__(
        self, screen: Screen, service: str, config: LoggingConfig, *, stream_logs: bool
    ) -> None:
        self._screen = screen
        self._service = service
        self._config = config
        self._stream_logs = stream_logs
        self._shown: set[DeployLog | Stage] = set()

    def log(self, line: DeployLog) -> None:
        """The user's code wrote a line while it was loaded."""
        is_wanted = line.source != "logger" or logs.is_wanted(line.level, self._config.level)
        if self._stream_logs and is_wanted and self._is_new(line):
            level = line.level if line.source == "logger" else None
            self._launch(line.text, level, line.time)

    def stage(self, stage: Stage) -> None:
        """The deploy has come so far."""
        if stage.stage == "event":
            is_wanted = self._config.include_events and self._config.level not in _QUIET
            if self._stream_logs and (stage.warning or is_wanted) and self._is_new(stage):
                text = logs.of_event(self._service, stage.pod or "pod", stage.message, time.time())
                self._screen.event(text, warning=stage.warning)
        elif stage.warning and self._is_new(stage):
            self.warn(stage.message)

    def warn(self, message: str) -> None:
        """Show a warning, in any case."""
        self._launch(message, "WARNING", time.time())

    def _launch(self, text: str, level: str | None, at: float) -> None:
        include_name = self._config.include_name
        self._screen.line(
            logs.of_launch(self._service, text, level=level, at=at, include_name=include_name)
        )

    def _is_new(self, event: DeployLog | Stage) -> bool:
        is_new = event not in self._shown
        self._shown.add(event)
        return is_new
