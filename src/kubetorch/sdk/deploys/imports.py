"""Which installed modules a project imports, found by reading its source: for the zygote's preload.

From the deployed module through the project's own files, only imports count that surely run when
the module is imported: those at the top level, in `try` and `with` blocks and class bodies, not
those in functions, in handlers, or under any `if`. A module is named if it is installed (it lies in
a `site-packages` folder): the standard library costs little, and what lies elsewhere may be code
that the user edits, which the zygote must never have loaded.

Not named are `NOT_PRELOADED`. Nothing is imported here.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from kubetorch.datastore.blobs import digest_of

#: Libraries that read the variables of one rank (RANK, LOCAL_RANK, those of MPI or a cluster's job)
#: when they are imported, so that a fork would inherit another rank's, …
_READ_RANK = (
    "bagua",
    "byteps",
    "colossalai",
    "deepspeed",
    "habana_frameworks",
    "horovod",
    "lightning",
    "lightning_fabric",
    "mpi4jax",
    "mpi4py",
    "nemo",
    "neuronx_distributed",
    "petsc4py",
    "pytorch_lightning",
    "slepc4py",
    "smdistributed",
    "torch_neuronx",
    "torch_xla",
    "torchmetrics",
)
#: … and those that make a CUDA context, which does not survive a fork.
_MAKE_CONTEXT = ("bitsandbytes", "cudf", "cugraph", "cuml", "rmm", "unsloth")
NOT_PRELOADED = frozenset((*_READ_RANK, *_MAKE_CONTEXT, "kubetorch"))

#: Files that are read at most: what a deployed module imports beyond them is not preloaded.
FILE_LIMIT = 2000

_INSTALLED = ("site-packages", "dist-packages")


class _Import(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One import statement: `from <dots><module> import <names>`, or `import <module>`."""

    module: str
    level: int = 0
    names: list[str] = []


