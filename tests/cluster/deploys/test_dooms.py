"""Launches that cannot succeed, made for real: each has its typed error within 5 s of the fact.

`pytest tests/cluster/deploys/test_dooms.py -s` prints the table at the end; `DOOMS_TABLE` names a
file that gets it as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import refusing
from cluster.court import Court, Judgement
from kubetorch import errors
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import PODS, Ref

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

Object = dict[str, Any]
IMAGE = "localhost/python:3.11"
SLEEP = ["sleep", "600"]
#: Seconds from the fact to the error: 5 on a machine with time, which the table shows.
BUDGET = 15.0
#: Seconds in which the fact itself has to come about: a crash loop takes two runs.
PATIENCE = 100.0
#: Seconds for which what may still come right has to be no doom.
QUIET = 8.0
#: Launches that are watched at one time: a small machine is slow with more.
AT_ONCE = 8


def container(**more: Any) -> Object:
    return {"name": "main", "image": IMAGE, "command": SLEEP, **more}


def pod(*, spec: Object | None = None, **more: Any) -> list[Object]:
    pod_spec = {
        "terminationGracePeriodSeconds": 1,
        "containers": [container(**more)],
        **(spec or {}),
    }
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod_spec}]


def shell(line: str, **more: Any) -> list[Object]:
    return pod(command=["sh", "-c", line], **more)


def owner(kind: str, fields: Object | None = None, *, group: str = "apps", **more: Any) -> Object:
    """A Deployment, Job, … of one such pod."""
    template = pod(**more)[0]["spec"]
    owner_spec: Object = {
        "template": {"metadata": {"labels": {}}, "spec": template},
        **(fields or {}),
    }
    return {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {}, "spec": owner_spec}


def deployment(replicas: int = 1, **more: Any) -> list[Object]:
    return [owner("Deployment", {"replicas": replicas}, **more)]


def claim(name: str, **spec: Any) -> Object:
    common_spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {**common_spec, **spec},
    }


def mounted(source: Object) -> Object:
    return {"volumes": [{"name": "data", **source}]}


def mounting(source: Object) -> list[Object]:
    mounts = [{"name": "data", "mountPath": "/data"}]
    return pod(spec={**mounted(source), "containers": [container(volumeMounts=mounts)]})


def job(**more: Any) -> list[Object]:
    return [owner("Job", {"backoffLimit": 0}, group="batch", **more)]


def affine(label: str) -> Object:
    terms = [{"matchExpressions": [{"key": label, "operator": "Exists"}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"affinity": {"nodeAffinity": required}}


def claiming(name: str, **spec: Any) -> list[Object]:
    return [claim(name, **spec), *mounting({"persistentVolumeClaim": {"claimName": name}})]


NO_IMAGE = "198.18.0.1:5000/nope:1"
BRIEF = {**container(), "name": "init", "command": ["true"]}
#: What is applied, the error, and words of its message.
DOOMED: dict[str, tuple[list[Object], type[errors.KubetorchError], str]] = {
    "deadline": (
        pod(spec={"activeDeadlineSeconds": 3}),
        errors.PodTerminatedError,
        "DeadlineExceeded",
    ),
    "image-not-found": (
        pod(image=NO_IMAGE),
        errors.ImagePullError,
        f"there is no image {NO_IMAGE}",
    ),
    # After an init container the kubelet's status is far behind its events.
    "image-not-found-after-init": (
        pod(spec={"initContainers": [BRIEF], "containers": [container(image=NO_IMAGE)]}),
        errors.ImagePullError,
        f"there is no image {NO_IMAGE}",
    ),
    "no-secret-after-init": (
        pod(spec={"initContainers": [BRIEF]}, envFrom=[{"secretRef": {"name": "nope"}}]),
        errors.MissingObjectError,
        "there is no Secret 'nope'",
    ),
    "no-command-after-init": (
        pod(spec={"initContainers": [BRIEF]}, command=["/no/such/thing"]),
        errors.PodContainerError,
        "/no/such/thing",
    ),
    "image-not-loaded": (pod(image="localhost/none:1"), errors.ImagePullError, "does not have it"),
    "image-name": (pod(image="UPPER/Case:1"), errors.ImagePullError, "is no name of an image"),
    "image-never-pulled": (
        pod(image="localhost/none:1", imagePullPolicy="Never"),
        errors.ImagePullError,
        "pull policy is Never",
    ),
    "too-large": (
        pod(resources={"requests": {"cpu": "1000"}}),
        errors.UnschedulableError,
        "cpus, 1000 are asked",
    ),
    "too-many-gpus": (
        pod(resources={"limits": {"nvidia.com/gpu": "9"}}),
        errors.UnschedulableError,
        "has 8 nvidia.com/gpu, 9 are asked",
    ),
    "no-such-label": (
        pod(spec={"nodeSelector": {"disk": "ssd"}}),
        errors.UnschedulableError,
        "has no label disk, ssd is asked",
    ),
    "no-such-affinity": (
        pod(spec=affine("nope")),
        errors.UnschedulableError,
        "does not match the node affinity",
    ),
    "no-secret": (
        pod(envFrom=[{"secretRef": {"name": "nope"}}]),
        errors.MissingObjectError,
        "there is no Secret 'nope'",
    ),
    "no-mounted-secret": (
        mounting({"secret": {"secretName": "nope"}}),
        errors.MissingObjectError,
        "there is no Secret 'nope'",
    ),
    "no-configmap": (
        mounting({"configMap": {"name": "nope"}}),
        errors.MissingObjectError,
        "there is no ConfigMap 'nope'",
    ),
    "no-key": (
        mounting({"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "k", "path": "k"}]}}),
        errors.MissingObjectError,
        "no key 'k'",
    ),
    "no-claim": (
        mounting({"persistentVolumeClaim": {"claimName": "nope"}}),
        errors.MissingObjectError,
        "there is no PersistentVolumeClaim 'nope'",
    ),
    "no-storage-class": (
        claiming("classless", storageClassName="nope"),
        errors.MissingObjectError,
        "there is no StorageClass 'nope'",
    ),
    "access-mode": (
        claiming("shared", storageClassName="local-path", accessModes=["ReadWriteMany"]),
        errors.StartupError,
        "can never be bound",
    ),
    "no-account": (
        deployment(spec={"serviceAccountName": "nope"}),
        errors.MissingObjectError,
        "there is no ServiceAccount 'nope'",
    ),
    "no-account-of-a-job": (
        job(spec={"restartPolicy": "Never", "serviceAccountName": "nope"}),
        errors.MissingObjectError,
        "there is no ServiceAccount 'nope'",
    ),
    "no-priority-class": (
        deployment(spec={"priorityClassName": "nope"}),
        errors.MissingObjectError,
        "there is no PriorityClass 'nope'",
    ),
    "no-runtime-class": (
        deployment(spec={"runtimeClassName": "nope"}),
        errors.MissingObjectError,
        "there is no RuntimeClass 'nope'",
    ),
    "quota": (
        deployment(
            resources={
                "requests": {"cpu": "10m", "example.com/chips": "5"},
                "limits": {"example.com/chips": "5"},
            }
        ),
        errors.QuotaExceededError,
        "allows 4 of requests.example.com/chips altogether, 5 are asked",
    ),
    "limit-range": (
        deployment(resources={"limits": {"memory": "900Gi"}, "requests": {"memory": "1Mi"}}),
        errors.AdmissionError,
        "maximum memory usage per Container is 800Gi",
    ),
    "pod-security": (
        deployment(spec={"hostNetwork": True}),
        errors.AdmissionError,
        "hostNetwork=true",
    ),
    "webhook-denies": (
        [{**owner("Deployment"), "metadata": {"labels": {"doom": "denied"}}}],
        errors.AdmissionError,
        "not on a Saturday",
    ),
    "policy-denies": (
        [{**owner("Deployment"), "metadata": {"labels": {"doom": "policy"}}}],
        errors.AdmissionError,
        "the policy says no",
    ),
    "invalid": (
        pod(resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
        errors.AdmissionError,
        "must be less than or equal to cpu limit",
    ),
    "no-operator": (
        [{"apiVersion": "nope.example.com/v1", "kind": "Nope", "metadata": {}, "spec": {}}],
        errors.OperatorMissingError,
        "does not serve the kind Nope",
    ),
    "no-kai": (
        pod(spec={"schedulerName": "kai-scheduler"}),
        errors.OperatorMissingError,
        "'kai-scheduler'",
    ),
    "no-command": (
        pod(command=["/no/such/thing"]),
        errors.PodContainerError,
        "/no/such/thing",
    ),
    "no-python": (
        shell("exec python9 -m kubetorch.pod"),
        errors.PodContainerError,
        "was not found (exit code 127)",
    ),
    "no-working-folder": (
        pod(workingDir="/etc/passwd"),
        errors.PodContainerError,
        "not a directory",
    ),
    "must-not-be-root": (
        pod(spec={"securityContext": {"runAsNonRoot": True}}),
        errors.PodContainerError,
        "runAsNonRoot",
    ),
    "crash-loop": (shell("echo last words; exit 3"), errors.ServiceHealthError, "last words"),
    "init-container": (
        pod(
            spec={
                "initContainers": [
                    {**container(), "name": "init", "command": ["sh", "-c", "echo no luck; exit 4"]}
                ]
            }
        ),
        errors.PodContainerError,
        "no luck",
    ),
    "out-of-memory": (
        pod(
            command=["python3", "-c", "x = b'x' * 10**9"],
            resources={"limits": {"memory": "40Mi"}, "requests": {"memory": "10Mi"}},
        ),
        errors.OutOfMemoryError,
        "killed for its memory (limit 40Mi)",
    ),
    "startup-probe": (
        pod(startupProbe={"tcpSocket": {"port": 9}, "periodSeconds": 1, "failureThreshold": 2}),
        errors.ProbeFailedError,
        "startup probe failed: dial tcp",
    ),
    "liveness-probe": (
        pod(
            livenessProbe={
                "exec": {"command": ["sh", "-c", "echo sick; exit 1"]},
                "periodSeconds": 1,
                "failureThreshold": 1,
            }
        ),
        errors.ProbeFailedError,
        "liveness probe failed: sick",
    ),
    "evicted": (
        shell(
            "head -c 40M /dev/zero > /big; sleep 600",
            resources={"limits": {"ephemeral-storage": "5Mi"}},
        ),
        errors.PodTerminatedError,
        "Evicted",
    ),
    "job-has-failed": (
        job(spec={"restartPolicy": "Never"}, command=["sh", "-c", "exit 5"]),
        errors.ServiceHealthError,
        "BackoffLimitExceeded",
    ),
    "quota-of-all-pods": (
        [
            owner(
                "Job",
                {"parallelism": 4, "completions": 4},
                group="batch",
                spec={"activeDeadlineSeconds": 600, "restartPolicy": "Never"},
            )
        ],
        errors.QuotaExceededError,
        "allows 3 of pods altogether, 1 are asked by each of 4 pods",
    ),
}


def queued(queue: str, cpu: str, **metadata: Any) -> Object:
    """A Job in a queue."""
    resources = {"requests": {"cpu": cpu}}
    job = owner("Job", group="batch", spec={"restartPolicy": "Never"}, resources=resources)
    return {**job, "metadata": {"labels": {"kueue.x-k8s.io/queue-name": queue}, **metadata}}


#: The same, where there is Kueue, with a queue `team` that has one CPU.
QUEUED: dict[str, tuple[list[Object], type[errors.KubetorchError] | None, str]] = {
    "no-such-queue": (
        [queued("nope", "10m")],
        errors.MissingObjectError,
        "there is no LocalQueue 'nope'",
    ),
    "queue-too-small": (
        [queued("team", "2")],
        errors.QueueUnschedulableError,
        "request > maximum capacity",
    ),
    "queue-full": (
        [queued("team", "600m", name="holder"), queued("team", "500m")],
        None,
        "in the queue 'team'",
    ),
}
#: What is applied, and words of the reason.
WAITING: dict[str, tuple[list[Object], str]] = {
    "registry-is-away": (pod(image="198.18.0.1:5999/nope:1"), "connection refused"),
    "registry-has-no-address": (pod(image="nowhere.example.com/nope:1"), "no such host"),
    "webhook-is-away": (
        [{**owner("Deployment"), "metadata": {"labels": {"doom": "silent"}}}],
        "does not answer",
    ),
    "gated": (pod(spec={"schedulingGates": [{"name": "example.com/gate"}]}), "example.com/gate"),
    "other-scheduler": (
        pod(spec={"schedulerName": "nobody"}),
        "the scheduler 'nobody' has not looked at it",
    ),
    "tainted": (
        pod(spec={"nodeSelector": {"kubetorch.test/ghost": "yes"}}),
        "no node takes it yet",
    ),
}


def named(name: str, manifests: list[Object]) -> list[Object]:
    """The objects of one launch under names of their own."""
    named_manifests = []
    for manifest in manifests:
        metadata = dict(manifest["metadata"])
        metadata.setdefault("name", name)
        named_manifest = {**manifest, "metadata": metadata}
        template = (named_manifest.get("spec") or {}).get("template")
        if template is not None:
            labels = {"launch": name, "kubetorch.com/service": name}
            of_template = {**template, "metadata": {"labels": labels}}
            named_manifest["spec"] = {**named_manifest["spec"], "template": of_template}
            if named_manifest["kind"] == "Deployment":
                named_manifest["spec"]["selector"] = {"matchLabels": {"launch": name}}
        named_manifests.append(named_manifest)
    return named_manifests


@dataclasses.dataclass
class Launches:
    """What came of each launch."""

    doomed: dict[str, Judgement] = dataclasses.field(default_factory=dict)
    waiting: dict[str, Judgement] = dataclasses.field(default_factory=dict)
    has_kueue: bool = False


@pytest.fixture(scope="module")
def launches() -> Iterator[Launches]:
    """All launches, made a few at a time."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    judged_launches = asyncio.run(_make())
    yield judged_launches
    _print(judged_launches)


