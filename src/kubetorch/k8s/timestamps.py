"""Times as the API writes them."""

from __future__ import annotations

import datetime


def seconds(timestamp: str | None) -> float:
    """Seconds since the epoch of a time such as `2026-01-31T12:00:00Z`; 0 for none."""
    if not timestamp:
        return 0.0
    return datetime.datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
