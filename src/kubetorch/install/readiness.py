"""Waiting until the controller runs as the chart says, or until it is certain that it will not.

What failed before the wait began says nothing: the cause may have been put right since. So a pod
that had failed by then is deleted, and a new one starts at once rather than after a back-off of
minutes. A cluster that had refused pods by then is asked to make them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kubetorch.errors import (
    ImagePullError,
    InstallError,
    KubernetesNotFoundError,
    KubetorchError,
)
from kubetorch.k8s import podlogs
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import DEPLOYMENTS, PODS, Object, Ref, Resource, Selection, version
from kubetorch.lib import deadlines
from kubetorch.lib.changes import Changes
from kubetorch.manifests import labels

NAME = "kubetorch-controller"
LABELS = "app.kubernetes.io/name=kubetorch,app.kubernetes.io/component=controller"
#: Reasons of a waiting container with which it will never run.
_HOPELESS = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
_PULLING = ("ErrImagePull", "ImagePullBackOff")
#: Restarts after which a controller that ends counts as one that always ends.
_RESTARTS = 2
_LAST_LINES = 15
#: Seconds for the first lists.
_LISTED = 30.0
#: Seconds in which a cluster that is asked again makes the pods that it had refused.
_AGAIN = 5.0

_REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
_EVENTS = Resource("", "v1", "events", "Event")
_REVISION = "deployment.kubernetes.io/revision"
_HASH = "pod-template-hash"
_WATCHED = "KT_WATCH_NAMESPACES"

Report = Callable[[str], object]


@dataclass(frozen=True)
class Doom:
    pod: str
    message: str
    hint: str
    kind: type[KubetorchError] = InstallError
    has_log: bool = False


async def wait(client: Client, namespace: str, *, timeout: float, report: Report) -> None:
    """Wait until every replica of the controller is of the present generation and ready."""
    async with _watching(client, namespace) as watch:
        said: set[str] = set()
        stale, gone = watch.failed(), set[str]()
        try:
            async with deadlines.timeout(timeout):
                await _ask_again(client, namespace, watch, report)
                while not watch.is_ready:
                    doom = watch.doom(gone)
                    if doom is not None:
                        if doom.pod not in stale or not await _delete(client, namespace, doom.pod):
                            raise await _error(client, namespace, doom)
                        report(f"deleted Pod {doom.pod}, which had failed before; a new one starts")
                        gone.add(doom.pod)
                        continue
                    # States that come and go are reported once.
                    if (now := watch.progress()) not in said:
                        said.add(now)
                        report(now)
                    await watch.changes.wait()
        except TimeoutError as error:
            raise InstallError(
                f"the controller was not ready within {timeout:g} s: {watch.progress()}",
                hint=f"kubectl --namespace {namespace} describe pods says more; "
                "--timeout lets it take longer",
            ) from error


async def _ask_again(client: Client, namespace: str, watch: _Watch, report: Report) -> None:
    """Make a cluster that refused pods try again; by itself it would try minutes later."""
    if not watch.is_refused:
        return
    report("pods were refused before: the cluster is asked again")
    for one in list(watch.replica_sets.objects.values()):
        if refusal_of(one) is not None:
            ref = Ref(_REPLICA_SETS, one["metadata"]["name"], namespace)
            # Who may not ask waits as long; the error then names what is still refused.
            with contextlib.suppress(KubetorchError):
                await client.patch(
                    ref, {"metadata": {"annotations": {labels.TRIED_AGAIN: version(one)}}}
                )
    with contextlib.suppress(TimeoutError):
        async with deadlines.timeout(_AGAIN):
            while watch.is_refused:
                await watch.changes.wait()


async def _delete(client: Client, namespace: str, pod: str) -> bool:
    """Delete a pod; whether it is gone."""
    try:
        await client.delete(Ref(PODS, pod, namespace))
    except KubernetesNotFoundError:
        return True
    except KubetorchError:
        return False
    return True


@contextlib.asynccontextmanager
async def _watching(client: Client, namespace: str) -> AsyncIterator[_Watch]:
    changes = Changes()

    def informer(resource: Resource, selector: str = "", fields: str = "") -> Informer:
        selection = Selection(resource, namespace, selector, fields)
        return Informer(client, selection, lambda change: changes.notify())

    watch = _Watch(
        informer(DEPLOYMENTS, fields=f"metadata.name={NAME}"),
        informer(_REPLICA_SETS, LABELS),
        informer(PODS, LABELS),
        informer(_EVENTS, fields="type=Warning"),
        changes,
    )
    async with contextlib.AsyncExitStack() as stack:
        for one in (watch.deployments, watch.replica_sets, watch.pods, watch.events):
            await stack.enter_async_context(one)
        for one in (watch.deployments, watch.replica_sets, watch.pods):
            await one.listed(timeout=_LISTED)
        yield watch


@dataclass(frozen=True)
class _Watch:
    """The controller's objects as they are."""

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
        """True if the cluster is known to make no pods."""
        return self._deployment is not None and refusal_of(self._deployment) is not None

    def failed(self) -> set[str]:
        """The pods that have failed by now, though some of them may run again."""
        return {
            str(pod["metadata"]["name"])
            for pod in self.pods.objects.values()
            if doom_of(pod) is not None or _restarts(pod) >= _RESTARTS
        }

    def doom(self, gone: Collection[str] = ()) -> Doom | None:
        """Why it will not get ready, if that is certain."""
        deployment = self._deployment
        if deployment is None or not _is_observed(deployment):
            return None
        newest = newest_hash(deployment, list(self.replica_sets.objects.values()))
        for pod in self._pods(newest):
            if pod["metadata"]["name"] in gone:
                continue
            if (found := doom_of(pod, self._told(pod, "Failed"))) is not None:
                return found
        return refusal_of(deployment)

    def progress(self) -> str:
        deployment = self._deployment
        if deployment is None:
            return "waiting for the Deployment"
        wanted = deployment["spec"].get("replicas", 1)
        ready = (deployment.get("status") or {}).get("readyReplicas", 0)
        newest = newest_hash(deployment, list(self.replica_sets.objects.values()))
        states = [f"{pod['metadata']['name']}: {self._state(pod)}" for pod in self._pods(newest)]
        leads = any(map(_leads, self.pods.objects.values()))
        states += [] if leads or not ready else ["none leads yet"]
        return f"{ready} of {wanted} controllers ready" + "".join(f"; {one}" for one in states)

    def _pods(self, template: str | None) -> list[Object]:
        found = [
            pod
            for pod in self.pods.objects.values()
            if pod["metadata"].get("labels", {}).get(_HASH) == template
        ]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def _state(self, pod: Object) -> str:
        state = state_of(pod)
        if state in ("running", "ready"):
            return state
        told = self._told(pod)
        return f"{state} ({told[-1]})" if told else state

    def _told(self, pod: Object, reason: str | None = None) -> list[str]:
        """The messages of events of a pod, the latest last."""
        uid = pod["metadata"]["uid"]
        found = [
            event
            for event in self.events.objects.values()
            if (event.get("involvedObject") or {}).get("uid") == uid
            and reason in (None, event.get("reason"))
        ]
        found.sort(key=lambda event: str(event.get("lastTimestamp") or ""))
        return [str(event.get("message")) for event in found]


