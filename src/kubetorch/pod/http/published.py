"""The blobs of keys that a pod publishes, for programs of its namespace.

The controller gives them a token for this alone. Blobs are read in few threads: a pod that many
getters read from goes on serving its calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kubetorch.errors import DataStoreError
from kubetorch.lib.asgi import NDJSON, Request, Responder, with_status
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import blobs as records
from kubetorch.wire import messages
from kubetorch.wire.data import AskBlobs

if TYPE_CHECKING:
    from kubetorch.datastore.publications import Publications

_T = TypeVar("_T")


class Published:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._publications: Publications | None = None
        self._free = asyncio.Semaphore(LIMITS.publishing_threads)

    async def answer(self, request: Request, respond: Responder) -> None:
        names = messages.decode(AskBlobs, await request.body(LIMITS.blob_names_bytes))
        publications, manifest = self._opened(), names.manifest
        if names.is_only_check:
            faults = publications.faults(manifest, names.blobs)
            await respond.stream(self._lines(faults), NDJSON, request.disconnected())
            return
        try:
            await self._in_thread(lambda: publications.check(manifest, names.blobs))
        except DataStoreError as error:
            raise with_status(error, 404) from error.__cause__
        pieces = self._pieces(publications, manifest, names.blobs)
        await respond.stream(pieces, records.CONTENT_TYPE, request.disconnected())

    async def _pieces(
        self, publications: Publications, manifest: str, blobs: Sequence[str]
    ) -> AsyncGenerator[bytes, None]:
        """The stream of blobs; those that the pod is getting itself are sent as they come.

        It ends early if none comes for a while, so that a getter sees that this pod is alive.
        """
        remaining, waited, pause = dict.fromkeys(blobs), 0.0, TIMING.arrival_check_seconds
        while remaining and waited < TIMING.arrival_seconds:
            try:
                arrived = await self._in_thread(lambda: publications.arrived(manifest, remaining))
            except DataStoreError:  # the program that got them has just ended
                return
            if not arrived:
                waited += pause
                await asyncio.sleep(pause)
                pause = min(2 * pause, TIMING.arrival_longest_check_seconds)
                continue
            waited, pause = 0.0, TIMING.arrival_check_seconds
            pieces = await self._in_thread(partial(publications.packed, manifest, arrived))
            while (piece := await self._in_thread(partial(next, pieces, None))) is not None:
                yield piece
            for digest in arrived:
                del remaining[digest]

    def _opened(self) -> Publications:
        if self._publications is None:
            from kubetorch.datastore.publications import Publications  # noqa: PLC0415  # few pods

            self._publications = Publications(self._folder)
        return self._publications

    async def _lines(self, faults: Iterator[tuple[str, str]]) -> AsyncGenerator[bytes, None]:
        while (fault := await self._in_thread(lambda: next(faults, None))) is not None:
            yield messages.encode(fault) + b"\n"

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        async with self._free:
            return await asyncio.to_thread(work)
