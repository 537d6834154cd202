"""What a pod ran of its image, and the environments that are its own.

As the files of a container are, both are gone when the agent starts again: it runs the steps anew.

    <root>/own/<number>  environments of this pod alone
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kubetorch.specs.image import EnvStep, Plan, Step, plan

#: Environments of the pod's own that its workers may still use.
_KEPT = 4


class Ran(NamedTuple):
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
        self._environments = root / "own"
        shutil.rmtree(self._environments, ignore_errors=True)
        self._used: deque[Path] = deque(maxlen=_KEPT)
        self._last = 0
        #: What it ran.
        self.ran = Ran()
        #: The variables that its images have set so far, apart from those of environments.
        self.variables: dict[str, str] = {}

    def todo(self, generation: int, steps: Sequence[Step]) -> Plan:
        """What has to be run for a generation; for one that was there already nothing has."""
        if self.ran.generation == generation and self.ran.steps == tuple(steps):
            return Plan(len(steps), ())
        return plan(self.ran.steps, steps)

    def environ(self, environ: Mapping[str, str], steps: Sequence[Step]) -> dict[str, str]:
        """The variables before any step: those that no step sets any more keep their values.

        Args:
            environ: What they are without an image.
            steps: Those that are wanted.
        """
        own = {step.name for step in steps if isinstance(step, EnvStep)}
        left = {name: value for name, value in self.variables.items() if name not in own}
        return {**environ, **left}

    def own(self, number: int) -> Path:
        """The folder of an environment of the pod's own."""
        return self._environments / str(number)

    def new_own(self) -> int:
        """A number that no environment of the pod's own has."""
        self._last += 1
        return self._last

    def use(self, venv: Path | None) -> None:
        """Workers will use this environment; remove those that none can use any more."""
        if venv is not None:
            self._used.append(venv)
        needed = set(self._used)
        if self.ran.own is not None:
            needed.add(self.own(self.ran.own))
        with contextlib.suppress(FileNotFoundError):
            for path in self._environments.iterdir():
                if path not in needed:
                    shutil.rmtree(path, ignore_errors=True)
