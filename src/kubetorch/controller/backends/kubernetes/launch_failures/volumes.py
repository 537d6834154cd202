"""Volumes for which a pod waits: missing claims, claims that cannot be bound, failed mounts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kubetorch.controller.backends.kubernetes.launch_failures import snapshot, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.snapshot import (
    CLAIMS,
    STORAGE_CLASSES,
    Cluster,
)
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    unless_just_missing,
    waiting,
    worst,
)
from kubetorch.errors import StartupError
from kubetorch.k8s.resources import Object

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
#: Reasons of events about mounts, and about the binding of claims.
_MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_BINDING_EVENTS = ("ProvisioningFailed", "FailedBinding")
#: Messages of provisioners about an access mode that they never provide.
_UNSUPPORTED_ACCESS_MODE = re.compile(
    r"multi[ _-]?(?:node[ _-]?)?(?:single[ _-]?)?writer|multi[ _-]?node access"
    r"|only (?:supports? )?\S*(?:read(?:write|only)|single_node)|invalid access ?mode"
    r"|access ?modes?\b.*(?:not supported|unsupported)|(?:not supported|unsupported).*access ?mode",
    re.I,
)
#: Messages about another part of a claim that they never provide, such as its volume mode.
_UNSUPPORTED = re.compile(r"only supports? |not supported|unsupported", re.I)


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge the claims of a pod that has no node."""
    if not cluster.knows(CLAIMS):
        return NO_TROUBLE
    return worst([_judge_claim(pod, name, events, cluster) for name in claims(pod)])


def claims(pod: Object) -> Iterator[str]:
    """Names of the claims that a pod mounts, also those that Kubernetes makes for the pod."""
    for volume in _volumes(pod):
        claim = volume.get("persistentVolumeClaim")
        if claim:
            yield str(claim["claimName"])
    yield from _generated_claims(pod)


def _generated_claims(pod: Object) -> list[str]:
    name = pod["metadata"]["name"]
    return [f"{name}-{volume['name']}" for volume in _volumes(pod) if volume.get("ephemeral")]


def _volumes(pod: Object) -> Sequence[Object]:
    return (pod.get("spec") or {}).get("volumes") or ()


def judge_mounts(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod with a node whose containers wait for its volumes."""
    name = pod["metadata"]["name"]
    mount_events = snapshot.events_of(events, "Pod", name, *_MOUNT_EVENTS)
    if not mount_events:
        return NO_TROUBLE
    last_event = mount_events[-1]
    message = str(last_event.get("message", ""))
    since = min(snapshot.first_time(event) for event in mount_events)
    error = verdicts.missing_object_in(message, namespace=pod["metadata"].get("namespace") or "")
    if error is not None:
        return unless_just_missing(doomed(error, since), cluster.now)
    return waiting(f"a volume is not there yet: {message}", since)


def _judge_claim(pod: Object, name: str, events: Sequence[Object], cluster: Cluster) -> Verdict:
    namespace = pod["metadata"].get("namespace") or ""
    since = snapshot.time_of(pod["metadata"].get("creationTimestamp"))
    claim = cluster.find(CLAIMS, name, namespace)
    if claim is None:
        if name in _generated_claims(pod):
            return waiting(f"Kubernetes has not made the claim {name} yet", since)
        error = verdicts.missing_object("PersistentVolumeClaim", name, namespace)
        return unless_just_missing(doomed(error, since), cluster.now)
    match (claim.get("status") or {}).get("phase"):
        case "Pending":
            return _judge_pending_claim(claim, events, cluster)
        case "Lost":
            hint = (
                f"delete the claim, kubectl delete pvc {name} -n {namespace}, and make the volume "
                "anew"
            )
            loss = StartupError(f"the PersistentVolume of the volume {name!r} is gone", hint=hint)
            return unless_just_missing(doomed(loss, since), cluster.now)
    return NO_TROUBLE


def _judge_pending_claim(claim: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    name, namespace = claim["metadata"]["name"], claim["metadata"].get("namespace") or ""
    storage_class = claim["spec"].get("storageClassName")
    binding_events = snapshot.events_of(events, "PersistentVolumeClaim", name, *_BINDING_EVENTS)
    binding_message = str(binding_events[-1].get("message", "")) if binding_events else ""
    since = (
        snapshot.first_time(binding_events[-1])
        if binding_events
        else snapshot.time_of(claim["metadata"].get("creationTimestamp"))
    )
    has_default = any(
        (class_object["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
        for class_object in cluster.all(STORAGE_CLASSES)
    )
    verdict = NO_TROUBLE
    if (
        storage_class
        and cluster.knows(STORAGE_CLASSES)
        and not cluster.find(STORAGE_CLASSES, storage_class)
    ):
        # The class may be only a name on volumes that an administrator made by hand. Then the
        # volume controller does not report a missing class.
        if "not found" not in binding_message:
            return waiting(
                f"the volume {name} waits for a storage of class {storage_class!r}", since
            )
        verdict = doomed(verdicts.missing_object("StorageClass", storage_class, namespace), since)
    elif storage_class is None and cluster.knows(STORAGE_CLASSES) and not has_default:
        problem = "it names no storage class, and the cluster has no default one"
        verdict = doomed(_unbindable(name, problem, "give kt.Volume a storage_class"), since)
    elif _UNSUPPORTED_ACCESS_MODE.search(binding_message):
        modes = ", ".join(claim["spec"].get("accessModes") or ())
        hint = f"choose another access_mode{modes and f' than {modes}'}, or another storage_class"
        verdict = doomed(_unbindable(name, binding_message, hint), since)
    elif _UNSUPPORTED.search(binding_message):
        hint = "choose another storage_class"
        verdict = doomed(_unbindable(name, binding_message, hint), since)
    elif binding_message:
        return waiting(f"the volume {name} is not provided yet: {binding_message}", since)
    return unless_just_missing(verdict, cluster.now)


def _unbindable(name: str, problem: str, hint: str) -> StartupError:
    return StartupError(f"the volume {name!r} can never be bound: {problem}", hint=hint)