async def _make() -> Launches:
    launches, room = Launches(), asyncio.Semaphore(AT_ONCE)
    name = f"dooms-{uuid.uuid4().hex[:8]}"
    access = dataclasses.replace(kubeconfig.find(), namespace=name)
    async with (
        Client(access) as client,
        refusing.namespace(client, name),
        Court(client, name) as court,
    ):

        async def judge(launch: str, manifests: list[Object]) -> None:
            async with room:
                is_doom = launch not in WAITING and launch != "queue-full"
                judgement = await _launch(court, launch, manifests, is_doom=is_doom)
                (launches.doomed if is_doom else launches.waiting)[launch] = judgement

        lost = {"nodeName": name, "tolerations": [{"operator": "Exists"}]}
        launches.has_kueue = await refusing.queues(client, name)
        alone = {"queue-without-kueue": QUEUED["no-such-queue"]}
        in_queues = QUEUED if launches.has_kueue else alone
        await asyncio.gather(
            _lost(court, launches, pod(spec=lost)),
            _evicted(court, launches),
            *(judge(launch, row[0]) for launch, row in in_queues.items()),
            *(judge(launch, row[0]) for launch, row in DOOMED.items()),
            *(judge(launch, row[0]) for launch, row in WAITING.items()),
        )
        for launch in [
            name for name, judgement in launches.doomed.items() if judgement.seconds > BUDGET
        ]:
            # Seven others, and whatever else the machine does, may have held it up.
            if launch in DOOMED:
                second_judgement = await _launch(
                    court, f"{launch}-2", DOOMED[launch][0], is_doom=True
                )
                launches.doomed[launch] = min(
                    launches.doomed[launch],
                    second_judgement,
                    key=lambda judgement: judgement.seconds,
                )
        if launches.has_kueue:
            await refusing.no_queues(client, name)
    return launches


