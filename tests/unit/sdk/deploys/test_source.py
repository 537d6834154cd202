"""What of a program's interpreter its pods need."""

import os
import sys
from pathlib import Path

import pytest

from kubetorch.sdk.deploys import source
from kubetorch.sdk.deploys.source import Placement, Source
from kubetorch.specs.workload import RuntimeSpec


def test_entries_of_the_interpreter_and_of_the_project_are_left_out(tmp_path):
    for name in ("site", "site/inner", "project/src", "mine", "sitelike"):
        (tmp_path / name).mkdir(parents=True)
    entries = [str(tmp_path / name) for name in ("site/inner", "project/src", "mine", "sitelike")]

    foreign_entries = source.foreign_entries(
        entries, [str(tmp_path / "site"), str(tmp_path / "project")]
    )

    assert foreign_entries == (str(tmp_path / "mine"), str(tmp_path / "sitelike"))


def test_entries_that_are_empty_repeated_or_missing_are_left_out(tmp_path):
    entries = ["", str(tmp_path), str(tmp_path / "missing"), f"{tmp_path}/."]

    assert source.foreign_entries(entries, []) == (str(tmp_path),)


def test_the_interpreter_is_this_one(tmp_path):
    spec = source.describe_runtime(tmp_path, ["numpy"], is_local=True)

    assert spec.python == sys.executable
    assert spec.version == ".".join(map(str, sys.version_info[:3]))
    assert spec.preload == ("numpy",)
    assert str(Path(os.__file__).parent) not in spec.path


def test_nothing_of_this_machine_is_said_to_a_cluster(tmp_path):
    spec = source.describe_runtime(tmp_path, ["numpy"], is_local=False)

    assert spec == RuntimeSpec(preload=("numpy",))


def test_entries_in_the_project_are_named_relative_to_it(tmp_path):
    for name in ("shop/src", "shop/lib/inner", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shop" / "archive.zip").touch()
    names = ("elsewhere", "shop", "shop/src", "shop/lib/inner", "shop/archive.zip", "shop/gone")
    entries = ["", *(str(tmp_path / name) for name in names)]

    project_entries = source.entries_below(entries, tmp_path / "shop")

    assert project_entries == ("src", "lib/inner", "archive.zip")


def export(n, workers=1, *, async_=False, batch_size=2):
    """A function with options of its own."""


class Base:
    def inherited(self, debug):
        """A method with one, too."""


class Trainer(Base):
    limit = 3

    @staticmethod
    def still(serialization):
        """None of an instance."""

    @classmethod
    def create(cls, pdb):
        """None of an instance."""

    def plain(self, x):
        """Nothing special."""

    def _private(self, workers):
        """Cannot be called."""

    def __call__(self, stream_logs):
        """The instance itself."""


@pytest.mark.parametrize(
    ("kind", "callable_object", "expected"),
    [
        ("fn", export, {None: {"workers", "async_"}}),
        (
            "cls",
            Trainer,
            {
                "still": {"serialization"},
                "create": {"pdb"},
                "inherited": {"debug"},
                "plain": set(),
                "limit": set(),
                "_private": set(),
                None: {"stream_logs"},
                "__call__": {"stream_logs"},
            },
        ),
    ],
)
def test_a_deploy_says_which_options_the_signatures_declare(kind, callable_object, expected):
    ref = Source(kind, callable_object, Placement(sync_dir=False)).ref()
    assert {method: set(ref.options_of(method)) for method in expected} == expected
