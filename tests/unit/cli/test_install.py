"""The YAML of `kt install --dry-run`."""

from __future__ import annotations

import pytest
import yaml

from kubetorch.cli.install import render_yaml


@pytest.mark.parametrize(
    "text",
    ["y", "N", "1e3", "12e5", ".5e3", "1e+3", "-1E-3", "1.", "08", "0o17", "0B1", "0X1f", "1__0"],
)
def test_a_text_that_kubectl_would_take_for_another_value_is_quoted(text: str) -> None:
    [line] = render_yaml([{"tag": text}]).splitlines()
    assert line in (f'tag: "{text}"', f"tag: '{text}'")
    assert yaml.safe_load(line) == {"tag": text}


@pytest.mark.parametrize("text", ["10Gi", "1.2.3", "v1", "e3", "10.0.0.0/8", "x0o17", "-"])
def test_other_texts_are_plain_where_yaml_allows_that(text: str) -> None:
    [line] = render_yaml([{"tag": text}]).splitlines()
    assert line.replace("'", "") == f"tag: {text}"
    assert '"' not in line
