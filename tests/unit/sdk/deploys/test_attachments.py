"""What pods get of a secret that exists already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import kubetorch as kt
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.deploys import attachments
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.secrets import SecretView

STORED = SecretView(
    namespace="default",
    object_name="kt.secret.global.hub",
    name="hub",
    mount_type="env",
    keys=("HF", "OTHER"),
    renamed=(("HF", "HF_TOKEN"),),
    version="1",
)


@pytest.mark.parametrize(
    ("declaration", "variables"),
    [
        ({"env_var": "HF"}, (("HF", "HF"),)),
        ({"env_vars": {"HF": "TOKEN"}}, (("TOKEN", "HF"),)),
        ({"provider": "ssh"}, (("HF_TOKEN", "HF"), ("OTHER", "OTHER"))),
    ],
)
def test_variables_that_are_named_here_are_those_of_the_pods(
    declaration: dict[str, Any],
    variables: tuple[tuple[str, str], ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KT_DEPLOYED_FILE", "shop.py")  # in pods a secret needs no values
    secret = kt.Secret("hub", **declaration)
    compute = ComputeSpec(secrets=(secret.to_ref(),))
    spec = WorkloadSpec("default", "shop", None, compute)
    secrets = SimpleNamespace(find=lambda namespace, name: STORED)
    controller = cast("Controller", SimpleNamespace(secrets=secrets))

    [ref] = attachments.provide(controller, spec, [secret]).compute.secrets

    assert ref.variables == variables
