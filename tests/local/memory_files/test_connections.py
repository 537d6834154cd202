"""The connections for memory files, at both of their ends."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubetorch.lib import memory_files, private_sockets
from kubetorch.lib.memory_files import FileSocket
from kubetorch.pod.http.auth import Credentials, Guard
from kubetorch.pod.memory_socket import MemorySocket
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.sdk.calls.stream_values import StreamFiles
from kubetorch.wire import codecs, frames, versions

pytestmark = pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files")

GUARD = Guard(Credentials(b"k" * 32), audience="ns/f", host="127.0.0.1", clock=lambda: 0.0)


def connected(path: Path, client: str = "client") -> socket.socket:
    """A connection that has proved to be that of a client."""
    connection = private_sockets.connect(path)
    proof = frames.StreamProof(f"Bearer {GUARD.own_token()}", client, "one")
    connection.send(frames.encode_proof(proof))
    return connection


@contextmanager
def memory_socket(path: Path, attach: Callable[[str], None]) -> Iterator[MemorySocket]:
    """A socket of an agent that closes each connection that it was to attach."""

    def attach_and_close(proof: frames.StreamProof, files: FileSocket) -> bool:
        attach(proof.client)
        return False

    memory = MemorySocket(path, GUARD, attach_and_close)
    memory.open()
    try:
        yield memory
    finally:
        memory.close()


def test_silent_connections_that_came_later_do_not_keep_one_out_that_has_its_proof(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        attached: list[str] = []
        with memory_socket(tmp_path / "sockets" / "files", attached.append) as memory:
            path = Path(memory.path)
            waiting = [connected(path)]
            waiting += [
                private_sockets.connect(path) for _ in range(LIMITS.silent_file_connections + 5)
            ]
            memory.accept()
            assert attached == ["client"]
            for connection in waiting:
                connection.close()

    asyncio.run(scenario())


def test_an_agent_that_may_open_no_file_waits_and_takes_the_connection_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        attached: asyncio.Queue[str] = asyncio.Queue()
        with memory_socket(tmp_path / "sockets" / "files", attached.put_nowait) as memory:
            connection = connected(Path(memory.path))
            spare = os.open("/dev/null", os.O_RDONLY)
            os.close(spare)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))
            try:
                with caplog.at_level(logging.WARNING):
                    for _ in range(100):
                        await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert sum("waits" in record.message for record in caplog.records) == 1
            assert attached.empty()
            assert await asyncio.wait_for(attached.get(), 20 * TIMING.accept_pause_seconds)
            connection.close()

    asyncio.run(scenario())


def test_a_client_whose_file_does_not_go_sends_later_arguments_on_the_stream(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sockets" / "files"
    server = private_sockets.listen(path, 1)
    welcome = frames.Welcome(
        incarnation="one",
        pod="demo-0",
        generation=1,
        protocol=versions.PROTOCOL,
        memory_socket=str(path),
        memory_share=1_000_000,
    )
    segments = codecs.encode("json", {"args": ["x" * 1000], "kwargs": {}})
    size = sum(map(len, segments))
    unsent: list[int] = []
    files = StreamFiles()
    files.open(welcome, "Bearer token", "client")
    assert files.can_send(size, {})
    server.accept()[0].close()

    file = files.write(segments, size, lambda: unsent.append(1))

    assert file is not None
    assert not file.send()
    assert unsent == [1]
    assert not files.can_send(size, {})
    files.open(welcome, "Bearer token", "client")
    assert files.can_send(size, {})
    files.close()
    server.close()
