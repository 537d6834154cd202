"""Which zygote starts a worker: one at a time, replaced when environment or packages change."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kubetorch.lib import processes
from kubetorch.pod.workers.launching import Launched, launch
from kubetorch.pod.workers.zygotes import Forked, Zygote, ZygoteLost

OnStage = Callable[[str, str], None]

#: Libraries that read variables of a rank while they are imported, or open a device: each worker
#: has to import them itself.
NOT_PRELOADED = frozenset(
    {"deepspeed", "horovod", "jax", "jaxlib", "mpi4py", "tensorflow", "torch_xla", "vllm"}
)
#: Variables that are for workers alone: a change of theirs does not need another zygote.
_WORKER_VARIABLES = ("KT_", "POD_", "HOSTNAME")
#: How often a zygote may be lost over one preload before that is not tried any more.
_LOSSES = 2
#: How often a worker is tried to be started.
_ATTEMPTS = _LOSSES + 1


class Environment(NamedTuple):
    """What decides whether a zygote can be used.

    Attributes:
        python: The interpreter.
        env: Environment variables.
        sys_path: Entries outside of the deployed code to import from.
    """

    python: str
    env: frozenset[tuple[str, str]]
    sys_path: tuple[str, ...]


class Belongings(NamedTuple):
    """What a worker is started with.

    Attributes:
        sock: Its end of the socket.
        output: Its end of the pipe for output.
        marker: In the environment of all that it will start.
    """

    sock: socket.socket
    output: int
    marker: str


class Zygotes:
    """The zygotes of one agent: the present one, and those that only wait for their workers.

    Args:
        first: One that was started before it was known what for; used if it fits.
    """

    def __init__(self, first: Launched | None = None) -> None:
        self._lock = asyncio.Lock()
        self._first = first
        self._present: Zygote | None = None
        self._environment: Environment | None = None
        self._retired: set[Zygote] = set()
        # Why forks are not sound, for an environment and what is preloaded in it.
        self._unfit: dict[tuple[Environment, frozenset[str]], str] = {}
        self._losses: Counter[tuple[Environment, frozenset[str]]] = Counter()

    @property
    def pid(self) -> int | None:
        """The process that workers are forked from at present."""
        return self._present.pid if self._present and self._present.is_alive else None

    async def start(
        self,
        python: str,
        env: Mapping[str, str],
        sys_path: Sequence[str],
        preload: Sequence[str],
        belongings: Belongings,
        on_stage: OnStage,
    ) -> tuple[Zygote, Forked]:
        """Start a worker process; see `WorkerHost.start`.

        Raises:
            ZygoteError: It could not be started.
            OSError: There is no such interpreter.
        """
        attempt = 0
        async with self._lock:
            while True:
                attempt += 1
                try:
                    zygote = await self._ready(python, env, sys_path, preload, on_stage)
                    if zygote.unfit is not None:
                        on_stage("starting", f"a fresh interpreter: {zygote.unfit}")
                    return zygote, await zygote.fork(*belongings)
                except ZygoteLost:
                    self._retire()
                    if attempt == _ATTEMPTS:
                        raise

    async def prewarm(
        self, python: str, env: Mapping[str, str], sys_path: Sequence[str], preload: Sequence[str]
    ) -> None:
        """Have a zygote ready.

        Raises:
            ZygoteError: It could not be made ready; `start` will try again.
            OSError: There is no such interpreter.
        """
        async with self._lock:
            await self._ready(python, env, sys_path, preload, lambda _stage, _message: None)

    async def close(self) -> None:
        """End all of them."""
        async with self._lock:
            self._take_first(None)
            self._retire()
            await asyncio.gather(*(zygote.close() for zygote in self._retired))
            self._retired.clear()

    async def _ready(
        self,
        python: str,
        env: Mapping[str, str],
        sys_path: Sequence[str],
        preload: Sequence[str],
        on_stage: OnStage,
    ) -> Zygote:
        """The zygote for this environment, with these modules imported if that is sound."""
        place = _environment(python, env, sys_path)
        wanted = frozenset(name for name in preload if name.partition(".")[0] not in NOT_PRELOADED)
        unfit = self._unfit.get((place, wanted))
        zygote = self._present
        is_usable = (
            zygote is not None
            and zygote.is_alive
            and self._environment == place
            and zygote.unfit in (None, unfit)
        )
        if zygote is None or not is_usable:
            self._retire()
            launched = self._take_first(place._replace(sys_path=())) or launch(python, env)
            zygote = self._present = Zygote(launched, sys_path)
            self._environment = place
        if unfit is not None:
            zygote.unfit = unfit
        elif not zygote.preloaded.issuperset(wanted):
            await self._preload(zygote, place, wanted, on_stage)
        return zygote

    async def _preload(
        self, zygote: Zygote, place: Environment, wanted: frozenset[str], on_stage: OnStage
    ) -> None:
        names = sorted(wanted)
        on_stage("preloading", ", ".join(names))
        try:
            await zygote.preload(names, lambda name: on_stage("preloading", name))
        except ZygoteLost as error:
            self._losses[place, wanted] += not error.is_outdated
            if self._losses[place, wanted] >= _LOSSES:
                self._unfit[place, wanted] = str(error)
            raise
        if zygote.unfit is not None:
            self._unfit[place, wanted] = zygote.unfit

    def _take_first(self, place: Environment | None) -> Launched | None:
        """The zygote that was there first, if it is still there and fits; else it ends."""
        first, self._first = self._first, None
        if first is None or _environment(first.python, first.environ, ()) == place:
            return first
        first.control.close()
        processes.reap(first.pid)
        return None

    def _retire(self) -> None:
        zygote, self._present = self._present, None
        if zygote is not None:
            zygote.retire()
            self._retired = {each for each in self._retired if each.is_alive} | {zygote}


def _environment(python: str, env: Mapping[str, str], sys_path: Sequence[str]) -> Environment:
    lasting = {name: value for name, value in env.items() if not name.startswith(_WORKER_VARIABLES)}
    return Environment(python, frozenset(lasting.items()), tuple(sys_path))
