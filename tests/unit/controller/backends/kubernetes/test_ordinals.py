"""Which ordinal a pod has, whoever counts it, and that it keeps it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from clock_loop import pause, run
from kubetorch.controller.backends.kubernetes.pods import OrdinalKeeper, Ordinals, ordinal_of
from kubetorch.errors import KubernetesConflictError, KubernetesUnavailableError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.manifests import labels


def pod(name: str = "train-1", kind: str = "ReplicaSet", **tags: str) -> Object:
    metadata: Object = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": tags}
    metadata["ownerReferences"] = [{"kind": kind, "name": "train"}]
    return {"metadata": metadata, "spec": {}, "status": {}}


def typed(name: str, kind: str, of_type: str, index: int) -> Object:
    return pod(name, kind, **{TYPE: of_type, INDEX: str(index)})


TYPE, INDEX = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
JOBS, JOB = "jobset.sigs.k8s.io/replicatedjob-replicas", "jobset.sigs.k8s.io/job-index"
COMPLETION = "batch.kubernetes.io/job-completion-index"
RAY = "ray.io/node-type"


@pytest.mark.parametrize(
    ("kind", "tags", "number"),
    [
        ("StatefulSet", {"apps.kubernetes.io/pod-index": "2"}, 2),
        ("Job", {COMPLETION: "1"}, 1),
        ("ReplicaSet", {}, None),
        ("PyTorchJob", {TYPE: "master", INDEX: "0"}, 0),
        ("PyTorchJob", {TYPE: "worker", INDEX: "0"}, 1),
        ("TFJob", {TYPE: "chief", INDEX: "0"}, 0),
        ("TFJob", {TYPE: "worker", INDEX: "3"}, 4),
        ("TFJob", {TYPE: "ps", INDEX: "0"}, None),
        ("MPIJob", {TYPE: "worker", INDEX: "0"}, 0),
        ("MPIJob", {TYPE: "launcher", INDEX: "0"}, None),
        ("PaddleJob", {TYPE: "worker", INDEX: "0"}, 1),
        ("Job", {JOBS: "1", JOB: "0", COMPLETION: "3"}, 3),
        ("Job", {JOBS: "3", JOB: "2", COMPLETION: "0"}, 2),
        ("Job", {JOBS: "2", JOB: "1", COMPLETION: "1"}, 3),
        ("RayCluster", {RAY: "head"}, 0),
        ("RayCluster", {RAY: "worker"}, None),
    ],
)
def test_the_ordinal_of_a_pod_is_its_owners_and_no_other_pods(
    kind: str, tags: dict[str, str], number: int | None
) -> None:
    assert ordinal_of(pod(kind=kind, **tags)) == number


def count(*arriving_pods: Object, ordinals: Ordinals | None = None) -> dict[str, int]:
    """The ordinals of pods that come one after another."""
    ordinals = ordinals or Ordinals()
    live_pods: dict[str, Object] = {}
    for arriving_pod in arriving_pods:
        live_pods[arriving_pod["metadata"]["name"]] = arriving_pod
        ordinals.put(arriving_pod, live_pods)
    return dict(ordinals.numbers)


def test_a_replacement_takes_the_lowest_ordinal_of_pods_that_do_not_stay() -> None:
    leaving = pod("b")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T15:50:01Z"
    ended = pod("c")
    ended["status"]["phase"] = "Failed"
    numbers = count(pod("a"), leaving, ended, pod("d"), pod("e"), pod("f"))
    assert numbers == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 2, "f": 3}


@pytest.mark.parametrize(
    "arriving",
    [
        [("launcher", 0), ("worker", 1), ("worker", 0)],
        [("worker", 1), ("launcher", 0), ("worker", 0)],
    ],
)
def test_a_pod_without_an_agent_takes_no_ordinal_of_those_that_are_counted(
    arriving: list[tuple[str, int]],
) -> None:
    pods = [typed(f"{kind}-{index}", "MPIJob", kind, index) for kind, index in arriving]
    numbers = count(*pods)
    assert numbers == {"worker-0": 0, "worker-1": 1, "launcher-0": 2}


def test_the_head_of_a_raycluster_is_the_first_whenever_it_comes() -> None:
    workers = [pod(name, "RayCluster", **{RAY: "worker"}) for name in ("w", "v")]
    head = pod("head", "RayCluster", **{RAY: "head"})
    assert count(*workers, head) == {"w": 1, "v": 2, "head": 0}


def numbered(name: str, ordinal: int) -> Object:
    numbered_pod = pod(name)
    numbered_pod["metadata"]["annotations"] = {labels.ORDINAL: str(ordinal)}
    return numbered_pod


def test_pods_have_the_ordinals_of_the_controller_before_in_whatever_order() -> None:
    assert count(pod("a"), numbered("b", 2), numbered("c", 0)) == {"a": 1, "b": 2, "c": 0}


def test_a_pod_keeps_its_ordinal_when_that_is_written_on_it() -> None:
    ordinals = Ordinals()
    count(pod("a"), pod("b"), ordinals=ordinals)
    assert ordinals.unwritten == {"a", "b"}
    count(numbered("b", 1), ordinals=ordinals)
    assert (dict(ordinals.numbers), ordinals.unwritten) == ({"a": 0, "b": 1}, {"a"})


class Server:
    """An API server that is away at first."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = [*failures]
        self.patches: list[tuple[str, Object]] = []

    async def patch(self, ref: Ref, patch: Object) -> None:
        self.patches.append((ref.name, patch))
        if self.failures:
            raise self.failures.pop(0)


@pytest.mark.parametrize(
    ("failure", "tries"),
    [(None, 1), (KubernetesUnavailableError("away"), 2), (KubernetesConflictError("other"), 1)],
)
def test_an_ordinal_is_written_on_its_pod_once_the_server_takes_it(
    failure: Exception | None, tries: int
) -> None:
    server = Server(*([failure] if failure else []))

    async def main() -> None:
        keeper = OrdinalKeeper(cast("Client", server))
        for _ in range(3):  # the pod changes, and its annotation is not there yet
            keeper.keep(pod("a"), 3)
            await pause(1)
        await keeper.close()

    run(main())
    annotations = {labels.ORDINAL: "3", "controller.kubernetes.io/pod-deletion-cost": "-3"}
    metadata: dict[str, Any] = {"uid": "uid-a", "annotations": annotations}
    assert server.patches == [("a", {"metadata": metadata})] * tries
