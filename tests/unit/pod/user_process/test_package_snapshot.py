"""Whether imported files have changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from kubetorch.pod.user_process.zygote import Snapshot


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "kt_plugin.py"
    path.write_text("x = 1")
    module = ModuleType("kt_plugin")
    module.__file__ = str(path)
    sys.modules["kt_plugin"] = module
    yield path
    del sys.modules["kt_plugin"]


def test_nothing_has_changed_at_once() -> None:
    assert not Snapshot().has_changed()


def test_a_module_outside_of_the_installed_ones_is_watched(module: Path) -> None:
    snapshot = Snapshot()
    stat = module.stat()
    module.write_text("x = 2")
    import os

    os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert snapshot.has_changed()
    assert not Snapshot().has_changed()
    module.unlink()
    assert Snapshot().has_changed() is False


def test_a_package_that_is_installed_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    snapshot = Snapshot()
    (site / "plugin-2.dist-info").mkdir()
    assert snapshot.has_changed()


@pytest.mark.parametrize("entry", [None, 3, object(), Path("/nowhere/a.py"), ["a.py"], "a\0.py"])
def test_what_is_no_file_of_a_module_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    module = ModuleType("kt_odd")
    vars(module)["__file__"] = entry
    monkeypatch.setitem(sys.modules, "kt_odd", module)
    monkeypatch.setitem(sys.modules, "kt_nothing", entry)  # type: ignore[arg-type]  # as libraries do
    assert not Snapshot().has_changed()
