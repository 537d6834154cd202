"""Adopting workloads that an earlier controller applied: again and again, until it succeeds.

A controller that starts asks for much at once, and one request too many is refused. A workload that
is not known for that reason is adopted later, without a new deploy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from kubetorch.controller.backends.kubernetes.apply import Applier
from kubetorch.controller.backends.kubernetes.objects import (
    AppliedWorkload,
    Identity,
    identities,
    identity,
)
from kubetorch.controller.backends.kubernetes.pods import Key
from kubetorch.errors import (
    KubernetesNotFoundError,
    KubernetesUnavailableError,
    KubetorchError,
    SpecError,
)
from kubetorch.lib import backoff
from kubetorch.lib.tasks import cancel_all
from kubetorch.manifests import labels, rendering
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.services import KubernetesServices
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Runtime

# Workloads at one time.
_AT_ONCE = 16
# Seconds until one is tried again: at first, and at most.
_AGAIN = (1.0, 30.0)

_log = logging.getLogger(__name__)


class Adopter:
    def __init__(
        self,
        adopt: Callable[[Sequence[WorkloadSpec]], Awaitable[None]],
        on_change: Callable[[Key], None],
    ) -> None:
        self._adopt = adopt
        self._on_change = on_change
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        #: Why workloads are not adopted yet.
        self.reasons: dict[Key, str] = {}

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        """Try each workload once; those that fail are tried again, and concern no other one."""
        await asyncio.gather(*map(self._try_first, specs))
        for of_one in specs:
            key = _key(of_one)
            if key in self.reasons:
                self._tasks[key] = asyncio.create_task(
                    self._adopt_later(of_one), name=f"adopt {key}"
                )

    def forget(self, key: Key) -> None:
        """Stop adopting a workload that is gone, or was applied."""
        self.reasons.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        await cancel_all(self._tasks.values())

    async def _try_first(self, specs: Sequence[WorkloadSpec]) -> None:
        error = await self._try(specs)
        if isinstance(error, KubernetesUnavailableError):
            raise error

    async def _adopt_later(self, specs: Sequence[WorkloadSpec]) -> None:
        pauses = backoff.jittered(backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1]))
        for pause in pauses:
            await asyncio.sleep(pause)
            if await self._try(specs) is None:
                break
        key = _key(specs)
        _log.info("workload adopted after all workload=%s/%s", *key)
        del self._tasks[key]
        self._on_change(key)

    async def _try(self, specs: Sequence[WorkloadSpec]) -> Exception | None:
        """Adopt a workload; returns the error if that fails."""
        key = _key(specs)
        try:
            async with self._room:
                await self._adopt(specs)
        except Exception as error:  # noqa: BLE001  # a user may have written its object
            self._note(key, error)
            return error
        self.reasons.pop(key, None)
        return None

    def _note(self, key: Key, error: Exception) -> None:
        is_refusal = isinstance(error, KubetorchError)
        reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        if self.reasons.get(key) != reason:
            trace = None if is_refusal else error
            _log.warning(
                "workload not adopted workload=%s/%s error=%s", *key, error, exc_info=trace
            )
        self.reasons[key] = reason


def _key(specs: Sequence[WorkloadSpec]) -> Key:
    return specs[0].namespace, specs[0].name


async def find_applied(
    applier: Applier, runtime: Runtime, specs: Sequence[WorkloadSpec]
) -> AppliedWorkload:
    """Find the applied spec: the wanted one, which is first, or an earlier one of another kind."""
    wanted = AppliedWorkload.of(specs[0])
    if wanted.main is None:
        return wanted
    there = await _find(applier, wanted.main)
    if there is None and rendering.operated_kind(specs[0].compute) is not None:
        plain = AppliedWorkload.of(specs[0], has_operator=False)
        other = None if plain.main is None else await _find(applier, plain.main)
        if other is not None and _template(other) == _template(plain.main or {}):
            wanted, there = plain, other
    for spec in () if there is not None else specs[1:]:
        with contextlib.suppress(SpecError):  # another version took it
            before = AppliedWorkload.of(spec)
            if before.main is not None and (other := await _find(applier, before.main)):
                before.found(other)
                return before
    wanted.equip(runtime)
    wanted.found(there)
    is_known = there is not None and identity(there) in _objects(wanted.spec)
    if is_known and len({_objects(spec) for spec in specs}) == 1:
        wanted.objects = _objects(wanted.spec)
    return wanted


def _template(one: Manifest) -> str | None:
    found: str | None = (one["metadata"].get("labels") or {}).get(labels.TEMPLATE)
    return found


async def _find(applier: Applier, main: Manifest) -> Manifest | None:
    try:
        return await applier.find(await applier.ref(main))
    except KubernetesNotFoundError:  # its kind is not there any more
        return None


def _objects(spec: WorkloadSpec) -> frozenset[Identity]:
    """The objects that a deploy applies, but for those that depend on the cluster."""
    try:
        main = None if spec.compute.is_selector_only else rendering.of_workload(spec)
    except SpecError:  # another version took it
        return frozenset()
    beside = KubernetesServices.of(spec, main).render()
    return identities(beside if main is None else [*beside, main])
