"""Files and tensors to the data store and back, beside rsync, cp, Ray, and the machine's own rates.

Each round has new content: no store has any of it, and no side has another one's. Before each
measurement the disk comes to rest: no side pays for what another one left.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from blake3 import blake3

from benchmarks import ours, peers, processes
from benchmarks.figures import Budget, Figure, Limit, Row
from benchmarks.rounds import OURS, STATED, Measure, Side, compare, stated
from benchmarks.venvs import UnavailableError

#: Bytes of the large file, number of the small ones, and the part of the large one that changes.
#: By default the rounds take some minutes on two busy cores; ratios hardly depend on the size.
SIZE = int(os.environ.get("KT_BENCHMARK_BYTES") or 250_000_000)
FILES, CHANGED = 20_000, 0.01
#: Bytes of a checkpoint that is put from afar twice, of a state dict, and of what many pods get.
CHECKPOINT, WEIGHTS, SHARED, PODS = SIZE // 2**24 * 2**23, SIZE // 2**21 * 2**20, 2 * SIZE // 5, 8
#: On a disk: /tmp may be memory.
FOLDER = os.environ.get("KT_BENCHMARK_FOLDER") or tempfile.gettempdir()
#: A put is on disk when it returns, so the peer's is, too.
RSYNC, CP = "rsync daemon, --fsync", "cp"
FLOOR, MEMCPY = "slowest of TCP, disk, BLAKE3", "memcpy"
#: ext4 looks at each inode that was freed within 5 s before it takes a new one.
_FREED_INODES_SECONDS = 6.0
_PIECE, _SPACING = 1024 * 1024, 64 * 1024
_CONNECT_SECONDS = 10.0

_TIMES_RSYNC = Limit(1.5, at_least=True)
_OF_FLOOR = Limit(0.6, at_least=True)
_SMALL = Limit(1 / 3)


_TRANSFER: dict[str, Budget | None] = {FLOOR: _OF_FLOOR, RSYNC: _TIMES_RSYNC, CP: None}


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


FIGURES = (
    Figure(
        f"put of {_mb(SIZE)}",
        "put",
        "MB/s",
        {FLOOR: _OF_FLOOR, RSYNC: _TIMES_RSYNC, CP: None},
        scale=1e-6,
    ),
    Figure(
        f"get of {_mb(SIZE)}",
        "get",
        "MB/s",
        {FLOOR: _OF_FLOOR, RSYNC: _TIMES_RSYNC, CP: None},
        scale=1e-6,
    ),
    Figure("put of 20,000 files", "put small", "s", {RSYNC: _SMALL, CP: None}),
    Figure("get of 20,000 files", "get small", "s", {RSYNC: _SMALL, CP: None}),
    Figure("put of 20,000 unchanged files", "unchanged", "s", {STATED: Limit(1.0), RSYNC: None}),
    Figure("sent after a change of 1 % in one place", "changed", "share", {STATED: Limit(1.0)}),
    Figure(
        f"sent of a checkpoint of {_mb(CHECKPOINT)}, 1 % of it changed",
        "scattered",
        "share",
        {STATED: Limit(1.0)},
    ),
    Figure("time of that put, of the first one's", "scattered time", "share", {STATED: Limit(1.0)}),
    Figure(
        f"{_mb(WEIGHTS)} of weights to another process",
        "weights",
        "MB/s",
        {MEMCPY: Limit(0.5, at_least=True), peers.RAY: None},
        scale=1e-6,
    ),
    Figure(
        f"copies that the store sent, {_mb(SHARED)} to {PODS} pods",
        "copies",
        "",
        {STATED: Limit(1.0)},
    ),
    Figure(f"time of each copy, {_mb(SHARED)} to {PODS} pods", "copy", "s", {CP: None}),
    Figure("memory of the client", "memory", "MB", {STATED: Limit(1.0)}, scale=1e-6),
)


def run(rounds: int) -> list[Row]:
    """Measure."""
    with files() as sources:
        return compare(FIGURES, _sides(sources), rounds)


def _sides(sources: Path) -> list[Side]:
    return [
        Side(OURS, "ours", lambda: _ours(sources)),
        Side(RSYNC, "peer", lambda: _rsync(sources)),
        Side(CP, "floor", lambda: _cp(sources)),
        Side(FLOOR, "floor", _floor),
        Side(MEMCPY, "floor", _memcpy),
        Side(peers.RAY, "peer", _ray),
        stated(
            {
                "unchanged": 0.5,
                "changed": 0.03,
                "scattered": 0.05,
                "scattered time": 0.4,
                "copies": 2.5,
                "memory": 128e6,
            }
        ),
    ]


# -------------------------------------------------------------------------------------- the files


@contextmanager
def files() -> Iterator[Path]:
    """A folder with the files that are stored, made once for all rounds and sides."""
    with tempfile.TemporaryDirectory(prefix="kt-files-", dir=FOLDER) as name:
        folder = Path(name)
        with (folder / "large").open("wb") as file:
            for begin in range(0, SIZE, _PIECE):
                file.write(os.urandom(min(_PIECE, SIZE - begin)))
        small_files(folder)
        yield folder


def renew(folder: Path) -> None:
    """Make other files of them: each chunk, however it is cut, becomes another one."""
    with (folder / "large").open("r+b", buffering=0) as file:
        for begin in range(0, SIZE, _SPACING):
            file.seek(begin)
            file.write(os.urandom(8))
    for path in (folder / "small").rglob("*.txt"):
        with path.open("r+b", buffering=0) as file:
            file.write(os.urandom(512))


def settle(*, has_deleted_files: bool = False) -> None:
    """Wait until the disk has all that was written, and has forgotten what was deleted."""
    os.sync()
    if has_deleted_files:
        time.sleep(_FREED_INODES_SECONDS)


def change(path: Path) -> None:
    """Change a part of the file, in one place."""
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(os.urandom(int(SIZE * CHANGED)))


def small_files(folder: Path) -> None:
    for number in range(FILES):
        parent = folder / "small" / str(number // 200)
        if not number % 200:
            parent.mkdir(parents=True)
        (parent / f"{number}.txt").write_bytes(os.urandom(512) + b"text" * 128)


# -------------------------------------------------------------------------------------- the sides


@contextmanager
def _ours(folder: Path) -> Iterator[Measure]:
    with (
        ours.project(["getters.py"]) as project,
        ours.home() as home,
        ExitStack() as programs,
    ):
        # Programs do not inherit what is ours.
        env = home | {"KT_BENCHMARK_BYTES": str(SIZE), "KT_BENCHMARK_FOLDER": FOLDER}
        client, writer, reader = (
            programs.enter_context(
                processes.program("kubetorch_store", str(project), str(folder), env=env)
            )
            for _ in range(3)
        )

        def measure() -> dict[str, float]:
            renew(folder)
            # The client never has a file of its own in memory, so its peak is what we take.
            values = {**client.ask("files"), **writer.ask("scattered")}
            seconds = writer.ask("put_weights")["seconds"] + reader.ask("get_weights")["seconds"]
            return {**values, "weights": WEIGHTS / seconds}

        yield measure


@contextmanager
def _rsync(sources: Path) -> Iterator[Measure]:
    program = shutil.which("rsync")
    if program is None:
        raise UnavailableError("rsync is not installed: apt-get install rsync")
    with tempfile.TemporaryDirectory(prefix="kt-rsync-", dir=FOLDER) as name:
        folder = Path(name)
        (folder / "store").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        settings = folder / "rsyncd.conf"
        settings.write_text(
            f"use chroot = no\nuid = {os.getuid()}\ngid = {os.getgid()}\n"
            f"[store]\npath = {folder}/store\nread only = no\n"
        )
        command = [program, "--daemon", "--no-detach", f"--port={port}", f"--config={settings}"]
        daemon = subprocess.Popen([*command, "--address=127.0.0.1"])
        try:
            _wait_for(port)
            url = f"rsync://127.0.0.1:{port}/store"
            command = [program, "-a", "--fsync"]
            yield lambda: _copied(
                folder, sources, lambda source, target: [*command, source, target], url
            )
        finally:
            daemon.terminate()
            daemon.wait()


@contextmanager
def _cp(sources: Path) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory(prefix="kt-cp-", dir=FOLDER) as name:
        folder = Path(name)
        (folder / "store").mkdir()
        yield lambda: _copied(
            folder,
            sources,
            lambda source, target: ["cp", "-a", source, target],
            f"{folder}/store",
        )


def _copied(
    folder: Path, sources: Path, command: Callable[[str, str], list[str]], store: str
) -> dict[str, float]:
    """Copy files to a store and back."""
    renew(sources)
    settle(has_deleted_files=True)

    def seconds(source: str, target: str) -> float:
        settle()
        began = time.perf_counter()
        subprocess.run(command(source, target), check=True)
        return time.perf_counter() - began

    values = {}
    for name, source in (("", sources / "large"), (" small", sources / "small")):
        (folder / "out").mkdir()
        values[f"put{name}"] = seconds(str(source), f"{store}/")
        values[f"get{name}"] = seconds(f"{store}/{source.name}", f"{folder}/out")
        if name:
            values["unchanged"] = seconds(str(source), f"{store}/")
        shutil.rmtree(folder / "out")
    shutil.rmtree(folder / "store")
    (folder / "store").mkdir()
    return values | {
        "put": SIZE / values["put"],
        "get": SIZE / values["get"],
        "copy": values["get"] * SHARED / SIZE,
    }


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


@contextmanager
def _floor() -> Iterator[Measure]:
    def measure() -> dict[str, float]:
        tcp, hashing = _tcp_rate(), _hash_rate()
        return {
            "put": min(tcp, hashing, _disk_rate(is_synced=True)),
            "get": min(tcp, hashing, _disk_rate(is_synced=False)),
        }

    yield measure


@contextmanager
def _memcpy() -> Iterator[Measure]:
    source, target = bytearray(os.urandom(_PIECE)) * (WEIGHTS // _PIECE), bytearray(WEIGHTS)

    def measure() -> dict[str, float]:
        began = time.perf_counter()
        memoryview(target)[:] = source
        return {"weights": WEIGHTS / (time.perf_counter() - began)}

    yield measure


@contextmanager
def _ray() -> Iterator[Measure]:
    with ExitStack() as stack:
        try:
            driver = stack.enter_context(peers.ray())
        except processes.ProgramError as error:  # it gives up on a busy machine
            raise UnavailableError("Ray does not start") from error
        yield lambda: {"weights": WEIGHTS / driver.ask("weights", size=WEIGHTS)["seconds"]}


def _tcp_rate() -> float:
    piece = bytes(_PIECE)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as sender:
                for _ in range(SIZE // _PIECE):
                    sender.sendall(piece)

        began = time.perf_counter()
        thread = threading.Thread(target=send)
        thread.start()
        receiver, _ = listener.accept()
        with receiver:
            while receiver.recv(_PIECE):
                pass
        thread.join()
        return SIZE / (time.perf_counter() - began)


def _disk_rate(*, is_synced: bool) -> float:
    """The rate of writes to a file, until they are on disk, or as `cp` has it without a sync."""
    settle()
    piece = os.urandom(_PIECE)
    with tempfile.TemporaryFile(dir=FOLDER, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(SIZE // _PIECE):
            file.write(piece)
        if is_synced:
            os.fsync(file.fileno())
        return SIZE / (time.perf_counter() - began)


def _hash_rate() -> float:
    piece = os.urandom(64 * _PIECE)
    began = time.perf_counter()
    for _ in range(4):
        blake3(piece, max_threads=blake3.AUTO).digest()
    return 4 * len(piece) / (time.perf_counter() - began)
