"""Whose code a program deploys: the project, and the callable in it.

    git remote + path in the repository  ─┐
    id of this machine + folder          ─┴─► project: a digest, and a name for people
    file in the project + qualified name ───► callable: ml/train.py:train

All checkouts of a repository are one project, whatever protocol and credentials they were cloned
by. Without a remote the folder is known by this machine's id, a random file in the home folder:
names of machines change with the network. Code in a pod is of the project that the pod's own code
came from, which its environment says.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from kubetorch.config import environment
from kubetorch.datastore.blobs import digest_of
from kubetorch.lib import files, modules, terminal
from kubetorch.sdk.deploys.source import (
    Source,
    find_project,
    git_folder,
    is_installed,
    origin_of_pod,
    pointers,
    project_of_pod,
    working_directory,
)
from kubetorch.specs.workload import Origin

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Errors of a file that cannot be read, or is no Python; Python 3.11 may fail where threads parse.
_UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, SystemError)
#: Hex digits of a project's digest.
_DIGITS = 16
#: Characters of a name that the controller takes.
_LONGEST = 4096
#: Seconds that a program waits for another that makes the id of the machine.
_PATIENCE = 5.0
_SECTION = re.compile(r'\s*\[\s*remote\s+"(?P<name>.*)"\s*\]')
_URL = re.compile(r"\s*url\s*=\s*(?P<url>\S.*?)\s*$", re.IGNORECASE)
#: `user@host:path`, as ssh has it.
_SCP = re.compile(r"(?:[^@/\s]+@)?(?P<host>\[[^]]+\]|[^:/\s]+):(?P<path>[^\s]+)")
_PORTS = {"http": 80, "https": 443, "git": 9418}


def find(source: Source) -> Origin:
    path, module = source.file()
    file = None if path is None else Path(os.path.abspath(path))  # noqa: PTH100  # links stay
    if file is not None and (is_installed(file) or not file.parent.exists()):
        module, file = module or file.stem, None
    own, folder = origin_of_pod(), project_of_pod()
    if own is None:
        folder = _folder(source, file)
        project, name = identify(folder)
        machine = digest_of(_machine().encode())[:_DIGITS]
    else:
        project, name, machine = own.project, own.name, own.machine
    if source.is_interactive:
        file = notebook() or file
    named = _callable(source, file, module, folder)
    name, named = (terminal.printable(text)[-_LONGEST:] for text in (name, named))
    return Origin(project, name, named, machine)


def is_defined(source: Source, callable_name: str) -> bool:
    """True if a callable of the same project is in its file, as far as that can be seen here."""
    file, _, qualname = callable_name.rpartition(":")
    if source.is_interactive:
        return hasattr(sys.modules["__main__"], qualname.partition(".")[0])
    path = source.file()[0]
    folder = project_of_pod() or _folder(source, None if path is None else Path(path))
    try:
        return _definition((folder / file).read_bytes(), qualname) is not None
    except FileNotFoundError:
        return False
    except _UNREADABLE:
        return True


def code_of(source: Source) -> str:
    """Digest of a callable's own text in its file; empty where that cannot be seen."""
    path = source.file()[0]
    if source.kind == "app" or source.is_interactive or path is None:
        return ""
    try:
        text = Path(path).read_bytes()
        found = _definition(text, source.qualname)
    except _UNREADABLE:
        return ""
    if found is None:
        return ""
    first = min([found.lineno, *(one.lineno for one in found.decorator_list)])
    return digest_of(b"\n".join(text.splitlines()[first - 1 : found.end_lineno]))[:_DIGITS]


def _definition(text: bytes, qualname: str) -> _Definition | None:
    """The statement of a file that defines a function or class."""
    scope: ast.AST = ast.parse(text)
    for name in qualname.split("."):
        inner = (one for one in ast.walk(scope) if isinstance(one, _DEFINITIONS))
        found = next((one for one in inner if one is not scope and one.name == name), None)
        if found is None:
            return None
        scope = found
    return scope if isinstance(scope, _DEFINITIONS) else None


