"""What the status of a program in a container says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kubetorch import errors
from kubetorch.k8s.failures import Action
from kubetorch.k8s.pod_streams import exit_code

EXEC = Action("get", "pods/exec", "team", "web")


def status(**fields: Any) -> bytes:
    return json.dumps({"metadata": {}, **fields}).encode()


def ended(code: str) -> bytes:
    causes = [{"reason": "ExitCode", "message": code}]
    return status(status="Failure", reason="NonZeroExitCode", details={"causes": causes})


def test_success_is_zero_and_failure_has_its_code() -> None:
    assert exit_code(EXEC, status(status="Success")) == 0
    assert exit_code(EXEC, ended("137")) == 137


@pytest.mark.parametrize(
    ("data", "expected_message"),
    [
        (status(status="Failure", message="no such container", code=400), "400: no such container"),
        (status(status="Failure", message="exec failed"), "500: exec failed"),
        (ended("many"), "NonZeroExitCode"),
        (b"plain text", "plain text"),
        (b"", "500"),
    ],
)
def test_anything_else_is_an_error_that_says_why(data: bytes, expected_message: str) -> None:
    with pytest.raises(errors.KubernetesRequestError, match=expected_message):
        exit_code(EXEC, data)
