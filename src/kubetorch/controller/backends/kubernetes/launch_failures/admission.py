"""Verdicts on objects that the API server refuses to make, by its message.

The same messages come in two ways: as the answer to a request of Kubetorch, and through the
controller that could not make a pod (`ReplicaFailure`, `FailedCreate`).
"""

from __future__ import annotations

import re
from fractions import Fraction

from kubetorch.controller.backends.kubernetes.launch_failures import scheduling, verdicts
from kubetorch.controller.backends.kubernetes.launch_failures.verdicts import (
    NO_TROUBLE,
    Verdict,
    doomed,
    unless_just_missing,
    waiting,
)
from kubetorch.errors import AdmissionError, QuotaExceededError

_QUOTA_DENIAL = re.compile(
    r"exceeded quota: (?P<quota>\S+), requested: (?P<requested>\S+), used: (?P<used>\S+), "
    r"limited: (?P<limited>\S+)"
)
_UNSPECIFIED_REQUESTS = re.compile(r"failed quota: (\S+): must specify ([^\"\n]+)")
_UNCOUNTED_QUOTA = re.compile(r"status unknown for quota: ([^,\s]+)")
#: Kubeflow's webhook reads the runtime of a TrainJob from its cache, which lags by a moment.
_STALE_WEBHOOK_CACHE = re.compile(
    r'admission webhook "(?P<reviewer>[^"]+)" denied .*: (?P<kind>\w+)\.\S+ "(?P<name>[^"]+)" '
    r"not found: specified \w+ must be created before",
    re.S,
)
_WEBHOOK_DENIAL = re.compile(
    r'admission webhook "(?P<reviewer>[^"]+)" denied the request'
    r"(?:: ?(?P<message>.*)| without explanation)?$",
    re.S,
)
_UNANSWERED_WEBHOOK = re.compile(
    r'failed calling webhook "(?P<reviewer>[^"]+)": (?P<message>.*)$', re.S
)
_POLICY_DENIAL = re.compile(
    r"ValidatingAdmissionPolicy '(?P<reviewer>[^']+)'.*? denied request: (?P<message>.*)$", re.S
)
_POD_SECURITY_DENIAL = re.compile(
    r'violates PodSecurity "(?P<reviewer>[^"]+)": (?P<message>.*)$', re.S
)
_LIMIT_RANGE_DENIAL = re.compile(
    r"(?:maximum|minimum) \S+ usage per|max limit to request ratio per"
)
#: The message of RBAC; the error of the client names the Role that is missing.
_RBAC_DENIAL = re.compile(r"cannot \w+ resource ")
_FORBIDDEN = re.compile(r'\S+ "[^"]*" is forbidden: (?P<message>.*)$', re.S)
_INVALID = re.compile(r'\S+ "[^"]*" is invalid: (?P<message>.*)$', re.S)


def judge(
    message: str, *, namespace: str, since: float | None, now: float, count: int = 1
) -> Verdict:
    unanswered = _UNANSWERED_WEBHOOK.search(message)
    if unanswered:
        return waiting(
            f"the webhook {unanswered['reviewer']!r} does not answer: {unanswered['message']}",
            since,
        )
    quota = _QUOTA_DENIAL.search(message)
    if quota:
        return _quota(quota, namespace, since, count)
    uncounted = _UNCOUNTED_QUOTA.search(message)
    if uncounted:
        return waiting(f"the quota {uncounted[1]!r} is new: nothing is counted for it yet", since)
    stale_cache = _STALE_WEBHOOK_CACHE.search(message)
    if stale_cache:
        missing_object = f"{stale_cache['kind']} {stale_cache['name']!r}"
        return waiting(
            f"the webhook {stale_cache['reviewer']!r} does not know the {missing_object} yet", since
        )
    error = verdicts.missing_object_in(message, namespace=namespace)
    if error is not None:
        return unless_just_missing(doomed(error, since), now)
    return _refusal(message, namespace, since)


def _refusal(text: str, namespace: str, since: float | None) -> Verdict:
    unspecified = _UNSPECIFIED_REQUESTS.search(text)
    if unspecified:
        error = AdmissionError(
            f"the quota {unspecified[1]!r} of namespace {namespace!r} demands that pods say "
            f"{unspecified[2].strip()}",
            hint="give cpus and memory, and limits with service_template",
        )
        return doomed(error, since)
    for pattern, reviewer, hint in (
        (
            _WEBHOOK_DENIAL,
            "the admission webhook",
            "change what it names, or ask who runs the webhook",
        ),
        (_POLICY_DENIAL, "the admission policy", "change what it names, or ask an administrator"),
        (
            _POD_SECURITY_DENIAL,
            "the Pod Security level",
            "Kubetorch asks for nothing of that: take it out of the manifest or service_template, "
            "or use another namespace",
        ),
    ):
        match = pattern.search(text)
        if match:
            words = (match["message"] or "it gave no reason").strip()
            message = f"{reviewer} {match['reviewer']!r} refuses it: {words}"
            return doomed(AdmissionError(message, hint=hint), since)
    if _LIMIT_RANGE_DENIAL.search(text):
        words = _server_words(text)
        hint = f"kubectl describe limitrange -n {namespace} shows the limits; ask within them"
        return doomed(AdmissionError(f"a LimitRange refuses it: {words}", hint=hint), since)
    if _RBAC_DENIAL.search(text):
        return NO_TROUBLE
    if _FORBIDDEN.search(text) or _INVALID.search(text):
        message = f"the API server refuses it: {_server_words(text)}"
        return doomed(AdmissionError(message, hint="change what the message names"), since)
    return NO_TROUBLE


def _server_words(message: str) -> str:
    match = _FORBIDDEN.search(message) or _INVALID.search(message)
    return match["message"].strip() if match else message


def _quota(match: re.Match[str], namespace: str, since: float | None, count: int) -> Verdict:
    name = match["quota"]
    requested, used, hard = (
        _quota_amounts(match[part]) for part in ("requested", "used", "limited")
    )
    for resource, amount in requested.items():
        limit = hard.get(resource)
        if limit is not None and amount * max(1, count) > limit:
            allowed = f"{_amount_text(resource, limit)} of {resource}"
            per_pod_note = f" by each of {count} pods" if count > 1 else ""
            error = QuotaExceededError(
                f"the quota {name!r} of namespace {namespace!r} allows {allowed} altogether, "
                f"{_amount_text(resource, amount)} are asked{per_pod_note}",
                hint="ask for less, or let an administrator raise the quota",
            )
            return doomed(error, since)
    parts = [
        f"{_amount_text(resource, used[resource])} of {_amount_text(resource, hard[resource])} "
        f"{resource} are used, {_amount_text(resource, amount)} more are asked"
        for resource, amount in requested.items()
        if resource in used and resource in hard
    ]
    return waiting(f"the quota {name!r} is full: {', '.join(parts)}", since)


def _quota_amounts(text: str) -> scheduling.Amounts:
    pairs = (part.partition("=") for part in text.split(","))
    return scheduling.amounts({name: amount for name, _, amount in pairs})


def _amount_text(resource: str, amount: Fraction) -> str:
    return scheduling.amount_text(
        resource.removeprefix("requests.").removeprefix("limits."), amount
    )
