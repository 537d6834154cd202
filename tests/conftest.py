"""Fixtures for every test: an environment of its own, homes for local services, the leak check.

`pytest` runs several tests at once, each in a worker of pytest-xdist, as most of them wait for
processes. A test that is marked `alone` measures the machine or loads it: no other runs beside it.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import leaks
import shared

# How long an example takes says nothing on a machine that does other things too. The examples are
# the same in each run, so that no change is refused for what it did not break.
IS_WHOLE = os.environ.get("KT_TEST_WHOLE") == "1"
settings.register_profile("kubetorch", deadline=None, max_examples=40, derandomize=not IS_WHOLE)
settings.load_profile("kubetorch")

# A shell that starts this in the background has it ignore Ctrl-C, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
#: Variables of a developer's machine or of a CI runner that change what a test sees.
FOREIGN = (
    "GITHUB_HEAD_REF",
    "GITHUB_REF_NAME",
    "CI_COMMIT_REF_NAME",
    "CIRCLE_BRANCH",
    "KUBERNETES_SERVICE_HOST",
    "PYTHONPATH",
)
#: `FS_IOC_GETFLAGS`, `FS_IOC_SETFLAGS` and `FS_TOPDIR_FL` of Linux, see `chattr +T`.
_GET_FLAGS, _SET_FLAGS, _TOPDIR = 0x80086601, 0x40086602, 0x00020000
#: More workers than processors, as most tests wait, as far as memory allows.
WORKERS_PER_PROCESSOR, MAX_WORKERS = 3, 8


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Keep the tests of a cluster's file in one worker: they share much that takes long to make."""
    if any("cluster" in Path(argument).parts for argument in config.args):
        config.option.dist = "no" if hasattr(config, "workerinput") else "loadfile"
        # In their order, not the file with the most tests first.
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have the garbage collector never look at the tests themselves and at what they import.

    There are ten thousand of them, so each of its full runs would take half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give attacks and loops the time that they take whole."""
    if shared.WHOLE:
        for item in items:
            item.add_marker(pytest.mark.timeout(1800), append=False)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers `pytest` starts: none when single files or tests were named."""
    paths = [argument.partition("::")[0] for argument in config.args]
    if any(path.endswith(".py") for path in paths):
        return 0
    return min(WORKERS_PER_PROCESSOR * len(os.sched_getaffinity(0)), MAX_WORKERS)


class _Room:
    """Where the tests of all workers run: many at once, or those that are alone."""

    def __init__(self, folder: Path) -> None:
        self._door, self._room = (folder / "door").open("w"), (folder / "room").open("w")
        self._is_mine = False

    def enter(self, *, alone: bool) -> None:
        """Wait until there is nobody who must not be there."""
        if not self._is_mine:
            # A test that waits for all others holds the door, so that no other goes in meanwhile.
            fcntl.flock(self._door, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._door, fcntl.LOCK_UN)
            self._is_mine = alone

    def leave(self) -> None:
        """Let others in; a process that the test forked may have the files, too."""
        fcntl.flock(self._room, fcntl.LOCK_UN)
        self._is_mine = False

    def close(self) -> None:
        """Forget the files."""
        self._door.close()
        self._room.close()


_ROOM = pytest.StashKey[_Room]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of what the workers share."""
    if (given := getattr(config, "workerinput", None)) is None:
        shared.FOLDER = Path(tempfile.mkdtemp(prefix="kt-shared-", dir="/tmp"))
    else:
        shared.FOLDER = Path(given["shared"])
        # Temporary files lie where `_environment` says, in a folder of each worker.
        config.option.basetemp = None
    config.stash[_ROOM] = _Room(shared.FOLDER)


def pytest_configure_node(node: Any) -> None:
    """Name the folder to a worker that starts."""
    node.workerinput["shared"] = str(shared.FOLDER)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder."""
    config.stash[_ROOM].close()
    if not hasattr(config, "workerinput"):
        shutil.rmtree(shared.FOLDER, ignore_errors=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Keep the tests of all workers waiting while tests run that are marked `alone`."""
    room = item.config.stash[_ROOM]
    is_alone, is_next = (
        one is not None and one.get_closest_marker("alone") is not None for one in (item, nextitem)
    )
    room.enter(alone=is_alone)
    try:
        return (yield)
    finally:
        if not (is_alone and is_next):
            room.leave()


def _place_apart(folder: Path) -> None:
    """Have ext4 make each folder in this one in a part of the disk of its own.

    Where ext4 has no journal, it reuses no inode that was deleted in the last minutes, and looks at
    each of those in the same part of the disk whenever it makes a file. Tests delete thousands.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8)), sys.byteorder)
        fcntl.ioctl(descriptor, _SET_FLAGS, (flags | _TOPDIR).to_bytes(8, sys.byteorder))
    except OSError:  # another file system
        pass
    finally:
        os.close(descriptor)


@pytest.fixture(scope="session", autouse=True)
def _environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test reads the user's settings, finds the user's service, or writes into the user's home.

    `KUBECONFIG` stays: tests of the tier `cluster` are given theirs by it, and `KT_BACKEND` keeps
    all others away from it.
    """
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        temporary = folder / "tmp"
        temporary.mkdir()
        _place_apart(temporary)
        # Tools that the tests start (pyright, uv) keep what they downloaded.
        patch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", _user_cache()))
        for name in [*FOREIGN, *(name for name in os.environ if name.startswith("KT_"))]:
            patch.delenv(name, raising=False)
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("KT_BACKEND", "local")
        # A local service that a file shares has nothing to do while its tests wait for others.
        patch.setenv("KT_LOCAL_IDLE", "3600")
        home = _point_home_at(folder, patch)
        # Only now: it is in the folder of temporary files.
        _place_apart(request.getfixturevalue("tmp_path_factory").getbasetemp())
        yield
        _stop_service(home)


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that may start pods: nothing that it started or made is left."""
    if not any(request.path.is_relative_to(TESTS / tier) for tier in ("local", "seeds")):
        yield
        return
    before = leaks.Census.take()
    yield
    left = before.leaks_since()
    if left:
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture
def service_home() -> Iterator[Path]:
    """An empty home, `KT_LOCAL_DIR`, whose local service is stopped after the test."""
    with _service_home() as home:
        yield home


@pytest.fixture(scope="module")
def shared_service_home() -> Iterator[Path]:
    """As `service_home`, for all tests of a file, which then cost no start of a service each."""
    with _service_home() as home:
        yield home


@contextmanager
def _service_home() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, _folder() as folder:
        home = _point_home_at(folder, patch)
        try:
            yield home
        finally:
            _stop_service(home)
        left = leaks.processes_left_of(home)
    if left:
        pytest.fail("left running by the local service:\n" + "\n".join(left), pytrace=False)


def _point_home_at(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    local = folder / "local"
    # The first deploy of a user says that calls that fail are kept: here it is not the first one.
    mark = folder / ".kt" / "cache" / "calls-are-kept"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    patch.setenv("HOME", str(folder))
    patch.setenv("KT_LOCAL_DIR", str(local))
    patch.setenv("KT_CONFIG_FILE", str(folder / "config.yaml"))
    return local


def _stop_service(home: Path) -> None:
    if home.exists():
        from kubetorch.local import lifetime

        lifetime.stop()


@contextmanager
def _folder() -> Iterator[Path]:
    # Short, and outside of the folder that the leak check watches: paths of sockets have a limit.
    folder = Path(tempfile.mkdtemp(prefix="kt-", dir="/tmp")).resolve()
    _place_apart(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _user_cache() -> str:
    return str(Path.home() / ".cache")
