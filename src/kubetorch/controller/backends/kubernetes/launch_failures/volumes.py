"""Volumes that hold a pod back: claims that are missing or cannot be bound, mounts that fail."""

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
    NOTHING,
    Verdict,
    doomed,
    settled,
    waiting,
    worst,
)
from kubetorch.errors import StartupError
from kubetorch.k8s.resources import Object

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
#: Reasons of events.
_MOUNTING = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_BINDING = ("ProvisioningFailed", "FailedBinding")
#: What provisioners say of an access mode that they never provide.
_NEVER = re.compile(r"only supports? |not supported|unsupported|invalid access ?mode", re.I)


def judge(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    if not cluster.knows(CLAIMS):
        return NOTHING
    found = [_claim(pod, name, events, cluster) for name in claims(pod["spec"])]
    return worst(found)


def claims(spec: Object) -> Iterator[str]:
    """Names of the claims that a pod mounts."""
    for volume in spec.get("volumes") or ():
        claim = volume.get("persistentVolumeClaim")
        if claim:
            yield str(claim["claimName"])


def judge_mounts(pod: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    """Judge a pod that has a node, and whose containers wait for its volumes."""
    name = pod["metadata"]["name"]
    found = snapshot.about(events, "Pod", name, *_MOUNTING)
    if not found:
        return NOTHING
    last = found[-1]
    said = str(last.get("message", ""))
    since = min(snapshot.began(event) for event in found)
    error = verdicts.missing_object_in(said, namespace=pod["metadata"].get("namespace") or "")
    if error is not None:
        return settled(doomed(error, since), cluster.now)
    return waiting(f"a volume is not there yet: {said}", since)


def _claim(pod: Object, name: str, events: Sequence[Object], cluster: Cluster) -> Verdict:
    namespace = pod["metadata"].get("namespace") or ""
    claim = cluster.find(CLAIMS, name, namespace)
    if claim is None:
        since = snapshot.time_of(pod["metadata"].get("creationTimestamp"))
        error = verdicts.missing_object("PersistentVolumeClaim", name, namespace)
        return settled(doomed(error, since), cluster.now)
    if (claim.get("status") or {}).get("phase") != "Pending":
        return NOTHING
    return _pending(claim, events, cluster)


def _pending(claim: Object, events: Sequence[Object], cluster: Cluster) -> Verdict:
    name, namespace = claim["metadata"]["name"], claim["metadata"].get("namespace") or ""
    since = snapshot.time_of(claim["metadata"].get("creationTimestamp"))
    wanted = claim["spec"].get("storageClassName")
    said = snapshot.about(events, "PersistentVolumeClaim", name, *_BINDING)
    text = str(said[-1].get("message", "")) if said else ""
    since = snapshot.began(said[-1]) if said else since
    has_default = any(
        (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
        for one in cluster.all(STORAGE_CLASSES)
    )
    verdict = NOTHING
    if wanted and cluster.knows(STORAGE_CLASSES) and not cluster.find(STORAGE_CLASSES, wanted):
        # The name may also be only a mark of volumes that somebody made by hand: then the
        # controller says nothing of a missing class.
        if "not found" not in text:
            return waiting(f"the volume {name} waits for a storage of class {wanted!r}", since)
        verdict = doomed(verdicts.missing_object("StorageClass", wanted, namespace), since)
    elif wanted is None and cluster.knows(STORAGE_CLASSES) and not has_default:
        why = "it names no storage class, and the cluster has no default one"
        verdict = doomed(_unbindable(name, why, "give kt.Volume a storage_class"), since)
    elif text and _NEVER.search(text):
        modes = ", ".join(claim["spec"].get("accessModes") or ())
        hint = f"choose another access_mode than {modes}, or another storage_class"
        verdict = doomed(_unbindable(name, text, hint), since)
    elif text:
        return waiting(f"the volume {name} is not provided yet: {text}", since)
    return settled(verdict, cluster.now)


def _unbindable(name: str, why: str, hint: str) -> StartupError:
    return StartupError(f"the volume {name!r} can never be bound: {why}", hint=hint)
