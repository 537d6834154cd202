"""What other libraries leave in `sys.modules`, in specs and among finders."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kubetorch.lib import modules


class Raises:
    def __getattr__(self, name: str) -> Any:  # it never returns
        raise RuntimeError(name)

    def __fspath__(self) -> str:
        raise RuntimeError("path")

    def __iter__(self) -> Any:  # as above
        raise KeyError("parent")


RAISES = pytest.param(Raises(), id="raises")


def module_with(name: str = "zz_odd", **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def spec_with(**names: object) -> ModuleSpec:
    spec = ModuleSpec("zz_odd", None)
    vars(spec).update(names)
    return spec


@pytest.mark.parametrize("file", ["/lib/a.py", Path("/lib/a.py"), b"/lib/a.py"])
def test_the_file_of_a_module_is_text_whatever_names_it(file: object) -> None:
    assert modules.file_of(module_with(__file__=file)) == "/lib/a.py"


@pytest.mark.parametrize("file", [None, 3, RAISES, ["/lib/a.py"]])
def test_a_file_that_is_no_path_is_none(file: object) -> None:
    assert modules.file_of(module_with(__file__=file)) is None


@pytest.mark.parametrize("entry", [None, RAISES, object(), type, 3])
def test_what_is_no_module_has_no_names(entry: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zz_odd", entry)  # type: ignore[arg-type]  # as libraries do

    assert modules.loaded("zz_odd") == {}
    assert modules.file_of(entry) is None


def test_a_module_is_not_asked_for_an_attribute() -> None:
    def refuse(name: str) -> object:
        raise AssertionError(name)

    assert modules.file_of(module_with(__getattr__=refuse)) is None


def test_a_lazy_module_stays_unloaded(tmp_path: Path) -> None:
    path = tmp_path / "zz_lazy.py"
    path.write_text("raise AssertionError('it was loaded')")
    spec = importlib.util.spec_from_file_location("zz_lazy", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert modules.file_of(module) == str(path)


@pytest.mark.parametrize(
    ("places", "folders"),
    [
        ([Path("/lib/a")], ["/lib/a"]),
        (("/lib/a", b"/lib/b"), ["/lib/a", "/lib/b"]),
        pytest.param(["/lib/a", None, 3, Raises()], ["/lib/a"], id="some"),
        ("/lib/a", []),
        (None, []),
        pytest.param(Raises(), [], id="raises"),
        (3, []),
    ],
)
def test_folders_of_a_package_are_those_that_are_paths(places: object, folders: list[str]) -> None:
    assert modules.folders_of(spec_with(submodule_search_locations=places)) == folders


@pytest.mark.parametrize("origin", [None, 3, RAISES])
def test_an_origin_that_is_no_path_is_none(origin: object) -> None:
    assert modules.origin_of(spec_with(origin=origin, _set_fileattr=True)) is None


def test_a_spec_that_raises_has_neither_an_origin_nor_folders() -> None:
    spec: Any = Raises()

    assert modules.origin_of(spec) is None
    assert modules.folders_of(spec) == []


@pytest.mark.parametrize("entry", [None, 3, ModuleType("zz_odd"), RAISES, Raises])
def test_a_module_without_a_spec_is_not_found(
    entry: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zz_odd", entry)  # type: ignore[arg-type]  # as libraries do

    assert modules.find_spec("zz_odd") is None


def test_a_finder_that_raises_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Raises(), *sys.meta_path])

    assert modules.find_spec("zz_odd") is None
