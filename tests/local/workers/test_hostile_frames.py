"""User code that writes to its worker's connection to the agent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from kubetorch.errors import CallCancelledError, WorkerDiedError
from kubetorch.pod.user_process import protocol
from tests.local.worker_harness import agent, run

pytestmark = pytest.mark.security

SHOP = """
import os, socket, time
from kubetorch.pod.user_process import protocol

def connection():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return int(name)
        except OSError:
            pass

class Shop:
    def pid(self): return os.getpid()
    def write(self, text, times=1):
        descriptor = connection()
        os.set_blocking(descriptor, True)
        for _ in range(times):
            os.write(descriptor, bytes.fromhex(text))
        print("written", flush=True)
        time.sleep(60)
    def send_files(self, text, sizes):
        files = [os.memfd_create("x") for _ in sizes]
        for file, size in zip(files, sizes):
            os.ftruncate(file, size)
        with socket.socket(fileno=os.dup(connection())) as sock:
            sock.setblocking(True)
            for file in files:
                sock.sendmsg([bytes.fromhex(text)], protocol.rights(file))
        time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def resident() -> int:
    return psutil.Process().memory_info().rss


def report(value: object) -> bytes:
    data = json.dumps(value).encode()
    return protocol.pack(protocol.PROGRESS, 1, length=len(data)) + data


RESULT = protocol.RESULT
SIZES = protocol._SIZES
FORGED = {
    "meta of 1.5 GiB": protocol.pack(RESULT, 1)[:4] + bytes.fromhex("00000060") + bytes(20),
    "a payload of 2**62 bytes": protocol.pack(RESULT, 1, length=1 << 62),
    "a file of 2**62 bytes": protocol.pack(RESULT, 1, flags=protocol.FILE, length=1 << 62),
    "zeros": bytes(65536),
    "a frame that only agents send": protocol.pack(protocol.CALL, 1),
    "a failure without an end": protocol.pack(protocol.ERROR, 1, length=1 << 30),
    "a descriptor that does not come": protocol.pack(
        RESULT, 1, flags=protocol.FILE | protocol.DESCRIPTOR, length=9
    ),
    "sizes that are not there": protocol.pack(RESULT, 1, flags=SIZES, meta=b"\xff\xff\xff\xff"),
    "sizes of another payload": protocol.pack(
        RESULT, 1, flags=SIZES, meta=protocol.pack_sizes("json", [7, 9])[1], length=5
    )
    + bytes(5),
    "progress of text": report(["far", None, None]),
    "progress with a message that is a number": report([1.0, None, 5]),
    "progress that is no JSON": protocol.pack(protocol.PROGRESS, 1, length=4) + b"[[[[",
    "progress without an end": protocol.pack(protocol.PROGRESS, 1, length=1 << 20),
    "values that nobody asked for": (protocol.pack(protocol.YIELD, 1, length=1) + b"1") * 17,
}


def test_a_worker_that_sends_what_none_sends_is_ended_with_its_calls(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            for forgery, data in FORGED.items():
                worker = await pod.worker("Shop", threads=4)
                before = resident()
                with pytest.raises(WorkerDiedError, match="wrote to its connection"):
                    await pod.call(worker, data.hex(), method="write")
                    pytest.fail(forgery)
                assert isinstance(await pod.exit(), WorkerDiedError), forgery
                assert resident() - before < 100_000_000, forgery
                while psutil.pid_exists(worker.pid):
                    await asyncio.sleep(0.01)

    run(main())


def test_what_a_frame_claims_takes_no_memory_until_it_comes(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            before = resident()
            for _ in range(3):
                worker = await pod.worker("Shop", threads=4)
                text = protocol.pack(RESULT, 1, length=900 << 20).hex()
                outcome = pod.open(worker, text, method="write")
                while "written" not in [line.text for line in outcome.lines]:
                    await asyncio.sleep(0.01)
                beside = pod.open(worker, method="pid")
                await asyncio.sleep(0.3)
                assert resident() - before < 100_000_000
                worker.cancel(outcome.number, "cancelled", timed_out=False)
                with pytest.raises(CallCancelledError):
                    await outcome.result()
                with pytest.raises(WorkerDiedError):
                    await beside.result()
            assert resident() - before < 100_000_000

    run(main())


@pytest.mark.parametrize(("size", "length"), [(4096, 5000), (0, 1)], ids=["shorter", "empty"])
def test_a_memory_file_that_is_shorter_than_its_frame_says_ends_its_worker(
    folder: Path, size: int, length: int
) -> None:
    flags = protocol.FILE | protocol.DESCRIPTOR
    text = protocol.pack(RESULT, 1, flags=flags, argument=5, length=length).hex()

    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop", threads=4)
            with pytest.raises(WorkerDiedError, match="a memory file without"):
                await pod.call(worker, text, [size], method="send_files")

    run(main())


def test_descriptors_that_belong_to_no_frame_are_not_kept(folder: Path) -> None:
    text = protocol.pack(protocol.LOADED).hex()

    async def main() -> None:
        async with agent(folder) as pod:
            before = psutil.Process().num_fds()
            worker = await pod.worker("Shop", threads=4)
            with pytest.raises(WorkerDiedError, match="descriptors without a frame"):
                await pod.call(worker, text, [9] * 50, method="send_files")
            await pod.exit()
            assert psutil.Process().num_fds() < before + 20

    run(main())
