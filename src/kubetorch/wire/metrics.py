"""Metrics of user code (`kt.metric`): their names, and their way from a process to its agent.

Each agent has a named pipe, whose path is in the environment of all processes that it starts. A
process writes a line for each value, at once, so that lines of several processes never mix:

    ["<identity of the process>", "<name>", <value>]

The pipe serves workers, the processes that user code starts, and apps alike.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final, NamedTuple

#: The metrics that agents measure themselves.
MEASURED: Final = ("concurrency", "rps", "cpu", "memory")
#: Names that `kt.metric` takes.
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")


class MetricValue(NamedTuple):
    """A value of a metric in a process, as `kubetorch.lib.processes.identity` names it."""

    process: str
    name: str
    value: float


def is_free(name: str) -> bool:
    """True for a name that user code may give to a metric."""
    return NAME.fullmatch(name) is not None and name.lower() not in MEASURED


def pack(line: MetricValue) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> MetricValue | None:
    """The value in a line; `None` for a line that `pack` does not make."""
    try:
        process, name, value = json.loads(line)
        number = float(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    is_text = isinstance(process, str) and isinstance(name, str) and not isinstance(value, str)
    if not is_text or not is_free(name) or not math.isfinite(number):
        return None
    return MetricValue(process, name, number)
