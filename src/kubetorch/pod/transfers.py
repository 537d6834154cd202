"""Blobs between the pod and its controller: what a generation needs, what calls leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import ConfigError, ControllerUnavailableError, DataStoreError, KubetorchError
from kubetorch.lib.answers import Response
from kubetorch.lib.http import HttpClient
from kubetorch.wire import blobs, failures, routes

#: Delays between attempts to reach a controller that does not answer, in seconds.
DELAYS = (0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 2.0, 5.0, 5.0, 10.0)
#: Seconds that a transfer may go without any progress.
STALL_TIMEOUT = 30.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Transfers:
    """Fetches and uploads blobs.

    Everything that blocks runs in threads.

    Args:
        store: The pod's blobs.
        controller_file: File with the controller's base URL, read at each attempt.
        token: The session's token.
    """

    def __init__(self, store: BlobStore, *, controller_file: str, token: str) -> None:
        self._store = store
        self._controller_file = Path(controller_file)
        self._token = token
        self._client: HttpClient | None = None

    async def fetch(self, digests: Iterable[str]) -> int:
        """Have these blobs in the store; how many had to be fetched.

        Raises:
            DataStoreError: The controller does not have them, or sent something else.
            ControllerUnavailableError: It does not answer, after several attempts.
        """
        wanted = list(digests)
        missing = await _in_thread(lambda: self._store.missing(wanted))
        if missing:
            await self._persistently(lambda: self._fetch(self._store.missing(missing)))
        return len(missing)

    async def upload(self, data: bytes) -> str:
        """Store a blob in the controller; its digest.

        Raises:
            KubetorchError: The controller refused it, or does not answer.
        """
        return await _in_thread(lambda: self._upload(data))

    def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            self._client.close()

    async def _persistently(self, attempt: Callable[[], None]) -> None:
        for delay in DELAYS:
            try:
                await _in_thread(attempt)
            except ControllerUnavailableError as error:
                _log.warning("controller unavailable error=%s delay=%s", error.message, delay)
                await asyncio.sleep(delay)
            else:
                return
        await _in_thread(attempt)

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

    def _upload(self, data: bytes) -> str:
        digest = digest_of(data)

        def source(_digest: str) -> tuple[int, Iterator[bytes]]:
            return len(data), _pieces(data)

        with self._http().request(
            "POST",
            routes.BLOBS,
            body=transfer.compressed([digest], source),
            headers={"Content-Type": blobs.CONTENT_TYPE},
        ) as answer:
            _check(answer)
            answer.read()
        return digest

    def _http(self) -> HttpClient:
        """The client for the controller's URL of this moment."""
        try:
            url = self._controller_file.read_text().strip()
        except OSError as error:
            raise ControllerUnavailableError(f"the controller's URL is unknown: {error}") from error
        if self._client is None or self._client.base_url != url.rstrip("/"):
            self.close()
            try:
                self._client = HttpClient(url, self._token, timeout=STALL_TIMEOUT)
            except ValueError as error:
                raise ConfigError(f"{self._controller_file}: {error}") from error
        return self._client


async def _in_thread(function: Callable[[], _T]) -> _T:
    """Run what blocks in a thread that does not keep the process alive.

    A controller that hangs would otherwise hold up the end of the agent.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(cast("_T", result))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  # it is raised where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="kubetorch-transfer", daemon=True).start()
    return await future


def _pieces(data: bytes, size: int = 1024 * 1024) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def _check(answer: Response) -> None:
    """Raise what the controller says is wrong."""
    if answer.status < 300:
        return
    error = failures.rebuild(failures.parse_json(answer.read()))
    if answer.status in (502, 503, 504):
        raise ControllerUnavailableError(f"the controller answered {answer.status}: {error}")
    if isinstance(error, KubetorchError):
        raise error
    raise DataStoreError(f"the controller answered {answer.status}: {error}")
