"""Faults, injected for real: processes that die, user code that misbehaves, missing resources."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kubetorch.errors import (
    CallRefusedError,
    OutOfMemoryError,
    WorkerDiedError,
    WorkerRecycledError,
)
from kubetorch.pod.tuning import Timing
from tests.local.worker_harness import agent, run

pytestmark = pytest.mark.faults

SHOP = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time

class Shop:
    def echo(self, value): return value
    def size(self, value): return len(value)
    def make(self, n): return bytes(n)
    def pid(self): return os.getpid()
    def sleep(self, seconds): time.sleep(seconds)
    def exit(self): os._exit(3)
    def die(self, number): os.kill(os.getpid(), number)
    def answer(self):
        print("printed")
        return "the answer"
    def crash(self): ctypes.string_at(0)
    def hold_lock_of_interpreter(self):
        ctypes.PyDLL(None).sleep(3600)
    def fork(self):
        pid = os.fork()
        return ["child" if pid == 0 else "parent", 1]
    def fork_and_raise(self):
        if os.fork() == 0:
            raise ValueError("in the child")
        return "parent"
    def fork_generator(self):
        os.fork()
        yield 1
        yield 2
    async def fork_async(self):
        os.fork()
        return "one of two"
    def exhaust(self):
        self.files = []
        try:
            while True:
                self.files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return len(self.files)
    def limit(self, n):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    def relax(self):
        for file in self.files: os.close(file)
    def close_all(self): os.closerange(3, 1000)
    def threads(self, n):
        for _ in range(n): threading.Thread(target=time.sleep, args=(3600,)).start()
    def start_children(self):
        code = "import time; time.sleep(3600)"
        one = subprocess.Popen([sys.executable, "-c", code])
        two = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        pid = os.fork()
        if pid == 0:
            time.sleep(3600)
        return [one.pid, two.pid, pid]
    def eat(self, n):
        data = [bytearray(b"x") * (1 << 20) for _ in range(n)]
        return len(data)
    def ignore_cancel(self):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
    def at_exit(self, path):
        import atexit
        atexit.register(lambda: open(path, "w").write("ran"))
    def hang_at_exit(self):
        import atexit
        atexit.register(time.sleep, 3600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
    )
    return tmp_path


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if not is_gone(pid)]
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "args", "exit_code", "words"),
    [
        ("exit", [], 3, "ended with exit code 3"),
        ("die", [signal.SIGKILL], -9, "was killed by SIGKILL"),
        ("die", [signal.SIGTERM], -15, "was killed by SIGTERM"),
        ("crash", [], -11, "was killed by SIGSEGV"),
    ],
)
def test_a_worker_that_dies_gives_its_calls_a_typed_error(
    folder: Path, method: str, args: list[int], exit_code: int, words: str
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            second_call = a.open(worker, 60, method="sleep")
            began = time.monotonic()
            call = a.open(worker, *args, method=method)
            for lost_call in (call, second_call):
                with pytest.raises(WorkerDiedError, match=words) as caught:
                    await lost_call.result()
                assert caught.value.exit_code == exit_code
                assert caught.value.pod_name == "pod-0"
                assert lost_call.ends == 1
            assert time.monotonic() - began < 59
            error = await a.exit()
            assert type(error) is WorkerDiedError
            with pytest.raises(CallRefusedError):
                a.open(worker, 1, method="echo")
            if method == "crash":
                assert any("Segmentation fault" in text for text in call.texts)
            assert await a.call(await a.worker("Shop"), 1, method="echo") == 1

    run(main())


def test_an_idle_worker_that_is_killed_is_noticed(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            os.kill(worker.pid, signal.SIGKILL)
            error = await a.exit()
            assert isinstance(error, WorkerDiedError)
            assert not worker.is_alive
            assert a.exits[0][0] is worker

    run(main())


def test_the_end_of_a_worker_whose_zygote_is_stopped_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(zygote_status_seconds=0.1)
    monkeypatch.setattr("kubetorch.pod.worker_process.zygotes.TIMING", timing)

    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            assert a.host.zygote_pid is not None
            os.kill(a.host.zygote_pid, signal.SIGSTOP)
            with pytest.raises(WorkerDiedError, match="ended with exit code 3"):
                await a.call(worker, method="exit")
            os.kill(a.host.zygote_pid, signal.SIGCONT)
            await until_gone(worker.pid)

    run(main())


def test_results_that_were_sent_before_the_end_arrive(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, method="answer")
            # The agent is busy until the worker has answered and is gone.
            assert select.select([worker.process.sock], [], [], 60)[0]
            os.kill(worker.pid, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while not is_gone(worker.pid):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert await call.result() == "the answer"
            assert call.texts == ["printed"]
            assert isinstance(await a.exit(), WorkerDiedError)

    run(main())


@pytest.mark.parametrize("ending", ["kill", "drain", "die"])
def test_nothing_that_a_worker_started_is_left(folder: Path, ending: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            children = await a.call(worker, method="start_children")
            assert not any(map(is_gone, children))
            if ending == "kill":
                await worker.kill()
            elif ending == "drain":
                await worker.drain(1)
            else:
                os.kill(worker.pid, signal.SIGKILL)
                await a.exit()
            await until_gone(worker.pid, *children)
            assert bool(a.exits) == (ending == "die")

    run(main())


# --------------------------------------------------------------------------------------- drain


def test_draining_waits_for_calls_and_runs_exit_handlers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = Timing(worker_stop_seconds=50.0)
    monkeypatch.setattr("kubetorch.pod.worker_process.worker.TIMING", timing)

    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            await a.call(worker, str(folder / "exited"), method="at_exit")
            call = a.open(worker, 0.3, method="sleep")
            await a.call(worker, 1, method="echo")
            draining = asyncio.ensure_future(worker.drain(50))
            await asyncio.sleep(0.05)
            with pytest.raises(CallRefusedError):
                a.open(worker, 1, method="echo")
            await draining
            assert await call.result() is None
            assert (folder / "exited").read_text() == "ran"
            assert not worker.is_alive
            assert a.exits == []

    run(main())


def test_draining_ends_after_its_grace_with_a_typed_error_for_the_rest(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 60, method="sleep")
            await a.call(worker, 1, method="echo")
            began = time.monotonic()
            await worker.drain(0.2)
            assert time.monotonic() - began < 59
            with pytest.raises(WorkerRecycledError, match="generation 1"):
                await call.result()

    run(main())


def test_an_exit_handler_that_hangs_does_not_keep_a_worker(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            await a.call(worker, method="hang_at_exit")
            await worker.drain(1)
            await until_gone(worker.pid)

    run(main())


# ---------------------------------------------------------------------------- user code that …


def test_a_fork_that_returns_into_the_worker_ends_silently(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for _ in range(5):
                assert await a.call(worker, method="fork") == ["parent", 1]
                assert await a.call(worker, method="fork_and_raise") == "parent"
                call = a.open(worker, method="fork_generator")
                await call.result()
                assert call.yields == [1, 2]
                assert await a.call(worker, method="fork_async") == "one of two"
            assert await a.call(worker, 1, method="echo") == 1
            assert worker.is_alive

    run(main())


def test_user_code_that_uses_up_all_descriptors_does_not_wedge_the_worker(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            await a.call(worker, 200, method="limit")
            assert await a.call(worker, method="exhaust") > 100
            # Small values need none, large results travel in the socket.
            assert await a.call(worker, 1, method="echo") == 1
            big = await a.call(worker, 5_000_000, method="make", codec="pickle")
            assert big == bytes(5_000_000)
            # A large argument needs one: it is refused before anything runs.
            failure = await a.failure(worker, bytes(5_000_000), method="size", codec="pickle")
            assert failure.error_type == "OSError"
            assert "many open files" in failure.message
            assert not failure.started
            await a.call(worker, method="relax")
            argument = bytes(5_000_000)
            assert await a.call(worker, argument, method="size", codec="pickle") == 5_000_000
            assert await a.call(worker, method="exhaust") > 100
            call = a.open(worker, method="ignore_cancel")
            worker.cancel(call.number, "enough", timed_out=False)
            with pytest.raises(Exception, match="enough"):
                await call.result()

    run(main())


def test_a_worker_whose_socket_is_closed_by_user_code_is_replaced(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, method="close_all")
            with pytest.raises(WorkerDiedError):
                await call.result()
            await a.exit()
            assert await a.call(await a.worker("Shop"), 1, method="echo") == 1

    run(main())


def test_threads_that_user_code_leaves_running_do_not_matter(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            await a.call(worker, 20, method="threads")
            assert await a.call(worker, 1, method="echo") == 1
            began = time.monotonic()
            await worker.drain(30)
            assert time.monotonic() - began < 30

    run(main())


def test_a_call_that_swallows_its_cancellation_is_ended_with_its_worker(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, method="ignore_cancel")
            await a.call(worker, 1, method="echo")
            worker.cancel(call.number, "enough", timed_out=False)
            with pytest.raises(Exception, match="enough"):
                await call.result()
            assert isinstance(await a.exit(), WorkerRecycledError)

    run(main())


def test_a_fork_that_still_sees_an_argument_keeps_its_memory(folder: Path) -> None:
    (folder / "shop.py").write_text(
        "import os\n"
        "class Shop:\n"
        "    def watch(self, array, path):\n"
        "        r, w = os.pipe()\n"
        "        if os.fork() == 0:\n"
        "            os.read(r, 1)\n"
        "            open(path, 'w').write(str(float(array.sum())))\n"
        "            os._exit(0)\n"
        "        self.w = w\n"
        "    def size(self, array): return len(array)\n"
        "    def go(self):\n"
        "        os.write(self.w, b'x')\n"
        "        os.wait()\n"
    )

    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            path = str(folder / "sum")
            await a.call(worker, np.ones(1_000_000), path, method="watch", codec="pickle")
            for _ in range(5):
                await a.call(worker, np.zeros(1_000_000), method="size", codec="pickle")
            await a.call(worker, method="go")
            assert Path(path).read_text() == "1000000.0"

    run(main())


# ----------------------------------------------------------------------------------- the agent


def _start_agent(folder: Path, scenario: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.local.worker_agent", str(folder), scenario],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_an_agent_that_is_killed_leaves_nothing_even_workers_that_are_stuck(folder: Path) -> None:
    with _start_agent(folder, "idle") as process:
        assert process.stdout is not None
        report = json.loads(process.stdout.readline())
        zygotes = [child.pid for child in psutil.Process(process.pid).children()]
        assert any("starts_thread" in message for _, message in report["stages"])
        assert not any(map(is_gone, report["workers"]))
        process.kill()
        asyncio.run(until_gone(*zygotes, *report["workers"]))


def test_workers_survive_their_zygote_and_their_end_is_known(folder: Path) -> None:
    with _start_agent(folder, "orphans") as process:
        assert process.stdout is not None
        reports = [json.loads(line) for line in process.stdout]
    assert reports[0] == {"same": True, "new_zygote": True}
    assert reports[1] == {"error": "WorkerDiedError", "exit_code": 3}
    assert reports[2] == {"zombies": [], "left": []}


# -------------------------------------------------------------------------------------- memory


def _memory_cgroup() -> Path | None:
    """A new cgroup with 150 MB, where this process may make one."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"kubetorch-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(150 * 1024 * 1024))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


def test_a_worker_that_the_kernel_kills_for_its_memory_is_told_apart(folder: Path) -> None:
    group = _memory_cgroup()
    if group is None:
        pytest.skip("this process may not make a memory cgroup")

    async def main() -> None:
        async with agent(folder) as a:
            await a.worker("Shop")
            zygote = a.host.zygote_pid
            (group / "cgroup.procs").write_text(str(zygote))
            worker = await a.worker("Shop")
            call = a.open(worker, 1000, method="eat")
            with pytest.raises(OutOfMemoryError, match="out of memory") as caught:
                await call.result()
            assert caught.value.exit_code == -9
            # One that is killed by hand is not.
            second_worker = await a.worker("Shop")
            os.kill(second_worker.pid, signal.SIGKILL)
            await a.exit()
            error = await a.exit() if len(a.exits) == 1 else a.exits[-1][1]
            assert type(error) is WorkerDiedError

    try:
        run(main())
    finally:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
