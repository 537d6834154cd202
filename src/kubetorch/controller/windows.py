"""Windows in which participants of a transfer wait for each other: `kt.BroadcastWindow`.

The first participant of a group opens its window. It closes for all of them as soon as one of the
conditions of any of them is met; who comes later opens the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import DataStoreError
from kubetorch.wire.data import JoinWindow, WindowView


@dataclass
class _Window:
    opened: float
    #: By participant: its last question.
    questions: dict[str, tuple[float, JoinWindow]] = field(default_factory=dict)
    closed: float | None = None

    def is_met(self, now: float) -> bool:
        joins = [join for _, join in self.questions.values()]
        addresses = {join.ip for join in joins}
        return any(
            (join.world_size is not None and len(joins) >= join.world_size)
            or (join.timeout is not None and now >= self.opened + join.timeout)
            or (bool(join.ips) and addresses.issuperset(join.ips))
            for join in joins
        )


class Windows:
    def __init__(self) -> None:
        # By namespace and group: the windows whose participants may still ask, the open one last.
        self._windows: dict[tuple[str, str], list[_Window]] = {}

    def join(self, namespace: str, join: JoinWindow, now: float) -> WindowView:
        """Note a participant; it asks until the window is closed.

        Raises:
            DataStoreError: The question is impossible, or there are too many.
        """
        if not 0 < len(join.participant) <= LIMITS.getter_characters:
            raise DataStoreError("a participant of a window needs a name")
        if not 0 < len(join.group) <= LIMITS.group_characters:
            raise DataStoreError(
                f"group_id has {len(join.group)} characters; {LIMITS.group_characters} are allowed"
            )
        self._forget(now)
        windows = self._windows.setdefault((namespace, join.group), [])
        window = next((group for group in windows if join.participant in group.questions), None)
        if window is None:
            window = self._open(windows, now)
        window.questions[join.participant] = now, join
        if window.closed is None and window.is_met(now):
            window.closed = now
        return WindowView(window.closed is not None, len(window.questions))

    def _open(self, windows: list[_Window], now: float) -> _Window:
        if windows and windows[-1].closed is None:
            window = windows[-1]
        else:
            window = _Window(now)
            windows.append(window)
        if sum(len(group.questions) for group in windows) >= LIMITS.manifest_holders:
            raise DataStoreError(
                f"a group has up to {LIMITS.manifest_holders} participants",
                hint="name the groups apart: kt.BroadcastWindow(group_id=...)",
            )
        return window

    def _forget(self, now: float) -> None:
        """Forget participants that ask no more."""
        oldest = now - TIMING.window_silence_seconds
        for group, windows in list(self._windows.items()):
            for window in windows:
                for participant, (asked, _) in list(window.questions.items()):
                    if asked < oldest:
                        del window.questions[participant]
            windows[:] = [window for window in windows if window.questions]
            if not windows:
                del self._windows[group]
