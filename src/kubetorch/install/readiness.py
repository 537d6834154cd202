"""Waits until controller and data store run as the chart says, or certainly never will.

A failure before the wait began says nothing: its cause may have been corrected since. So a pod that
had failed by then is deleted, and a new pod starts at once rather than after a back-off of minutes.
A cluster that had refused pods by then is made to retry.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kubetorch.errors import ImagePullError, InstallError, KubernetesNotFoundError, KubetorchError
from kubetorch.install.tuning import LIMITS, TIMING
from kubetorch.k8s import pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import DEPLOYMENTS, PODS, Object, Ref, Resource, Selection, version
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.manifests import labels

NAME = "kubetorch-controller"
LABELS = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"


class Component(NamedTuple):
    """A Deployment of the installation: its name, the labels of its pods, and a word for it."""

    name: str
    labels: str
    noun: str


CONTROLLER = Component(NAME, LABELS, "controller")
#: A data store of its own (`store.separate` of the chart).
STORE = Component(
    "kubetorch-store",
    "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=store",
    "data store",
)
#: Reasons of a waiting container with which it will never run.
_HOPELESS_REASONS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
_PULL_REASONS = ("ErrImagePull", "ImagePullBackOff")

_REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
_EVENTS = Resource("", "v1", "events", "Event")
_REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
_HASH_LABEL = "pod-template-hash"
_WATCHED_VARIABLE = "KT_WATCH_NAMESPACES"

Report = Callable[[str], object]


@dataclass(frozen=True)
class Doom:
    """The reason why a component will certainly not get ready.

    Attributes:
        pod: The pod that fails; empty if the cluster makes no pod.
        kind: The class of the error.
        has_log: True if the end of the pod's log belongs to the message.
    """

    pod: str
    message: str
    hint: str
    kind: type[KubetorchError] = InstallError
    has_log: bool = False


async def wait(
    client: Client, namespace: str, component: Component, *, timeout: float, report: Report
) -> None:
    """Wait until every replica of a component is of the present generation and ready."""
    async with _watching(client, namespace, component) as watch:
        reported_states: set[str] = set()
        stale, deleted_pods = watch.failed_pods(), set[str]()
        try:
            async with deadlines.timeout(timeout):
                await _retry_refused_pods(client, namespace, watch, report)
                while not watch.is_ready:
                    doom = watch.doom(deleted_pods)
                    if doom is not None:
                        if doom.pod not in stale or not await _delete(client, namespace, doom.pod):
                            raise await _error_of(client, namespace, doom)
                        report(f"deleted Pod {doom.pod}, which had failed before; a new one starts")
                        deleted_pods.add(doom.pod)
                        continue
                    # States that come and go are reported once.
                    if (now := watch.progress()) not in reported_states:
                        reported_states.add(now)
                        report(now)
                    await watch.changes.wait()
        except TimeoutError as error:
            raise InstallError(
                f"the {component.noun} was not ready within {timeout:g} s: {watch.progress()}",
                hint=f"kubectl --namespace {namespace} describe pods says more; "
                "--timeout lets it take longer",
            ) from error


async def _retry_refused_pods(
    client: Client, namespace: str, watch: _Watch, report: Report
) -> None:
    """Make a cluster that refused pods retry at once; by itself it would retry minutes later."""
    if not watch.is_refused:
        return
    report("pods were refused before: the cluster is asked again")
    for replica_set in list(watch.replica_sets.objects.values()):
        if refusal_of(replica_set) is not None:
            ref = Ref(_REPLICA_SETS, replica_set["metadata"]["name"], namespace)
            # A user without this right waits as long; the error then names the refusal.
            with contextlib.suppress(KubetorchError):
                await client.patch(
                    ref, {"metadata": {"annotations": {labels.TRIED_AGAIN: version(replica_set)}}}
                )
    with contextlib.suppress(TimeoutError):
        async with deadlines.timeout(TIMING.refused_pods_seconds):
            while watch.is_refused:
                await watch.changes.wait()


async def _delete(client: Client, namespace: str, pod: str) -> bool:
    """Delete a pod; return whether it is deleted."""
    try:
        await client.delete(Ref(PODS, pod, namespace))
    except KubernetesNotFoundError:
        return True
    except KubetorchError:
        return False
    return True


@contextlib.asynccontextmanager
async def _watching(client: Client, namespace: str, component: Component) -> AsyncIterator[_Watch]:
    changes = Changes()

    def informer(resource: Resource, selector: str = "", fields: str = "") -> Informer:
        selection = Selection(resource, namespace, selector, fields)
        return Informer(client, selection, lambda change: changes.notify())

    watch = _Watch(
        component,
        informer(DEPLOYMENTS, fields=f"metadata.name={component.name}"),
        informer(_REPLICA_SETS, component.labels),
        informer(PODS, component.labels),
        informer(_EVENTS, fields="type=Warning"),
        changes,
    )
    async with contextlib.AsyncExitStack() as stack:
        for object_informer in (watch.deployments, watch.replica_sets, watch.pods, watch.events):
            await stack.enter_async_context(object_informer)
        for object_informer in (watch.deployments, watch.replica_sets, watch.pods):
            await object_informer.listed(timeout=TIMING.readiness_list_seconds)
        yield watch


@dataclass(frozen=True)
class _Watch:
    """The objects of a component, as watches have them."""

    component: Component
    deployments: Informer
    replica_sets: Informer
    pods: Informer
    events: Informer
    changes: Changes

    @property
    def is_ready(self) -> bool:
        """True if all pods run and one of them leads and answers clients."""
        if self._deployment is None or not is_rolled_out(self._deployment):
            return False
        return any(_leads(pod) and state_of(pod) == "ready" for pod in self.pods.objects.values())

    @property
    def _deployment(self) -> Object | None:
        return next(iter(self.deployments.objects.values()), None)

    @property
    def is_refused(self) -> bool:
        """True if the cluster refuses to make the pods."""
        return self._deployment is not None and refusal_of(self._deployment) is not None

    def failed_pods(self) -> set[str]:
        """Names of the pods that have failed so far, though some of them may run again."""
        return {
            str(pod["metadata"]["name"])
            for pod in self.pods.objects.values()
            if doom_of(pod) is not None or _restarts(pod) >= LIMITS.controller_restarts
        }

    def doom(self, deleted_pods: Collection[str] = ()) -> Doom | None:
        """The reason why the component will not get ready, if that is certain."""
        deployment = self._deployment
        if deployment is None or not _is_observed(deployment):
            return None
        newest = newest_hash(deployment, list(self.replica_sets.objects.values()))
        for pod in self._pods(newest):
            if pod["metadata"]["name"] in deleted_pods:
                continue
            if (doom := doom_of(pod, self._event_messages(pod, "Failed"))) is not None:
                return doom
        return refusal_of(deployment)

    def progress(self) -> str:
        deployment = self._deployment
        if deployment is None:
            return "waiting for the Deployment"
        replicas = deployment["spec"].get("replicas", 1)
        ready = (deployment.get("status") or {}).get("readyReplicas", 0)
        newest = newest_hash(deployment, list(self.replica_sets.objects.values()))
        states = [f"{pod['metadata']['name']}: {self._state(pod)}" for pod in self._pods(newest)]
        leads = any(map(_leads, self.pods.objects.values()))
        states += [] if leads or not ready else ["none leads yet"]
        return f"{ready} of {replicas} {self.component.noun}s ready" + "".join(
            f"; {state}" for state in states
        )

    def _pods(self, template: str | None) -> list[Object]:
        pods = [
            pod
            for pod in self.pods.objects.values()
            if pod["metadata"].get("labels", {}).get(_HASH_LABEL) == template
        ]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def _state(self, pod: Object) -> str:
        state = state_of(pod)
        if state in ("running", "ready"):
            return state
        messages = self._event_messages(pod)
        return f"{state} ({messages[-1]})" if messages else state

    def _event_messages(self, pod: Object, reason: str | None = None) -> list[str]:
        """The messages of events of a pod, the latest last."""
        uid = pod["metadata"]["uid"]
        events = [
            event
            for event in self.events.objects.values()
            if (event.get("involvedObject") or {}).get("uid") == uid
            and reason in (None, event.get("reason"))
        ]
        events.sort(key=lambda event: str(event.get("lastTimestamp") or ""))
        return [str(event.get("message")) for event in events]


def _leads(pod: Object) -> bool:
    return (pod["metadata"].get("labels") or {}).get(labels.LEADS) == "true"


def _restarts(pod: Object) -> int:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return max((int(status.get("restartCount", 0)) for status in statuses), default=0)


def is_rolled_out(deployment: Object) -> bool:
    """True if all replicas of a Deployment are of its present generation, and ready."""
    status = deployment.get("status") or {}
    replicas = deployment["spec"].get("replicas", 1)
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return _is_observed(deployment) and counts == [replicas] * 3


def _is_observed(deployment: Object) -> bool:
    observed_generation = (deployment.get("status") or {}).get("observedGeneration", 0)
    return bool(observed_generation >= deployment["metadata"].get("generation", 0))


def watched(deployment: Object) -> list[str]:
    """The namespaces that a controller watches; empty if it watches all of them."""
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in container.get("env") or []}
    return [name for name in (variables.get(_WATCHED_VARIABLE) or "").split(",") if name]


def newest_hash(deployment: Object, replica_sets: list[Object]) -> str | None:
    """The hash that distinguishes pods of the present template from earlier pods."""
    revision = _revision(deployment)
    for replica_set in replica_sets:
        if _revision(replica_set) == revision:
            pod_hash: str | None = replica_set["metadata"].get("labels", {}).get(_HASH_LABEL)
            return pod_hash
    return None


def _revision(manifest: Object) -> str | None:
    all_annotations: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return all_annotations.get(_REVISION_ANNOTATION)


def state_of(pod: Object) -> str:
    """The state of a pod of a component, in a word or two."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        if "waiting" in state:
            return str(state["waiting"].get("reason") or "waiting")
        if "terminated" in state:
            return f"ended with {state['terminated'].get('exitCode')}"
        return "ready" if container.get("ready") else "running"
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return str(status.get("phase") or "Pending")


