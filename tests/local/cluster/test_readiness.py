"""Waiting for a controller whose pods had failed before, against an API server of the tests."""

import asyncio

import pytest

from kubetorch.errors import ImagePullError, InstallError
from kubetorch.install import readiness
from kubetorch.k8s.client import Client
from kubetorch.manifests import labels
from local.fake_apiserver import FakeApiServer
from local.object_server import ObjectServer

SPACE = "kubetorch"
PODS = f"api/v1/pods/{SPACE}"
DEPLOYMENTS, REPLICA_SETS = (
    f"apis/apps/v1/{kind}/{SPACE}" for kind in ("deployments", "replicasets")
)
OURS = {"app.kubernetes.io/name": "kubetorch", "app.kubernetes.io/component": "controller"}
REVISION = {"deployment.kubernetes.io/revision": "1"}
PULLING = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}}
CRASHING = {
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 137}},
    "restartCount": 7,
}
READY = {"state": {"running": {}}, "ready": True}
REFUSED = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}


class Cluster(ObjectServer):
    """Makes a new pod in the place of one that is deleted, and tries again when it is asked to.

    Args:
        state: Of the container of a new pod.
        refuses: Whether it goes on refusing to make pods.
    """

    def __init__(self, state, *, refuses=False):
        super().__init__()
        self.state = state
        self.refuses = refuses
        metadata = {"name": readiness.NAME, "generation": 1, "annotations": REVISION}
        self.put(DEPLOYMENTS, {"metadata": metadata, "spec": {"replicas": 1}, "status": {}})
        self.condition()

    def condition(self, *conditions, ready=0):
        replicas = {
            "metadata": {
                "name": "one",
                "annotations": REVISION,
                "labels": {**OURS, "pod-template-hash": "h"},
            }
        }
        self.put(REPLICA_SETS, {**replicas, "status": {"conditions": conditions}})
        deployment = self.objects[DEPLOYMENTS, readiness.NAME]
        counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), ready)
        status = {"observedGeneration": 1, "conditions": list(conditions), **counts}
        self.put(DEPLOYMENTS, {**deployment, "status": status})

    def pod(self, name, state):
        marks = {**OURS, "pod-template-hash": "h"}
        if state.get("ready"):
            marks[labels.LEADS] = "true"
        metadata = {"name": name, "namespace": SPACE, "labels": marks}
        status = {"containerStatuses": [{"name": "c", "image": "i:1", **state}]}
        self.put(PODS, {"metadata": metadata, "status": status})

    def remove(self, collection, name):
        super().remove(collection, name)
        self.make()

    def make(self):
        self.pod("new", self.state)
        self.condition(ready=1 if self.state.get("ready") else 0)

    def _write(self, exchange, collection, names):
        super()._write(exchange, collection, names)
        if exchange.request.method == "PATCH" and not self.refuses:
            self.make()


def wait(cluster, timeout=20.0):
    report_lines = []

    async def run():
        async with (
            FakeApiServer(cluster) as server,
            Client(server.access(), variables={}) as client,
        ):
            await readiness.wait(
                client,
                SPACE,
                readiness.CONTROLLER,
                timeout=timeout,
                report=report_lines.append,
            )

    asyncio.run(run())
    return report_lines


def deleted(cluster):
    return [path.rpartition("/")[2] for method, path, _ in cluster.writes if method == "DELETE"]


@pytest.mark.parametrize("state", [PULLING, CRASHING], ids=["pulling", "crashing"])
def test_a_pod_that_had_failed_before_is_replaced_and_counts_for_nothing(state):
    cluster = Cluster(READY)
    cluster.pod("old", state)
    assert any("deleted Pod old" in line for line in wait(cluster))
    assert deleted(cluster) == ["old"]


def test_a_pod_that_fails_again_is_the_end_and_is_left_for_who_looks():
    cluster = Cluster(PULLING)
    cluster.pod("old", CRASHING)
    with pytest.raises(ImagePullError, match="i:1 cannot be pulled"):
        wait(cluster)
    assert deleted(cluster) == ["old"]


def test_a_pod_that_only_now_fails_is_not_deleted():
    cluster = Cluster(READY)
    cluster.pod("first", {"state": {"waiting": {"reason": "ContainerCreating"}}})

    async def run():
        async with (
            FakeApiServer(cluster) as server,
            Client(server.access(), variables={}) as client,
        ):
            # It reports what it waits for once it knows what had failed before.
            await readiness.wait(
                client,
                SPACE,
                readiness.CONTROLLER,
                timeout=20,
                report=lambda text: cluster.pod("first", PULLING),
            )

    with pytest.raises(ImagePullError):
        asyncio.run(run())
    assert deleted(cluster) == []


def test_who_may_not_delete_the_pod_is_told_why_it_failed():
    cluster = Cluster(READY)
    cluster.pod("old", PULLING)
    cluster.refusals = [(403, "Forbidden")]
    with pytest.raises(ImagePullError, match="i:1 cannot be pulled"):
        wait(cluster)


def test_a_cluster_that_had_refused_pods_is_asked_again():
    cluster = Cluster(READY)
    cluster.condition(REFUSED)
    assert "pods were refused before: the cluster is asked again" in wait(cluster)


def test_a_cluster_that_goes_on_refusing_is_asked_once():
    cluster = Cluster(READY, refuses=True)
    cluster.condition(REFUSED)
    with pytest.raises(InstallError, match="no pod is made: exceeded quota"):
        wait(cluster, timeout=60)
    assert [method for method, _, _ in cluster.writes] == ["PATCH"]
