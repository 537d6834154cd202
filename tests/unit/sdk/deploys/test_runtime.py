"""What of a program's interpreter its pods need."""

import os
import sys
from pathlib import Path

from kubetorch.sdk.deploys import runtime
from kubetorch.specs.workload import RuntimeSpec


def test_entries_of_the_interpreter_and_of_the_project_are_left_out(tmp_path):
    for name in ("site", "site/inner", "project/src", "mine", "sitelike"):
        (tmp_path / name).mkdir(parents=True)
    entries = [str(tmp_path / name) for name in ("site/inner", "project/src", "mine", "sitelike")]

    found = runtime.foreign_entries(entries, [str(tmp_path / "site"), str(tmp_path / "project")])

    assert found == (str(tmp_path / "mine"), str(tmp_path / "sitelike"))


def test_entries_that_are_empty_repeated_or_missing_are_left_out(tmp_path):
    entries = ["", str(tmp_path), str(tmp_path / "missing"), f"{tmp_path}/."]

    assert runtime.foreign_entries(entries, []) == (str(tmp_path),)


def test_the_interpreter_is_this_one(tmp_path):
    spec = runtime.describe(tmp_path, ["numpy"], is_local=True)

    assert spec.python == sys.executable
    assert spec.version == ".".join(map(str, sys.version_info[:3]))
    assert spec.preload == ("numpy",)
    assert str(Path(os.__file__).parent) not in spec.path


def test_nothing_of_this_machine_is_said_to_a_cluster(tmp_path):
    spec = runtime.describe(tmp_path, ["numpy"], is_local=False)

    assert spec == RuntimeSpec(preload=("numpy",))


def test_entries_in_the_project_are_named_relative_to_it(tmp_path):
    for name in ("shop/src", "shop/lib/inner", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shop" / "archive.zip").touch()
    names = ("elsewhere", "shop", "shop/src", "shop/lib/inner", "shop/archive.zip", "shop/gone")
    entries = ["", *(str(tmp_path / name) for name in names)]

    assert runtime.entries_below(entries, tmp_path / "shop") == ("src", "lib/inner")
