"""Blobs between the pod and its controller: the code of a generation, the results of calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar
from urllib.parse import urlencode

from blake3 import blake3

from kubetorch.datastore import transfer, trees
from kubetorch.datastore.blobs import BlobStore, Source
from kubetorch.errors import ConfigError, ControllerUnavailableError, DataStoreError, KubetorchError
from kubetorch.lib import backoff, deadlines
from kubetorch.lib.http_client import HttpClient, Response
from kubetorch.pod.session import ControllerAddress
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import blobs, exceptions, routes

#: Answers of a controller that has just started, or is about to end: it does not know yet all pods
#: and blobs, or cannot check rights.
_TEMPORARY_STATUSES = (401, 403, 404, 408, 429, 500, 502, 503, 504)

#: Makes the pieces of a blob; may be called several times.
Pieces = Callable[[], Iterable[bytes]]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class _NotYetError(Exception):
    """The controller cannot transfer blobs now; the message is the reason."""


class Transfers:
    """Fetches and uploads blobs.

    Transfers block, so they run in threads; those of fetches and of uploads are separate, so that a
    deploy does not wait for uploads.
    """

    def __init__(
        self, store: BlobStore, address: ControllerAddress, *, workload: str = "", pod: str = ""
    ) -> None:
        # The pod and its workload tell the controller where to get blobs that it does not have.
        query = urlencode({"workload": workload, "pod": pod})
        self._fetch_path = f"{routes.BLOBS_FETCH}?{query}"
        self._store = store
        self._address = address
        self._fetching = _Threads()
        self._sending = _Threads()
        self._lock = threading.Lock()
        self._client: HttpClient | None = None
        # URL and token that the client was made for.
        self._client_address = ("", "")
        self._return_task: asyncio.Task[None] | None = None
        # Digests that the controller has lost and asked for: blobs, and trees with their files.
        self._lost: tuple[dict[str, None], dict[str, None]] = ({}, {})
        # Set when a retry need not wait any longer.
        self._retry_now = asyncio.Event()

    async def fetch(self, digests: Iterable[str], on_wait: Callable[[str], object] = len) -> int:
        """Fetch missing blobs into the store; returns how many were fetched.

        A fetch has no deadline: a controller may be away, and may have to get the blobs from other
        pods or from the next deploy. A caller that does not need them any more cancels it.

        Args:
            digests: The blobs.
            on_wait: Is called with the reason when the controller does not have them yet.
        """
        requested_digests = list(digests)
        missing = await self._fetching.run(lambda: self._store.missing(requested_digests))
        if missing:
            await self._until_done(
                self._fetching, lambda: self._fetch(self._store.missing(missing)), on_wait
            )
        return len(missing)

    def hurry(self) -> None:
        """Ask the controller at once for the blobs that it did not have."""
        self._retry_now.set()

    async def upload(self, blob_pieces: Sequence[Pieces]) -> list[str]:
        """Store blobs in the controller, each as a maker of its pieces; returns their digests."""
        return await self._sending.run(lambda: self._upload(blob_pieces))

    def send_later(self, digests: tuple[str, ...], of_trees: tuple[str, ...]) -> None:
        """Give the controller back the blobs that it lost, as far as this pod has them."""
        for lost_digests, requested_digests in zip(self._lost, (digests, of_trees), strict=True):
            lost_digests.update(dict.fromkeys(requested_digests))
        if self._return_task is None or self._return_task.done():
            self._return_task = asyncio.get_running_loop().create_task(self._return_lost())

    def close(self) -> None:
        if self._return_task is not None:
            self._return_task.cancel()
        if self._client is not None:
            self._client.close()

    def _fetch(self, missing: list[str]) -> None:
        if not missing:
            return
        body = json.dumps({"blobs": missing}).encode()
        headers = {"Content-Type": "application/json"}
        receiver = transfer.Receiver(self._store)
        try:
            with self._http().request(
                "POST", self._fetch_path, body=body, headers=headers
            ) as answer:
                _check(answer)
                for piece in answer.iter_bytes():
                    receiver.feed(piece)
            receiver.finish()
        finally:
            receiver.close()
        missing_blobs = self._store.missing(missing)
        if missing_blobs:
            raise _NotYetError(
                f"the controller does not have {len(missing_blobs)} blobs that the code consists "
                f"of, such as {missing_blobs[0]}"
            )

    def _upload(self, blob_pieces: Sequence[Pieces]) -> list[str]:
        blobs_by_digest: dict[str, tuple[int, Pieces]] = {}
        digests = []
        for pieces in blob_pieces:
            hasher, size = blake3(), 0
            for piece in pieces():
                hasher.update(piece)
                size += len(piece)
            digests.append(hasher.hexdigest())
            blobs_by_digest[digests[-1]] = size, pieces

        def source(digest: str) -> tuple[int, Iterable[bytes]]:
            size, pieces = blobs_by_digest[digest]
            return size, pieces()

        self._post(list(blobs_by_digest), source)
        return digests

    async def _return_lost(self) -> None:
        while any(self._lost):
            (digests, of_trees), self._lost = self._lost, ({}, {})
            try:
                await self._return_blobs(digests, of_trees)
            except (KubetorchError, OSError) as error:
                _log.warning("blobs not returned to the controller error=%s", error)

    async def _return_blobs(self, digests: Iterable[str], of_trees: Iterable[str]) -> None:
        stored_digests = await self._sending.run(lambda: self._stored(digests, of_trees))
        if stored_digests:
            post = functools.partial(self._post, stored_digests, self._store.stream)
            await self._until_done(self._sending, post, len)
        _log.info("blobs returned to the controller sent=%s", len(stored_digests))

    async def _until_done(
        self, threads: _Threads, attempt: Callable[[], None], on_wait: Callable[[str], object]
    ) -> None:
        first, limit = TIMING.transfer_first_delay_seconds, TIMING.transfer_longest_delay_seconds
        reason = ""
        for delay in backoff.jittered(first=first, limit=limit):
            self._retry_now.clear()
            try:
                await threads.run(attempt)
                return
            except (ControllerUnavailableError, _NotYetError) as error:
                if str(error) != reason:
                    reason = str(error)
                    _log.warning("controller asked again reason=%s", reason)
                    on_wait(reason)
            await deadlines.wait_at_most(delay, self._retry_now.wait())

    def _stored(self, digests: Iterable[str], of_trees: Iterable[str]) -> list[str]:
        requested_digests = dict.fromkeys(digests)
        for tree in of_trees:
            if self._store.has(tree):
                files = trees.decode(self._store.read(tree)).digests()
                requested_digests |= dict.fromkeys([tree, *files])
        missing = set(self._store.missing(requested_digests))
        return [digest for digest in requested_digests if digest not in missing]

    def _post(self, digests: list[str], source: Source) -> None:
        with self._http().request(
            "POST",
            routes.BLOBS,
            body=transfer.compressed(digests, source),
            headers={"Content-Type": blobs.CONTENT_TYPE},
        ) as answer:
            _check(answer)
            answer.read()

    def _http(self) -> HttpClient:
        """The client for the controller's URL and the token of this moment."""
        try:
            url, token = self._address.url(), self._address.token()
        except OSError as error:
            raise ControllerUnavailableError(f"the controller's URL is unknown: {error}") from error
        with self._lock:
            if self._client is None or self._client_address != (url, token):
                if self._client is not None:
                    self._client.close()
                try:
                    self._client = HttpClient(url, token, timeout=TIMING.transfer_stall_seconds)
                except ValueError as error:
                    raise ConfigError(f"the controller's URL: {error}") from error
                self._client_address = url, token
            return self._client


class _Threads:
    """Threads for blocking functions, which do not keep the process alive.

    Other threads would hold up the end of the agent while a controller hangs.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(LIMITS.transfer_threads)

    async def run(self, function: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled: the thread goes on anyhow

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  # it is raised where it is awaited
                future.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        await self._free.acquire()
        try:
            threading.Thread(target=run, name="kubetorch-transfer", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise DataStoreError(
                f"the pod cannot start a thread to talk to its controller: {error}",
                hint="it has as many processes and threads as it may have, or no memory is left",
            ) from error
        return await asyncio.wrap_future(future)


def _check(answer: Response) -> None:
    if answer.status < 300:
        return
    error = exceptions.rebuild(exceptions.parse_json(answer.read()))
    if answer.status in (502, 503, 504):
        raise ControllerUnavailableError(f"the controller answered {answer.status}: {error}")
    if answer.status in _TEMPORARY_STATUSES:
        message = error.message if isinstance(error, KubetorchError) else str(error)
        raise _NotYetError(message or f"the controller answered {answer.status}")
    if isinstance(error, KubetorchError):
        raise error
    raise DataStoreError(f"the controller answered {answer.status}: {error}")
