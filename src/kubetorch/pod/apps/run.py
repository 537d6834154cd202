"""What an app is started with, and what became of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from kubetorch.lib.decoding import json_decoder
from kubetorch.lib.records import record
from kubetorch.specs.app import AppSpec
from kubetorch.wire.apps import AppView

#: What a shell adds to the number of the signal that ended its command.
_SIGNALLED = 128


@record
class AppRun:
    """One run of an app.

    Attributes:
        generation: The generation that it belongs to.
        app: The app.
        folder: Absolute path of its working directory.
        env: All of its environment.
    """

    generation: int
    app: AppSpec
    folder: str
    env: tuple[tuple[str, str], ...]


class Ended(msgspec.Struct, frozen=True):
    """The end of a run that is not to be repeated.

    Attributes:
        generation: The generation that ran.
        exit_code: What it ended with.
        started, ended: Seconds since the epoch.
    """

    generation: int
    exit_code: int
    started: float
    ended: float

    @property
    def view(self) -> AppView:
        """As the controller is told."""
        return AppView(
            state="exited", exit_code=self.exit_code, started=self.started, ended=self.ended
        )


def exit_code(status: int | None) -> int:
    """An exit status as shells count it: 128 and the signal's number for one that was killed."""
    if status is None:
        return _SIGNALLED
    return _SIGNALLED - status if status < 0 else status


class Memory:
    """Remembers on disk how the app ended: an agent that is started again leaves it at that.

    Args:
        file: Where.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, generation: int) -> Ended | None:
        """How the run of a generation ended."""
        try:
            found = json_decoder(Ended).decode(self._file.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return found if found.generation == generation else None

    def keep(self, ended: Ended) -> None:
        """A run ended. On a full disk it is forgotten: then it would be repeated."""
        beside = self._file.with_suffix(".new")
        with contextlib.suppress(OSError):
            beside.write_bytes(msgspec.json.encode(ended))
            os.replace(beside, self._file)  # noqa: PTH105  # as everywhere where a name is given