class _Source(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file as it was read, and its imports."""

    size: int
    mtime_ns: int
    inode: int
    imports: list[_Import]


_decoder = msgspec.msgpack.Decoder(dict[str, _Source])


def find(entry: Path, roots: Sequence[Path], *, cache: Path | None = None) -> tuple[str, ...]:
    """Names of installed modules that importing a file imports, sorted.

    Args:
        entry: The deployed module's file.
        roots: The project's entries of `sys.path`.
        cache: Folder in which to keep what was read, see `kubetorch.datastore.listings`.
    """
    search = _Search([os.fspath(root) for root in roots], cache, os.fspath(entry))
    return search.run(os.fspath(entry))


class _Search:
    def __init__(self, roots: list[str], cache: Path | None, key: str) -> None:
        self._roots = roots
        self._cache = cache and cache / f"{digest_of(key.encode())[:32]}.imports"
        self._known = self._load()
        self._read: dict[str, _Source] = {}
        self._queue: list[str] = []
        self._found: set[str] = set()
        self._places: dict[str, list[str] | None] = {}

    def run(self, entry: str) -> tuple[str, ...]:
        self._queue.append(entry)
        self._enqueue_packages(entry)
        while self._queue and len(self._read) < FILE_LIMIT:
            path = self._queue.pop()
            if path in self._read:
                continue
            source = self._source(path)
            if source is not None:
                self._read[path] = source
                for item in source.imports:
                    self._follow(item, path)
        if self._read != self._known:
            self._save()
        return tuple(sorted(self._found))

    # ---------------------------------------------------------------------------------- following

    def _enqueue_packages(self, entry: str) -> None:
        """Queue the `__init__.py` files that run before a module of a package."""
        for root in self._roots:
            if entry.startswith(f"{root}/"):
                folder = root
                for part in entry[len(root) + 1 :].split("/")[:-1]:
                    folder = f"{folder}/{part}"
                    self._enqueue(folder)
                return

    def _follow(self, item: _Import, path: str) -> None:
        parts = item.module.split(".") if item.module else []
        if item.level:
            folder = path
            for _ in range(item.level):
                folder = os.path.dirname(folder)  # noqa: PTH120  # text is quicker
            self._follow_own(folder, parts, item.names)
        elif parts[0] not in sys.stdlib_module_names:
            root = self._own_root(parts[0])
            if root is not None:
                self._follow_own(root, parts, item.names)
            elif parts[0] not in NOT_PRELOADED:
                self._name(item, parts)

    def _own_root(self, top: str) -> str | None:
        """The root that has this module; a mere folder is one only if nothing else has the name."""
        for root in self._roots:
            if _is_module(f"{root}/{top}"):
                return root
        for root in self._roots:
            if os.path.isdir(f"{root}/{top}") and self._place(top) is None:  # noqa: PTH112
                return root
        return None

    def _follow_own(self, folder: str, parts: list[str], names: Iterable[str]) -> None:
        """Queue the project's files that an import of `parts` in `folder` runs."""
        for part in parts:
            folder = f"{folder}/{part}"
            self._enqueue(folder)
        for name in names:
            self._enqueue(f"{folder}/{name}")

    def _enqueue(self, module: str) -> None:
        for path in (f"{module}/__init__.py", f"{module}.py"):
            if path in self._read or os.path.isfile(path):  # noqa: PTH113  # text is quicker
                self._queue.append(path)
                return

    # ------------------------------------------------------------------------------------- naming

    def _name(self, item: _Import, parts: list[str]) -> None:
        places = self._place(parts[0])
        if places is None:
            return
        self._found.add(item.module)
        # `from sklearn import linear_model` imports a module, `from math import sqrt` does not.
        for place in places:
            folder = "/".join((place, *parts[1:]))
            for name in item.names:
                if _is_module(f"{folder}/{name}"):
                    self._found.add(f"{item.module}.{name}")

    def _place(self, top: str) -> list[str] | None:
        """The folders of an installed package; `None` if it is not installed."""
        if top not in self._places:
            self._places[top] = _installed(top)
        return self._places[top]

    # ------------------------------------------------------------------------------------ reading

    def _source(self, path: str) -> _Source | None:
        try:
            facts = os.stat(path)  # noqa: PTH116  # text is quicker
            known = self._known.get(path)
            stamp = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
            if known is not None and (known.size, known.mtime_ns, known.inode) == stamp:
                return known
            content = Path(path).read_bytes()
        except OSError:
            return None
        return _Source(*stamp, imports=list(parse(content)))

    def _load(self) -> dict[str, _Source]:
        if self._cache is None:
            return {}
        try:
            return _decoder.decode(self._cache.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def _save(self) -> None:
        if self._cache is None:
            return
        temporary = self._cache.with_suffix(f".{os.getpid()}")
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary.write_bytes(msgspec.msgpack.encode(self._read))
            temporary.replace(self._cache)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def _installed(top: str) -> list[str] | None:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    places = folders or [spec.origin or ""]
    if not all(any(f"/{name}/" in f"{place}/" for name in _INSTALLED) for place in places):
        return None
    return folders


def _is_module(path: str) -> bool:
    """Whether there is a module or package of this name."""
    endings = ("/__init__.py", ".py", *importlib.machinery.EXTENSION_SUFFIXES)
    return any(os.path.isfile(path + ending) for ending in endings)  # noqa: PTH113


# ------------------------------------------------------------------------------------ one source


def parse(content: bytes) -> Iterator[_Import]:
    """The imports that run when this source is imported; none if it has a syntax error."""
    try:
        body = ast.parse(content).body
    except (SyntaxError, ValueError, RecursionError):
        return
    yield from _imports(body)


def _imports(body: Iterable[ast.stmt]) -> Iterator[_Import]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (_Import(alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            names = [alias.name for alias in statement.names if alias.name != "*"]
            yield _Import(statement.module or "", statement.level, names)
        elif isinstance(statement, ast.Try):
            yield from _imports((*statement.body, *statement.finalbody))
        elif isinstance(statement, (ast.With, ast.ClassDef)):
            yield from _imports(statement.body)
        elif isinstance(statement, ast.If) and _is_never(statement.test):
            yield from _imports(statement.orelse)


def _is_never(test: ast.expr) -> bool:
    """Whether a condition is false while a module is imported: TYPE_CHECKING, or being a script."""
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name):
        return test.left.id == "__name__"
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"
