"""What a pod remembers of its image, on disk: the steps that it ran, and environments of its own.

<root>/image.json             the steps that this pod ran
<root>/environments/<number>  environments of this pod alone
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kubetorch.errors import ProtocolError
from kubetorch.lib import files
from kubetorch.specs.image import Plan, Step, plan
from kubetorch.wire import messages

#: Environments of the pod's own that its workers may still use.
_KEPT = 4


class Ran(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pod ran.

    Attributes:
        base: Identity of the interpreter, see `venvs.base_digest`.
        steps: The steps.
        own: Number of the environment of the pod's own that they made.
        generation: The generation whose steps these are, once all of them were run.
    """

    base: str = ""
    steps: tuple[Step, ...] = ()
    own: int | None = None
    generation: int = 0


class Records:
    """The records of one pod.

    Args:
        root: The pod's folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "image.json"
        self._environments = root / "environments"
        self._used: deque[Path] = deque(maxlen=_KEPT)
        #: What it ran.
        self.ran = self._read()

    def todo(self, generation: int, steps: Sequence[Step]) -> Plan:
        """What has to be run for a generation; for one that was there already nothing has."""
        if self.ran.generation == generation and self.ran.steps == tuple(steps):
            return Plan(len(steps), ())
        return plan(self.ran.steps, steps)

    def commit(self, ran: Ran) -> None:
        """Remember what was run."""
        if ran != self.ran:
            files.write_atomically(self._path, messages.encode(ran))
            self.ran = ran

    def own(self, number: int) -> Path:
        """The folder of an environment of the pod's own."""
        return self._environments / str(number)

    def new_own(self) -> int:
        """A number that no environment of the pod's own has."""
        return max(self._numbers(), default=0) + 1

    def use(self, venv: Path | None) -> None:
        """Workers will use this environment; remove those that none can use any more."""
        if venv is not None:
            self._used.append(venv)
        needed = set(self._used)
        if self.ran.own is not None:
            needed.add(self.own(self.ran.own))
        for number in self._numbers():
            if self.own(number) not in needed:
                shutil.rmtree(self.own(number), ignore_errors=True)

    def _numbers(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            names = [path.name for path in self._environments.iterdir()]
            return [int(name) for name in names if name.isdigit()]
        return []

    def _read(self) -> Ran:
        try:
            return messages.decode(Ran, self._path.read_bytes())
        except (FileNotFoundError, ProtocolError):
            return Ran()
