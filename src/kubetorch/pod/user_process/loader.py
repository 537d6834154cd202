"""From the name of a callable to the callable: `sys.path`, import, constructor.

A program may deploy at module level, without a `__main__` guard. When a pod imports that file, the
statements after the first `.to()`, `kt.app` or call of a handle are the deploying program, not the
deployed code. So the SDK calls this module before each of these operations:

    importing = sys.modules.get("kubetorch.pod.user_process.loader")
    if importing is not None and importing.is_deploying():
        return self  # this statement has no effect

    statement                                              `is_deploying`
    -----------------------------------------------------  -----------------------------------------
    no import of the deployed file is under way            false: user code deploys and calls
    of another module, or of a thread of the file          true
    of the file, once the callable is defined              raises `EndOfImport`
    of the file, before: a `.to()`                         true: the callable may want the handle
    of the file, before: a call, which has no result       raises `EndOfImport`
    of a thread of the file that outlives the import       true for deploys, false for calls
    of a child process that imports the file again         true while a thread runs the file's body
    of the command of an app                               false: the file runs as a program

The name of a decorated callable means the callable itself here, which has no `.deploy()`: that ends
the import too. A process serves calls only once its import is over, and never imports the file a
second time. A thread that outlives the import deploys nothing, else each pod would deploy the next
service. A spawned `multiprocessing` child does not have this loader: `FILE_VARIABLE` names the file
to it, and `APPS_VARIABLE` the app to its command.

A callable that is defined below the statement that ended the import, such as the next callable that
the program deploys, is found all the same: the defining statements of the rest of the file run
(imports, functions, classes, assignments, and conditions around them). A statement that fails,
since it needs the result of a deploy, is passed over.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from kubetorch.errors import CallableNotFoundError
from kubetorch.lib import modules
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.pod.user_process import frameworks
from kubetorch.pod.user_process.frameworks import MonarchHosts
from kubetorch.wire import codecs, exceptions, introspection

#: Environment variable with the path of the deployed file.
FILE_VARIABLE = "KT_DEPLOYED_FILE"
#: Environment variable with the app that a command belongs to, and the apps that deployed it.
APPS_VARIABLE = "KT_DEPLOYED_APPS"
#: Folder of the `sitecustomize` of interpreters that user code starts.
CHILDREN_FOLDER = str(Path(__file__).with_name("children"))
#: The import of the deployed file; at most one.
_under_way: list[Import] = []
#: The same import, if it ended early.
_ended: list[EndedImport] = []
#: Threads that the import started, and that outlived it.
_left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_DEFINING = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
    ast.Try,
    getattr(ast, "TryStar", ast.Try),  # since Python 3.11
    getattr(ast, "TypeAlias", ast.Assign),  # since Python 3.12
)
_FUTURE_FLAGS = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
#: Distributions of well-known modules that have another name.
_DISTRIBUTION_NAMES = {
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
#: Attributes of handles that functions and classes do not have.
_HANDLE_NAMES = (
    *("map", "map_async", "starmap", "starmap_async", "spawn", "options", "local", "endpoint"),
    *("to", "to_async", "deploy", "deploy_async", "teardown", "teardown_async", "service_name"),
)
#: Methods of a handle that deploy it, or end its service.
_DEPLOYING_METHODS = ("to", "to_async", "deploy", "deploy_async", "teardown", "teardown_async")


class EndOfImport(BaseException):
    """Ends the import of the deployed file. The loader catches it; the module stays."""


class EndedImport(FrozenValue):
    """An import of the deployed file that ended early.

    Attributes:
        module: The module, which lacks the names that are bound below `line`.
        path: The file of the module.
        line: The line of the statement that ended the import.
        source: The text of the file.
    """

    module: ModuleType
    path: str
    line: int
    source: bytes

    def binds_below(self, name: str) -> bool:
        """True if the statement that ended the import, or one below it, binds a global name."""
        return any(
            name in _bound_names(statement)
            for statement in ast.parse(self.source).body
            if (statement.end_lineno or statement.lineno) >= self.line
        )


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top level binds there."""
    nodes_to_visit: list[ast.AST] = [statement]
    for node in nodes_to_visit:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.comprehension):  # whose target is a name of its own
            nodes_to_visit += [node.iter, *node.ifs]
        elif not isinstance(node, ast.Lambda):
            nodes_to_visit += ast.iter_child_nodes(node)
            capture = getattr(node, "rest" if isinstance(node, ast.MatchMapping) else "name", None)
            if isinstance(node, ast.pattern) and capture is not None:
                yield capture


