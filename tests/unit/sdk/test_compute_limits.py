"""Impossible objects are refused where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.errors import SpecError


def manifest(resources: dict[str, Any], env: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    container = {"name": "kubetorch", "image": "x", "resources": resources, "env": env or []}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "m"},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}},
        },
    }


def test_a_setter_that_asks_for_more_than_the_limit_is_refused() -> None:
    compute = kt.Compute.from_manifest(manifest({"limits": {"memory": "300Mi", "cpu": "1"}}))
    with pytest.raises(SpecError, match="memory 2Gi, above its limit 300Mi"):
        compute.memory = "2Gi"
    with pytest.raises(SpecError, match="cpu 2, above its limit 1"):
        compute.cpus = 2
    compute.memory = "200Mi"
    assert compute.memory == "200Mi"


def test_a_template_whose_limit_is_below_the_request_is_refused() -> None:
    container = {"name": "kubetorch", "resources": {"limits": {"memory": "1Gi"}}}
    template = {"spec": {"template": {"spec": {"containers": [container]}}}}
    compute = kt.Compute(memory="2Gi")
    with pytest.raises(SpecError, match="above its limit"):
        compute.service_template = template
    with pytest.raises(SpecError, match="above its limit"):
        kt.Compute(memory="2Gi", service_template=template)


@pytest.mark.parametrize("amount", ["1GB", "-1", "1_000", "abc", True, {}, [], None])
def test_an_amount_that_is_none_is_refused(amount: object) -> None:
    with pytest.raises(SpecError, match=r"resources\.limits\.memory"):
        kt.Compute.from_manifest(manifest({"limits": {"memory": amount}}))


def test_what_was_meant_is_said() -> None:
    with pytest.raises(SpecError) as caught:
        kt.Compute.from_manifest(manifest({"limits": {"memory": "1GB"}}))
    assert caught.value.hint is not None
    assert "did you mean 1G?" in caught.value.hint


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (3, "3"), (1.5, "1.5")])
def test_a_variable_that_is_no_text_is_refused(value: object, text: str) -> None:
    with pytest.raises(SpecError, match="'V'") as caught:
        kt.Compute.from_manifest(manifest({}, [{"name": "V", "value": value}]))
    assert caught.value.hint is not None
    assert f'value: "{text}"' in caught.value.hint


def test_a_variable_without_a_value_is_empty() -> None:
    env = [{"name": "NULL", "value": None}, {"name": "MISSING"}]
    compute = kt.Compute.from_manifest(manifest({}, env))
    assert compute.env_vars == {"NULL": "", "MISSING": ""}


BOMB = """
a: &a [x, x, x, x, x, x, x, x, x, x]
b: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]
c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]
d: &d [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]
e: &e [*d, *d, *d, *d, *d, *d, *d, *d, *d, *d]
f: &f [*e, *e, *e, *e, *e, *e, *e, *e, *e, *e]
g: &g [*f, *f, *f, *f, *f, *f, *f, *f, *f, *f]
h: [*g, *g, *g, *g, *g, *g, *g, *g, *g, *g]
"""
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)
)


@pytest.mark.parametrize("text", [BOMB, MERGES, "a: &a [*a]"], ids=["lists", "merges", "cycle"])
def test_aliases_that_stand_for_too_much_are_refused_at_once(tmp_path: Path, text: str) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match="aliases") as caught:
        kt.Compute.from_manifest(file)
    assert caught.value.message.count("manifest is") == 1
    assert caught.value.hint == "write the values out, or leave the anchors of YAML out"


def test_aliases_of_values_that_are_nested_too_deeply_are_refused_at_once(tmp_path: Path) -> None:
    merges = ", ".join(f"&a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))
    file = tmp_path / "manifest.yaml"
    file.write_text(f"deep: {'[' * 101}&a0 {{k: 1}}, {merges}{']' * 101}\ntop: *a39\n")
    with pytest.raises(SpecError, match="nested more than 100 levels"):
        kt.Compute.from_manifest(file)


def test_a_dictionary_that_repeats_itself_is_refused_at_once() -> None:
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(SpecError, match="more than 100,000 values"):
        kt.Compute.from_manifest(manifest({"limits": {"memory": bomb}}))
