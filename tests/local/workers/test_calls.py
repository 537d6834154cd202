"""Calls through a real worker: values, failures, generators, cancellation, concurrency."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from kubetorch.errors import CallCancelledError, CallRefusedError, CallTimeoutError
from kubetorch.lib import memory
from tests.local.worker_harness import CallFailed, agent, run

SHOP = '''
import asyncio, functools, os, sys, threading, time
from contextvars import ContextVar

def add(a, b=1):
    return a + b

def echo(value):
    return value

async def add_async(a, b=1):
    await asyncio.sleep(0)
    return a + b

def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

class Odd:
    """Not JSON."""

class Money(Exception):
    def __init__(self, amount, currency):
        super().__init__(f"{amount} {currency}")
        self.amount = amount

seen = ContextVar("seen", default="nothing")

class Shop:
    limit = 3
    def __init__(self, start=0):
        self.n = start
        self.events = []
        self.started = threading.Event()
    def add(self, k):
        self.n += k
        return self.n
    def echo(self, value):
        return value
    async def aecho(self, value):
        await asyncio.sleep(0)
        return value
    def sleep(self, seconds):
        self.started.set()
        time.sleep(seconds)
        return "slept"
    def pause(self, path=None, count=1):
        if path is not None:
            self.barrier(count)
            while not os.path.exists(path):
                time.sleep(0.01)
        return "paused"
    async def asleep(self, seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return "slept"
    def wait_until_started(self):
        return self.started.wait(20)
    def spin(self, seconds):
        end = time.monotonic() + seconds
        try:
            self.started.set()
            while time.monotonic() < end:
                self.events.count(1)
        except BaseException as error:
            self.events.append(type(error).__name__)
            raise
        return "spun"
    def get_events(self):
        return self.events
    def count(self, n):
        for i in range(n):
            self.n = i
            yield i
        return "end"
    async def acount(self, n):
        try:
            for i in range(n):
                self.n = i
                yield i
        finally:
            self.events.append("closed")
    def endless(self):
        try:
            i = 0
            while True:
                self.n = i
                yield i
                i += 1
        finally:
            self.events.append("closed")
    def produced(self):
        return self.n
    @staticmethod
    def static(a): return ["static", a]
    @classmethod
    def of_class(cls, a): return [cls.__name__, a]
    @property
    def size(self): return 1
    def _private(self): return 1
    @wrapped
    def decorated(self, a): return a
    def lazily(self, a):
        return self.aecho(a)
    def money(self): raise Money(3, "EUR")
    def chained(self):
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("no such thing") from error
    def odd(self): return {"fine": 1, "list": [1, Odd()]}
    def exits(self): sys.exit(3)
    def interrupts(self): raise KeyboardInterrupt
    def inner_type_error(self): return len(5)
    def set_context(self, value):
        before = seen.get()
        seen.set(value)
        return before
    def checksum(self, array):
        return [float(array.sum()), bool(array.flags.writeable), array.ctypes.data % 64]
    def double(self, array):
        array *= 2
        return array
    def keep(self, array):
        self.kept = array
        return None
    def kept_sum(self):
        return float(self.kept.sum())
    def respond(self):
        class Response:
            body = b"<p>hi</p>"
            media_type = "text/html"
        return Response()
    async def abarrier(self, n):
        self.waiting = getattr(self, "waiting", 0) + 1
        end = time.monotonic() + 60
        while self.waiting < n and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return self.waiting >= n
    def barrier(self, n):
        with self.lock():
            self.waiting = getattr(self, "waiting", 0) + 1
        end = time.monotonic() + 60
        while self.waiting < n and time.monotonic() < end:
            time.sleep(0.001)
        return self.waiting >= n
    _lock = threading.Lock()
    def lock(self): return self._lock

class Door:
    def __call__(self, name): return f"hello {name}"

class Wall:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def test_functions_are_called_with_arguments_and_keywords(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("add")
            assert await a.call(worker, 1) == 2
            assert await a.call(worker, 1, b=5) == 6
            async_worker = await a.worker("add_async")
            assert await a.call(async_worker, 2, b=5) == 7

    run(main())


def test_an_instance_is_constructed_once_and_keeps_its_state(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop", init_args='{"start": 5}')
            assert await a.call(worker, 2, method="add") == 7
            assert await a.call(worker, 3, method="add") == 10
            second_worker = await a.worker("Shop", init_args='{"start": 5}')
            assert await a.call(second_worker, 2, method="add") == 7

    run(main())


def test_every_kind_of_method_can_be_called(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            assert await a.call(worker, 1, method="static") == ["static", 1]
            assert await a.call(worker, 1, method="of_class") == ["Shop", 1]
            assert await a.call(worker, 1, method="decorated") == 1
            assert await a.call(worker, 1, method="aecho") == 1
            # A plain function that returns a coroutine: it is awaited.
            assert await a.call(worker, 1, method="lazily") == 1
            door = await a.worker("Door")
            assert await a.call(door, "you") == "hello you"
            assert await a.call(door, "you", method="__call__") == "hello you"

    run(main())


def test_what_is_no_public_method_is_not_found(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for method in ("nothing", "_private", "__init__", "size", "limit", "n"):
                failure = await a.failure(worker, method=method)
                assert failure.code == "callable_not_found", method
                assert method in failure.message
                assert not failure.started
            failure = await a.failure(worker, method="ad")
            assert "did you mean add?" in failure.state["hint"]
            wall = await a.worker("Wall")
            assert (await a.failure(wall)).code == "callable_not_found"
            function = await a.worker("add")
            failure = await a.failure(function, method="add")
            assert failure.code == "callable_not_found"
            assert await a.call(worker, 1, method="echo") == 1

    run(main())


def test_arguments_that_do_not_bind_fail_before_anything_runs(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            failure = await a.failure(worker, 1, 2, 3, method="add")
            assert failure.error_type == "TypeError"
            assert "positional argument" in failure.message
            assert not failure.started
            # A TypeError of the user's own code is not that.
            failure = await a.failure(worker, method="inner_type_error")
            assert failure.error_type == "TypeError"
            assert failure.started

    run(main())


def test_the_users_exception_arrives_with_its_own_traceback(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            failure = await a.failure(worker, method="money")
            assert (failure.error_type, failure.module) == ("Money", "shop")
            assert failure.args == ["3 EUR"]
            assert failure.state["amount"] == 3
            assert failure.pod_name == "pod-0"
            assert failure.started
            assert 'raise Money(3, "EUR")' in failure.traceback
            assert "kubetorch" not in failure.traceback
            failure = await a.failure(worker, method="chained")
            assert failure.cause is not None
            assert failure.cause["error_type"] == "KeyError"

    run(main())


def test_exceptions_that_end_programs_end_only_the_call(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            assert (await a.failure(worker, method="exits")).error_type == "SystemExit"
            assert (await a.failure(worker, method="interrupts")).error_type == "KeyboardInterrupt"
            assert await a.call(worker, 1, method="echo") == 1
            assert worker.is_alive

    run(main())


def test_a_result_that_json_cannot_carry_is_named_with_its_place(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            failure = await a.failure(worker, method="odd")
            assert failure.code == "serialization"
            assert "shop.Odd at $.list[1]" in failure.message
            assert await a.call(worker, 1, method="echo") == 1

    run(main())


@pytest.mark.parametrize("body", [b"{", b"[1, 2]", b'{"args": 3}', b"\xff\xfe"])
def test_arguments_that_are_no_arguments_are_refused(folder: Path, body: bytes) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            failure = await a.failure(worker, method="echo", arguments=[body])
            assert failure.code == "serialization"
            assert not failure.started
            assert await a.call(worker, 1, method="echo") == 1

    run(main())


def test_a_pickle_that_cannot_be_loaded_is_refused(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for garbage in (b"garbage", b"cnowhere\nnothing\n."):
                failure = await a.failure(
                    worker, method="echo", codec="pickle", arguments=[garbage]
                )
                assert failure.code == "serialization"

    run(main())


def test_codec_none_passes_raw_content_with_its_type(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            text = a.open(worker, "héllo", method="echo", codec="none")
            await text.result()
            assert text.raw == ["héllo".encode(), b"text/plain; charset=utf-8"]
            response = a.open(worker, method="respond", codec="none")
            await response.result()
            assert response.raw == [b"<p>hi</p>", b"text/html"]
            assert await a.call(worker, {"a": 1}, method="echo", codec="none") == {"a": 1}

    run(main())


# ---------------------------------------------------------------------------------- concurrency


def test_sync_calls_overlap_up_to_the_number_of_threads(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            calls = [a.open(worker, 40, method="barrier") for _ in range(40)]
            assert all([await call.result() for call in calls])

    run(main())


def test_more_calls_than_threads_are_refused_with_the_reason(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop", threads=2)
            end = folder / "end"
            calls = [a.open(worker, str(end), method="pause") for _ in range(2)]
            with pytest.raises(CallFailed, match=r"2 calls run .* no thread for one more"):
                await a.call(worker, method="pause")
            end.touch()
            assert [await call.result() for call in calls] == ["paused"] * 2
            assert await a.call(worker, method="pause") == "paused"

    run(main())


def test_more_calls_than_declared_threads_wait_in_line(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop", threads=2, may_wait=True)
            began = time.monotonic()
            calls = [a.open(worker, 0.1, method="sleep") for _ in range(6)]
            assert [await call.result() for call in calls] == ["slept"] * 6
            assert time.monotonic() - began > 0.29

    run(main())


def test_a_call_that_is_usually_quick_does_not_hold_up_others_when_it_is_slow(
    folder: Path,
) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for _ in range(200):
                await a.call(worker, method="pause")
            end = folder / "end"
            slow = [a.open(worker, str(end), 8, method="pause") for _ in range(8)]
            assert await a.call(worker, 1, method="echo") == 1
            assert not any(call.ends for call in slow)
            assert await a.call(worker, 8, method="barrier")
            end.touch()
            for call in slow:
                assert await call.result() == "paused"

    run(main())


def test_async_calls_run_at_the_same_time(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            calls = [a.open(worker, 100, method="abarrier") for _ in range(100)]
            assert all([await call.result() for call in calls])

    run(main())


def test_thousands_of_calls_all_end_with_their_own_result(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for method in ("echo", "aecho"):
                calls = [a.open(worker, i, method=method) for i in range(1500)]
                assert [await call.result() for call in calls] == list(range(1500))

    run(main())


def test_a_worker_with_too_many_calls_refuses_more(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            calls = [a.open(worker, 0.5, method="asleep") for _ in range(2000)]
            with pytest.raises(CallRefusedError):
                a.open(worker, 1, method="echo")
            for call in calls:
                await call.result()
            assert await a.call(worker, 1, method="echo") == 1

    run(main())


def test_context_variables_of_one_call_are_not_those_of_the_next(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            assert await a.call(worker, "first", method="set_context") == "nothing"
            assert await a.call(worker, "second", method="set_context") == "nothing"

    run(main())


# ------------------------------------------------------------------------------- large payloads


def test_large_arrays_lie_writable_and_aligned_in_shared_memory(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            array = np.arange(12_500_000, dtype=np.float64)
            total, writable, misaligned = await a.call(
                worker, array, method="checksum", codec="pickle"
            )
            assert (total, writable, misaligned) == (float(array.sum()), True, 0)
            for _ in range(3):
                value = await a.call(worker, array, method="double", codec="pickle")
                assert np.array_equal(value, array * 2)

    run(main())


def test_memory_that_user_code_keeps_is_not_used_again(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            ones = np.ones(1_000_000)
            await a.call(worker, ones, method="keep", codec="pickle")
            for _ in range(5):
                await a.call(worker, ones * 7, method="checksum", codec="pickle")
            assert await a.call(worker, method="kept_sum") == 1_000_000.0

    run(main())


def test_a_result_that_is_kept_does_not_change(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            arrays = [
                await a.call(worker, np.full(500_000, float(i)), method="echo", codec="pickle")
                for i in range(5)
            ]
            assert [array[0] for array in arrays] == [0.0, 1.0, 2.0, 3.0, 4.0]
            assert [array[-1] for array in arrays] == [0.0, 1.0, 2.0, 3.0, 4.0]

    run(main())


def test_payloads_of_every_size_around_the_limits_arrive_whole(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for size in (0, 1, 65_000, 65_536, 262_100, 262_144, 262_200, 1_048_600, 5_000_000):
                text = "é" * (size // 2)
                assert await a.call(worker, text, method="echo") == text
                data = bytes(size)
                assert await a.call(worker, data, method="echo", codec="pickle") == data
            many = [np.full(3, i) for i in range(3000)]
            value = await a.call(worker, many, method="echo", codec="pickle")
            assert all(np.array_equal(x, y) for x, y in zip(value, many, strict=True))

    run(main())


def test_files_of_memory_are_used_again(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            array = np.ones(2_000_000)
            for _ in range(20):
                await a.call(worker, array, method="echo", codec="pickle")
            descriptors = list(Path(f"/proc/{worker.pid}/fd").iterdir())
            mapped = Path(f"/proc/{worker.pid}/maps").read_text().count("memfd:kubetorch")
            assert len(descriptors) < 30
            assert mapped < 12
            memory.trim()

    run(main())


# ----------------------------------------------------------------------------------- generators


@pytest.mark.parametrize(("method", "end"), [("count", "end"), ("acount", None)])
def test_generators_stream_and_return(folder: Path, method: str, end: Any) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 100, method=method)
            call.on_value = lambda _: worker.grant(call.number, 1)
            assert await call.result() == end
            assert call.streamed
            assert call.yields == list(range(100))

    run(main())


@pytest.mark.parametrize("method", ["count", "acount"])
def test_a_generator_does_not_run_ahead_of_its_grants(folder: Path, method: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 1000, method=method)
            while len(call.yields) < 16:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            assert len(call.yields) == 16
            assert await a.call(worker, method="produced") == 15
            worker.grant(call.number, 4)
            while len(call.yields) < 20:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            assert len(call.yields) == 20
            worker.grant(call.number, 10_000)
            await call.result()
            assert call.yields == list(range(1000))

    run(main())


@pytest.mark.parametrize("method", ["endless", "acount"])
def test_a_cancelled_generator_is_closed(folder: Path, method: str) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            args = [10**9] if method == "acount" else []
            call = a.open(worker, *args, method=method)
            while len(call.yields) < 16:
                await asyncio.sleep(0.005)
            worker.cancel(call.number, "enough", timed_out=False)
            with pytest.raises(CallFailed) as caught:
                await call.result()
            assert caught.value.failure.code == "call_cancelled"
            assert caught.value.failure.message == "enough"
            assert await a.call(worker, method="get_events") == ["closed"]

    run(main())


# --------------------------------------------------------------------------------- cancellation


def test_a_cancelled_async_call_ends_with_its_reason(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 60, method="asleep")
            await a.call(worker, 0, method="asleep")  # on the loop after it
            worker.cancel(call.number, "the caller is gone", timed_out=False)
            with pytest.raises(CallFailed) as caught:
                await call.result()
            assert caught.value.failure.code == "call_cancelled"
            assert caught.value.failure.message == "the caller is gone"
            assert await a.call(worker, method="get_events") == ["cancelled"]

    run(main())


def test_a_sync_call_that_returns_to_the_interpreter_is_interrupted(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 60, method="spin")
            assert await a.call(worker, method="wait_until_started")
            worker.cancel(call.number, "2 s are over", timed_out=True)
            with pytest.raises(CallFailed) as caught:
                await call.result()
            assert caught.value.failure.code == "call_timeout"
            assert "in spin" in caught.value.failure.traceback
            assert await a.call(worker, method="get_events") == ["CallTimeoutError"]
            assert worker.is_alive

    run(main())


def test_an_interruption_never_reaches_another_call(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            for i in range(300):
                call = a.open(worker, (i % 10) / 10_000, method="spin")
                worker.cancel(call.number, "now", timed_out=False)
                following = a.open(worker, 0.0001, method="spin")
                assert await following.result() == "spun"
                try:
                    assert await call.result() == "spun"
                except CallFailed as error:
                    assert error.failure.code == "call_cancelled"
            assert worker.is_alive

    run(main())


def test_a_call_that_waits_in_line_is_cancelled_without_running(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop", threads=1, may_wait=True)
            end = folder / "end"
            first = a.open(worker, str(end), method="pause")
            waiting = a.open(worker, 1, method="add")
            worker.cancel(waiting.number, "not needed", timed_out=False)
            with pytest.raises(CallFailed) as caught:
                await waiting.result()
            assert not first.ends
            assert caught.value.failure.message == "not needed"
            assert not caught.value.failure.started
            end.touch()
            assert await first.result() == "paused"
            assert await a.call(worker, method="produced") == 0

    run(main())


def test_a_call_that_cannot_be_interrupted_costs_its_worker(folder: Path) -> None:
    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            stuck = a.open(worker, 60, method="sleep")
            second_call = a.open(worker, 60, method="asleep")
            assert await a.call(worker, method="wait_until_started")
            began = time.monotonic()
            worker.cancel(stuck.number, "its time is over", timed_out=True)
            with pytest.raises(CallTimeoutError, match="its time is over"):
                await stuck.result()
            assert 1.9 < time.monotonic() - began < 20
            with pytest.raises(Exception, match="could not be interrupted") as caught:
                await second_call.result()
            assert type(caught.value).__name__ == "WorkerRecycledError"
            error = await a.exit()
            assert type(error).__name__ == "WorkerRecycledError"
            fresh = await a.worker("Shop")
            assert await a.call(fresh, 1, method="echo") == 1

    run(main())


def test_a_stopped_worker_is_killed_when_a_call_on_it_is_cancelled(folder: Path) -> None:
    import os
    import signal

    async def main() -> None:
        async with agent(folder) as a:
            worker = await a.worker("Shop")
            call = a.open(worker, 60, method="asleep")
            await a.call(worker, 1, method="echo")
            os.kill(worker.pid, signal.SIGSTOP)
            while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
            worker.cancel(call.number, "gone", timed_out=False)
            with pytest.raises(CallCancelledError):
                await call.result()
            await a.exit()
            assert not worker.is_alive

    run(main())
