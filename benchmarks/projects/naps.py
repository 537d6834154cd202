"""A function that waits, and writes down that it has run."""

from __future__ import annotations

import time
from pathlib import Path


def nap(number: int, seconds: float, ledger: str = "") -> int:
    """Give the number back after so long; with `ledger`, a file, append the number to it."""
    time.sleep(seconds)
    if ledger:
        with Path(ledger).open("a") as lines:
            lines.write(f"{number}\n")
    return number
