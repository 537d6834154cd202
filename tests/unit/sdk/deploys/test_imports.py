from __future__ import annotations

import gc
import select
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from kubetorch.sdk import tuning as sdk_tuning
from kubetorch.sdk.deploys import deploy
from kubetorch.sdk.deploys.deploy import NOT_PRELOADED, find_imports


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `site-packages` with modules that no test can have imported."""
    folder = tmp_path / "env/lib/site-packages"
    for path in (
        "zz_one/__init__.py",
        "zz_one/sub/__init__.py",
        "zz_one/sub/deep.py",
        "zz_one/fast.abi3.so" if sys.platform != "win32" else "zz_one/fast.pyd",
        "zz_two.py",
        "zz_space/inner/__init__.py",
        "deepspeed/__init__.py",
        "data/__init__.py",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("raise RuntimeError('imported while it was only looked for')")
    monkeypatch.syspath_prepend(str(folder))
    elsewhere = tmp_path / "editable"
    elsewhere.mkdir()
    (elsewhere / "zz_editable.py").touch()
    monkeypatch.syspath_prepend(str(elsewhere))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "project"


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def imports_of(root: Path, source: str, entry: str = "main.py", **files: str) -> tuple[str, ...]:
    write(root, {entry: source, **files})
    return find_imports(root / entry, [root], cache=root / "cache")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import zz_one", ["zz_one"]),
        ("import zz_one.sub as s, zz_two", ["zz_one.sub", "zz_two"]),
        ("from zz_two import anything", ["zz_two"]),
        ("from zz_one import sub", ["zz_one", "zz_one.sub"]),
        ("from zz_one.sub import deep, other", ["zz_one.sub", "zz_one.sub.deep"]),
        ("from zz_one import fast", ["zz_one", "zz_one.fast"]),
        ("from zz_one import *", ["zz_one"]),
        ("from zz_space import inner", ["zz_space", "zz_space.inner"]),
        ("import os, json, sys, asyncio", []),
        ("import zz_not_there", []),
        ("import zz_editable", []),
        ("import kubetorch as kt", []),
        ("import deepspeed", []),
        ("from deepspeed import zero", []),
        ("def f():\n    import zz_one", []),
        ("async def f():\n    import zz_one", []),
        ("f = lambda: __import__('zz_one')", []),
        ("if True:\n    import zz_one", []),
        ("for x in y:\n    import zz_one", []),
        ("class A:\n    import zz_one", ["zz_one"]),
        ("with open('x'):\n    import zz_one", ["zz_one"]),
        ("try:\n    import zz_one\nexcept ImportError:\n    import zz_two", ["zz_one"]),
        ("try:\n    pass\nfinally:\n    import zz_two", ["zz_two"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import zz_one", []),
        ("if typing.TYPE_CHECKING:\n    import zz_one\nelse:\n    import zz_two", ["zz_two"]),
        ("if __name__ == '__main__':\n    import zz_one", []),
        ("def broken(", []),
        ("\0", []),
        ("# -*- coding: nothing -*-\nimport zz_one", []),
        ("", []),
    ],
)
def test_imports_that_run_with_the_module_are_found(
    root: Path, source: str, names: list[str]
) -> None:
    assert imports_of(root, source) == tuple(names)


def test_imports_of_the_projects_own_modules_are_followed(root: Path) -> None:
    files = {
        "helper.py": "import zz_one.sub",
        "pkg/__init__.py": "from . import inner",
        "pkg/inner.py": "import helper",
        "pkg/deep/__init__.py": "",
        "pkg/deep/mod.py": "from .other import y",
        "pkg/deep/other.py": "import zz_two",
        "pkg/unused.py": "import zz_space",
    }
    write(root, files)
    assert imports_of(root, "import helper") == ("zz_one.sub",)
    assert imports_of(root, "from pkg.deep import mod") == ("zz_one.sub", "zz_two")
    assert imports_of(root, "import pkg.deep.mod") == ("zz_one.sub", "zz_two")
    assert imports_of(root, "import pkg") == ("zz_one.sub",)


def test_packages_around_the_deployed_module_are_imported_before_it(root: Path) -> None:
    write(root, {"pkg/__init__.py": "import zz_one", "pkg/sub/__init__.py": "from . import other"})
    write(root, {"pkg/sub/other.py": "import zz_two"})
    assert imports_of(root, "", entry="pkg/sub/train.py") == ("zz_one", "zz_two")


def test_modules_that_import_each_other_end(root: Path) -> None:
    write(root, {"a.py": "import b, zz_one", "b.py": "import a"})
    assert imports_of(root, "import a") == ("zz_one",)


def test_a_module_of_the_project_hides_an_installed_one(root: Path) -> None:
    assert imports_of(root, "import zz_one", **{"zz_one.py": "import zz_two"}) == ("zz_two",)


def test_a_mere_folder_does_not_hide_an_installed_package(root: Path) -> None:
    assert imports_of(root, "import data", **{"data/images.txt": ""}) == ("data",)


def test_a_folder_without_init_file_is_a_package_of_the_project(root: Path) -> None:
    files = {"spaces/mod.py": "import zz_two"}
    assert imports_of(root, "from spaces import mod", **files) == ("zz_two",)


def test_all_roots_are_searched(root: Path) -> None:
    write(root, {"src/main.py": "import top", "top.py": "import zz_one"})
    roots = [root / "src", root]
    assert find_imports(root / "src/main.py", roots, cache=root / "cache") == ("zz_one",)


def test_a_file_that_is_not_there_imports_nothing(root: Path) -> None:
    assert find_imports(root / "gone.py", [root], cache=root / "cache") == ()


def test_libraries_that_read_a_ranks_variables_are_never_named() -> None:
    assert {"deepspeed", "horovod", "mpi4py", "torch_xla", "lightning"} <= NOT_PRELOADED
    assert not NOT_PRELOADED & {"torch", "numpy", "pandas", "transformers", "jax"}


def test_what_was_read_is_kept_and_read_again_when_it_changed(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    write(root, {"main.py": "import helper", "helper.py": "import zz_one"})
    assert find_imports(root / "main.py", [root], cache=cache) == ("zz_one",)
    (cache_file,) = cache.iterdir()
    before = cache_file.stat().st_mtime_ns
    assert find_imports(root / "main.py", [root], cache=cache) == ("zz_one",)
    assert cache_file.stat().st_mtime_ns == before
    write(root, {"helper.py": "import zz_one, zz_two"})
    assert find_imports(root / "main.py", [root], cache=cache) == ("zz_one", "zz_two")
    write(root, {"main.py": "import zz_two  # no helper"})
    assert find_imports(root / "main.py", [root], cache=cache) == ("zz_two",)


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\x81\xa1\xff\x90"])
def test_a_cache_that_cannot_be_read_is_made_anew(
    root: Path, tmp_path: Path, garbage: bytes
) -> None:
    cache = tmp_path / "cache"
    write(root, {"main.py": "import zz_one"})
    find_imports(root / "main.py", [root], cache=cache)
    (cache_file,) = cache.iterdir()
    cache_file.write_bytes(garbage)
    assert find_imports(root / "main.py", [root], cache=cache) == ("zz_one",)


def test_a_cache_that_cannot_be_written_changes_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(root, {"main.py": "import zz_one"})
    assert find_imports(root / "main.py", [root], cache=tmp_path / "file") == ("zz_one",)


def test_a_project_without_end_is_read_up_to_a_limit(root: Path) -> None:
    count = sdk_tuning.LIMITS.read_files + 10
    write(root, {f"m{n}.py": f"import m{n + 1}" for n in range(count)})
    write(root, {f"m{count}.py": "import zz_one"})
    assert imports_of(root, "import zz_two, m0") == ("zz_two",)


def test_several_threads_may_parse_at_the_same_time() -> None:
    method = "    def f(self, a, b=[0, (1, 2)]):\n        return [x for x in a if x > 3]\n"
    source = ("import zz_one\nclass A:\n" + 200 * method).encode()
    threshold, interval = gc.get_threshold(), sys.getswitchinterval()

    def give_way(*_: object) -> None:
        select.select([], [], [], 0)

    gc.callbacks.append(give_way)
    try:
        gc.set_threshold(200)
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(4) as threads:
            parsed_imports = list(
                threads.map(lambda _: list(deploy.parse_imports(source)), range(16))
            )
    finally:
        gc.callbacks.remove(give_way)
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)
    assert [[item.module for item in imports] for imports in parsed_imports] == [["zz_one"]] * 16


@pytest.mark.parametrize("odd", [[Path("/x/site-packages/zz_odd")], ["/x/site-packages/zz_odd"]])
def test_folders_of_a_package_may_be_any_paths(
    root: Path, monkeypatch: pytest.MonkeyPatch, odd: object
) -> None:
    spec = ModuleSpec("zz_odd", None)
    vars(spec)["submodule_search_locations"] = odd
    module = ModuleType("zz_odd")
    module.__spec__ = spec
    monkeypatch.setitem(sys.modules, "zz_odd", module)

    assert imports_of(root, "from zz_odd import pipeline\nimport zz_two") == ("zz_odd", "zz_two")


@pytest.mark.parametrize("entry", [None, 3, ModuleType("zz_odd")])
def test_a_module_that_cannot_be_understood_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    monkeypatch.setitem(sys.modules, "zz_odd", entry)  # type: ignore[arg-type]  # as libraries do

    assert imports_of(root, "from zz_odd import pipeline\nimport zz_two") == ("zz_two",)
