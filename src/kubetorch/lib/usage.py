"""How much memory processes use, as Linux says it; nothing where there is no `/proc`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """A process and all that it started, directly or not, as far as they live."""
    found, pending = [], [pid]
    while pending:
        one = pending.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                pending += map(int, (thread / "children").read_text().split())
    return found


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory that processes have, those that several share counted for each of them."""
    return sum(map(_resident, pids))


def proportional(pids: Iterable[int]) -> int:
    """Bytes of memory that processes have, those that several share counted once in all."""
    return sum(map(_proportional, pids))


def _resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * _PAGE if len(fields) > 1 else 0


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # It has ended, or belongs to somebody else, of whom only the sum is known.
        return _resident(pid)
    for line in lines:
        name, _, amount = line.partition(":")
        if name == "Pss":
            return int(amount.split()[0]) * 1024
    return 0


def written(size: int) -> str:
    """Bytes as manifests write them, to four digits."""
    for unit, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return str(size)
