"""Blobs between the pod and its controller: what a generation needs, what calls leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from blake3 import blake3

from kubetorch.datastore import transfer, trees
from kubetorch.datastore.blobs import BlobStore, Source
from kubetorch.errors import ConfigError, ControllerUnavailableError, DataStoreError, KubetorchError
from kubetorch.lib.http_client import HttpClient, Response
from kubetorch.pod.session import ControllerAddress
from kubetorch.wire import blobs, exceptions, routes

#: Delays between attempts to reach a controller that does not answer, in seconds.
DELAYS = (0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 10.0)
#: Seconds that a transfer may go without any progress.
STALL_TIMEOUT = 30.0
#: Threads that fetch at one time, and as many that send: each may hold a blob in memory.
MOST_THREADS = 8

#: Makes the pieces of a blob, as often as they are wanted.
Pieces = Callable[[], Iterable[bytes]]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Transfers:
    """Fetches and uploads blobs.

    Everything that blocks runs in threads; what a deploy waits for does not wait for uploads.
    """

    def __init__(self, store: BlobStore, address: ControllerAddress) -> None:
        self._store = store
        self._address = address
        self._fetching = _Threads()
        self._sending = _Threads()
        self._lock = threading.Lock()
        self._client: HttpClient | None = None
        # What the client was made for.
        self._reached = ("", "")
        self._returning: asyncio.Task[None] | None = None

    async def fetch(self, digests: Iterable[str]) -> int:
        """Fetch missing blobs into the store; returns how many were fetched."""
        wanted = list(digests)
        missing = await self._fetching.run(lambda: self._store.missing(wanted))
        if missing:
            await _with_retries(self._fetching, lambda: self._fetch(self._store.missing(missing)))
        return len(missing)

    async def upload(self, made: Sequence[Pieces]) -> list[str]:
        """Store blobs in the controller, each given by what makes its pieces; their digests."""
        return await self._sending.run(lambda: self._upload(made))

    def send_later(self, digests: tuple[str, ...], of_trees: tuple[str, ...]) -> None:
        """Give the controller back what it lost, as far as it is here."""
        if self._returning is None or self._returning.done():
            self._returning = asyncio.get_running_loop().create_task(
                self._return(digests, of_trees)
            )

    def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
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
                "POST", routes.BLOBS_FETCH, body=body, headers=headers
            ) as answer:
                _check(answer)
                for piece in answer.iter_bytes():
                    receiver.feed(piece)
            receiver.finish()
        finally:
            receiver.close()
        lacking = self._store.missing(missing)
        if lacking:
            raise DataStoreError(
                f"the controller does not have {len(lacking)} blobs that the code consists of, "
                f"such as {lacking[0]}",
                hint="deploy again: the client uploads what is missing",
            )

    def _upload(self, made: Sequence[Pieces]) -> list[str]:
        found: dict[str, tuple[int, Pieces]] = {}
        digests = []
        for pieces in made:
            hasher, size = blake3(), 0
            for piece in pieces():
                hasher.update(piece)
                size += len(piece)
            digests.append(hasher.hexdigest())
            found[digests[-1]] = size, pieces

        def source(digest: str) -> tuple[int, Iterable[bytes]]:
            size, pieces = found[digest]
            return size, pieces()

        self._post(list(found), source)
        return digests

    async def _return(self, digests: tuple[str, ...], of_trees: tuple[str, ...]) -> None:
        try:
            here = await self._sending.run(lambda: self._here(digests, of_trees))
            if here:
                await _with_retries(self._sending, lambda: self._post(here, self._store.stream))
            _log.info("blobs returned to the controller sent=%s", len(here))
        except (KubetorchError, OSError) as error:
            _log.warning("blobs not returned to the controller error=%s", error)

    def _here(self, digests: Iterable[str], of_trees: Iterable[str]) -> list[str]:
        wanted = dict.fromkeys(digests)
        for tree in of_trees:
            if self._store.has(tree):
                files = trees.decode(self._store.read(tree)).digests()
                wanted |= dict.fromkeys([tree, *files])
        missing = set(self._store.missing(wanted))
        return [digest for digest in wanted if digest not in missing]

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
            if self._client is None or self._reached != (url, token):
                if self._client is not None:
                    self._client.close()
                try:
                    self._client = HttpClient(url, token, timeout=STALL_TIMEOUT)
                except ValueError as error:
                    raise ConfigError(f"the controller's URL: {error}") from error
                self._reached = url, token
            return self._client


async def _with_retries(threads: _Threads, attempt: Callable[[], None]) -> None:
    for delay in DELAYS:
        try:
            await threads.run(attempt)
        except ControllerUnavailableError as error:
            _log.warning("controller unavailable error=%s delay=%s", error.message, delay)
            await asyncio.sleep(delay)
        else:
            return
    await threads.run(attempt)


class _Threads:
    """Threads for what blocks, which do not keep the process alive.

    A controller that hangs would otherwise hold up the end of the agent.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MOST_THREADS)

    async def run(self, function: Callable[[], _T]) -> _T:
        loop = asyncio.get_running_loop()
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it: the thread goes on anyhow

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
    if isinstance(error, KubetorchError):
        raise error
    raise DataStoreError(f"the controller answered {answer.status}: {error}")
