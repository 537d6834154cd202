"""From names to callables: `sys.path`, import, end of import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kubetorch.errors import CallableNotFoundError
from kubetorch.pod.user_process import loader
from kubetorch.pod.user_process.call_runner import DeployedCallable


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    path, modules, environ = list(sys.path), dict(sys.modules), dict(os.environ)
    main = sys.modules["__main__"]
    loader.prepare_path([str(tmp_path)])
    yield tmp_path
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environ)
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules["__main__"] = main


def source(
    project: Path, qualname: str, *, module: str = "kt_job", **changes: object
) -> loader.Source:
    values = {
        "kind": "fn",
        "module": module,
        "qualname": qualname,
        "source_file": module.replace(".", "/") + ".py",
        "sys_path": [str(project)],
        "is_script": False,
        "init_args": {},
    }
    return loader.Source(**(values | changes))  # type: ignore[arg-type]


def write(project: Path, text: str, name: str = "kt_job.py") -> None:
    (project / name).write_text(text)


def test_nested_names_are_resolved(project: Path) -> None:
    write(project, "class Outer:\n    class Inner:\n        x = 5\n")
    assert loader.load(source(project, "Outer.Inner", kind="cls")).x == 5


def test_a_class_is_constructed_with_its_arguments(project: Path) -> None:
    write(project, "class Shop:\n    def __init__(self, n): self.n = n\n")
    assert loader.load(source(project, "Shop", kind="cls", init_args={"n": 4})).n == 4


def test_a_local_function_cannot_be_loaded(project: Path) -> None:
    write(project, "def f():\n    def g(): pass\n")
    with pytest.raises(CallableNotFoundError, match="<locals>"):
        loader.load(source(project, "f.<locals>.g"))


def test_a_module_that_cannot_be_found_by_name_is_loaded_from_its_file(project: Path) -> None:
    (project / "deep").mkdir()
    write(project, "def f(): return __name__", "deep/job.py")
    function = loader.load(source(project, "f", module="elsewhere.job", source_file="deep/job.py"))
    assert function() == "elsewhere.job"


@pytest.mark.parametrize("file", [None, 3, Path("elsewhere.py"), ["kt_job.py"]])
def test_a_module_of_that_name_whose_file_is_another_gives_way(project: Path, file: object) -> None:
    write(project, "def f(): return 5")
    loaded_module = ModuleType("kt_job")
    vars(loaded_module)["__file__"] = file
    sys.modules["kt_job"] = loaded_module
    assert loader.load(source(project, "f"))() == 5


def test_finders_of_other_libraries_may_be_of_any_age(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, "def f(): return 5")

    class Old:
        def find_module(self, name: str, path: object = None) -> None:
            """Of Python before 3.4."""

    monkeypatch.setattr(sys, "meta_path", [Old(), object(), *sys.meta_path])
    assert loader.load(source(project, "f"))() == 5


def test_a_failed_import_leaves_no_half_module(project: Path) -> None:
    write(project, "x = 1\nraise ValueError('no')")
    with pytest.raises(ValueError, match="no"):
        loader.load(source(project, "f"))
    assert "kt_job" not in sys.modules
    write(project, "def f(): return 'longer than before'")
    assert loader.load(source(project, "f"))() == "longer than before"


def test_entries_come_first_once_and_children_inherit_them(project: Path) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(["/a", str(project)])
    loader.prepare_path([str(project), "/b", str(project), ""])
    assert sys.path[:2] == [str(project), "/b"]
    assert sys.path.count(str(project)) == 1
    path = [str(project), "/b", loader.CHILDREN_FOLDER, "/a"]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == path


# ------------------------------------------------------------------------------ end of import


def test_the_import_ends_where_the_file_deploys(project: Path) -> None:
    write(
        project,
        "from kubetorch.pod.user_process import loader\n"
        "def f(): return 1\n"
        "loader.is_deploying()\n"
        "raise AssertionError\n",
    )
    assert loader.load(source(project, "f"))() == 1
    assert os.environ[loader.FILE_VARIABLE] == str(project / "kt_job.py")


def test_an_early_statement_has_no_effect(project: Path) -> None:
    write(
        project,
        "from kubetorch.pod.user_process import loader\n"
        "early = loader.is_deploying()\n"
        "def f(): return early\n",
    )
    assert loader.load(source(project, "f"))() is True


def test_below_an_early_call_only_definitions_run(project: Path) -> None:
    write(
        project,
        "from __future__ import annotations\n"
        "from kubetorch.pod.user_process import loader\n"
        "def call(): loader.is_deploying(is_call=True)\n"
        "total = sum(call())\n"
        "raise AssertionError('the deploying program ran')\n"
        "import math\n"
        "scaled = total * 2\n"
        "factor = math.floor(2.5)\n"
        "if factor:\n"
        "    def twice(x: Unknown): return x * factor\n"
        "f = twice\n"
        "del f\n",
    )
    assert loader.load(source(project, "f"))(4) == 8


@pytest.mark.parametrize(
    "definition",
    [
        "import contextlib\nwith contextlib.suppress(ImportError): from math import floor as f",
        pytest.param(
            "try: f = abs\nexcept* OSError: pass",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="syntax of Python 3.11"),
        ),
        pytest.param(
            "type Kind = int\ndef f(x: Kind): return Kind.__value__(x)",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12"),
        ),
    ],
)
def test_below_an_early_call_definitions_of_any_form_run(project: Path, definition: str) -> None:
    write(
        project,
        "from kubetorch.pod.user_process import loader\n"
        "loader.is_deploying(is_call=True)\n" + definition,
    )
    assert loader.load(source(project, "f"))(2) == 2


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("total = [f(x) for x in (y := rows)]", {"total", "y"}),
        (
            "match rows:\n case {'a': a, **rest}: pass\n case [b, *c] as d: pass",
            set("abcd") | {"rest"},
        ),
        ("import a.b, c as d", {"a", "d"}),
    ],
)
def test_the_names_that_a_statement_below_the_end_of_the_import_binds(
    statement: str, names: set[str]
) -> None:
    ended = loader.EndedImport(ModuleType("kt_job"), "kt_job.py", 1, statement.encode())
    candidates = {"total", "x", "y", "rows", "a", "b", "c", "d", "rest"}
    assert {name for name in candidates if ended.binds_below(name)} == names


def test_a_module_that_takes_itself_out_of_sys_modules_fails_with_its_own_error(
    project: Path,
) -> None:
    write(project, "import sys\ndel sys.modules[__name__]\nraise ValueError('no')\n", "job.py")
    with pytest.raises(ValueError, match="no"):
        loader.load(source(project, "f", module="elsewhere.job", source_file="job.py"))


def test_a_callable_that_needs_what_was_passed_over_fails_with_the_reason(project: Path) -> None:
    write(
        project,
        "from kubetorch.pod.user_process import loader\n"
        "total = loader.is_deploying(is_call=True)\n"
        "f = total.bit_length\n",
    )
    with pytest.raises(NameError, match="total"):
        loader.load(source(project, "f"))


def test_a_package_that_imports_its_deployed_module_is_complete(project: Path) -> None:
    (project / "kt_pkg").mkdir()
    write(project, "from kt_pkg.job import f\nname = 'whole'\n", "kt_pkg/__init__.py")
    write(
        project,
        "from kubetorch.pod.user_process import loader\n"
        "def f():\n"
        "    import kt_pkg\n"
        "    return kt_pkg.name, kt_pkg.job.__name__\n"
        "loader.is_deploying()\n"
        "raise AssertionError\n",
        "kt_pkg/job.py",
    )
    assert loader.load(source(project, "f", module="kt_pkg.job"))() == ("whole", "kt_pkg.job")


def test_outside_of_an_import_nothing_is_deploying() -> None:
    assert loader.is_deploying() is False


def test_in_other_threads_no_statement_has_an_effect_while_the_file_is_imported(
    project: Path,
) -> None:
    write(
        project,
        "import threading\n"
        "from kubetorch.pod.user_process import loader\n"
        "seen = []\n"
        "def f(): return seen\n"
        "def ask():\n"
        "    seen.append(loader.is_deploying())\n"
        "    seen.append(loader.is_deploying(is_call=True))\n"
        "thread = threading.Thread(target=ask)\n"
        "thread.start()\n"
        "thread.join()\n"
        "complete = True\n",
    )
    loaded = loader.load(source(project, "f"))
    assert loaded() == [True, True]
    assert loaded.__globals__["complete"]


def test_a_thread_that_outlives_the_import_may_call_and_does_not_deploy(project: Path) -> None:
    write(
        project,
        "import threading\n"
        "from kubetorch.pod.user_process import loader\n"
        "over = threading.Event()\n"
        "seen = []\n"
        "def ask():\n"
        "    over.wait(60)\n"
        "    seen.append(loader.is_deploying())\n"
        "    seen.append(loader.is_deploying(is_call=True))\n"
        "thread = threading.Thread(target=ask)\n"
        "thread.start()\n"
        "def f():\n"
        "    over.set()\n"
        "    thread.join()\n"
        "    later = threading.Thread(target=ask)\n"
        "    later.start()\n"
        "    later.join()\n"
        "    return seen\n",
    )
    assert loader.load(source(project, "f"))() == [True, False, False, False]


def test_a_child_that_imports_the_file_again_deploys_in_none_of_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "/code/shop.py"
    monkeypatch.setenv(loader.FILE_VARIABLE, path)
    body = compile(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from kubetorch.pod.user_process import loader\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    seen = [loader.is_deploying(), pool.submit(loader.is_deploying).result()]\n",
        path,
        "exec",
    )
    module: dict[str, object] = {}
    exec(body, module)
    assert module["seen"] == [True, True]
    assert loader.is_deploying() is False


# --------------------------------------------------------------------------- what can be called


class Shop:
    limit = 3

    def __init__(self) -> None:
        self.function = lambda: "of the instance"

    def add(self) -> str:
        return "add"

    async def later(self) -> None: ...

    async def stream(self):
        yield 1

    @property
    def broken(self) -> int:
        raise AssertionError("a property must not run")

    def __getattr__(self, name: str):
        if name == "dynamic":
            return lambda: "dynamic"
        raise AttributeError(name)


class AsyncCallable:
    async def __call__(self) -> None: ...


def shop() -> DeployedCallable:
    return DeployedCallable("Shop", Shop(), is_instance=True)


@pytest.mark.parametrize(
    ("method", "value"),
    [("add", "add"), ("function", "of the instance"), ("dynamic", "dynamic")],
)
def test_public_callables_are_found(method: str, value: str) -> None:
    assert shop().find(method)() == value


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("broken", "property"),
        ("limit", "value of type int"),
        ("_private", "private"),
        ("__init__", "private"),
        ("missing", "no method 'missing'"),
        (None, "without __call__"),
    ],
)
def test_all_else_is_refused_and_said_why(method: str | None, words: str) -> None:
    with pytest.raises(CallableNotFoundError, match=words):
        shop().find(method)


def test_the_hint_names_what_was_meant() -> None:
    with pytest.raises(CallableNotFoundError) as caught:
        shop().find("ad")
    assert caught.value.hint == "did you mean add?"
    with pytest.raises(CallableNotFoundError) as caught:
        shop().find("zzz")
    assert caught.value.hint == "it has add, function, later, stream"


def test_a_function_has_no_methods() -> None:
    target = DeployedCallable("len", len, is_instance=False)
    assert target.find(None) is len
    with pytest.raises(CallableNotFoundError, match="is a function"):
        target.find("add")


def test_the_event_loop_runs_async_functions_only() -> None:
    target = shop()
    assert target.runs_on_loop("later")
    assert target.runs_on_loop("stream")
    assert not target.runs_on_loop("add")
    assert not target.runs_on_loop("missing")
    assert DeployedCallable("AsyncCallable", AsyncCallable(), is_instance=True).runs_on_loop(None)


def test_members_that_raise_when_they_are_looked_at_are_passed_over() -> None:
    class Raises:
        def __get__(self, instance: object, owner: type) -> object:
            raise RuntimeError("outside of a request")

    class Uncountable:
        def __len__(self) -> int:
            raise TypeError("it has no len()")

        def __call__(self) -> str:
            return "called"

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    class Odd:
        described = Raises()

        def __init__(self) -> None:
            self.compiled = Uncountable()
            vars(self)[3] = len  # type: ignore[index]  # Python allows it

    target = DeployedCallable("Odd", Odd(), is_instance=True)
    assert target.is_sync_class
    assert target.find("compiled")() == "called"
    assert target.callables("missing")["names"] == ["compiled"]
