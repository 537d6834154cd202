"""The origin of the code that a program deploys: its project, and the callable in it.

    git remote + path in the repository  ─┐
    id of this machine + folder          ─┴─► project: a digest, and a name for people
    file in the project + qualified name ───► callable: ml/train.py:train

All checkouts of a repository are one project, whatever protocol and credentials they were cloned
by. Without a remote the project is this machine's id, a random file in the home folder, with the
folder: names of machines change with the network. Code in a pod belongs to the project of the pod's
own code, which its environment names.
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
from kubetorch.sdk.tuning import LIMITS, TIMING
from kubetorch.specs.workload import Origin

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Errors of a file that cannot be read, or is no Python; Python 3.11 may fail where threads parse.
_UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, SystemError)
#: Hex digits of a project's digest.
_DIGITS = 16
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
    pod_origin, folder = origin_of_pod(), project_of_pod()
    if pod_origin is None:
        folder = _folder(source, file)
        project, name = identify(folder)
        machine = digest_of(_machine_id().encode())[:_DIGITS]
    else:
        project, name, machine = pod_origin.project, pod_origin.name, pod_origin.machine
    if source.is_interactive:
        file = notebook() or file
    callable_name = _callable(source, file, module, folder)
    name, callable_name = (
        terminal.printable(text)[-LIMITS.origin_name_characters :] for text in (name, callable_name)
    )
    return Origin(project, name, callable_name, machine)


def is_defined(source: Source, callable_name: str) -> bool:
    """True if a callable of the same project is in its file; also true if that is unknown."""
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
    """Digest of a callable's own text in its file; empty where the file does not show the text."""
    path = source.file()[0]
    if source.kind == "app" or source.is_interactive or path is None:
        return ""
    try:
        text = Path(path).read_bytes()
        definition = _definition(text, source.qualname)
    except _UNREADABLE:
        return ""
    if definition is None:
        return ""
    first = min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])
    return digest_of(b"\n".join(text.splitlines()[first - 1 : definition.end_lineno]))[:_DIGITS]


def _definition(text: bytes, qualname: str) -> _Definition | None:
    """The statement of a file that defines a function or class."""
    scope: ast.AST = ast.parse(text)
    for name in qualname.split("."):
        definitions = (node for node in ast.walk(scope) if isinstance(node, _DEFINITIONS))
        definition = next(
            (node for node in definitions if node is not scope and node.name == name), None
        )
        if definition is None:
            return None
        scope = definition
    return scope if isinstance(scope, _DEFINITIONS) else None


def _callable(source: Source, file: Path | None, module: str | None, folder: Path | None) -> str:
    if file is not None and folder is not None and file.is_relative_to(folder):
        inner = file.relative_to(folder)
    else:
        dotted = module if file is None else pointers(file, module)[1]
        inner = Path(*(dotted or "").split(".")).with_suffix(".py")
    return inner.as_posix() if source.kind == "app" else f"{inner.as_posix()}:{source.qualname}"


def _folder(source: Source, file: Path | None) -> Path:
    """The folder of the callable's project, else of the program that deploys it."""
    if file is None:
        program = modules.file_of(sys.modules["__main__"]) or ""
        is_own = program.endswith(".py") and not is_installed(Path(program))
        start = Path(os.path.abspath(program)).parent if is_own else working_directory()  # noqa: PTH100
        return find_project(start) or start
    sync_dir = source.placement.sync_dir
    sync_folder = Path(sync_dir).expanduser() if isinstance(sync_dir, (str, Path)) else file.parent
    return find_project(file.parent) or Path(os.path.abspath(sync_folder))  # noqa: PTH100


def notebook() -> Path | None:
    """The file of the notebook that this session runs, from Jupyter or VS Code."""
    path_text = (
        vars(sys.modules["__main__"]).get("__vsc_ipynb_file__") or environment.session_name()
    )
    return Path(path_text) if isinstance(path_text, str) and path_text.endswith(".ipynb") else None


def identify(folder: Path) -> tuple[str, str]:
    real = folder.resolve()
    repository = _repository(real)
    if repository is not None:
        identity = name = "/".join((repository[0], *real.relative_to(repository[1]).parts))
    else:
        home = Path.home().resolve()
        shown = str(Path("~", real.relative_to(home))) if real.is_relative_to(home) else str(real)
        identity, name = f"{_machine_id()}:{real}", f"{platform.node().partition('.')[0]}:{shown}"
    return digest_of(identity.encode())[:_DIGITS], name


def _repository(folder: Path) -> tuple[str, Path] | None:
    """The remote of the repository that a folder lies in, and the repository's top folder."""
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
        url = remotes.get("origin") or next(iter(remotes.values()), None)
        return None if url is None else normalised(url)
    return None


def _remotes(text: str) -> Mapping[str, str]:
    """The URLs of a repository's remotes, by name."""
    urls: dict[str, str] = {}
    name: str | None = None
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            section = _SECTION.match(line)
            name = None if section is None else section["name"]
        elif name is not None and (url := _URL.match(line)):
            urls.setdefault(name, url["url"].strip('"'))
    return urls


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


def _machine_id() -> str:
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
        lock.get(TIMING.machine_id_lock_seconds)
        if not file.exists():
            files.write_atomically(file, os.urandom(16).hex().encode())
    finally:
        lock.close()