class Import:
    """An import of the deployed file, under way in the thread that made this."""

    def __init__(self, module: ModuleType, qualname: str) -> None:
        self._module = module
        self._qualname = qualname
        self._thread_id = threading.get_ident()
        self._threads_before = set(threading.enumerate())

    def __enter__(self) -> Import:
        _under_way.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _left_behind.update(set(threading.enumerate()) - self._threads_before)
        _under_way.remove(self)

    @property
    def is_here(self) -> bool:
        """True if this thread runs the import."""
        return self._thread_id == threading.get_ident()

    def has_body(self, frame: FrameType | None) -> bool:
        """True if the frame is the body of the file."""
        return frame is not None and frame.f_globals is self._module.__dict__

    @property
    def is_defined(self) -> bool:
        """True if the callable exists by now."""
        definition: object = self._module
        for part in self._qualname.split("."):
            definition = getattr(definition, part, None)
        return definition is not None

    def deploys(self, error: AttributeError) -> bool:
        """True if the failed statement deploys the callable, which is no handle in its own pods."""
        return (
            type(error.name) is str and error.name in _DEPLOYING_METHODS and self.defines(error.obj)
        )

    def defines(self, definition: object) -> bool:
        """True if this function or class is the callable."""
        expected_names = (self._module.__name__, self._qualname)
        actual_names = [
            introspection.attribute(definition, attribute)
            for attribute in ("__module__", "__qualname__")
        ]
        return (
            all(type(name) is str for name in actual_names)
            and tuple(actual_names) == expected_names
        )


def is_deploying(*, is_call: bool = False) -> bool:
    """True if the calling statement of the SDK must have no effect."""
    under_way = next(iter(_under_way), None)  # another thread may end it at any moment
    if under_way is None:
        is_left_behind = not is_call and threading.current_thread() in _left_behind
        return is_left_behind or (APPS_VARIABLE not in os.environ and is_imported_again())
    body = _innermost_module_body(sys._getframe(1))
    is_the_deployed_file = under_way.is_here and under_way.has_body(body)
    if is_the_deployed_file and (is_call or under_way.is_defined):
        raise EndOfImport
    return True


def is_under_way() -> bool:
    """True if this process is importing the deployed file."""
    return bool(_under_way)


def is_being_imported(definition: object) -> bool:
    """True if the running import is that of this function or class."""
    return any(running_import.defines(definition) for running_import in _under_way)


def is_imported_again() -> bool:
    """True if a thread of a process that user code started is importing the deployed file."""
    deployed = os.environ.get(FILE_VARIABLE)
    if deployed is None:
        return False
    for frame in sys._current_frames().values():
        body = _innermost_module_body(frame)
        while body is not None:
            if body.f_code.co_filename == deployed:
                return True
            body = _innermost_module_body(body.f_back)
    return False


def _innermost_module_body(frame: FrameType | None) -> FrameType | None:
    """The innermost module body among the callers of `frame`."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame


def run_rest(
    module: ModuleType,
    path: str,
    source: bytes,
    ended: BaseException,
    is_complete: Callable[[], bool],
) -> None:
    """Run the defining statements of `module` below the statement that ended its import."""
    failure: BaseException | None = None
    for code in _definitions_below(path, source, line=_running_line(ended.__traceback__, module)):
        if is_complete():
            return
        try:
            exec(code, module.__dict__)
        except (Exception, EndOfImport) as error:  # noqa: BLE001  # user code
            if failure is None and not isinstance(error, EndOfImport):
                failure = error
    if failure is not None and not is_complete():
        raise failure


def _running_line(trace: TracebackType | None, module: ModuleType) -> int:
    """The line of the module's body that was running."""
    while trace is not None:
        if trace.tb_frame.f_globals is module.__dict__:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def _definitions_below(path: str, source: bytes, *, line: int) -> Iterator[CodeType]:
    tree = ast.parse(source, path)
    whole = compile(tree, path, "exec", dont_inherit=True)
    flags = sum(flag for flag in _FUTURE_FLAGS if whole.co_flags & flag)
    for statement in tree.body:
        decorators = getattr(statement, "decorator_list", ())
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        if first > line and _is_defining(statement):
            alone = ast.Module([statement], [])
            yield compile(alone, path, "exec", flags=flags, dont_inherit=True)


def _is_defining(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.With):  # such as `with contextlib.suppress(ImportError):`
        return all(isinstance(inner, (ast.Import, ast.ImportFrom)) for inner in statement.body)
    return isinstance(statement, _DEFINING)


