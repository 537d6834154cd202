"""`kt` and Python programs, each a fork of a process that has imported what it needs.

pytest process ── arguments, variables, files ──▶ this file as a program ── fork ──▶ `kt`
                                                           ╰ another one ── fork ──▶ a program

What they do, see and leave is what it would be in a process that was started for them, apart from
settings of the interpreter (`PYTHONUNBUFFERED`), and from what tells a program how it was started:
its parent, and its command line as `ps` shows it. Signals and terminals need a process of their
own. The first program of each file of tests has one, too, so that each file runs both kinds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import json
import linecache
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

#: Bytes of the longest request: arguments and variables.
_REQUEST_BYTES = 1 << 20
#: Seconds in which a server has imported its modules, also on a machine that does much else.
_IMPORT_SECONDS = 110.0
#: What a program that deploys and calls imports in the end; all else it imports itself.
_MODULES = ("fn", "cls", "compute", "backend", "deploys.deploy", "calls.caller")


class Server:
    """The process that `kt`, or Python programs, are forked from; it ends with this process."""

    def __init__(self, kind: str) -> None:
        self._control, theirs = _sockets()
        with theirs:
            command = [sys.executable, __file__, kind]
            self._process = subprocess.Popen(command, stdin=theirs.fileno())

    def run(
        self,
        arguments: tuple[str, ...],
        *,
        cwd: str | os.PathLike[str] | None,
        stdin: str,
        timeout: float,
        environ: Mapping[str, str],
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; it is killed if it does not end in time."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            files[0].write(stdin)
            files[0].seek(0)
            request = json.dumps([arguments, str(cwd or Path.cwd()), dict(environ)]).encode()
            answers, theirs = map(stack.enter_context, _sockets())
            descriptors = [theirs.fileno(), *(file.fileno() for file in files)]
            socket.send_fds(self._control, [request], descriptors)
            theirs.close()
            answers.settimeout(_IMPORT_SECONDS)
            pid = int(answers.recv(64))
            answers.settimeout(timeout)
            try:
                status = int(answers.recv(64))
            except BaseException:
                os.kill(pid, signal.SIGKILL)
                raise
            for file in files[1:]:
                file.seek(0)
            return subprocess.CompletedProcess(arguments, status, files[1].read(), files[2].read())

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


def _sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


#: The servers of this process, once there are some.
_servers: dict[str, Server] = {}
#: Whether the next program gets a process of its own.
_is_first_program = [True]


def server_pids() -> set[int]:
    """The processes that belong to `kt` and programs in this process, and end with it."""
    return {server.pid for server in _servers.values()}


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Have servers for `kt` and programs in this process, unless it has them."""
    servers = {} if _servers else {kind: Server(kind) for kind in ("kt", "python")}
    _servers.update(servers)
    try:
        yield
    finally:
        for kind, server in servers.items():
            del _servers[kind]
            server.close()


def begin_file() -> None:
    """Say that tests of another file begin."""
    _is_first_program[0] = True


def kt(
    *arguments: str,
    cwd: str | os.PathLike[str] | None = None,
    stdin: str = "",
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run `kt` as a user would.

    Args:
        arguments: Words after `kt`.
        cwd: The working directory.
        stdin: The text that it reads.
        timeout: Seconds until it is killed.
        env: All its variables; those of this process unless they are given.
        environ: Variables beside them.
    """
    server = _servers["kt"]  # the fixture `_commands` of tests/local/conftest.py starts it
    variables = {**(os.environ if env is None else env), **environ}
    return server.run(arguments, cwd=cwd, stdin=stdin, timeout=timeout, environ=variables)


def python(
    *arguments: str,
    cwd: str | os.PathLike[str] | None = None,
    stdin: str = "",
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as a user would, see `kt`; in a fork if it is a file or `-c` and code.

    Before them there may be `-W` and an action. A variable for Python itself takes no fork.
    """
    variables = {**(os.environ if env is None else env), **environ}
    differs = any(
        variables.get(name) != os.environ.get(name)
        for name in {*variables, *os.environ}
        if name.startswith("PYTHON")
    )
    is_plain = arguments[0] in ("-c", "-W") or arguments[0].endswith(".py")
    if _is_first_program[0] or differs or not is_plain:
        _is_first_program[0] = False
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            input=stdin,
            env=variables,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    server = _servers["python"]
    return server.run(arguments, cwd=cwd, stdin=stdin, timeout=timeout, environ=variables)


# ------------------------------------------------------------------------------------ the program


def _serve(kind: str, control: socket.socket) -> None:
    sys.path.pop(0)  # the folder of this file
    if kind == "kt":
        from kubetorch.cli.main import COMMANDS

        for module in {module for module, _ in COMMANDS.values()}:
            importlib.import_module(f"kubetorch.cli.{module}")
        with contextlib.suppress(ImportError):  # what the first option would import
            importlib.import_module("typer._adapters")
    else:
        for module in _MODULES:
            importlib.import_module(f"kubetorch.sdk.{module}")
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
        if not request:
            return None
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # those that have given their answers
                pass
        if os.fork() == 0:
            control.close()
            answers = socket.socket(fileno=descriptors.pop(0))
            pid = os.fork()
            if pid == 0:
                answers.close()
                arguments, cwd, environ = json.loads(request)
                _settle(descriptors, cwd, environ)
                become = _become_kt if kind == "kt" else _become_program
                return become(arguments, cwd)
            answers.send(str(pid).encode())
            answers.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _settle(descriptors: list[int], cwd: str, environ: dict[str, str]) -> None:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    sys.stdin = sys.__stdin__ = _stream(sys.stdin, 0, "r")
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, 1, "w")
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, 2, "w", buffering=1)


def _stream(before: TextIO, number: int, mode: str, *, buffering: int = -1) -> Any:
    return open(
        number, mode, buffering, encoding=before.encoding, errors=before.errors, closefd=False
    )


def _become_kt(arguments: list[str], cwd: str) -> Any:
    sys.argv = ["kt", *arguments]
    sys.path.insert(0, cwd)
    from kubetorch.__main__ import main

    return main()


def _become_program(arguments: list[str], cwd: str) -> None:
    """Do what Python does with its arguments, and end as it does."""
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    error = None
    source: str | bytes
    try:
        if arguments[0] == "-c":
            source, file = arguments.pop(1), "<string>"
            sys.path.insert(0, "")
            if sys.version_info >= (3, 13):  # tracebacks show its lines
                linecache.cache[file] = (len(source), None, source.splitlines(True), file)
            main.__loader__ = importlib.machinery.BuiltinImporter
        else:
            file = os.path.join(cwd, arguments[0])  # noqa: PTH118  # which Python leaves as it is
            source = Path(file).read_bytes()
            sys.path.insert(0, str(Path(file).resolve().parent))
            main.__file__, main.__cached__ = file, None
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
        sys.argv = arguments
        exec(compile(source, file, "exec", dont_inherit=True), vars(main))
    except Exception as raised:
        error = raised
    if error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=0))
