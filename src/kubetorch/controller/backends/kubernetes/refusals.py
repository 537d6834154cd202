"""What it means for the user that the API server does not make an object in their namespace."""

from __future__ import annotations

from collections.abc import Collection

from kubetorch.errors import (
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
    SpecError,
    StorageFullError,
)
from kubetorch.k8s import failures

#: What etcd says when its database has reached its limit.
_DATABASE_FULL = "database space exceeded"
#: What a LimitRange says of a claim that is too large or too small.
_OUT_OF_LIMITS = "storage usage per PersistentVolumeClaim"
_TERMINATING = "NamespaceTerminating"


def explain(namespace: str, error: KubernetesRequestError) -> KubetorchError:
    """The error to raise instead, which says more; else the same one.

    Args:
        namespace: Where the object was to be.
        error: What the API server answered.
    """
    if _is_no_namespace(namespace, error):
        return no_namespace(namespace, error)
    if any(cause["reason"] == _TERMINATING for cause in error.causes):
        return _about_namespace(
            error,
            f"the namespace {namespace!r} is being deleted",
            "wait until it is gone and make it again, or name another",
        )
    if failures.is_quota(error.message):
        return StorageFullError(
            f"a quota of the namespace {namespace!r} is full: {_said(error)}",
            hint=f"kubectl describe resourcequota -n {namespace} says how much is used; free some "
            "of it, or ask for less",
        )
    if _OUT_OF_LIMITS in error.message:
        return SpecError(
            f"a limit of the namespace {namespace!r} forbids it: {_said(error)}",
            hint=f"kubectl describe limitrange -n {namespace} says what is allowed",
        )
    if _DATABASE_FULL in error.message:
        return StorageFullError(
            f"the cluster has no space left for objects: {_said(error)}",
            hint="an administrator has to compact and defragment etcd",
        )
    return error


def check_watched(namespace: str, watched: Collection[str]) -> None:
    """Refuse a namespace in which the controller has no rights, before it asks for anything there.

    Args:
        namespace: Where something is to be.
        watched: Namespaces that the controller has a say in; all if there are none.

    Raises:
        SpecError: It has none in this one.
    """
    if watched and namespace not in watched:
        wider = ",".join((*watched, namespace))
        raise SpecError(
            f"this installation of Kubetorch does not work in namespace {namespace!r}: its "
            f"watchNamespaces has {', '.join(watched)}",
            hint="name one of those: namespace=, --namespace, KT_NAMESPACE; or let an "
            f"administrator add it: kt upgrade --set 'watchNamespaces={{{wider}}}'",
        )


def no_namespace(namespace: str, error: KubernetesRequestError) -> KubernetesRequestError:
    """The error for a namespace that does not exist; Kubetorch makes none."""
    return _about_namespace(
        error,
        f"the namespace {namespace!r} does not exist",
        f"kubectl create namespace {namespace}; or name another: namespace=, --namespace, "
        "KT_NAMESPACE",
    )


def _is_no_namespace(namespace: str, error: KubernetesRequestError) -> bool:
    is_missing = isinstance(error, KubernetesNotFoundError)
    return is_missing and f'namespaces "{namespace}" not found' in error.message


def _about_namespace(
    error: KubernetesRequestError, message: str, hint: str
) -> KubernetesRequestError:
    found = KubernetesNotFoundError(message, hint=hint)
    found.verb, found.resource = error.verb, error.resource
    found.namespace, found.name = error.namespace, error.name
    found.status_code, found.reason = error.status_code, error.reason
    return found


def _said(error: KubernetesRequestError) -> str:
    """The words of the server, without ours about the request."""
    return error.message.partition(": the API server answered ")[2] or error.message
