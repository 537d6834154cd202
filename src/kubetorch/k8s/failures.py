"""Turns refusals of an API server into errors that name the request and the next step. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetorch import errors
from kubetorch.k8s.tuning import LIMITS

#: Parts of pods that are connections.
_STREAM_RESOURCES = ("pods/exec", "pods/portforward")
#: The verbs needed to make objects of a kind, to follow them and to delete them.
MAKER_VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
_CLASSES_BY_STATUS: dict[int, type[errors.KubernetesRequestError]] = {
    401: errors.KubernetesForbiddenError,
    403: errors.KubernetesForbiddenError,
    404: errors.KubernetesNotFoundError,
    409: errors.KubernetesConflictError,
}


@dataclass(frozen=True)
class Action:
    """An action on the server, in the words of RBAC."""

    verb: str
    resource: str
    namespace: str | None = None
    name: str | None = None
    origin: str = ""

    def __str__(self) -> str:
        which = f" {self.name!r}" if self.name else ""
        where = f" in namespace {self.namespace!r}" if self.namespace else ""
        return f"{self.verb} {self.resource}{which}{where}"


def unavailable(action: Action, server: str, error: BaseException) -> errors.KubetorchError:
    return errors.KubernetesUnavailableError(
        f"cannot {action}: the API server {server} did not answer: {error}",
        hint=f"check that the cluster runs and can be reached ({action.origin})",
    )


def untrusted(action: Action, server: str, error: BaseException) -> errors.KubetorchError:
    return errors.KubernetesCredentialsError(
        f"cannot {action}: the API server {server}: {error}",
        hint=f"correct certificate-authority, tls-server-name or client-certificate "
        f"({action.origin})",
    )


def garbled(action: Action, server: str, why: object) -> errors.KubetorchError:
    """The error for an answer that cannot come from an API server."""
    return errors.KubernetesError(
        f"cannot {action}: {server} answered with something that is no answer of Kubernetes: {why}",
        hint=f"have the kubeconfig name the API server itself, and no portal or proxy "
        f"({action.origin})",
    )


def refused(
    action: Action, status_code: int, body: bytes, headers: Mapping[str, str] | None = None
) -> errors.KubernetesRequestError:
    status = parse_status(body)
    server_message = (
        "" if status else body[: LIMITS.refusal_text_bytes].decode(errors="replace").strip()
    )
    return refused_by(action, status, status_code, server_message=server_message, headers=headers)


def refused_by(
    action: Action,
    status: Mapping[str, Any],
    status_code: int | None = None,
    *,
    server_message: str = "",
    headers: Mapping[str, str] | None = None,
) -> errors.KubernetesRequestError:
    """The error that a `Status` describes, with its own code if there is no `status_code`."""
    if status_code is None:
        code = status.get("code")
        status_code = code if isinstance(code, int) else 500
    details = _mapping(status.get("details"))
    reason = str(status.get("reason") or "")
    server_message = server_message or str(status.get("message") or "")
    words = " ".join(filter(None, [str(status_code), reason]))
    message = f"cannot {action}: the API server answered {words}" + (
        f": {server_message}" if server_message else ""
    )
    error_class = _CLASSES_BY_STATUS.get(status_code, errors.KubernetesRequestError)
    error = error_class(message, hint=_hint(action, status_code, reason, server_message))
    error.verb, error.resource = action.verb, action.resource
    error.namespace, error.name = action.namespace, action.name
    error.status_code, error.reason = status_code, reason
    error.causes = [
        {name: str(_mapping(cause).get(name) or "") for name in ("reason", "message", "field")}
        for cause in _list(details.get("causes"))
    ]
    error.retry_after = _retry_after(details, headers or {})
    return error


def grant_commands(
    resource: str, verbs: Sequence[str], subjects: Sequence[str], namespace: str
) -> str:
    """The two commands with which an administrator grants rights on a kind in a namespace.

    The role may be there already, for another namespace. `subjects` are options of `kubectl create
    rolebinding`.
    """
    name = f"kubetorch-{resource}"
    return (
        f"kubectl create clusterrole {name} --verb={','.join(verbs)} --resource={resource} "
        "--dry-run=client -o yaml | kubectl apply -f -\n"
        f"kubectl create rolebinding {name} -n {namespace} --clusterrole={name} "
        f"{' '.join(subjects)}"
    )


def parse_status(body: bytes) -> dict[str, Any]:
    """The `Status` in an answer; empty if there is none."""
    try:
        status = json.loads(body)
    except ValueError:
        return {}
    return status if isinstance(status, dict) and status.get("kind") == "Status" else {}


def _mapping(value: object) -> Mapping[str, Any]:
    """A part of an answer that has to be a mapping; empty if a server, or a proxy, sent another."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _retry_after(details: Mapping[str, Any], headers: Mapping[str, str]) -> float | None:
    for value in (headers.get("retry-after"), details.get("retryAfterSeconds")):
        text = str(value or "")
        if text.isascii() and text.isdigit():
            return float(text)
    return None