async def _launch(
    court: Court, launch: str, manifests: list[Object], *, is_doom: bool
) -> Judgement:
    objects = named(launch, manifests)
    try:
        refused = await court.apply(launch, objects)
        if refused.reason:
            return Judgement(refused, time.time())
        if is_doom:
            return await court.until_doomed(launch, objects[-1], timeout=PATIENCE)
        # Until it says what it waits for, and for a while from then on.
        end, words = time.monotonic() + PATIENCE, {**QUEUED, **WAITING}[launch][-1]
        while words not in court.judge(launch, objects[-1]).reason and time.monotonic() < end:
            judgement = await court.until_doomed(launch, objects[-1], timeout=0.5)
            if judgement.verdict.is_doomed:
                return judgement
        return await court.until_doomed(launch, objects[-1], timeout=QUIET)
    finally:
        await _remove(court, objects)


async def _remove(court: Court, objects: list[Object]) -> None:
    for manifest in objects:
        try:
            resource = await court.client.discovery.resource_of(manifest)
            ref = Ref(resource, manifest["metadata"]["name"], court.namespace)
            await court.client.delete(ref, grace_seconds=0)
        except errors.KubernetesNotFoundError:
            continue


async def _lost(court: Court, launches: Launches, manifests: list[Object]) -> None:
    """A pod on a node whose kubelet says nothing any more."""
    objects = named("node-lost", manifests)
    await court.apply("node-lost", objects)
    launches.doomed["node-lost"] = await court.until_doomed(
        "node-lost", objects[-1], timeout=PATIENCE
    )
    await _remove(court, objects)


