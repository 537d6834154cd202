"""Claims for which a pod waits, and what provisioners say of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes.launch_failures import diagnosis, volumes
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import Verdict
from unit.controller.backends.kubernetes.launch_failures import recorded


def record() -> dict[str, Any]:
    """A pod that waits for a claim with an access mode that its provisioner never gives."""
    return copy.deepcopy(recorded.read("claim-mode"))


def judge(case: dict[str, Any]) -> Verdict:
    cluster = recorded.cluster(case)
    return diagnosis.judge_pod(case["pod"], events=case["events"], cluster=cluster)


def judge_message(message: str) -> Verdict:
    case = record()
    case["events"][-1]["message"] = message
    return judge(case)


@pytest.mark.parametrize(
    "message",
    [
        "VolumeCapabilities is invalid: specified multi writer with mount access type",
        "invalid volume capabilities requested. Only SINGLE_NODE_WRITER is supported",
        "Volume capabilities MULTI_NODE_MULTI_WRITER not supported. Only AccessModes[RWO]",
        "multi node access modes are only supported on rbd `block` type volumes",
        "invalid AccessModes [ReadWriteMany]: only AccessModes [ReadWriteOnce] are supported",
        "access mode ReadWriteMany is not supported",
        "unsupported access mode: ReadWriteMany",
        "Only support ReadWriteOnce access mode",
    ],
)
def test_an_access_mode_that_a_provisioner_never_gives_is_a_doom(message: str) -> None:
    error = judge_message(message).error
    assert error is not None
    assert error.hint == "choose another access_mode than ReadWriteMany, or another storage_class"


@pytest.mark.parametrize("message", ["volume mode Block not supported", "unsupported fstype xfs"])
def test_another_thing_that_a_provisioner_never_gives_says_nothing_of_access_modes(
    message: str,
) -> None:
    error = judge_message(message).error
    assert error is not None
    assert error.hint == "choose another storage_class"


def test_a_provisioner_that_fails_for_a_while_is_no_doom() -> None:
    verdict = judge_message("rpc error: the read write multi-attach check timed out")
    assert not verdict.is_doomed
    assert "is not provided yet" in verdict.reason


def test_a_claim_without_its_volume_is_a_doom() -> None:
    case = record()
    case["claims"][0]["status"] = {"phase": "Lost"}
    error = judge(case).error
    assert error is not None
    assert "the PersistentVolume of the volume 'rwx-local' is gone" in error.message
    assert "kubectl delete pvc rwx-local -n dooms-a" in (error.hint or "")


def test_the_claim_of_an_ephemeral_volume_is_that_of_the_pod() -> None:
    case = record()
    case["pod"]["spec"]["volumes"] = [{"name": "v", "ephemeral": {"volumeClaimTemplate": {}}}]
    case["claims"][0]["metadata"]["name"] = "claim-rwx-v"
    for event in case["events"]:
        event["involvedObject"]["name"] = "claim-rwx-v"
    assert list(volumes.claims(case["pod"])) == ["claim-rwx-v"]
    assert judge(case).is_doomed
    case["claims"] = []
    without_claim = judge(case)
    assert not without_claim.is_doomed
    assert without_claim.reason == "Kubernetes has not made the claim claim-rwx-v yet"
