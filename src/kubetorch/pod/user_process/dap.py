"""debugpy in the program of the user, whose debug adapter is at the terminal's end.

    VS Code ── adapter ── terminal ── agent ── RemoteTerminal ── relay ── debugpy

debugpy can only dial a port. So it dials one of this process, which takes this one connection and
closes. A process has one debugpy: one session at a time. It traces the thread of the call and
threads that start later; the threads of other calls go on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from kubetorch.errors import CallRefusedError, ProtocolError, StartupError
from kubetorch.pod.user_process.remote_terminal import RemoteTerminal
from kubetorch.pod.user_process.tuning import LIMITS, TIMING
from kubetorch.wire import debugger as wire
from kubetorch.wire import tuning as wire_tuning

#: Held while a session has debugpy.
_debugpy_lock = threading.Lock()
_LIBRARY = str(Path(__file__).parents[2])


class AdapterSession:
    """A session of debugpy, from the first stop of a call to its end."""

    def __init__(self, terminal: RemoteTerminal) -> None:
        self._terminal = terminal
        self._socket: socket.socket | None = None
        self._debugpy: Any = None
        self._pydevd: Any = None
        self._exempt_threads: list[threading.Thread] = []
        self._has_left = False
        #: Set when the user's breakpoints are, or nobody is there to set them.
        self._is_configured = threading.Event()
        self._closing = threading.Lock()

    @classmethod
    def start(cls, terminal: RemoteTerminal) -> AdapterSession:
        """Connect debugpy with the adapter, and wait until the user's breakpoints are set.

        Raises:
            CallRefusedError: Another call of this process has debugpy.
            StartupError: debugpy is not installed, nor can be.
        """
        if not _debugpy_lock.acquire(blocking=False):
            raise CallRefusedError(
                f"process {os.getpid()} has a debug adapter attached to another call or thread",
                hint="kt debug without --vscode attaches pdb to any number of them",
            )
        session = cls(terminal)
        try:
            session._start()
        except BaseException:
            session.close()
            raise
        return session

    def _start(self) -> None:
        kind, content = self._terminal.receive()
        if kind == wire.LEFT:
            self.close()
            return
        if kind != wire.START:
            raise ProtocolError(f"a message of kind {kind} from a terminal with a debug adapter")
        about = wire.decode(content)
        self._debugpy = _load(str(about.get("version", "")))
        hook = sys.breakpointhook
        importlib.import_module("debugpy.server.api")  # which has pydevd, and finds it
        self._pydevd = importlib.import_module("pydevd")
        sys.breakpointhook = hook  # pydevd's stops only while a client is attached
        current = threading.current_thread()
        for thread in threading.enumerate():
            if thread is not current and not hasattr(thread, "pydev_do_not_trace"):
                thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # debugpy reads it
                self._exempt_threads.append(thread)
        self._socket = self._connect(str(about["token"]))
        for relay in (self._relay_to_debugpy, self._relay_to_terminal):
            thread = threading.Thread(target=relay, name="kubetorch-debugger", daemon=True)
            thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # as above
            thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]  # nor list it
            thread.start()
        # By these the caller's folder of the project is mapped to that of the pod.
        file = os.environ.get("KT_DEPLOYED_FILE", "")
        self._terminal.send(wire.READY, {"file": file, "folder": str(Path.cwd())})
        self._pydevd._wait_for_attach(cancel=self._is_configured)

    def _connect(self, token: str) -> socket.socket:
        """Have debugpy dial this process; returns this process's end of the connection."""
        with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
            server.settimeout(TIMING.debugger_connect_seconds)
            self._pydevd.settrace(
                host="127.0.0.1",
                port=server.getsockname()[1],
                suspend=False,
                patch_multiprocessing=False,
                access_token=token,
                block_until_connected=True,
                wait_for_ready_to_run=False,
                notify_stdin=False,
                dont_trace_start_patterns=(_LIBRARY, str(Path(self._debugpy.__file__).parent)),
                dont_trace_end_patterns=("debugpy_launcher.py",),
            )
            while True:
                connection, address = server.accept()
                if _is_of_this_process(address):
                    connection.settimeout(None)
                    return connection
                connection.close()

    # ----------------------------------------------------------------------------------- stops

    def suspend(self, frame: FrameType) -> None:
        """Stop before the next line of this frame, or of its callers."""
        if self._has_left:
            return
        self._pydevd.settrace(
            suspend=True,
            trace_only_current_thread=True,
            patch_multiprocessing=False,
            notify_stdin=False,
            stop_at_frame=frame,
        )

    def post_mortem(self, error: BaseException) -> None:
        """Stop where this error was raised, until the user goes on."""
        if not self._has_left:
            raised = (type(error), error, error.__traceback__)
            self._debugpy.trigger_exception_handler(raised, as_uncaught=False)

    # ------------------------------------------------------------------------------- the relay

    def _relay_to_debugpy(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while True:
                kind, content = self._terminal.receive()
                if kind in (wire.LEFT, wire.QUIT):
                    break
                if kind == wire.ADAPTER:
                    self._socket.sendall(content)
        self.close()

    def _relay_to_terminal(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while data := self._socket.recv(wire_tuning.LIMITS.debug_message_bytes):
                self._terminal.send(wire.ADAPTER, data)
        if not self._has_left:  # debugpy has given up by itself
            self._terminal.wake()

    def close(self) -> None:
        """Let all threads go on, and have debugpy trace none of them."""
        with self._closing:
            if self._has_left:
                return
            self._has_left = True
            self._is_configured.set()
            if self._pydevd is not None:
                self._pydevd.stoptrace()
                # Else threads that were stopped stop in the next session's first line, for ever.
                importlib.import_module("_pydevd_bundle.pydevd_thread_lifecycle").resume_threads(
                    "*"
                )
            for thread in self._exempt_threads:
                del thread.pydev_do_not_trace  # type: ignore[attr-defined]  # as above
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._socket.close()
            _debugpy_lock.release()


def _is_of_this_process(address: tuple[str, int]) -> bool:
    """True if a socket of this process has this address: no other can have it meanwhile."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208  # names alone
        with contextlib.suppress(OSError, ValueError), _copy_of(int(name)) as candidate:
            if candidate.family == socket.AF_INET and candidate.getsockname() == address:
                return True
    return False


@contextlib.contextmanager
def _copy_of(descriptor: int) -> Iterator[socket.socket]:
    copy = os.dup(descriptor)
    try:
        candidate = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        raise
    with candidate:
        yield candidate


# ---------------------------------------------------------------------------------------- debugpy


def _load(version: str) -> ModuleType:
    """The module debugpy, which is installed if the pod does not have it."""
    # Else debugpy writes a warning of six lines about modules that are frozen in the interpreter.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    if "debugpy" not in sys.modules and not _is_new_enough():
        folder = Path(os.environ[wire.SOCKET]).with_name("debugpy-packages")
        if not folder.is_dir():
            install(version, folder)
        if folder.stat().st_uid not in (os.geteuid(), 0):
            raise StartupError(
                f"{folder} belongs to another user: debugpy is not imported from there",
                hint=f'kt.Image().pip_install(["debugpy>={wire.DEBUGPY}"]) brings it',
            )
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    debugpy = importlib.import_module("debugpy")
    if not hasattr(debugpy, "trigger_exception_handler"):
        raise StartupError(
            f"the program has imported debugpy {debugpy.__version__}, which is too old",
            hint=f'kt.Image().pip_install(["debugpy>={wire.DEBUGPY}"]) brings a newer one',
        )
    return debugpy


def _is_new_enough() -> bool:
    try:
        installed = importlib.metadata.version("debugpy")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = [[int(number) for number in re.findall(r"\d+", v)] for v in (installed, wire.DEBUGPY)]
    return numbers[0] >= numbers[1]


def install(version: str, folder: Path) -> None:
    """Install debugpy into a folder, which then holds all of it or does not exist.

    Raises:
        StartupError: There is no installer, no network, or no such version for this Python.
    """
    package = f"debugpy=={version}" if version else "debugpy"
    uv = shutil.which("uv")
    installers = [[uv, "pip", "install", "--python", sys.executable]] if uv else []
    installers.append([sys.executable, "-m", "pip", "install", "--disable-pip-version-check"])
    problem = ""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="debugpy-") as scratch:
        for installer in installers:
            problem = _run([*installer, "--quiet", "--target", scratch, package])
            if not problem:
                with contextlib.suppress(OSError):  # another process of the pod was first
                    Path(scratch).rename(folder)
                    Path(scratch).mkdir()
                return
    raise StartupError(
        f"the pod does not have debugpy, nor can it be installed: {problem}",
        hint='kt.Image().pip_install(["debugpy"]) brings it into the pods; kt debug without '
        "--vscode needs nothing",
    )


def _run(words: list[str]) -> str:
    """Run an installer; returns the last lines of what it says if it fails, else nothing."""
    try:
        ended = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMING.debugger_install_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} has not ended within {TIMING.debugger_install_seconds:g} s"
    except OSError as error:
        return str(error)
    return ended.stdout.strip()[-LIMITS.debugger_problem_characters :] if ended.returncode else ""
