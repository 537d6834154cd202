"""What a user of the benchmarks would deploy."""

from __future__ import annotations

from typing import Any


def add(number: int) -> int:
    """Add one."""
    return number + 1


def echo(array: Any) -> Any:  # noqa: ANN401  # whatever it is
    """Give the argument back."""
    return array
