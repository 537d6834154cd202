"""The zygote: imports third-party modules once, then forks a worker for each request.

The zygote and the agent exchange JSON lines on a Unix socket, with descriptors beside them:

    agent    {"op": "begin", "path": [...]} + stdout, stderr
             {"op": "preload", "modules": [...]}      {"op": "fork", "id": 1, …} + socket, pipe
    zygote   {"op": "importing", "module": "torch"}   {"op": "forked", "id": 1, "pid": 42} + pidfd
             {"op": "ready", "unfit": null, …}        {"op": "failed", "id": 1, "message": "...", …}
                                                      {"op": "exited", "pid": 42, "status": 0}

In `ready` and `failed`, `outdated` is the reason why another zygote has to preload or fork, if any.

A zygote has one thread, never imports the user's own modules, and ends with the agent.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any, NoReturn

import kubetorch
from kubetorch.lib import modules
from kubetorch.lib.processes import kill_session
from kubetorch.pod.user_process import loader, process, protocol
from kubetorch.pod.user_process.numeric_threads import VARIABLES, NumericThreads
from kubetorch.wire import (
    codecs,  # noqa: F401  # workers need it with their first pickle
    introspection,
)

#: The program that runs in a fresh interpreter.
PROGRAM = str(Path(__file__).with_name("__main__.py"))
#: Names of threads that survive a fork: their libraries start them anew.
SAFE_THREADS = ("jemalloc_bg_thd",)


class Snapshot:
    """The times of the files behind the modules that are imported now.

    For installed packages the time of their folder is enough: it changes with every package that
    is installed, removed, or changes its version. Modules from elsewhere (editable installs,
    entries of `PYTHONPATH`) are compared one by one.
    """

    def __init__(self) -> None:
        site = _folders("purelib", "platlib") | {
            entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))
        }
        library = _folders("stdlib", "platstdlib") | {str(Path(kubetorch.__file__).parent)}
        self._times = {path: _time(path) for path in site}
        for module in list(sys.modules.values()):
            path = modules.file_of(module)
            if path is None or _is_below(path, site) or _is_below(path, library):
                continue
            self._times[path] = _time(path)

    def has_changed(self) -> bool:
        return any(_time(path) != time for path, time in self._times.items())


def _folders(*names: str) -> set[str]:
    return {sysconfig.get_path(name) for name in names}


def _is_below(path: str, folders: set[str]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


def _time(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except (OSError, ValueError):  # it may be no path
        return 0


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        control.set_inheritable(False)
        self._control = control
        self._buffer = b""
        self._descriptors: list[int] = []
        # The workers, each with the marker of all processes that it starts.
        self._children: dict[int, str] = {}
        self._preloaded: set[str] = set()
        # Why forks of this process would not be sound any more.
        self._unfit: str | None = None
        self._pools = NumericThreads()
        self._snapshot = Snapshot()
        self._wakeup, self._woken = os.pipe()
        for descriptor in (self._wakeup, self._woken):
            os.set_blocking(descriptor, False)

    def run(self) -> None:
        """Serve until the agent is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if protocol.STACKS is not None:  # workers inherit this until they can answer
            signal.signal(protocol.STACKS, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(self._wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._receive():
                self._end_children()
                return

    # ------------------------------------------------------------------------------- messages

    def _receive(self) -> bool:
        try:
            data, ancillary, _, _ = self._control.recvmsg(65536, socket.CMSG_SPACE(64))
        except OSError:
            return False
        self._descriptors += protocol.descriptors(ancillary)
        if not data:
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return True

    def _handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "preload":
            self._preload(message["modules"])
            return
        first, second = self._descriptors[:2]
        del self._descriptors[:2]
        try:
            if message["op"] == "begin":
                self._begin(message["path"], first, second)
            else:
                self._start(message, first, second)
        finally:
            os.close(first)
            os.close(second)

    def _send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        rights = [] if descriptor is None else protocol.rights(descriptor)
        with contextlib.suppress(OSError):  # the next read notices that the agent is gone
            self._control.sendmsg([data], rights)

    def _begin(self, path: list[str], output: int, errors: int) -> None:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        loader.prepare_path(path)
        self._snapshot = Snapshot()

    # -------------------------------------------------------------------------------- preload

    def _preload(self, modules: list[str]) -> None:
        outdated = self._why_outdated()
        if outdated is not None:
            self._send({"op": "ready", "unfit": None, "outdated": outdated})
            return
        for name in modules:
            if name in self._preloaded:
                continue
            self._preloaded.add(name)
            self._send({"op": "importing", "module": name})
            _import(name)
            self._unfit = _why_unfit(name)
            if self._unfit is not None:
                break
        self._pools = NumericThreads()
        self._snapshot = Snapshot()
        gc.collect()
        gc.freeze()
        self._send({"op": "ready", "unfit": self._unfit, "outdated": None})

    def _why_outdated(self) -> str | None:
        """Why another zygote has to preload or fork, if it has to.

        The agent may not know that this zygote is unfit: it stops waiting for a preload that no
        start needs any more.
        """
        if self._unfit is not None:
            return self._unfit
        return "installed packages have changed" if self._snapshot.has_changed() else None

    # -------------------------------------------------------------------------------- workers

    def _start(self, message: dict[str, Any], sock: int, output: int) -> None:
        request = message["id"]
        failed = {"op": "failed", "id": request, "message": "", "outdated": None}
        if message["fresh"]:
            pid = self._spawn(sock, output)
        elif (outdated := self._why_outdated()) is not None:
            self._send({**failed, "outdated": outdated})
            return
        else:
            try:
                pid = self._fork(sock, output)
            except OSError as error:
                self._send({**failed, "message": f"cannot fork: {error}"})
                return
        self._children[pid] = message["marker"]
        descriptor = _open_pidfd(pid)
        has_descriptor = descriptor is not None
        self._send({"op": "forked", "id": request, "pid": pid, "pidfd": has_descriptor}, descriptor)
        if descriptor is not None:
            os.close(descriptor)

    def _spawn(self, sock: int, output: int) -> int:
        environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        for descriptor in (sock, output):
            os.set_inheritable(descriptor, True)
        arguments = [sys.executable, PROGRAM, "worker", str(sock), str(output)]
        return os.posix_spawn(sys.executable, arguments, environ)

    def _fork(self, sock: int, output: int) -> int:
        # No handler may run in the child before its handlers are reset.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(sock, output, mask)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become_worker(self, sock: int, output: int, mask: set[int | signal.Signals]) -> NoReturn:
        try:
            self._shed(mask)
            process.run(socket.socket(fileno=sock), output, self._pools)
        finally:  # whatever happens, the child must not go on as a zygote
            sys.excepthook(*sys.exc_info())
            os._exit(70)

    def _shed(self, mask: set[int | signal.Signals]) -> None:
        """Drop what belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._control.close()
        os.close(self._wakeup)
        os.close(self._woken)
        gc.enable()

    # ------------------------------------------------------------------------------- children

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._children.pop(pid, None) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._send({"op": "exited", "pid": pid, "status": code})

    def _end_children(self) -> None:
        """End the workers when the agent is gone: a stuck worker would not notice."""
        for pid, marker in self._children.items():
            kill_session(pid, marker=marker)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  # the worker's own import reports it to the user
        sys.stderr.write(f"preloading {name}: {introspection.summary(error)}\n")


def _why_unfit(name: str) -> str | None:
    """Why a fork of this process would not be sound, after `name` was imported."""
    threads = _other_threads()
    if threads:
        return f"importing {name} starts threads ({', '.join(sorted(threads))})"
    if _has_device():
        return f"importing {name} opens a GPU"
    return None


def _other_threads() -> list[str]:
    if sys.platform != "linux":
        return [
            thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
        ]
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [Path(task, "comm").read_text().strip() for task in tasks]
    return [name for name in names if name not in SAFE_THREADS]


def _has_device() -> bool:
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith("/dev/nvidia"):
                    return True
    return False


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def main() -> None:
    """Run a zygote; the socket to the agent is this program's standard input."""
    control = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    Zygote(socket.socket(fileno=control)).run()
