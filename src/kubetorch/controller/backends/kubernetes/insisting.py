"""Applying objects until the API server takes them, or says that it never will.

A webhook that is away, a request too many, another writer: what may still come right is tried
again, and whoever waits for the deploy is told the reason. It ends with the deploy's own time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from kubetorch.controller.backends.kubernetes.applying import Applier, Known
from kubetorch.controller.backends.kubernetes.dooms import judging
from kubetorch.controller.backends.kubernetes.watching import Key
from kubetorch.errors import KubetorchError, ServiceTimeoutError
from kubetorch.k8s.resources import Object
from kubetorch.lib import backoff, deadlines
from kubetorch.manifests.kinds import Manifest

_T = TypeVar("_T")

# Seconds until an object is applied again that could not be: at first, and at most.
_AGAIN = (0.5, 5.0)


class Wish(NamedTuple):
    """Objects of a workload that are to be there.

    Attributes:
        manifests: The objects, in the order in which they are applied.
        taken: The one that may be taken over from somebody else, if one may.
        owner: What they go away with.
        known: What is known to be there.
        timeout: Seconds for all of them.
    """

    manifests: Sequence[Manifest]
    taken: Manifest | None
    owner: Manifest | None
    known: Known
    timeout: float


class Insisting:
    """Applies, again and again if need be.

    Args:
        applier: Applies once.
        now: Seconds since the epoch.
        on_wait: Told of a workload that something keeps waiting.
    """

    def __init__(
        self, applier: Applier, *, now: Callable[[], float], on_wait: Callable[[Key], None]
    ) -> None:
        self._applier = applier
        self._now = now
        self._on_wait = on_wait
        #: Why objects are not applied yet, by workload.
        self.reasons: dict[Key, str] = {}

    async def apply(self, key: Key, wish: Wish) -> list[Object]:
        """Have the objects of a workload there; as they are then.

        Raises:
            ServiceTimeoutError: The time is over.
            KubetorchError: The API server will never take one.
        """
        async with self.within(key, wish.timeout):
            return [await self._apply(key, manifest, wish) for manifest in wish.manifests]

    async def _apply(self, key: Key, manifest: Manifest, wish: Wish) -> Object:
        takes = manifest is wish.taken
        return await self.until_taken(
            key,
            manifest,
            lambda: self._applier.apply(
                manifest,
                owner=wish.owner,
                takes=takes,
                known=wish.known,
                on_wait=lambda reason: self._wait(key, reason),
            ),
        )

    @contextlib.asynccontextmanager
    async def within(self, key: Key, seconds: float) -> AsyncIterator[None]:
        """What is asked of the API server for a workload, and how long.

        Raises:
            ServiceTimeoutError: The time is over.
        """
        try:
            async with deadlines.timeout(seconds):
                yield
        except TimeoutError as error:
            raise ServiceTimeoutError(
                f"{key[1]} could not be applied within {seconds:.0f} s: "
                f"{self.reasons.get(key, 'the API server is slow')}",
                hint="kt.Compute(launch_timeout=...) allows more time",
            ) from error
        finally:
            self.reasons.pop(key, None)

    async def until_taken(
        self, key: Key, manifest: Manifest, ask: Callable[[], Awaitable[_T]]
    ) -> _T:
        """Ask the API server for something about a manifest until it does it.

        Raises:
            KubetorchError: It never will.
        """
        pauses = backoff.exponential(first=_AGAIN[0], limit=_AGAIN[1])
        while True:
            try:
                return await ask()
            except KubetorchError as error:
                verdict = judging.judge_refusal(error, manifest, now=self._now())
                if verdict.error is error:
                    raise
                if verdict.error is not None:
                    raise verdict.error from error
                self._wait(key, verdict.reason)
                await asyncio.sleep(verdict.again or next(pauses))

    def _wait(self, key: Key, reason: str) -> None:
        self.reasons[key] = reason
        self._on_wait(key)
