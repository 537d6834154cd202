"""Arguments and results of a worker in sealed files in memory."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from kubetorch.errors import WorkerDiedError
from kubetorch.lib import memory, memory_files
from kubetorch.lib.memory_files import MemoryFile
from kubetorch.pod.user_process import protocol
from tests.local.worker_harness import Outcome, agent, run

pytestmark = pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files")

SHOP = """
import os, socket, time
from pathlib import Path
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
    def add(self, array, number):
        array += number
        return array
    def ones(self, count):
        import numpy
        return numpy.ones(count)
    def each(self, count, times):
        import numpy
        for number in range(times):
            yield numpy.full(count, number)
    def keep(self, array):
        self.array = array
    def mapped(self, array=None):
        return Path("/proc/self/maps").read_text().count("memfd:kubetorch")
    def sleep(self, array):
        print("asleep", flush=True)
        time.sleep(60)
    def forge(self, text, sizes):
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


def census() -> int:
    """Files in memory that this process has open or mapped."""
    gc.collect()
    memory.trim()
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    return sum(link.startswith("/memfd:") for link in links) + maps.count("/memfd:")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = census()
    yield
    assert census() == before


def test_an_array_goes_and_comes_in_sealed_files_and_is_the_functions_to_change(
    folder: Path,
) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            array = numpy.arange(100_000.0)
            call = pod.open(worker, array, 1, method="add", codec="values", takes_files=True)
            result = await call.result()
            assert call.payloads == [MemoryFile]
            assert (result == array + 1).all()
            assert array[0] == 0
            result += 1  # it is the caller's to change, too

    run(main())


def test_small_values_come_in_the_stream_also_to_a_caller_that_takes_files(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            call = pod.open(worker, 10, method="ones", codec="values", takes_files=True)
            assert len(await call.result()) == 10
            assert MemoryFile not in call.payloads

    run(main())


def test_values_of_a_generator_come_in_sealed_files(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            call = pod.open(worker, 50_000, 3, method="each", codec="values", takes_files=True)
            await call.result()
            assert call.payloads[:3] == [MemoryFile] * 3
            assert [int(array[-1]) for array in call.yields] == [0, 1, 2]

    run(main())


def test_a_caller_that_takes_no_files_gets_none(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            call = pod.open(worker, 100_000, method="ones", codec="values")
            assert len(await call.result()) == 100_000
            assert MemoryFile not in call.payloads

    run(main())


def test_a_worker_keeps_only_its_share_of_other_memory_in_place(folder: Path) -> None:
    size = 400_000

    async def main() -> None:
        async with agent(folder, memory_limit=10 * size) as pod:
            worker = await pod.worker("Shop")
            mapped = await pod.call(worker, method="mapped")
            for _ in range(2):
                array = numpy.ones(size // 8)
                call = pod.open(worker, array, method="keep", codec="values", takes_files=True)
                await call.result()
            assert await pod.call(worker, method="mapped") == mapped + 1
            # This array does not fit into its share, so it is a copy.
            array = numpy.ones(3 * size // 8)
            call = pod.open(worker, array, method="mapped", codec="values", takes_files=True)
            assert await call.result() == mapped + 1
            call = pod.open(worker, array, 1, method="add", codec="values", takes_files=True)
            assert (await call.result() == 2).all()

    run(main())


def test_the_end_of_a_worker_frees_what_it_was_sent(folder: Path) -> None:
    files_before = census()

    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            array = numpy.ones(1_000_000)
            calls = [
                pod.open(worker, array, method="sleep", codec="values", takes_files=True)
                for _ in range(3)
            ]
            while [line.text for line in calls[0].lines] != ["asleep"]:
                await asyncio.sleep(0.01)
            os.kill(worker.pid, signal.SIGKILL)
            for call in calls:
                with pytest.raises(WorkerDiedError):
                    await call.result()
            await pod.exit()
            del calls, call
            assert census() <= files_before

    run(main())


SEALED = protocol.FILE | protocol.SEALED | protocol.DESCRIPTOR
FORGERIES = {
    "not sealed": (protocol.pack(protocol.RESULT, 1, flags=SEALED, length=4096), [4096]),
    "not sealed, and cut": (protocol.pack(protocol.RESULT, 1, flags=SEALED, length=4096), [9]),
    "a file of the pool that can be cut": (
        protocol.pack(
            protocol.RESULT,
            1,
            flags=protocol.FILE | protocol.DESCRIPTOR,
            argument=7,
            length=4096,
        ),
        [4096],
    ),
}


@pytest.mark.security
@pytest.mark.parametrize("name", FORGERIES)
def test_a_worker_that_sends_a_file_that_could_be_cut_is_ended(folder: Path, name: str) -> None:
    text, sizes = FORGERIES[name]

    async def main() -> None:
        async with agent(folder) as pod:
            worker = await pod.worker("Shop")
            call: Outcome = pod.open(worker, text.hex(), sizes, method="forge")
            with pytest.raises(WorkerDiedError, match="wrote to its connection"):
                await call.result()
            await pod.exit()
            assert census() == 0

    run(main())
