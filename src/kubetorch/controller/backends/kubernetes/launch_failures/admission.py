"""Objects that the API server refuses to make: what it says, as a verdict.

The same words reach us twice: as the answer to our own request, and through the controller that
could not make a pod (`ReplicaFailure`, `FailedCreate`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NOTHING,
    Verdict,
    doomed,
    settled,
    waiting,
)
from kubetorch.errors import AdmissionError, QuotaExceededError

_QUOTA = re.compile(
    r"exceeded quota: (?P<quota>\S+), requested: (?P<requested>\S+), used: (?P<used>\S+), "
    r"limited: (?P<limited>\S+)"
)
_UNSAID = re.compile(r"failed quota: (\S+): must specify ([^\"\n]+)")
_UNCOUNTED = re.compile(r"status unknown for quota: ([^,\s]+)")
#: Kubeflow's webhook looks a TrainJob's runtime up in its own cache, a moment behind what was made.
_NOT_SEEN = re.compile(
    r'admission webhook "(?P<who>[^"]+)" denied .*: (?P<what>\w+)\.\S+ "(?P<name>[^"]+)" not found'
    r": specified \w+ must be created before",
    re.S,
)
_DENIED = re.compile(
    r'admission webhook "(?P<who>[^"]+)" denied the request'
    r"(?:: ?(?P<said>.*)| without explanation)?$",
    re.S,
)
_SILENT = re.compile(r'failed calling webhook "(?P<who>[^"]+)": (?P<said>.*)$', re.S)
_POLICY = re.compile(
    r"ValidatingAdmissionPolicy '(?P<who>[^']+)'.*? denied request: (?P<said>.*)$", re.S
)
_SECURITY = re.compile(r'violates PodSecurity "(?P<who>[^"]+)": (?P<said>.*)$', re.S)
_LIMITS = re.compile(r"(?:maximum|minimum) \S+ usage per|max limit to request ratio per")
#: RBAC's words, which say what to grant: the client's own error has the Role for it.
_RBAC = re.compile(r"cannot \w+ resource ")
_FORBIDDEN = re.compile(r'\S+ "[^"]*" is forbidden: (?P<said>.*)$', re.S)
_INVALID = re.compile(r'\S+ "[^"]*" is invalid: (?P<said>.*)$', re.S)


def judge(said: str, *, namespace: str, since: float | None, now: float, count: int = 1) -> Verdict:
    silent = _SILENT.search(said)
    if silent:
        return waiting(f"the webhook {silent['who']!r} does not answer: {silent['said']}", since)
    quota = _QUOTA.search(said)
    if quota:
        return _quota(quota, namespace, since, count)
    uncounted = _UNCOUNTED.search(said)
    if uncounted:
        return waiting(f"the quota {uncounted[1]!r} is new: nothing is counted for it yet", since)
    unseen = _NOT_SEEN.search(said)
    if unseen:
        what = f"{unseen['what']} {unseen['name']!r}"
        return waiting(f"the webhook {unseen['who']!r} does not know the {what} yet", since)
    error = verdicts.missing_object_in(said, namespace=namespace)
    if error is not None:
        return settled(doomed(error, since), now)
    return _refused(said, namespace, since)


def _refused(said: str, namespace: str, since: float | None) -> Verdict:
    unsaid = _UNSAID.search(said)
    if unsaid:
        error = AdmissionError(
            f"the quota {unsaid[1]!r} of namespace {namespace!r} demands that pods say "
            f"{unsaid[2].strip()}",
            hint="give cpus and memory, and limits with service_template",
        )
        return doomed(error, since)
    for pattern, who, hint in (
        (_DENIED, "the admission webhook", "change what it names, or ask who runs the webhook"),
        (_POLICY, "the admission policy", "change what it names, or ask an administrator"),
        (
            _SECURITY,
            "the Pod Security level",
            "Kubetorch asks for nothing of that: take it out of the manifest or service_template, "
            "or use another namespace",
        ),
    ):
        match = pattern.search(said)
        if match:
            words = (match["said"] or "it gave no reason").strip()
            message = f"{who} {match['who']!r} refuses it: {words}"
            return doomed(AdmissionError(message, hint=hint), since)
    if _LIMITS.search(said):
        words = _words(said)
        hint = f"kubectl describe limitrange -n {namespace} shows the limits; ask within them"
        return doomed(AdmissionError(f"a LimitRange refuses it: {words}", hint=hint), since)
    if _RBAC.search(said):
        return NOTHING
    if _FORBIDDEN.search(said) or _INVALID.search(said):
        message = f"the API server refuses it: {_words(said)}"
        return doomed(AdmissionError(message, hint="change what the message names"), since)
    return NOTHING


def _words(said: str) -> str:
    match = _FORBIDDEN.search(said) or _INVALID.search(said)
    return match["said"].strip() if match else said


def _quota(match: re.Match[str], namespace: str, since: float | None, count: int) -> Verdict:
    name = match["quota"]
    requested, used, hard = (_pairs(match[part]) for part in ("requested", "used", "limited"))
    for resource, asked in requested.items():
        limit = hard.get(resource)
        if limit is not None and asked * max(1, count) > limit:
            allowed = f"{_shown(resource, limit)} of {resource}"
            each = f" by each of {count} pods" if count > 1 else ""
            error = QuotaExceededError(
                f"the quota {name!r} of namespace {namespace!r} allows {allowed} altogether, "
                f"{_shown(resource, asked)} are asked{each}",
                hint="ask for less, or let an administrator raise the quota",
            )
            return doomed(error, since)
    parts = [
        f"{_shown(resource, used[resource])} of {_shown(resource, hard[resource])} {resource} are "
        f"used, {_shown(resource, asked)} more are asked"
        for resource, asked in requested.items()
        if resource in used and resource in hard
    ]
    return waiting(f"the quota {name!r} is full: {', '.join(parts)}", since)


def _pairs(text: str) -> scheduling.Amounts:
    pairs = (part.partition("=") for part in text.split(","))
    return scheduling.amounts({name: amount for name, _, amount in pairs})


def _shown(resource: str, amount: Fraction) -> str:
    return scheduling.written(resource.removeprefix("requests.").removeprefix("limits."), amount)
