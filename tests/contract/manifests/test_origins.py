"""Each field of a manifest is explained, and YAML for people says so."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given

from kubetorch.manifests import parameters, rendering
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.compute import ComputeSpec
from tools import goldens
from unit.manifests.test_parameters import computes
from unit.manifests.users import manifests

KINDS = sorted(manifests())


def render(compute: ComputeSpec) -> Manifest:
    return rendering.render(compute, namespace="ns", name="mine")


@given(computes())
def test_every_field_is_explained(compute: ComputeSpec) -> None:
    manifest, explained = goldens.explain(compute, render)
    assert manifest == render(compute)
    assert explained.keys() == goldens.leaves(manifest).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_users_manifest_is_explained(kind: str) -> None:
    _, explained = goldens.explain(parameters.read_manifest(manifests()[kind]), render)
    assert explained["kind",] == "the user's manifest"
    assert "starts the agent: Kubetorch" in explained.values()


def test_a_field_is_that_of_the_parameter_without_which_it_would_be_another() -> None:
    _, explained = goldens.explain(ComputeSpec(cpus="2", labels=(("team", "ml"),)), render)
    where = ("spec", "template", "spec", "containers", "<kubetorch>", "resources")
    assert explained[(*where, "requests", "cpu")].startswith("cpus: ")
    assert explained["metadata", "labels", "team"].startswith("labels: ")
    assert explained["spec", "replicas"].startswith("replicas: ")


def test_a_field_that_nothing_explains_is_an_error() -> None:
    def changed(compute: ComputeSpec) -> Manifest:
        return {**render(compute), "surprise": 1}

    with pytest.raises(KeyError, match="surprise"):
        goldens.explain(ComputeSpec(), changed)


@given(computes())
def test_the_commented_yaml_is_the_manifest(compute: ComputeSpec) -> None:
    text = goldens.dump(*goldens.explain(compute, render))
    assert yaml.safe_load(text) == render(compute)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, "a: 1  # x"),
        ({"a": "1"}, "a: '1'  # x"),
        ({"a": "yes: #no"}, "a: 'yes: #no'  # x"),
        ({"a": {}, "b": []}, "a: {}  # x\nb: []  # x"),
        ({"a": [{"name": "n", "v": 2}]}, "a:  # x\n- name: n\n  v: 2"),
        ({"a": ["p", "q"]}, "a:  # x\n- p\n- q"),
    ],
)
def test_what_has_one_origin_is_commented_once(value: Any, text: str) -> None:
    dumped_text = goldens.dump(value, dict.fromkeys(goldens.leaves(value), "x"))
    assert "\n".join(" ".join(line.split()) for line in dumped_text.splitlines()) == "\n".join(
        " ".join(line.split()) for line in text.splitlines()
    )