def _hint(action: Action, status_code: int, reason: str, server_message: str) -> str | None:
    if status_code == 401:
        return f"the credentials are unknown or have expired; log in again ({action.origin})"
    if status_code == 403:
        return _forbidden_hint(action, server_message)
    if status_code == 404:
        if is_unserved(server_message):
            return "install the operator of this kind: the cluster does not serve it"
        return "check name and namespace; it may have been deleted"
    if status_code == 409:
        if reason == "AlreadyExists":
            return "choose another name, or apply it instead of creating it"
        if "Apply failed with" in server_message:
            return "leave those fields to the manager that owns them, or apply with force"
        return "somebody changed it in between: read it again and repeat"
    if status_code == 429:
        return "the API server is busy; try again later"
    if status_code in (400, 422):
        if is_from_admission(server_message):
            return "change the object as the admission webhook asks"
        return "correct the fields that the message names"
    return None


def may_pass(error: errors.KubernetesRequestError) -> bool:
    """True if the server, or a node behind it, may answer the same request later."""
    is_away = error.status_code == 429 or error.status_code >= 500
    return is_away and not is_malformed(error.message)


#: The message of a server about an applied object that does not fit the schema of its kind; its
#: status is 500, as when the server's storage is away.
_MALFORMED = re.compile(
    r"failed to (?:create typed patch object|convert new object) \([^)]*\)"
    r"(?: to proper version: unable to convert [^:]*)?: (?P<faults>.*)",
    re.DOTALL,
)
_FAULT = re.compile(r"\s*\.(?P<path>(?:\[[^]]*]|[^:[])+): (?P<problem>.*)")
_VALUE = re.compile(r"&value\.valueUnstructured\{Value:(.*)\}")
_MAPPING = re.compile(r"&\{map\[.*", re.DOTALL)
_UNDECLARED = "field not declared in schema"


@dataclass(frozen=True)
class FieldFault:
    """A field of an object that its kind does not have, or has with another type.

    Attributes:
        path: Such as `spec.template.spec.tolerationz`; empty where the message names no field.
    """

    path: str
    problem: str

    @property
    def is_unknown(self) -> bool:
        return self.problem == _UNDECLARED


def is_malformed(message: str) -> bool:
    """True if a message says that an object does not fit the schema of its kind."""
    return _MALFORMED.search(message) is not None


def field_faults(message: str) -> list[FieldFault]:
    """The faults in a message about an object's schema; none for any other message."""
    match = _MALFORMED.search(message)
    if match is None:
        return []
    lines = [line for line in match["faults"].splitlines() if line.strip() not in ("", "errors:")]
    return [_fault(line) for line in lines]


def _fault(line: str) -> FieldFault:
    match = _FAULT.fullmatch(line)
    path, problem = ("", line.strip()) if match is None else (match["path"], match["problem"])
    return FieldFault(path, _MAPPING.sub("a mapping", _VALUE.sub(r"\1", problem)))


def is_unserved(message: str) -> bool:
    """True if a message says that a path is not served, rather than that an object is missing."""
    return "could not find the requested resource" in message or "404 page not found" in message


def is_from_admission(message: str) -> bool:
    """True if a message comes from an admission webhook or policy."""
    return "admission webhook" in message or "ValidatingAdmissionPolicy" in message


def is_quota(message: str) -> bool:
    return "exceeded quota" in message


def _forbidden_hint(action: Action, server_message: str) -> str:
    if is_quota(server_message):
        return "free some of the quota (kubectl describe resourcequota), or ask for less"
    if is_from_admission(server_message):
        return "change the object as the admission webhook asks"
    plural, _, group = action.resource.partition(".")
    _, slash, subresource = group.partition("/")
    if slash:  # deployments.apps/status is deployments/status of the group apps
        plural, group = f"{plural}/{subresource}", group.partition("/")[0]
    verbs = [action.verb]
    if plural in _STREAM_RESOURCES:
        verbs = ["create", "get"]  # which of them the server demands depends on its version
    kind = "Role" if action.namespace else "ClusterRole"
    where = f" in namespace {action.namespace!r}" if action.namespace else ""
    return (
        f"let an administrator grant it with a {kind}{where}: apiGroups: [{group!r}], "
        f"resources: [{plural!r}], verbs: {verbs} ({action.origin})"
    )