def _leads(pod: Object) -> bool:
    return (pod["metadata"].get("labels") or {}).get(labels.LEADS) == "true"


def _restarts(pod: Object) -> int:
    found = (pod.get("status") or {}).get("containerStatuses") or []
    return max((int(one.get("restartCount", 0)) for one in found), default=0)


def is_rolled_out(deployment: Object) -> bool:
    """True if all replicas of a Deployment are of its present generation, and ready."""
    status = deployment.get("status") or {}
    wanted = deployment["spec"].get("replicas", 1)
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return _is_observed(deployment) and counts == [wanted] * 3


def _is_observed(deployment: Object) -> bool:
    seen = (deployment.get("status") or {}).get("observedGeneration", 0)
    return bool(seen >= deployment["metadata"].get("generation", 0))


def watched(deployment: Object) -> list[str]:
    """The namespaces to which a controller keeps; none if it works in all of them."""
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value") for one in container.get("env") or []}
    return [name for name in (variables.get(_WATCHED) or "").split(",") if name]


def newest_hash(deployment: Object, replica_sets: list[Object]) -> str | None:
    """The hash that distinguishes pods of the present template from earlier pods."""
    revision = _annotation(deployment)
    for one in replica_sets:
        if _annotation(one) == revision:
            found: str | None = one["metadata"].get("labels", {}).get(_HASH)
            return found
    return None


def _annotation(manifest: Object) -> str | None:
    found: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return found.get(_REVISION)


def state_of(pod: Object) -> str:
    """The state of a pod of the controller, in a word or two."""
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


def doom_of(pod: Object, told: Sequence[str] = ()) -> Doom | None:
    """Why a pod of the controller will never run, as far as can be known.

    A pull that failed counts at once, whatever the reason: whoever installs sits there and waits,
    and can install again.
    """
    name = pod["metadata"]["name"]
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason"), str(waiting.get("message") or "")
        if reason in _PULLING:
            causes = [one for one in told if one.startswith("Failed to pull")]
            return Doom(
                name,
                f"the image {container['image']} cannot be pulled: {(causes or [message])[-1]}",
                "give an image that the nodes have or can pull with --image; a private registry "
                "needs imagePullSecrets, in a file with -f",
                ImagePullError,
            )
        if reason in _HOPELESS:
            return Doom(name, f"{name}: {reason}: {message}", "correct the values, then kt upgrade")
        if container.get("restartCount", 0) >= _RESTARTS and not container.get("ready"):
            ended = (container.get("lastState") or {}).get("terminated") or {}
            words = f"{ended.get('reason')}, exit code {ended.get('exitCode')}"
            return Doom(
                name,
                f"the controller {name} ends again and again ({words})",
                "its last lines say why",
                has_log=True,
            )
    return None


def refusal_of(deployment: Object) -> Doom | None:
    """Why the cluster makes no pod of a Deployment or ReplicaSet, such as a quota or a webhook."""
    for condition in (deployment.get("status") or {}).get("conditions") or []:
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            hint = "change what refuses it, or the values; then kt upgrade"
            return Doom("", f"no pod is made: {condition.get('message')}", hint)
    return None


async def _error(client: Client, namespace: str, doom: Doom) -> KubetorchError:
    message = doom.message
    if doom.has_log:
        with contextlib.suppress(KubetorchError):
            pod = Ref(PODS, doom.pod, namespace)
            log = await podlogs.read_ended(client, pod, podlogs.LogOptions(tail=_LAST_LINES))
            message += "\n" + log.decode(errors="replace").rstrip()
    return doom.kind(message, hint=doom.hint)
