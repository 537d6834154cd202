"""The app of a pod, as agent, controller and clients speak of it."""

from __future__ import annotations

import msgspec


class AppView(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The app of a pod.

    Attributes:
        state: `starting`, `running` or `exited`.
        pid: Process id of its shell, while it lives.
        exit_code: What it ended with, as shells count: 128 and the signal's number when killed.
        started, ended: Seconds since the epoch.
    """

    state: str
    pid: int | None = None
    exit_code: int | None = None
    started: float = 0.0
    ended: float = 0.0