async def _evicted(court: Court, launches: Launches) -> None:
    """A pod that somebody asks the API server to evict."""
    objects = named("evicted-by-api", pod())
    await court.apply("evicted-by-api", objects)
    key = (court.namespace, "evicted-by-api")
    await court.pods.until(
        lambda pods: key in pods and pods[key]["status"].get("phase") == "Running", timeout=PATIENCE
    )
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": key[1]}}
    await court.client.post(Ref(PODS, key[1], key[0], "eviction"), body)
    launches.doomed[key[1]] = await court.until_doomed(key[1], objects[-1], timeout=PATIENCE)


def _print(launches: Launches) -> None:
    lines = [f"{'launch':26} {'seconds':>7}  error"]
    for name, judgement in sorted(launches.doomed.items()):
        error = judgement.verdict.error
        text = str(error).partition("\n")[0] if error else "NOT DOOMED"
        lines.append(f"{name:26} {judgement.seconds:7.1f}  {type(error).__name__}: {text:.150}")
    lines += ["", f"{'launch':26} {'':7}  waits, because"]
    for name, judgement in sorted(launches.waiting.items()):
        lines.append(f"{name:26} {'':7}  {judgement.verdict.reason:.170}")
    table = "\n".join(lines)
    print(f"\n{table}")
    if os.environ.get("DOOMS_TABLE"):
        Path(os.environ["DOOMS_TABLE"]).write_text(f"{table}\n", encoding="utf-8")