def doom_of(pod: Object, event_messages: Sequence[str] = ()) -> Doom | None:
    """The reason why a pod of a component will never run, if there is one.

    A failed pull counts at once, whatever its cause: the user who installs waits for the answer,
    and can install again.
    """
    name = pod["metadata"]["name"]
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason"), str(waiting.get("message") or "")
        if reason in _PULL_REASONS:
            causes = [
                event_message
                for event_message in event_messages
                if event_message.startswith("Failed to pull")
            ]
            return Doom(
                name,
                f"the image {container['image']} cannot be pulled: {(causes or [message])[-1]}",
                "give an image that the nodes have or can pull with --image; a private registry "
                "needs imagePullSecrets, in a file with -f",
                ImagePullError,
            )
        if reason in _HOPELESS_REASONS:
            return Doom(name, f"{name}: {reason}: {message}", "correct the values, then kt upgrade")
        if container.get("restartCount", 0) >= LIMITS.controller_restarts and not container.get(
            "ready"
        ):
            last_end = (container.get("lastState") or {}).get("terminated") or {}
            words = f"{last_end.get('reason')}, exit code {last_end.get('exitCode')}"
            return Doom(
                name,
                f"{name} ends again and again ({words})",
                "its last lines say why",
                has_log=True,
            )
    return None


def refusal_of(deployment: Object) -> Doom | None:
    """The reason why the cluster makes no pod of a Deployment or ReplicaSet, such as a quota."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            hint = "change what refuses it, or the values; then kt upgrade"
            return Doom("", f"no pod is made: {condition.get('message')}", hint)
    return None


async def _error_of(client: Client, namespace: str, doom: Doom) -> KubetorchError:
    message = doom.message
    if doom.has_log:
        with contextlib.suppress(KubetorchError):
            pod = Ref(PODS, doom.pod, namespace)
            log = await pod_streams.read_ended_log(
                client, pod, pod_streams.LogOptions(tail=LIMITS.controller_log_lines)
            )
            message += "\n" + log.decode(errors="replace").rstrip()
    return doom.kind(message, hint=doom.hint)
