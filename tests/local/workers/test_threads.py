"""The threads of a worker, the frames that it reads, and interruptions, without a worker."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kubetorch.errors import CallCancelledError
from kubetorch.pod.user_process import current_call, protocol
from kubetorch.pod.user_process.call_runner import Interruptible, RunningCall
from kubetorch.pod.user_process.thread_pool import Job, ThreadPool
from kubetorch.sdk.calls.call import ThreadWakeup
from kubetorch.wire import codecs
from tests.local.calling import until


class Pool:
    """A pool that takes its jobs from a queue."""

    def __init__(self, limit: int, *, has_home: bool = False) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self.threads = ThreadPool(limit, self.jobs.get, self._wait_for_unread, lambda: None)
        self.threads.start()
        self.home = threading.Thread(target=self._live, daemon=True)
        self._is_made = threading.Event()
        if has_home:
            self.home.start()
            assert self._is_made.wait(60)

    def _wait_for_unread(self) -> None:
        while self.jobs.empty() and not self._is_closed.is_set():
            time.sleep(0.0005)

    def _live(self) -> None:
        self.threads.make_home()
        self._is_made.set()
        self.threads.run_at_home()

    def run(
        self, kind: str, function: Callable[[], object], *, in_line: bool = False
    ) -> threading.Event:
        done = threading.Event()

        def job() -> None:
            function()
            self.threads.job_is_done()
            done.set()

        self.jobs.put(Job(kind, job, in_line=in_line))
        return done

    def close(self) -> None:
        self._is_closed.set()
        self.jobs.put(None)


@pytest.fixture
def pool():
    pools: list[Pool] = []

    def make(limit: int, *, has_home: bool = False) -> Pool:
        pools.append(Pool(limit, has_home=has_home))
        return pools[-1]

    yield make
    for open_pool in pools:
        open_pool.close()
        if open_pool.home.is_alive():
            open_pool.home.join(60)
            assert not open_pool.home.is_alive()


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kubetorch-")}


def test_jobs_that_wait_for_each_other_all_run(pool) -> None:
    p = pool(10)
    barrier = threading.Barrier(10)
    for done in [p.run("wait", lambda: barrier.wait(60)) for _ in range(10)]:
        assert done.wait(60)


def test_no_more_jobs_than_allowed_run_at_once(pool) -> None:
    p = pool(3)
    running, most, lock = 0, 0, threading.Lock()
    barrier = threading.Barrier(3)

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(60)
        time.sleep(0.02)
        with lock:
            running -= 1

    for done in [p.run("job", job) for _ in range(21)]:
        assert done.wait(60)
    assert most == 3


def test_quick_jobs_need_no_more_threads(pool) -> None:
    before = len(names())
    p = pool(40)
    for _ in range(500):
        assert p.run("quick", lambda: None).wait(60)
    assert len(names()) - before < 20


def test_a_job_that_is_slow_for_once_does_not_hold_up_the_others(pool) -> None:
    p = pool(40)
    for _ in range(300):
        assert p.run("mostly quick", lambda: None).wait(60)
    gate = threading.Event()
    slow = [p.run("mostly quick", lambda: gate.wait(60)) for _ in range(20)]
    assert p.run("mostly quick", lambda: None).wait(60)
    assert not any(done.is_set() for done in slow)
    gate.set()
    assert all(done.wait(60) for done in slow)


@pytest.mark.parametrize("has_home", [False, True])
def test_jobs_in_line_run_one_after_the_other_and_others_beside_them(
    pool, *, has_home: bool
) -> None:
    p = pool(40, has_home=has_home)
    lock, order = threading.Lock(), []

    def job(number: int) -> None:
        assert lock.acquire(blocking=False)
        time.sleep(0.002 if number % 50 == 0 else 0.0)
        order.append(number)
        lock.release()

    # Some wait behind another one, some come when none runs.
    for first in range(0, 400, 20):
        jobs = [p.run("line", functools.partial(job, first + n), in_line=True) for n in range(20)]
        assert all(done.wait(60) for done in jobs)
    assert order == list(range(400))
    gate = threading.Event()
    held_jobs = [p.run("line", lambda: gate.wait(60), in_line=True) for _ in range(2)]
    assert p.run("other", lambda: None).wait(60)
    assert not any(done.is_set() for done in held_jobs)
    gate.set()
    assert all(done.wait(60) for done in held_jobs)


def test_a_job_runs_at_home_unless_another_does(pool) -> None:
    p = pool(40, has_home=True)
    places: list[threading.Thread] = []
    # Some are quick, some are not, and some are slow for once.
    for number in range(400):
        pause = 0.002 if number % 7 == 0 else 0.0
        name = str(number % 3)
        job = p.run(name, lambda pause=pause: time.sleep(pause) or places.append(current_thread()))
        assert job.wait(60)
    assert set(places) == {p.home}
    gate = threading.Event()
    holds = p.run("holds", lambda: gate.wait(60))
    elsewhere = [p.run("other", lambda: places.append(current_thread())) for _ in range(20)]
    assert all(done.wait(60) for done in elsewhere)
    assert p.home not in places[400:]
    gate.set()
    assert holds.wait(60)
    assert p.run("other", lambda: places.append(current_thread())).wait(60)
    assert places[-1] is p.home


def current_thread() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.parametrize("has_home", [False, True])
def test_every_job_runs_exactly_once_under_load(pool, has_home: bool) -> None:
    p = pool(8, has_home=has_home)
    counts = [0] * 5000

    def job(i: int) -> None:
        counts[i] += 1
        if i % 97 == 0:
            time.sleep(0.003)

    events = [p.run(str(i % 3), lambda i=i: job(i)) for i in range(5000)]
    assert all(event.wait(60) for event in events)
    assert set(counts) == {1}


# ------------------------------------------------------------------------------- interruptions


def test_an_interruption_arrives_inside_its_block_or_not_at_all() -> None:
    late = []
    delivered = 0
    requests: queue.SimpleQueue[Interruptible | None] = queue.SimpleQueue()

    def interrupter() -> None:
        while (interruptible := requests.get()) is not None:
            interruptible.interrupt(CallCancelledError)

    thread = threading.Thread(target=interrupter, daemon=True)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for i in range(5000):
        interruptible = Interruptible()
        try:
            with interruptible:
                requests.put(interruptible)
                # Now and then there is time for it to come, however busy the machine is.
                end = time.monotonic() + 5 if i % 1000 == 999 else 0.0
                for _ in range(i % 400):
                    pass
                while time.monotonic() < end:
                    pass
        except CallCancelledError:
            delivered += 1
        try:
            for _ in range(50):
                pass
        except CallCancelledError:
            late.append(i)
    sys.setswitchinterval(interval)
    requests.put(None)
    try:
        thread.join()
    except CallCancelledError:
        late.append(-1)
    assert late == []
    assert delivered > 0


def test_an_interruption_outside_of_the_block_does_nothing() -> None:
    interruptible = Interruptible()
    interruptible.interrupt(CallCancelledError)
    with interruptible:
        pass
    for _ in range(1000):
        pass


def test_a_thread_can_be_traced_after_another_was_interrupted() -> None:
    interruptible = Interruptible()

    def interrupt() -> None:
        while interruptible.thread is None:
            time.sleep(0.001)
        interruptible.interrupt(CallCancelledError)

    interrupter = threading.Thread(target=interrupt, daemon=True)
    interrupter.start()
    with pytest.raises(CallCancelledError), interruptible:
        while True:
            pass
    interrupter.join()

    def call() -> None:
        """A debugger stops where a function begins."""

    def trace(*_: object) -> None:
        begun.set()

    def run() -> None:
        sys.settrace(trace)
        call()
        sys.settrace(None)

    begun = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert begun.is_set()


def test_a_cancellation_between_two_waits_of_a_thread_ends_the_next_one() -> None:
    loop = asyncio.new_event_loop()
    pipe: Any = None
    call = RunningCall(1, "request", "", None, "json", [], [], pipe, loop)

    def wait_twice() -> str:
        current_call.current.set(call)
        wakeup = ThreadWakeup(("inner", "service"))
        wakeup.wait(0)
        call.cancel("enough", timed_out=False)
        with pytest.raises(CallCancelledError, match="enough"):
            wakeup.wait(60)
        # What it begins now is a clean-up.
        ThreadWakeup(("inner", "service")).wait(0)
        return "cleaned up"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(contextvars.copy_context().run, wait_twice).result(30) == "cleaned up"
    loop.close()


# -------------------------------------------------------------------------------------- frames


@pytest.fixture
def sockets():
    sending, receiving = socket.socketpair()
    yield sending, receiving
    sending.close()
    receiving.close()


def frames(receiver: protocol.Receiver, count: int) -> list[protocol.Frame]:
    received: list[protocol.Frame] = []
    while len(received) < count:
        frame = receiver.next()
        if frame is not None:
            received.append(frame)
        else:
            assert receiver.receive()
    return received


def receiver_of(sock: socket.socket, limit: int = 10**9) -> protocol.Receiver:
    return protocol.Receiver(sock, protocol.StreamMemory(limit))


@pytest.mark.parametrize("length", [0, 1, 5000, 65_507, 65_508, 65_509, 70_000, 1_000_000])
def test_frames_arrive_whole_whatever_their_length(sockets, length: int) -> None:
    sending, receiving = sockets
    data = os.urandom(length)
    frame = protocol.pack(protocol.RESULT, 7, meta=b"meta", length=length) + data
    small = protocol.pack(protocol.RELEASE, 8, argument=5)
    sender = threading.Thread(target=sending.sendall, args=(small + frame + frame + small,))
    sender.start()
    received = frames(receiver_of(receiving), 4)
    sender.join()
    assert [received_frame.call for received_frame in received] == [8, 7, 7, 8]
    assert received[1].payload == received[2].payload == data
    assert received[1].meta == b"meta"
    assert received[3].argument == 5


def test_frames_that_trickle_in_byte_by_byte_are_put_together(sockets) -> None:
    sending, receiving = sockets
    receiver = receiver_of(receiving)
    data = protocol.pack(protocol.YIELD, 1, meta=b"ab", length=3) + b"xyz"
    for byte in data[:-1]:
        sending.send(bytes([byte]))
        assert receiver.receive()
        assert receiver.next() is None
    sending.send(data[-1:])
    [frame] = frames(receiver, 1)
    assert (frame.meta, frame.payload) == (b"ab", b"xyz")


def test_descriptors_come_with_their_own_frames(sockets) -> None:
    sending, receiving = sockets
    receiver = receiver_of(receiving)
    sent = [os.pipe() for _ in range(3)]
    for number, (read, _) in enumerate(sent):
        sending.sendall(protocol.pack(protocol.LOADED, 99))
        head = protocol.pack(protocol.RESULT, number, flags=protocol.FILE | protocol.DESCRIPTOR)
        sending.sendmsg([head], protocol.rights(read))
    frames_with_descriptor = [
        frame for frame in frames(receiver, 6) if frame.descriptor is not None
    ]
    assert [frame.call for frame in frames_with_descriptor] == [0, 1, 2]
    for frame, (read, write) in zip(frames_with_descriptor, sent, strict=True):
        assert frame.descriptor is not None
        assert os.fstat(frame.descriptor).st_ino == os.fstat(read).st_ino
        for descriptor in (frame.descriptor, read, write):
            os.close(descriptor)


@pytest.mark.security
def test_the_memory_of_long_frames_counts_as_long_as_anybody_has_it(sockets) -> None:
    sending, receiving = sockets
    memory = protocol.StreamMemory(1_000_000)
    receiver = protocol.Receiver(receiving, memory)
    head = protocol.pack(protocol.RESULT, 1, length=600_000)
    sending.sendall(head)
    assert receiver.receive()
    assert receiver.next() is None
    second_sending, their = socket.socketpair()
    with second_sending, their:
        beside = protocol.Receiver(their, memory)
        second_sending.sendall(head)
        assert beside.receive()
        with pytest.raises(protocol.FrameError, match="1200056 bytes, of a pod"):
            beside.next()
        receiver.close()
        assert beside.next() is None
        sender = threading.Thread(target=second_sending.sendall, args=(bytes(600_000),))
        sender.start()
        [frame] = frames(beside, 1)
        sender.join()
        assert frame.payload == bytes(600_000)
        with pytest.raises(protocol.FrameError):
            memory.hold(500_000)
        del frame
        memory.hold(500_000)


def test_a_worker_takes_one_frame_at_a_time(sockets) -> None:
    sending, receiving = sockets
    agent = protocol.AgentSocket(receiving)
    sent = [
        protocol.pack(protocol.CALL, number, meta=b"meta", length=size) + bytes(size)
        for number, size in enumerate((0, 5000, 70_000, 5))
    ]
    for data in sent[:-1]:
        sending.sendall(data)
    sender = threading.Thread(target=lambda: [sending.send(bytes([byte])) for byte in sent[-1]])
    sender.start()
    for number, data in enumerate(sent):
        assert receiving.recv(1, socket.MSG_PEEK) == data[:1]
        frame = agent.read()
        assert (frame.call, frame.meta, frame.length) == (number, b"meta", len(frame.payload))
    sender.join()


def test_a_worker_gets_the_descriptor_of_a_frame_that_was_sent_with_another(sockets) -> None:
    sending, receiving = sockets
    agent = protocol.AgentSocket(receiving)
    read, write = os.pipe()
    first = protocol.pack(protocol.GRANT, 1)
    second = protocol.pack(protocol.CALL, 2, flags=protocol.DESCRIPTOR)
    sending.sendmsg([first, second], protocol.rights(read))
    assert agent.read().descriptor is None
    descriptor = agent.read().descriptor
    assert descriptor is not None
    assert os.fstat(descriptor).st_ino == os.fstat(read).st_ino
    for open_descriptor in (descriptor, read, write):
        os.close(open_descriptor)


def wait_until_asleep(thread: threading.Thread) -> None:
    """Wait until a thread waits in the system, and for no lock of the interpreter."""
    if sys.platform != "linux":
        time.sleep(0.5)
        return
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def is_asleep() -> bool:
        before = status.read_text()
        time.sleep(0.01)  # the lock is free: a thread that waits for it counts one more switch
        return "State:\tS" in before and _switches(before) == _switches(status.read_text())

    until(is_asleep)


def _switches(status: str) -> list[str]:
    return [line for line in status.splitlines() if "ctxt_switches" in line]


def test_of_two_that_wait_for_a_frame_the_reader_is_woken(sockets) -> None:
    sending, receiving = sockets
    agent = protocol.AgentSocket(receiving)
    woken = threading.Event()
    deputy = threading.Thread(target=lambda: (agent.wait_for_unread(), woken.set()), daemon=True)
    deputy.start()
    read_frames: list[protocol.Frame] = []
    reader = threading.Thread(
        target=lambda: [read_frames.append(agent.read()) for _ in range(3)], daemon=True
    )
    reader.start()
    for number in range(3):
        until(lambda number=number: len(read_frames) == number)
        wait_until_asleep(reader)
        sending.sendall(protocol.pack(protocol.GRANT, number))
    reader.join(60)
    if sys.platform == "linux":
        assert not woken.wait(0.1)
    sending.sendall(protocol.pack(protocol.GRANT, 3))
    assert woken.wait(60)


def test_sizes_and_codec_survive() -> None:
    for codec in ("json", "pickle", "none"):
        for sizes in ((5,), (5, 0, 2**40), ()):
            flags, meta = protocol.pack_sizes(codec, sizes)
            length = codecs.layout(sizes)[1]
            frame = protocol.Frame(0, flags, 0, 0, meta + b"rest", length, bytearray(), None)
            assert protocol.unpack_sizes(frame) == (codec, sizes, b"rest")
