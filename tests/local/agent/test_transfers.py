"""Blobs between a pod and its controller: how many go at one time, and what holds them up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kubetorch.datastore import transfer
from kubetorch.datastore.blobs import BlobStore, digest_of
from kubetorch.errors import ConfigError, DataStoreError, ProtocolError
from kubetorch.lib import deadlines, sockets
from kubetorch.lib.http_server import Server
from kubetorch.pod.session import ControllerAddress
from kubetorch.pod.transfers import Transfers
from kubetorch.pod.tuning import LIMITS
from kubetorch.wire import exceptions, routes
from tests.local.starved import no_new_threads

FILE = b"def f(): return 1"


class Controller:
    """Takes uploads when it is let; gives blobs at once."""

    def __init__(self) -> None:
        self.letting = asyncio.Event()
        self.uploads = 0
        self.is_busy = asyncio.Event()
        self.blobs = {digest_of(FILE): FILE}
        #: Statuses and bodies that it answers with first.
        self.refusals: list[tuple[int, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        status, body = 200, b"{}"
        if self.refusals:
            status, body = self.refusals.pop(0)
        elif scope["path"] == routes.BLOBS_FETCH:
            blobs = self.blobs
            body = b"".join(transfer.compressed(blobs, lambda d: (len(blobs[d]), [blobs[d]])))
        else:
            self.uploads += 1
            if self.uploads == LIMITS.transfer_threads:
                self.is_busy.set()
            await self.letting.wait()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def pod(folder: Path) -> AsyncIterator[tuple[Transfers, Controller]]:
    controller = Controller()
    server = Server(controller)
    listener = sockets.listen(sockets.LOOPBACK, 0)
    await server.start(listener)
    url_file = folder / "controller-url"
    url_file.write_text(f"http://{sockets.LOOPBACK}:{listener.getsockname()[1]}")
    transfers = Transfers(
        BlobStore(folder / "blobs"), ControllerAddress(url_file=str(url_file), fixed_token="token")
    )
    try:
        async with deadlines.timeout(60):
            yield transfers, controller
    finally:
        transfers.close()
        await server.close(1.0)


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


async def upload(transfers: Transfers, content: bytes) -> str:
    [digest] = await transfers.upload([lambda: [content]])
    return digest


def transfer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kubetorch-transfer"}


def test_many_uploads_take_few_threads_and_hold_up_no_deploy(tmp_path: Path) -> None:
    before = transfer_threads()  # of an earlier test, which are ending

    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            uploads = [
                asyncio.create_task(upload(transfers, bytes([number]) * 100))
                for number in range(5 * LIMITS.transfer_threads)
            ]
            await controller.is_busy.wait()
            mine = transfer_threads() - before
            assert len(mine) == LIMITS.transfer_threads
            assert await transfers.fetch([digest_of(FILE)]) == 1
            controller.letting.set()
            assert len(set(await asyncio.gather(*uploads))) == 5 * LIMITS.transfer_threads

    run(scenario)


def test_uploads_that_nobody_waits_for_any_more_make_room_when_they_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            uploads = [
                asyncio.create_task(upload(transfers, bytes([number]) * 100))
                for number in range(2 * LIMITS.transfer_threads)
            ]
            await controller.is_busy.wait()
            for task in uploads:
                task.cancel()
            await asyncio.wait(uploads)
            assert controller.uploads == LIMITS.transfer_threads
            controller.letting.set()
            assert await upload(transfers, b"last") == digest_of(b"last")

    run(scenario)


@pytest.mark.faults
def test_fault_a_pod_that_can_start_no_thread_says_so_and_goes_on_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            controller.letting.set()
            with no_new_threads():
                for _ in range(LIMITS.transfer_threads + 1):
                    with pytest.raises(DataStoreError, match="cannot start a thread"):
                        await upload(transfers, b"result")
            assert await upload(transfers, b"result") == digest_of(b"result")

    run(scenario)


def test_a_controller_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            controller.refusals = [(503, b"")]
            assert await transfers.fetch([digest_of(FILE)]) == 1

    run(scenario)


def test_a_controller_whose_address_is_not_known_yet_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, _):
            url_file = tmp_path / "controller-url"
            hidden = url_file.rename(tmp_path / "hidden")
            fetching = asyncio.create_task(transfers.fetch([digest_of(FILE)]))
            while "the controller's URL is unknown" not in caplog.text and not fetching.done():
                await asyncio.sleep(0.01)
            hidden.rename(url_file)
            assert await fetching == 1

    run(scenario)


def test_what_a_controller_refuses_is_its_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            failure = exceptions.describe_refusal(ProtocolError("no digests"))
            controller.refusals = [(400, failure.to_json()), (418, b"a teapot")]
            with pytest.raises(ProtocolError, match="no digests"):
                await transfers.fetch([digest_of(FILE)])
            with pytest.raises(DataStoreError, match=r"the controller answered 418: .*a teapot"):
                await transfers.fetch([digest_of(FILE)])

    run(scenario)


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_controller_that_cannot_do_it_yet_is_asked_until_it_can(
    tmp_path: Path, status: int
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            failure = exceptions.describe_refusal(DataStoreError("1 blobs are not here: pod a"))
            controller.refusals = [(status, failure.to_json())] * 3
            reasons: list[str] = []
            assert await transfers.fetch([digest_of(FILE)], reasons.append) == 1
            assert len(reasons) == 1
            assert "1 blobs are not here: pod a" in reasons[0]

    run(scenario)


def test_a_fetch_ends_when_it_is_cancelled_in_the_moment_in_which_it_is_told_to_hurry(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, _):

            def supersede() -> None:
                fetching.cancel()
                transfers.hurry()

            def begin_to_wait(_: str) -> None:
                asyncio.get_running_loop().call_soon(supersede)

            missing = [digest_of(b"of a deploy that was cut")]
            fetching = asyncio.create_task(transfers.fetch(missing, begin_to_wait))
            await asyncio.wait([fetching], timeout=60)
            assert fetching.cancelled()

    run(scenario)


def test_blobs_that_the_controller_does_not_have_are_waited_for_and_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            blobs, controller.blobs = controller.blobs, {}
            waiting = asyncio.Event()

            def wait(reason: str) -> None:
                assert f"not have 1 blobs that the code consists of, such as {digest_of(FILE)}" in (
                    reason
                )
                waiting.set()

            fetching = asyncio.create_task(transfers.fetch([digest_of(FILE)], wait))
            await waiting.wait()
            controller.blobs = blobs
            transfers.hurry()
            assert await fetching == 1

    run(scenario)


def test_a_second_request_for_lost_blobs_is_met_after_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, controller):
            store = BlobStore(tmp_path / "blobs")
            for content in (b"first", b"second"):
                store.put(digest_of(content), content)
            controller.refusals = [(503, b"")] * 3
            transfers.send_later((digest_of(b"first"),), ())
            await asyncio.sleep(0)
            transfers.send_later((digest_of(b"second"),), ())
            controller.letting.set()
            while controller.uploads < 2:
                await asyncio.sleep(0.01)

    run(scenario)


def test_what_is_no_url_of_a_controller_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pod(tmp_path) as (transfers, _):
            (tmp_path / "controller-url").write_text("ftp://controller")
            with pytest.raises(ConfigError, match=r"the controller's URL: .*ftp://controller"):
                await transfers.fetch([digest_of(FILE)])

    run(scenario)
