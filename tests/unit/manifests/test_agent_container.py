"""What the container of a manifest, or of an image, would run."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.manifests import agent_container


def pod(**container: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "main", "image": "a", **container}]},
    }


@pytest.mark.parametrize(
    ("container", "command"),
    [
        ({}, None),
        ({"command": ["python", "-m", "http.server"]}, "python -m http.server"),
        ({"command": ["echo"], "args": ["a b", "$HOME"]}, "echo 'a b' '$HOME'"),
        ({"args": ["serve", 8000]}, "serve 8000"),
        (
            {
                "command": ["echo", "$(A)", "$(B)", "$$(A)", "$(NONE)"],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)2"}],
            },
            "echo 1 12 '$(A)' '$(NONE)'",
        ),
        (
            {
                "command": ["echo", "$(S)"],
                "env": [{"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            },
            "echo '$(S)'",
        ),
    ],
)
def test_the_command_of_a_manifest(container: dict[str, Any], command: str | None) -> None:
    assert agent_container.command_of(pod(**container)) == command


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (None, None),
        (("python", "m.py", "a b"), "python m.py 'a b'"),
        ("python m.py && echo done", "python m.py && echo done"),
    ],
)
def test_the_command_of_an_image(command: Any, line: str | None) -> None:
    assert agent_container.command_line(command) == line