class Source(FrozenValue):
    """Where the callable is defined; see `kubetorch.specs.callable.CallableRef`."""

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
    first.append(CHILDREN_FOLDER)
    rest = [entry for entry in inherited.split(os.pathsep) if entry and entry not in first]
    os.environ["PYTHONPATH"] = os.pathsep.join(first + rest)
    importlib.invalidate_caches()


def load(source: Source, hosts: MonarchHosts | None = None) -> Any:  # noqa: ANN401  # the user's
    """Import the callable; a class is constructed."""
    user_callable = _import_callable(source)
    _check_kind(user_callable, source)
    # After the import of the module, whose classes the arguments may be instances of.
    arguments = codecs.decode_arguments(source.init_args, source.module)
    if hosts is not None:
        frameworks.check_allocators(user_callable)
    if source.kind == "cls":
        if hosts is not None:
            hosts.give(user_callable, (), arguments)
        try:
            return user_callable(**arguments)
        except TypeError as error:
            _explain_arguments(error, user_callable, arguments)
            raise
    return user_callable


def _explain_arguments(error: TypeError, cls: Any, init_args: Mapping[str, Any]) -> None:  # noqa: ANN401  # the user's own class
    """Explain how a class gets the arguments that it lacks."""
    try:
        inspect.signature(cls).bind(**init_args)
    except TypeError:
        name = introspection.name_of(cls)
        exceptions.add_note(
            error, f"hint: pass the arguments of {name}() in .to(compute, init_args={{...}})"
        )
    except Exception:  # noqa: BLE001  # a class that says nothing of its arguments, or raises
        return


def explain_call(error: BaseException, called: object) -> None:
    """Explain an error that a call meets because its file does not run as a program in pods.

    Args:
        error: What the call raised: a name, or an attribute of the callable, is missing.
        called: The callable that was deployed.
    """
    if isinstance(error, NameError) and type(error.name) is str:
        _explain_name(error, error.name)
    elif isinstance(error, AttributeError) and error.name in _HANDLE_NAMES:
        definition = introspection.unwrapped(called)
        definition = (
            definition if isinstance(definition, (type, FunctionType)) else type(definition)
        )
        if error.obj is definition:
            _explain_handle(error, definition)


def _explain_name(error: NameError, name: str) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    for ended in _ended:
        is_same_module = trace is not None and trace.tb_frame.f_globals is ended.module.__dict__
        if is_same_module and ended.binds_below(name):
            file = Path(ended.path).name
            exceptions.add_note(
                error,
                f"hint: in pods the import of {file} ended at line {ended.line}, which deploys or "
                f"calls, so {name!r} is not defined there: define it above that line (a handle: "
                f'{name} = kt.fn(...)), and deploy below if __name__ == "__main__":',
            )


def _explain_handle(error: AttributeError, definition: type | FunctionType) -> None:
    is_class = isinstance(definition, type)
    name = (
        introspection.name_of(definition) if isinstance(definition, type) else definition.__name__
    )
    service = os.environ.get("KT_SERVICE_NAME", name)
    exceptions.add_note(
        error,
        f"hint: in its own pods {name} is the {'class' if is_class else 'function'} itself, and no "
        f"handle: kt.{'cls' if is_class else 'fn'}(name={service!r}).{error.name}",
    )


def _explain_guard(error: BaseException, source: Source) -> None:
    """Explain why a file that ran as a program fails when a pod imports it."""
    if source.is_script and source.source_file and not isinstance(error, SyntaxError):
        file = Path(source.source_file).name
        exceptions.add_note(
            error,
            f"hint: pods import {file} without the arguments and the environment of your program: "
            'put what only the program needs below if __name__ == "__main__":',
        )


def _import_callable(source: Source) -> Any:  # noqa: ANN401
    path = _synced_file(source)
    finder = _Finder(source.module, source.qualname)
    sys.meta_path.insert(0, finder)
    try:
        module = _import(source, path)
    except ModuleNotFoundError as error:
        _explain_missing_module(error, source)
        raise
    except BaseException as error:  # argparse ends with SystemExit
        _explain_guard(error, source)
        raise
    finally:
        sys.meta_path.remove(finder)
    if source.is_script:
        # In pickles of the program, where the file was `__main__`, its classes belong to that.
        sys.modules["__main__"] = module
    return _unwrap(_resolve(module, source.qualname))


