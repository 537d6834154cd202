"""Values of the chart as users give them."""

import pytest

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install import values

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "expected_values"),
    [
        ("a=1", {"a": 1}),
        ("a.b=x,a.c=true", {"a": {"b": "x", "c": True}}),
        ("a={x,y},b=2", {"a": ["x", "y"], "b": 2}),
        ("a={}", {"a": []}),
        ("a=null", {"a": None}),
        ("a=", {"a": ""}),
        ("a=01", {"a": "01"}),
        ("a=x=y", {"a": "x=y"}),
        (r"a\.b/c=x\,y", {"a.b/c": "x,y"}),
        ("a[0].b=1,a[0].c=x,a[1].b=2", {"a": [{"b": 1, "c": "x"}, {"b": 2}]}),
        ("a.b[1]=x", {"a": {"b": [None, "x"]}}),
        ("a[0][1]=x,a[0][0]={y,z}", {"a": [[["y", "z"], "x"]]}),
        (r"a\[0\]=1", {"a[0]": 1}),
    ],
)
def test_set_is_read_as_helm_reads_it(text, expected_values):
    assert values.parse_set(text) == expected_values


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=1",
        "a..b=1",
        "[0]=1",
        "a[x]=1",
        "a[-1]=1",
        "a[0]b=1",
        "a[0=1",
        "a[65536]=1",
        ",",
        "a=1,b",
    ],
)
def test_what_set_cannot_be_read_from_is_an_error(text):
    with pytest.raises(ConfigError, match="cannot be read"):
        values.parse_set(text)


def test_an_index_changes_one_item_of_the_list_that_was_given_before():
    former_values = {"a": [{"b": 1, "c": 2}, "x"], "d": 1}
    changed = values.parse_set("a[0].b=5", former_values)
    assert changed == {"a": [{"b": 5, "c": 2}, "x"], "d": 1}
    assert former_values == {"a": [{"b": 1, "c": 2}, "x"], "d": 1}


def test_mappings_are_merged_and_lists_replaced():
    lower = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert values.merged(lower, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}, "d": 1}
    assert lower == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_null_takes_a_default_away():
    assert values.merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}) == {"a": {"c": 2}}
    layered_values = values.layered({"a": {"b": 1}}, {"a": {"b": None}})
    assert layered_values == {"a": {"b": None}}, "among given values it stays, for the chart's own"


@pytest.mark.parametrize(
    ("reference", "expected_parts"),
    [
        ("kubetorch", ("kubetorch", "latest", "")),
        ("localhost/kubetorch:dev", ("localhost/kubetorch", "dev", "")),
        ("198.18.0.1:5000/a/b:1", ("198.18.0.1:5000/a/b", "1", "")),
        ("host:5000/a", ("host:5000/a", "latest", "")),
        (f"ghcr.io/a/b@{DIGEST}", ("ghcr.io/a/b", "", DIGEST)),
        (f"ghcr.io/a/b:1@{DIGEST}", ("ghcr.io/a/b", "1", DIGEST)),
    ],
)
def test_a_reference_is_taken_apart(reference, expected_parts):
    assert tuple(values.parse(reference).values()) == expected_parts


@pytest.mark.parametrize("reference", ["", "a b", "a/CASE:1", "a:", "a@sha256:1", "a//b:1:2"])
def test_what_is_no_reference_is_refused(reference):
    with pytest.raises(ConfigError, match="is no reference"):
        values.parse(reference)


SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["n"],
    "properties": {
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
        "t": {"type": "string", "minLength": 2, "pattern": "^a"},
        "e": {"enum": ["x", "y"]},
        "l": {"type": "array", "items": {"type": "boolean"}},
    },
}


@pytest.mark.parametrize(
    ("value", "expected_faults"),
    [
        ({"n": 2, "t": "ab", "e": "x", "l": [True]}, []),
        ({}, ["n is missing"]),
        ({"n": 0}, ["n is 0; it must be at least 1"]),
        ({"n": 4}, ["n is 4; it must be at most 3"]),
        ({"n": True}, ["n is True; it must be of type integer"]),
        ({"n": 1, "t": "b"}, ["t is 'b'; it must be longer", "t is 'b'; it must match ^a"]),
        ({"n": 1, "e": "z"}, ["e is 'z'; it must be one of x, y"]),
        ({"n": 1, "l": [True, 1]}, ["l[1] is 1; it must be of type boolean"]),
        ({"n": 1, "x": 1}, ["x is not a value of the chart; the values are n, t, e, l"]),
        ([], ["values is []; it must be of type object"]),
    ],
)
def test_values_are_held_against_the_schema(value, expected_faults):
    assert values.faults(SCHEMA, value) == expected_faults


def test_a_word_of_the_schema_that_is_not_known_is_not_passed_over():
    with pytest.raises(InstallError, match="oneOf"):
        values.faults({"oneOf": []}, 1)
