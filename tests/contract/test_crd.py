"""The definition of `KubetorchWorkload` in the chart is that of the classes."""

from __future__ import annotations

from pathlib import Path

from tools import crd

CHART = Path(__file__).parents[2] / "src/kubetorch/chart/templates/crd.yaml"


def test_the_charts_definition_is_that_of_the_classes() -> None:
    """After a change that is meant: the module's docstring says what writes the file."""
    assert CHART.read_text() == crd.template()


def test_helm_leaves_the_schema_as_it_is() -> None:
    spec = CHART.read_text().partition("\nspec:")[2]
    assert spec.count("{{") == 1