def _check_kind(user_callable: object, source: Source) -> None:
    """Refuse an object that calls could not use, while the generation before still serves."""
    is_class = isinstance(user_callable, type)
    if is_class if source.kind == "cls" else callable(user_callable) and not is_class:
        return
    expected_kind = "class" if source.kind == "cls" else "function"
    actual_kind = (
        "a class" if is_class else f"a value of type {introspection.name_of(type(user_callable))}"
    )
    raise CallableNotFoundError(
        f"{source.qualname!r} of module {source.module!r} is {actual_kind}, not a {expected_kind}",
        hint="deploy it with kt.cls(...)"
        if is_class
        else f"the last statement of its file that binds {source.qualname!r} must make a "
        f"{expected_kind}",
    )


def _synced_file(source: Source) -> str | None:
    if source.source_file is None:
        return None
    for entry in source.sys_path:
        path = Path(entry, source.source_file)
        if path.is_file():
            return str(path)
    return None


def _import(source: Source, path: str | None) -> ModuleType:
    loaded_module = sys.modules.get(source.module)
    if loaded_module is not None and path is not None and not _is_same(loaded_module, path):
        # The file has the name of another module, which is loaded already.
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
    file = modules.file_of(module)
    return file is not None and os.path.realpath(file) == os.path.realpath(path)


def _import_file(source: Source, path: str) -> ModuleType:
    loader = _Loader(source.module, path, source.qualname)
    spec = importlib.util.spec_from_file_location(source.module, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no Python file", name=source.module, path=path)
    module = importlib.util.module_from_spec(spec)
    earlier_module = sys.modules.get(source.module)
    sys.modules[source.module] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(source.module, None)
        if earlier_module is not None:
            sys.modules[source.module] = earlier_module
        raise
    return module


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the deployed file; its import may end early (`kubetorch.pod.user_process.loader`)."""

    def __init__(self, fullname: str, path: str, qualname: str) -> None:
        super().__init__(fullname, path)
        self._qualname = qualname

    def exec_module(self, module: ModuleType) -> None:
        os.environ[FILE_VARIABLE] = self.path
        with Import(module, self._qualname) as under_way:
            try:
                super().exec_module(module)
            except (EndOfImport, AttributeError) as end:
                if isinstance(end, AttributeError) and not under_way.deploys(end):
                    raise
                source = self.get_data(self.path)
                line = _running_line(end.__traceback__, module)
                _ended.append(EndedImport(module, self.path, line, source))
                run_rest(module, self.path, source, end, lambda: under_way.is_defined)


class _Finder:
    """Gives the deployed file its loader; everything else is left to the other finders.

    A finder of `sys.meta_path`; it does without the base class, whose module costs 4 ms.
    """

    def __init__(self, name: str, qualname: str) -> None:
        self._name = name
        self._qualname = qualname

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            # As Python itself, pass over finders in the form of before Python 3.4.
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                loader = getattr(spec, "loader", None)
                if type(loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _Loader(fullname, loader.path, self._qualname)
                return spec  # type: ignore[no-any-return]  # as a finder gives it
        return None


def _resolve(module: ModuleType, qualname: str) -> Any:  # noqa: ANN401
    definition: Any = module
    for part in qualname.split("."):
        try:
            definition = getattr(definition, part)
        except AttributeError:
            file = getattr(module, "__file__", None)
            raise CallableNotFoundError(
                f"module {module.__name__!r} ({file}) has no {qualname!r}",
                hint="it must be defined at the top level of its file",
            ) from None
    return definition


def _unwrap(handle: Any) -> Any:  # noqa: ANN401
    """The user's own object, if the name is bound to one of our handles: `f = kt.fn(f)`."""
    while introspection.is_ours(handle) and hasattr(handle, "__wrapped__"):
        handle = handle.__wrapped__
    return handle


def _explain_missing_module(error: ModuleNotFoundError, source: Source) -> None:
    """Explain where a module was looked for, and how to get it."""
    if error.name is None:
        return
    top = error.name.partition(".")[0]
    package = _DISTRIBUTION_NAMES.get(error.name) or _DISTRIBUTION_NAMES.get(top, top)
    roots = ", ".join(source.sys_path) or "none"
    message = (
        f"{error}\n"
        f"searched the project's roots ({roots}) and the packages of {sys.executable}\n"
        f'hint: if it is a package, kt.Image().pip_install(["{package}"]) brings it into the pods '
        f"(on this machine also pip install {package}); if it is your own, it must be among the "
        "files that were sent"
    )
    error.msg = message
    error.args = (message,)
