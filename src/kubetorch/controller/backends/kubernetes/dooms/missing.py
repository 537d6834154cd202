"""Objects that a pod refers to and that do not exist, as every component words it."""

from __future__ import annotations

import re

from kubetorch.errors import MissingObjectError

#: Seconds for which something has to be missing: whoever makes a pod may make the rest after it.
SETTLE = 2.0

_KINDS = {
    "secret": "Secret",
    "configmap": "ConfigMap",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "serviceaccount": "ServiceAccount",
    "storageclass.storage.k8s.io": "StorageClass",
    "runtimeclass": "RuntimeClass",
    "priorityclass": "PriorityClass",
}
_NOT_FOUND = re.compile(rf'\b({"|".join(map(re.escape, _KINDS))}) "([^"]+)" not found', re.I)
_PRIORITY = re.compile(r"no PriorityClass with name (\S+) was found")
_KEY = re.compile(r"couldn't find key (\S+) in (\w+) (?:\S+/)?(\S+)")
_KEY_OF_VOLUME = re.compile(r"references non-existent (secret|config) key: (\S+)")

_HINTS = {
    "Secret": "create it (kt secrets, kubectl create secret), or correct the name",
    "ConfigMap": "create it (kubectl create configmap), or correct the name",
    "PersistentVolumeClaim": "create it with kt.Volume(name=…, size=…), or correct the name",
    "ServiceAccount": "create it, or leave service_account_name out",
    "PriorityClass": "kubectl get priorityclass lists them; correct priority_class_name",
    "RuntimeClass": "kubectl get runtimeclass lists them; correct runtimeClassName",
    "StorageClass": "kubectl get storageclass lists them; correct storage_class",
    "LocalQueue": "kubectl get localqueue lists them; correct queue_name",
    "Queue": "kubectl get queues.scheduling.run.ai lists them; correct queue",
}
_CLUSTER_WIDE = ("PriorityClass", "RuntimeClass", "StorageClass", "Queue")


def error(kind: str, name: str, namespace: str = "", *, key: str = "") -> MissingObjectError:
    """The error of a missing object, or of a key that an object lacks.

    Args:
        kind: What is missing.
        name: Its name.
        namespace: Where it should be.
        key: The key, when the object is there.
    """
    where = f" in namespace {namespace!r}" if namespace and kind not in _CLUSTER_WIDE else ""
    text = f"there is no {kind} {name!r}{where}"
    if key:
        text = f"the {kind} {name!r}{where} has no key {key!r}"
    hint = "add the key, or correct its name" if key else _HINTS.get(kind)
    found = MissingObjectError(text, hint=hint)
    found.kind, found.name = kind, name
    return found


def error_of(said: str, *, namespace: str = "") -> MissingObjectError | None:
    """The error that a message of the API server or the kubelet amounts to, if it is one.

    Args:
        said: The message.
        namespace: Namespace of the pod.
    """
    match = _NOT_FOUND.search(said)
    if match:
        return error(_KINDS[match[1].lower()], match[2], namespace)
    match = _PRIORITY.search(said)
    if match:
        return error("PriorityClass", match[1], namespace)
    match = _KEY.search(said)
    if match:
        return error(match[2], match[3], namespace, key=match[1])
    match = _KEY_OF_VOLUME.search(said)
    if match:
        kind = "Secret" if match[1] == "secret" else "ConfigMap"
        text = f"a {kind} that is mounted has no key {match[2]!r}: {said}"
        found = MissingObjectError(text, hint="add the key, or correct its name")
        found.kind = kind
        return found
    return None