def _callable(source: Source, file: Path | None, module: str | None, folder: Path | None) -> str:
    if file is not None and folder is not None and file.is_relative_to(folder):
        inner = file.relative_to(folder)
    else:
        dotted = module if file is None else pointers(file, module)[1]
        inner = Path(*(dotted or "").split(".")).with_suffix(".py")
    return inner.as_posix() if source.kind == "app" else f"{inner.as_posix()}:{source.qualname}"


def _folder(source: Source, file: Path | None) -> Path:
    """The folder of the project: of the callable's, else of the program that deploys it."""
    if file is None:
        program = modules.file_of(sys.modules["__main__"]) or ""
        is_own = program.endswith(".py") and not is_installed(Path(program))
        start = Path(os.path.abspath(program)).parent if is_own else working_directory()  # noqa: PTH100
        return find_project(start) or start
    sync_dir = source.placement.sync_dir
    given = Path(sync_dir).expanduser() if isinstance(sync_dir, (str, Path)) else file.parent
    return find_project(file.parent) or Path(os.path.abspath(given))  # noqa: PTH100


def notebook() -> Path | None:
    """The notebook that this session is of, as Jupyter or VS Code says it."""
    given = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__") or environment.session_name()
    return Path(given) if isinstance(given, str) and given.endswith(".ipynb") else None


def identify(folder: Path) -> tuple[str, str]:
    real = folder.resolve()
    found = _repository(real)
    if found is not None:
        known = name = "/".join((found[0], *real.relative_to(found[1]).parts))
    else:
        home = Path.home().resolve()
        shown = str(Path("~", real.relative_to(home))) if real.is_relative_to(home) else str(real)
        known, name = f"{_machine()}:{real}", f"{platform.node().partition('.')[0]}:{shown}"
    return digest_of(known.encode())[:_DIGITS], name


def _repository(folder: Path) -> tuple[str, Path] | None:
    """The remote of the repository that a folder lies in, and where that begins."""
    home = Path.home().resolve()
    for parent in (folder, *folder.parents):
        if parent in (home, parent.parent):
            return None
        if (parent / ".git").exists():
            remote = _remote(parent / ".git")
            return None if remote is None else (remote, parent)
    return None


def _remote(entry: Path) -> str | None:
    """The remote `origin` of a repository, else its first one."""
    with suppress(OSError, UnicodeDecodeError):
        folder = git_folder(entry)
        common = folder / "commondir"  # of a work tree
        if common.exists():
            folder = folder / common.read_text(encoding="utf-8").strip()
        remotes = _remotes((folder / "config").read_text(encoding="utf-8"))
        found = remotes.get("origin") or next(iter(remotes.values()), None)
        return None if found is None else normalised(found)
    return None


def _remotes(text: str) -> Mapping[str, str]:
    """The URLs of a repository's remotes, by name."""
    found: dict[str, str] = {}
    name: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            section = _SECTION.match(line)
            name = None if section is None else section["name"]
        elif name is not None and (url := _URL.match(line)):
            found.setdefault(name, url["url"].strip('"'))
    return found


def normalised(url: str) -> str | None:
    """A remote without protocol, credentials and `.git`; `None` if it is a folder."""
    if "://" in url:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            return None
        if parts.scheme == "file" or host is None:
            return None
        if port is not None and port != _PORTS.get(parts.scheme) and "ssh" not in parts.scheme:
            host = f"{host}:{port}"
        path = parts.path
    else:
        match = _SCP.fullmatch(url)
        if match is None:
            return None
        host, path = match["host"].lower(), match["path"]
    return f"{host}/{path.strip('/').removesuffix('.git').rstrip('/')}"


def _machine() -> str:
    file = Path.home() / ".kt" / "machine"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make(file)
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a home that cannot be written to
        return platform.node()


def _make(file: Path) -> None:
    lock = files.FileLock(file.parent)
    try:
        lock.get(_PATIENCE)
        if not file.exists():
            files.write_atomically(file, os.urandom(16).hex().encode())
    finally:
        lock.close()
