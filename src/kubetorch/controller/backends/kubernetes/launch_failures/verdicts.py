"""Verdicts on a launch: the launch cannot succeed, it waits for a reason, or nothing is wrong."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubetorchError, MissingObjectError

_KINDS = {
    "secret": "Secret",
    "configmap": "ConfigMap",
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "serviceaccount": "ServiceAccount",
    "storageclass.storage.k8s.io": "StorageClass",
    "runtimeclass": "RuntimeClass",
    "priorityclass": "PriorityClass",
}
# secret "token" not found
_NOT_FOUND = re.compile(rf'\b({"|".join(map(re.escape, _KINDS))}) "([^"]+)" not found', re.I)
# no PriorityClass with name high was found
_MISSING_PRIORITY_CLASS = re.compile(r"no PriorityClass with name (\S+) was found")
# couldn't find key PASSWORD in Secret team/token
_MISSING_KEY = re.compile(r"couldn't find key (\S+) in (\w+) (?:\S+/)?(\S+)")
# MountVolume.SetUp failed for volume "keys" : references non-existent secret key: password
_MISSING_KEY_OF_VOLUME = re.compile(r"references non-existent (secret|config) key: (\S+)")
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


@dataclass(frozen=True)
class Verdict:
    """A verdict on a launch; without a reason, nothing is wrong.

    Attributes:
        error: Why the launch can never succeed; a verdict with an error is called a doom.
        reason: Why the launch waits, or fails.
        since: The time since when the reason holds, in seconds since the epoch.
        recheck_seconds: Seconds after which to judge again, even if nothing has changed.
        settle_seconds: Seconds for which a doom has to last before it counts.
        log_container: The container whose last log lines belong into the error.
        log_is_of_previous_run: Whether these lines are of the run before the present one.
    """

    error: KubetorchError | None = None
    reason: str = ""
    since: float | None = None
    recheck_seconds: float | None = None
    settle_seconds: float = 0.0
    log_container: str | None = None
    log_is_of_previous_run: bool = False

    @property
    def is_doomed(self) -> bool:
        return self.error is not None

    def with_log(self, lines: Iterable[str]) -> Verdict:
        """The verdict with the last lines of its container in the error."""
        text = "\n".join(list(lines)[-LIMITS.container_log_lines :])
        text = text[-LIMITS.container_log_characters :].strip("\n")
        if self.error is None or not text:
            return replace(self, log_container=None)
        error = copy.copy(self.error)
        indented = "\n".join(f"  {line}" for line in text.splitlines())
        error.message = f"{self.error.message}; its last lines:\n{indented}"
        error.args = (error.message,)
        return replace(self, error=error, log_container=None)


#: Nothing is wrong.
NO_TROUBLE = Verdict()


def doomed(error: KubetorchError, since: float | None = None) -> Verdict:
    error.since = since
    return Verdict(error, error.message, since)


def waiting(
    reason: str, since: float | None = None, *, recheck_seconds: float | None = None
) -> Verdict:
    return Verdict(None, reason, since, recheck_seconds)


def unless_just_missing(verdict: Verdict, now: float) -> Verdict:
    """Turn a doom that is younger than `missing_object_settle_seconds` into a reason to wait.

    A missing object may be made a moment later.
    """
    if (
        verdict.since is None
        or not verdict.is_doomed
        or now - verdict.since >= TIMING.missing_object_settle_seconds
    ):
        return verdict
    remaining_seconds = TIMING.missing_object_settle_seconds - max(0.0, now - verdict.since)
    return Verdict(None, verdict.reason, verdict.since, recheck_seconds=remaining_seconds)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that matters most: a doom, else the first reason; the earliest recheck holds."""
    if not verdicts:
        return NO_TROUBLE
    worst_verdict = next(
        (verdict for verdict in verdicts if verdict.is_doomed),
        next((verdict for verdict in verdicts if verdict.reason), NO_TROUBLE),
    )
    recheck_times = [
        verdict.recheck_seconds for verdict in verdicts if verdict.recheck_seconds is not None
    ]
    if worst_verdict.is_doomed or not recheck_times:
        return worst_verdict
    return replace(worst_verdict, recheck_seconds=min(recheck_times))


def missing_object(
    kind: str, name: str, namespace: str = "", *, key: str = ""
) -> MissingObjectError:
    """The error for a missing object, or with `key` for a key that an object lacks."""
    in_namespace = f" in namespace {namespace!r}" if namespace and kind not in _CLUSTER_WIDE else ""
    text = f"there is no {kind} {name!r}{in_namespace}"
    if key:
        text = f"the {kind} {name!r}{in_namespace} has no key {key!r}"
    hint = "add the key, or correct its name" if key else _HINTS.get(kind)
    error = MissingObjectError(text, hint=hint)
    error.kind, error.name = kind, name
    return error


def missing_object_in(message: str, *, namespace: str = "") -> MissingObjectError | None:
    """The error for a message about a missing object, by the API server or a kubelet."""
    match = _NOT_FOUND.search(message)
    if match:
        return missing_object(_KINDS[match[1].lower()], match[2], namespace)
    match = _MISSING_PRIORITY_CLASS.search(message)
    if match:
        return missing_object("PriorityClass", match[1], namespace)
    match = _MISSING_KEY.search(message)
    if match:
        return missing_object(match[2], match[3], namespace, key=match[1])
    match = _MISSING_KEY_OF_VOLUME.search(message)
    if match:
        kind = "Secret" if match[1] == "secret" else "ConfigMap"
        text = f"a {kind} that is mounted has no key {match[2]!r}: {message}"
        error = MissingObjectError(text, hint="add the key, or correct its name")
        error.kind = kind
        return error
    return None