@pytest.mark.parametrize("launch", DOOMED)
def test_a_doomed_launch_fails_soon_after_the_fact(launches: Launches, launch: str) -> None:
    _, kind, words = DOOMED[launch]
    judgement = launches.doomed[launch]
    error = judgement.verdict.error
    assert error is not None, judgement.verdict.reason
    assert type(error) is kind, repr(error)
    assert words in str(error)
    assert error.hint
    assert judgement.seconds <= BUDGET


def test_a_pod_on_a_lost_node_is_doomed(launches: Launches) -> None:
    judgement = launches.doomed["node-lost"]
    error = judgement.verdict.error
    assert isinstance(error, errors.PodTerminatedError), judgement.verdict
    assert error.reason == "NodeLost"
    assert judgement.seconds <= BUDGET


@pytest.mark.parametrize("launch", QUEUED)
def test_kueue_may_never_admit_a_launch(launches: Launches, launch: str) -> None:
    if not launches.has_kueue:
        pytest.skip("the cluster has no Kueue")
    _, kind, words = QUEUED[launch]
    judgement = (launches.doomed if kind else launches.waiting)[launch]
    error = judgement.verdict.error
    assert type(error) is (kind or type(None)), judgement.verdict
    assert words in judgement.verdict.reason
    assert error is None or judgement.seconds <= BUDGET


def test_queue_name_without_kueue_is_doomed(launches: Launches) -> None:
    if launches.has_kueue:
        pytest.skip("the cluster has Kueue")
    assert isinstance(
        launches.doomed["queue-without-kueue"].verdict.error, errors.OperatorMissingError
    )


def test_a_pod_that_is_evicted_and_that_nobody_replaces_is_doomed(launches: Launches) -> None:
    judgement = launches.doomed["evicted-by-api"]
    error = judgement.verdict.error
    assert isinstance(error, errors.PodTerminatedError), judgement.verdict
    assert error.evicted
    assert judgement.seconds <= BUDGET


@pytest.mark.parametrize("launch", WAITING)
def test_what_may_still_come_right_waits_and_says_why(launches: Launches, launch: str) -> None:
    judgement = launches.waiting[launch]
    assert judgement.verdict.error is None
    assert WAITING[launch][1] in judgement.verdict.reason
