"""What each kind of object becomes of a compute that says everything: the files beside, to a byte.

After a change that is meant: `python -m tools.goldens examples/everything.py --into
tests/contract/manifests/goldens`, and read the difference.
"""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import yaml

import kubetorch as kt
from kubetorch.manifests.kinds import KINDS
from kubetorch.specs.compute import ComputeSpec
from tools import goldens as program

GOLDENS = Path(__file__).with_name("goldens")
EXAMPLE = Path(__file__).parents[3] / "examples/everything.py"
#: Every kind that a manifest may be, and one that nobody knows.
EXPECTED_KINDS = {kind for kind, _ in KINDS} | {"Gang"}


@pytest.fixture(scope="module")
def settings():
    """The example sets a name of its own."""
    before = kt.config.username
    yield
    kt.config.username = before


@pytest.fixture(scope="module")
def rendered(settings):
    return dict(program.render_file(str(EXAMPLE)))


def test_there_is_a_golden_of_each_compute(rendered):
    assert sorted(rendered) == sorted(path.stem for path in GOLDENS.iterdir())


@pytest.mark.parametrize("golden", sorted(GOLDENS.iterdir()), ids=lambda path: path.stem)
def test_what_is_rendered_is_the_golden(golden, rendered):
    assert rendered[golden.stem] == golden.read_text()


def test_every_kind_has_a_golden():
    kinds = {next(objects(path))["kind"] for path in GOLDENS.iterdir()}
    assert kinds == EXPECTED_KINDS


@pytest.mark.parametrize("golden", sorted(GOLDENS.iterdir()), ids=lambda path: path.stem)
def test_every_value_says_where_it_comes_from(golden):
    """In its own line, or in that of something that it is a part of."""
    comment_by_depth = {}
    for line in golden.read_text().splitlines():
        indent = len(line) - len(line.lstrip(" "))
        # An entry of a list is below the key at the same indentation.
        depth = 2 * indent + line.lstrip(" ").startswith("- ")
        comment_by_depth = {
            level: text for level, text in comment_by_depth.items() if level < depth
        }
        text, hash_sign, comment = line.partition("  # ")
        if hash_sign:
            comment_by_depth[depth] = comment
        is_value = not text.rstrip().endswith(":") and line != "---"
        assert comment_by_depth or not is_value, f"{golden.name}: {line}"
        assert all(
            re.fullmatch(r"[^:]+(: \S.*)?", comment) for comment in comment_by_depth.values()
        )


def test_every_field_of_a_compute_is_said_by_one_of_them(settings):
    specs = [
        value.to_spec()
        for value in runpy.run_path(str(EXAMPLE)).values()
        if isinstance(value, kt.Compute)
    ]
    unsaid = ComputeSpec()
    for name in (field.name for field in dataclasses.fields(ComputeSpec)):
        assert any(getattr(spec, name) != getattr(unsaid, name) for spec in specs), name


def objects(path):
    yield from yaml.safe_load_all(path.read_text())
