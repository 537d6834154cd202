"""The life of a worker process: take over the descriptors, load the callable, serve calls.

main thread      loads, then runs the event loop of `async def` calls; of a class without such
                 methods it is the home of sync calls, and another thread runs the loop
other threads    `kubetorch.pod.user_process.thread_pool`: read frames, run sync calls
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from kubetorch.lib import modules
from kubetorch.lib.memory_files import Share
from kubetorch.pod.user_process import (
    capture,
    current_call,
    frameworks,
    loader,
    numeric_threads,
    protocol,
)
from kubetorch.pod.user_process.call_runner import CODE, CallRunner, DeployedCallable
from kubetorch.pod.user_process.capture import COutput, OutputPipe
from kubetorch.pod.user_process.frameworks import MonarchHosts
from kubetorch.pod.user_process.protocol import AgentSocket
from kubetorch.pod.user_process.thread_pool import ThreadPool
from kubetorch.pod.user_process.tuning import TIMING
from kubetorch.wire import exceptions

#: True where `asyncio.get_event_loop()` makes a loop in a main thread.
_MAKES_LOOPS = sys.version_info < (3, 14)


def run(
    sock: socket.socket, output: int, numeric: numeric_threads.NumericThreads | None
) -> NoReturn:
    current_call.is_worker = True
    os.setsid()
    for descriptor in (sock.fileno(), output):
        os.set_inheritable(descriptor, False)
    _disregard_interrupts()
    agent = AgentSocket(sock)
    frame = agent.read()
    while frame.kind != protocol.LOAD:
        frame = agent.read()
    if frame.descriptor is not None and protocol.STACKS is not None:
        # The deputy of the threads takes it: system calls of user code are not interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, [protocol.STACKS])
        faulthandler.register(protocol.STACKS, file=frame.descriptor, all_threads=True)
    spec = json.loads(frame.meta)
    agent.marker = spec["marker"]
    agent.share = Share(spec["memory_share"])
    pipe = _take_output(output, bytes.fromhex(spec["nonce"]))
    _set_environment(spec)
    if spec["umask"] is not None:
        os.umask(spec["umask"])
    capture.install(pipe, spec["log_level"])
    _install_event_loops()
    worker = _Worker(agent, pipe, spec, stacks=frame.descriptor)
    if numeric is not None:
        numeric.resize(os.environ)
        _reseed()
    worker.start(numeric)
    worker.run()
    _leave(pipe.c_output)


class _Thread(threading.local):
    is_of_calls = False
    #: The call that has set this thread's loop, to a loop or to `None`.
    setter: object = None


_thread = _Thread()


def _enter_thread() -> None:
    """Run calls in this thread from now on."""
    _thread.is_of_calls = True


def _install_event_loops() -> None:
    """Have all policies, also the user's own, make loops in threads of calls.

    `asyncio.get_event_loop()` makes a loop in a main thread that never had one, up to Python 3.13,
    and raises in all other threads. Calls run in threads of a pool, so each call gets what its code
    gets on the user's machine: the loop of its thread, or a new one.
    """
    if not _MAKES_LOOPS:
        return
    policy: Any = asyncio.events.BaseDefaultEventLoopPolicy
    get, put = policy.get_event_loop, policy.set_event_loop

    def get_event_loop(self: Any) -> asyncio.AbstractEventLoop:  # noqa: ANN401  # of any policy
        if _thread.is_of_calls and _thread.setter is not current_call.current.get():
            loop = self._local._loop
            if loop is None or loop.is_closed():
                self.set_event_loop(self.new_event_loop())
        return get(self)  # type: ignore[no-any-return]

    def set_event_loop(self: Any, loop: asyncio.AbstractEventLoop | None) -> None:  # noqa: ANN401
        _thread.setter = current_call.current.get()
        put(self, loop)

    policy.get_event_loop, policy.set_event_loop = get_event_loop, set_event_loop


def _disregard_interrupts() -> None:
    """Let SIGINT do nothing in this process, and have its usual effect in children.

    An ignored signal would be ignored in the programs that user code starts, too; a handled one is
    not. A forked child of user code has Python's own handler again.
    """
    signal.signal(signal.SIGINT, _disregard)
    signal.siginterrupt(signal.SIGINT, False)
    os.register_at_fork(after_in_child=_regard_interrupts)


def _disregard(_number: int, _frame: object) -> None:
    """Do nothing: a worker ends when its agent says so."""


def _regard_interrupts() -> None:
    if signal.getsignal(signal.SIGINT) is _disregard:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Worker:
    def __init__(
        self, agent: AgentSocket, pipe: OutputPipe, spec: dict[str, Any], *, stacks: int | None
    ) -> None:
        self._agent = agent
        self._pipe = pipe
        self._spec = spec
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        # Made before user code can see what its making logs.
        self._own_loop = asyncio.new_event_loop()
        self._runner = CallRunner(
            agent,
            self._loop,
            pipe,
            pod_name=spec["pod_name"],
            modules=spec["modules"],
            working_dir=spec["cwd"],
            code=spec["code"],
            stacks=stacks,
            may_wait=spec["may_wait"],
            values=spec["values"],
        )

    def start(self, numeric: numeric_threads.NumericThreads | None) -> None:
        """Begin to read, so that the end of the agent is noticed while user code is imported."""

        def on_thread() -> None:
            _enter_thread()
            if numeric is not None:
                numeric.on_thread()

        self._pool = ThreadPool(
            self._spec["threads"], self._runner.next_job, self._agent.wait_for_unread, on_thread
        )
        self._pool.start()

    def run(self) -> None:
        """Load the callable and serve until the agent stops this process."""
        self._report_exits()
        deployed = self._load()
        if deployed is None:
            return
        if not deployed.is_sync:
            if self._loop.is_closed():  # by user code that was done with it when it was imported
                self._loop = self._runner.loop = self._own_loop
            else:
                self._own_loop.close()
            # User code may have run a loop of its own, which leaves none set.
            asyncio.set_event_loop(self._loop)
            self._report_loaded(deployed)
            self._run_loop()
            return
        # The loop that was set during the import is the user's, who may run it in a call.
        self._loop = self._runner.loop = self._own_loop
        if not deployed.is_sync_class:
            self._report_loaded(deployed)
            self._run_loop()
            return
        if not _MAKES_LOOPS:
            asyncio.set_event_loop(None)
        _enter_thread()
        main_thread_is_done = threading.Event()
        loop_thread = threading.Thread(
            target=self._run_loop_aside, args=(main_thread_is_done,), daemon=True
        )
        loop_thread.start()
        self._agent.before_end = self._pool.job_is_done
        self._pool.make_home()
        self._report_loaded(deployed)
        try:
            self._pool.run_at_home()
        except BaseException:  # noqa: BLE001  # a handler of signals raised in the middle of our code
            traceback.print_exc()
            os._exit(1)
        main_thread_is_done.set()

    def _report_exits(self) -> None:
        """Report the call whose code calls `os._exit`, for the errors of calls beside it."""
        original_exit, agent = os._exit, self._agent

        @functools.wraps(original_exit)
        def _exit(status: int) -> NoReturn:
            call = current_call.current.get()
            if call is not None:
                agent.report_exit(call.number)
            original_exit(status)

        os._exit = _exit

    def _report_loaded(self, deployed: DeployedCallable) -> None:
        self._agent.send(protocol.LOADED, payload=protocol.pack_methods(deployed.methods))

    def _run_loop_aside(self, main_thread_is_done: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._run_loop()
        # A call may hold the main thread up.
        if not main_thread_is_done.wait(TIMING.main_thread_exit_seconds):
            _leave(self._pipe.c_output)

    def _run_loop(self) -> None:
        while not self._runner.is_stopped:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001  # SystemExit of a task that user code made
                traceback.print_exc()

    def _load(self) -> DeployedCallable | None:
        spec = self._spec
        hosts: MonarchHosts | None = None
        try:
            os.chdir(spec["cwd"])
            if frameworks.MONARCH_HOSTS in os.environ:
                hosts = MonarchHosts()
            source = loader.Source(**spec["source"])
            value = loader.load(source, hosts)
        except BaseException as error:  # noqa: BLE001  # SystemExit of user code is a failure
            failure = exceptions.describe(
                error, pod_name=spec["pod_name"], started=False, skip=CODE
            )
            self._agent.send(protocol.FAILED, payload=failure.to_json())
            return None
        finally:
            capture.flush_streams()
            self._pipe.c_output.flush()
        deployed = DeployedCallable(spec["name"], value, is_instance=source.kind == "cls")
        self._runner.serve(deployed, hosts)
        return deployed


def _take_output(output: int, nonce: bytes) -> OutputPipe:
    """Make the pipe standard output and error; a private duplicate is for records."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    faulthandler.enable(file=2)
    return OutputPipe(output, nonce, COutput())


def _set_environment(spec: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(spec["env"])
    os.environ.setdefault(*protocol.BREAKPOINT)
    if hasattr(time, "tzset"):
        time.tzset()
    sys.argv = [spec["source"]["source_file"] or ""]
    # Not the file of the zygote, which spawned children would import.
    sys.modules["__main__"] = ModuleType("__main__")
    loader.prepare_path(spec["source"]["sys_path"])
    if frameworks.JAX_PROCESS in os.environ:
        frameworks.install_jax_cluster()


def _reseed() -> None:
    """Forks must not share a random sequence; `random` sees to itself."""
    seed = modules.loaded("numpy.random").get("seed")
    if callable(seed):
        seed()


def _leave(c_output: COutput) -> NoReturn:
    """End as a program does, but without waiting for threads that user code left behind."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    capture.flush_streams()
    c_output.flush_all()
    os._exit(0)
