"""Refusals of an API server as errors."""

from __future__ import annotations

import json
import pickle

import pytest

from kubetorch import errors
from kubetorch.k8s import failures
from kubetorch.k8s.failures import Action

PODS = Action("create", "pods", "team", "web", "context 'dev'")


def refused(
    status: int, message: str = "", reason: str = "", action: Action = PODS
) -> errors.KubernetesRequestError:
    body = {"kind": "Status", "message": message, "reason": reason, "code": status}
    return failures.refused(action, status, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (401, errors.KubernetesForbiddenError),
        (403, errors.KubernetesForbiddenError),
        (404, errors.KubernetesNotFoundError),
        (409, errors.KubernetesConflictError),
        (422, errors.KubernetesRequestError),
        (500, errors.KubernetesRequestError),
    ],
)
def test_the_status_decides_the_class(status: int, cls: type[Exception]) -> None:
    error = refused(status, "why", "Reason")
    assert type(error) is cls
    assert "cannot create pods 'web' in namespace 'team'" in str(error)
    assert f"the API server answered {status} Reason: why" in str(error)


@pytest.mark.parametrize(
    ("status", "message", "reason", "hint"),
    [
        (403, 'pods "web" is forbidden: exceeded quota: q', "Forbidden", "quota"),
        (403, 'admission webhook "a.b" denied the request', "Forbidden", "webhook asks"),
        (400, 'admission webhook "a.b" denied the request', "BadRequest", "webhook asks"),
        (403, "ValidatingAdmissionPolicy 'p' denied request", "Forbidden", "webhook asks"),
        (404, "the server could not find the requested resource", "NotFound", "operator"),
        (404, 'pods "web" not found', "NotFound", "name and namespace"),
        (409, 'pods "web" already exists', "AlreadyExists", "another name"),
        (409, "Apply failed with 1 conflict", "Conflict", "force"),
        (409, "the object has been modified", "Conflict", "read it again"),
        (422, "spec.x: Invalid value", "Invalid", "fields"),
        (429, "", "TooManyRequests", "busy"),
        (401, "", "Unauthorized", "context 'dev'"),
    ],
)
def test_the_hint_is_the_next_step(status: int, message: str, reason: str, hint: str) -> None:
    shown_hint = refused(status, message, reason).hint
    assert shown_hint is not None
    assert hint in shown_hint


@pytest.mark.parametrize(
    ("action", "rule"),
    [
        (
            Action("patch", "deployments.apps/status", "team", "web"),
            "Role in namespace 'team': apiGroups: ['apps'], resources: ['deployments/status'], "
            "verbs: ['patch']",
        ),
        (
            Action("list", "nodes"),
            "ClusterRole: apiGroups: [''], resources: ['nodes'], verbs: ['list']",
        ),
        (
            Action("get", "pods/exec", "team", "web"),
            "resources: ['pods/exec'], verbs: ['create', 'get']",
        ),
    ],
)
def test_a_missing_permission_is_given_as_the_rule_that_grants_it(
    action: Action, rule: str
) -> None:
    hint = refused(403, "User cannot", "Forbidden", action).hint
    assert hint is not None
    assert rule in hint


def test_what_is_no_status_is_shown_and_cut() -> None:
    error = failures.refused(PODS, 502, b"<html>" + b"x" * 1000, {"retry-after": "7"})
    assert "answered 502: <html>xxx" in error.message
    assert len(error.message) < 500
    assert error.retry_after == 7
    assert error.reason == ""


@pytest.mark.parametrize("details", ["x", ["x"], {"causes": "x"}, {"causes": [None]}])
def test_a_status_with_details_of_another_form_is_a_refusal_as_well(details: object) -> None:
    error = failures.refused_by(PODS, {"code": 422, "details": details})
    assert error.status_code == 422


def test_an_error_keeps_its_attributes_on_its_way_to_another_process() -> None:
    error = refused(409, "Apply failed with 1 conflict", "Conflict")
    error.causes = [{"reason": "FieldManagerConflict", "field": ".spec", "message": "by x"}]
    state = errors.KubernetesConflictError.from_state(error.message, error.to_state())
    for copy in (pickle.loads(pickle.dumps(error)), state):
        assert type(copy) is errors.KubernetesConflictError
        assert (copy.verb, copy.resource, copy.namespace) == ("create", "pods", "team")
        assert copy.causes == error.causes
        assert copy.reason == "Conflict"


TYPED = "failed to create typed patch object (team/web; apps/v1, Kind=Deployment): "
UNTYPED = (
    "failed to convert new object (team/web; apps/v1, Kind=Deployment) to proper version: "
    "unable to convert unstructured object to apps/v1, Kind=Deployment: "
)


@pytest.mark.parametrize(
    ("message", "may_pass"),
    [
        (f"{TYPED}.spec.replica: field not declared in schema", False),
        (f"{UNTYPED}quantities must match the regular expression '^x$'", False),
        ("etcdserver: leader changed", True),
        ("Internal error occurred: failed calling webhook", True),
    ],
)
def test_an_object_of_a_wrong_form_never_passes(message: str, may_pass: bool) -> None:
    assert failures.may_pass(refused(500, message)) is may_pass


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        (
            f"{TYPED}.spec.replicas: expected numeric (int or float), got string",
            [("spec.replicas", "expected numeric (int or float), got string", False)],
        ),
        (
            f'{TYPED}errors:\n  .spec.containers[name="a.b: c"].imag: field not declared in '
            "schema\n"
            "  .spec.tolerationz: field not declared in schema",
            [
                ('spec.containers[name="a.b: c"].imag', "field not declared in schema", True),
                ("spec.tolerationz", "field not declared in schema", True),
            ],
        ),
        (
            f"{TYPED}.metadata.labels.a: expected string, got &value.valueUnstructured{{Value:5}}",
            [("metadata.labels.a", "expected string, got 5", False)],
        ),
        (
            f"{TYPED}.spec.tolerations: expected list, got &{{map[a:1]}}",
            [("spec.tolerations", "expected list, got a mapping", False)],
        ),
        (f"{UNTYPED}quantities must match", [("", "quantities must match", False)]),
        ("etcdserver: leader changed", []),
    ],
)
def test_the_fields_of_a_wrong_form_are_named(
    message: str, faults: list[tuple[str, str, bool]]
) -> None:
    named_faults = failures.field_faults(refused(500, message).message)
    assert [(fault.path, fault.problem, fault.is_unknown) for fault in named_faults] == faults
