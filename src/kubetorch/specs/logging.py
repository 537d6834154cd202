"""The logs of a service, and the part of them that the caller sees: `kt.LoggingConfig`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from kubetorch.errors import SpecError

Level = Literal["debug", "info", "warning", "error", "critical"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error", "critical")


def _default_level() -> Level:
    level = os.environ.get("KT_LOG_LEVEL", "info").lower()
    if level not in LEVELS:
        raise SpecError(f"KT_LOG_LEVEL is {level!r}; it must be one of {', '.join(LEVELS)}")
    return level


@dataclass(unsafe_hash=True)
class LoggingConfig:
    """The part of a service's logs that reaches the caller. Fields can be set at any time.

    Attributes:
        stream_logs: Whether calls and deploys stream logs; `None` leaves it to `kt.config`.
        level: Lowest level of lines that are shown, and that the workers of programs which do not
            configure logging write. Prints are always shown, unless the program gives the root
            logger a handler: then what it writes to stdout counts as `info`, to stderr as `error`.
        include_system_logs: Whether lines of the agent itself are shown too.
        include_events: Whether events of pods are shown while a deploy runs.
        grace_period: Without effect: lines arrive before the result of the call that wrote them.
        include_name: Whether each line begins with the pod's name in parentheses.
        poll_timeout: Without effect: nothing polls.
        grace_poll_timeout: Without effect: nothing polls.
        shutdown_grace_period: Seconds that a blocking call waits for late lines after its result.
    """

    stream_logs: bool | None = None
    level: Level = field(default_factory=_default_level)
    include_system_logs: bool = False
    include_events: bool = True
    grace_period: float = 2.0
    include_name: bool = True
    poll_timeout: float = 1.0
    grace_poll_timeout: float = 0.5
    shutdown_grace_period: float = 0

    def __setattr__(self, name: str, value: object) -> None:
        _check(name, value)
        super().__setattr__(name, value)


_FLAGS = ("stream_logs", "include_system_logs", "include_events", "include_name")
_TIMES = ("grace_period", "poll_timeout", "grace_poll_timeout", "shutdown_grace_period")


def _check(name: str, value: object) -> None:
    """Refuse an impossible value of a field."""
    if name == "level" and value not in LEVELS:
        raise SpecError(
            f"level is {value!r}; it must be one of {', '.join(LEVELS)}",
            hint='for example kt.LoggingConfig(level="info")',
        )
    is_default = name == "stream_logs" and value is None
    if name in _FLAGS and not isinstance(value, bool) and not is_default:
        raise SpecError(f"{name} is {value!r}; it must be True or False")
    if name in _TIMES:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):  # type: ignore[operator]  # a number
            raise SpecError(f"{name} is {value!r}; it must be a number of seconds, 0 or more")
