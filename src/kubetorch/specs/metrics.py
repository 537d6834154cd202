"""The pods' use of resources, as callers see it: `kt.MetricsConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kubetorch.errors import SpecError


@dataclass(frozen=True)
class MetricsConfig:
    """Settings of the lines about the pods' use of resources; this release streams none.

    Attributes:
        interval: Seconds between two lines.
        scope: Whether a line is about the whole service (`"resource"`) or about each pod (`"pod"`).
    """

    interval: int = 30
    scope: Literal["resource", "pod"] = "resource"

    def __post_init__(self) -> None:
        interval: object = self.interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise SpecError(f"interval is {interval!r}; it must be a number of seconds, 1 or more")
        if self.scope not in ("resource", "pod"):
            raise SpecError(f"scope is {self.scope!r}; it must be 'resource' or 'pod'")
