"""What a manifest may be: an object of Kubetorch's own is none, however it is brought."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.specs.compute import freeze
from kubetorch.wire import messages, routes
from tests.local.service_harness import FAKE, Service, deploy, spec

pytestmark = pytest.mark.security

PODS = {"template": {"spec": {"containers": [{"name": "kubetorch", "image": "python"}]}}}
OWN_OBJECT = {
    "apiVersion": "kubetorch.com/v1alpha1",
    "kind": "KubetorchWorkload",
    "metadata": {"name": "f"},
    "spec": {"generation": 1, **PODS},
}
TRAIN = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "f"},
    "spec": {"runtimeRef": {"name": "torch"}, "trainer": {"numNodes": 1}},
}
CHANGED = {"apiVersion": "kubetorch.com/v2", "kind": "Other"}


@pytest.fixture(scope="module")
def service(shared_service_home: Path) -> Iterator[Service]:
    service = Service(shared_service_home, FAKE).start()
    yield service
    service.terminate()


def test_a_workload_of_ours_is_no_manifest() -> None:
    with pytest.raises(kt.SpecError, match="a KubetorchWorkload can be no service"):
        kt.Compute.from_manifest(OWN_OBJECT, pod_template_path="spec.template")


@pytest.mark.parametrize(
    "compute",
    [
        {"manifest": freeze(OWN_OBJECT, parameter="m"), "pod_template_path": ("spec", "template")},
        {"service_template": freeze(CHANGED, parameter="t")},
        {
            "manifest": freeze(TRAIN, parameter="m"),
            "service_template": freeze(CHANGED, parameter="t"),
        },
    ],
    ids=["manifest", "template", "template-of-a-kind-without-pods"],
)
def test_the_controller_takes_no_workload_of_ours_as_a_manifest(
    service: Service, compute: dict[str, object]
) -> None:
    body = messages.encode(deploy(spec("f", **compute))) + b"\n"
    status, envelope = service.request("POST", routes.workload("default", "f", "deploy"), body)
    assert (status, envelope["error_type"]) == (400, "SpecError")
    assert "can be no service: Kubetorch makes it itself" in envelope["message"]
