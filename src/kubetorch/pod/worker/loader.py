"""From the name of a callable to the callable: `sys.path`, import, constructor."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kubetorch.errors import CallableNotFoundError
from kubetorch.pod.worker import definitions, importing

#: What to install for a module that is called otherwise; the usual suspects.
_DISTRIBUTIONS = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "git": "GitPython",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "magic": "python-magic",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "psycopg2": "psycopg2-binary",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "umap": "umap-learn",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


@dataclass(frozen=True)
class Source:
    """Where the callable lies; see `kubetorch.specs.callable.CallableRef`.

    Attributes:
        kind: `fn` or `cls`.
        module, qualname: What to import, and from where.
        source_file: Path of the module's file below one of `sys_path`, when it is synced.
        sys_path: Entries to put first.
        is_script: The module was `__main__` where it was deployed.
        init_args: Keyword arguments for the constructor.
    """

    kind: str
    module: str
    qualname: str
    source_file: str | None
    sys_path: Sequence[str]
    is_script: bool
    init_args: Mapping[str, Any]


def prepare_path(entries: Sequence[str]) -> None:
    """Put entries first, here and for the processes that user code starts."""
    first = [entry for entry in dict.fromkeys(entries) if entry]
    sys.path[:] = first + [entry for entry in sys.path if entry not in first]
    inherited = os.environ.get("PYTHONPATH", "")
    rest = [entry for entry in inherited.split(os.pathsep) if entry and entry not in first]
    if first or rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(first + rest)
    importlib.invalidate_caches()


def load(source: Source) -> Any:  # noqa: ANN401  # the user's function or instance
    """Import the callable; a class is constructed.

    Raises:
        BaseException: Whatever the user's module or constructor raises.
        CallableNotFoundError: The module has no such callable, or the name is one of another kind.
    """
    found = _callable(source)
    _check_kind(found, source)
    if source.kind == "cls":
        return found(**source.init_args)
    return found


def _callable(source: Source) -> Any:  # noqa: ANN401
    path = _path(source)
    finder = _Finder(source.module, source.qualname, path)
    sys.meta_path.insert(0, finder)
    try:
        module = _import(source, path)
    except ModuleNotFoundError as error:
        _explain(error, source)
        raise
    finally:
        sys.meta_path.remove(finder)
    if source.is_script:
        # Pickles that were written where the file was `__main__` name their classes so.
        sys.modules["__main__"] = module
    return _unwrap(_resolve(module, source.qualname))


def _check_kind(found: object, source: Source) -> None:
    """Refuse what calls could not use, while the generation before still serves."""
    is_class = isinstance(found, type)
    if is_class if source.kind == "cls" else callable(found) and not is_class:
        return
    wanted = "class" if source.kind == "cls" else "function"
    raise CallableNotFoundError(
        f"{source.qualname!r} of module {source.module!r} is "
        f"{'a class' if is_class else f'a value of type {type(found).__name__}'}, not a {wanted}",
        hint="deploy it with kt.cls(...)"
        if is_class
        else f"the last statement of its file that binds {source.qualname!r} must make a {wanted}",
    )


def _path(source: Source) -> str | None:
    """The file of the module, if it is a synced one."""
    if source.source_file is None:
        return None
    for entry in source.sys_path:
        path = Path(entry, source.source_file)
        if path.is_file():
            return str(path)
    return None


def _import(source: Source, path: str | None) -> ModuleType:
    known = sys.modules.get(source.module)
    if known is not None and path is not None and not _is_same(known, path):
        # A file that is called like a module of the library which is loaded already.
        return _import_file(source, path)
    try:
        # Not importlib's own function, whose frame would stand in the user's tracebacks.
        __import__(source.module)
    except ModuleNotFoundError as error:
        if path is None or not f"{source.module}.".startswith(f"{error.name}."):
            raise
    else:
        return sys.modules[source.module]
    return _import_file(source, path)


def _is_same(module: ModuleType, path: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and os.path.realpath(file) == os.path.realpath(path)


def _import_file(source: Source, path: str) -> ModuleType:
    loader = _Loader(source.module, path, source.qualname)
    spec = importlib.util.spec_from_file_location(source.module, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no Python file", name=source.module, path=path)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(source.module)
    sys.modules[source.module] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[source.module]
        if before is not None:
            sys.modules[source.module] = before
        raise
    return module


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the deployed file; its import may end early (`kubetorch.pod.worker.importing`)."""

    def __init__(self, fullname: str, path: str, qualname: str) -> None:
        super().__init__(fullname, path)
        self._qualname = qualname

    def exec_module(self, module: ModuleType) -> None:
        """Run the body of the file."""
        os.environ[importing.FILE_VARIABLE] = self.path
        with importing.Import(module, self._qualname) as under_way:
            try:
                super().exec_module(module)
            except importing.EndOfImport as end:
                source = self.get_data(self.path)
                definitions.run_rest(module, self.path, source, end, lambda: under_way.is_defined)


class _Finder:
    """Gives the deployed file its loader; everything else is left to the other finders.

    A finder of `sys.meta_path`; it does without the base class, whose module costs 4 ms.
    """

    def __init__(self, name: str, qualname: str, path: str | None) -> None:
        self._name = name
        self._qualname = qualname
        self._path = path

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the deployed file."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _Loader(fullname, spec.loader.path, self._qualname)
                return spec
        return None


def _resolve(module: ModuleType, qualname: str) -> Any:  # noqa: ANN401
    found: Any = module
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            file = getattr(module, "__file__", None)
            raise CallableNotFoundError(
                f"module {module.__name__!r} ({file}) has no {qualname!r}",
                hint="it must be defined at the top level of its file",
            ) from None
    return found


def _unwrap(found: Any) -> Any:  # noqa: ANN401
    """The user's own object, if the name is bound to one of our handles: `f = kt.fn(f)`."""
    while type(found).__module__.partition(".")[0] == "kubetorch" and hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def _explain(error: ModuleNotFoundError, source: Source) -> None:
    """Say where a module was looked for, and how to get it."""
    if error.name is None:
        return
    top = error.name.partition(".")[0]
    package = _DISTRIBUTIONS.get(error.name) or _DISTRIBUTIONS.get(top, top)
    roots = ", ".join(source.sys_path) or "none"
    message = (
        f"{error}\n"
        f"searched the project's roots ({roots}) and the packages of {sys.executable}\n"
        f"hint: if it is a package, pip install {package}; "
        "if it is your own, it must be among the files that were sent"
    )
    error.msg = message
    error.args = (message,)
