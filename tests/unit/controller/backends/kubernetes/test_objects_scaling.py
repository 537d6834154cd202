"""What Knative's objects say of an autoscaled service."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes import objects
from kubetorch.manifests import labels

API = "serving.knative.dev/v1"
PARTITION = {"updateStrategy": {"rollingUpdate": {"partition": 1}}}


def workload(kind: str, *, api_version: str = "apps/v1", **spec: Any) -> dict[str, Any]:
    """An object with a pod template."""
    template = {"spec": {"containers": [{"name": "kubetorch"}]}}
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": "echo"},
        "spec": {"template": template, **spec},
    }


def owners(
    *, ready: str = "True", desired: int | None = 0, name: str = "echo-1", active: str = ""
) -> list[Any]:
    """A Knative Service whose latest Revision is `echo-1`, and a Revision."""
    conditions = [{"type": "Ready", "status": ready}, {"type": "Active", "reason": active}]
    status: dict[str, Any] = {"conditions": conditions}
    if desired is not None:
        status["desiredReplicas"] = desired
    return [
        {
            "apiVersion": API,
            "kind": "Service",
            "metadata": {"name": "echo"},
            "status": {
                "latestReadyRevisionName": "echo-1",
                "address": {"url": "http://echo.team.svc.cluster.local"},
            },
        },
        {
            "apiVersion": API,
            "kind": "Revision",
            "metadata": {"name": name, "annotations": {labels.TEMPLATE_DIGEST: "abc"}},
            "status": status,
        },
    ]


def test_a_service_rests_whose_revision_is_ready_and_wants_no_pods() -> None:
    assert objects.is_scaled_to_zero(owners(), "abc")


def test_a_service_rests_that_began_without_pods_and_was_not_called_yet() -> None:
    assert objects.is_scaled_to_zero(owners(desired=None, active="NoTraffic"), "abc")


@pytest.mark.parametrize(
    "owner_objects",
    [
        owners(desired=1),
        owners(desired=1, active="NoTraffic"),
        owners(desired=None),
        owners(ready="Unknown"),
        owners(name="echo-2"),
        [],
    ],
    ids=[
        "pods are wanted",
        "pods are wanted again",
        "not decided yet",
        "not ready",
        "not the latest that is",
        "nothing",
    ],
)
def test_otherwise_it_does_not(owner_objects: list[Any]) -> None:
    assert not objects.is_scaled_to_zero(owner_objects, "abc")


def test_a_revision_of_an_older_template_says_nothing() -> None:
    assert not objects.is_scaled_to_zero(owners(), "def")


@pytest.mark.parametrize(
    ("kind", "spec", "count"),
    [
        ("Deployment", {"replicas": 3}, 3),
        ("Deployment", {}, 1),
        ("Deployment", {"replicas": 0}, 1),
        ("StatefulSet", {"replicas": 3, **PARTITION}, 2),
    ],
    ids=["as many", "none said", "scaled to none", "an update that leaves one as it is"],
)
def test_an_object_says_how_many_pods_it_asks_for(
    kind: str, spec: dict[str, Any], count: int
) -> None:
    assert objects.expected(workload(kind, **spec)) == count


def test_the_nodes_decide_how_many_pods_a_daemon_set_has_once_its_controller_saw_it() -> None:
    daemon_set = workload("DaemonSet")
    assert objects.expected(daemon_set) is None
    daemon_set["metadata"]["generation"] = 2
    daemon_set["status"] = {"observedGeneration": 1, "desiredNumberScheduled": 1}
    assert objects.expected(daemon_set) is None
    daemon_set["status"] = {"observedGeneration": 2, "desiredNumberScheduled": 3}
    assert objects.expected(daemon_set) == 3


def test_an_autoscaled_service_asks_for_a_pod() -> None:
    knative_service = workload("Service", api_version=API, replicas=7)
    assert objects.expected(knative_service) == 1


def test_a_service_says_where_it_is_called() -> None:
    assert objects.service_url(owners()) == "http://echo.team.svc.cluster.local"
    assert objects.service_url([]) == ""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "echo"}}
    assert objects.service_url([service]) == ""
