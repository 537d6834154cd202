"""Namespaces: the service account of Kubetorch's pods, its rights, and what the API server refuses.

The first deploy in a namespace makes the account, which stays after the last workload: it has no
secret and costs nothing, and other pods may run as it. `kt uninstall` finds it by its labels and
removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
    KubetorchError,
    SpecError,
    StorageFullError,
)
from kubetorch.k8s import failures
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource, Selection, key
from kubetorch.manifests import labels, pod_security
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT

_log = logging.getLogger(__name__)
#: The message of etcd when its database is full.
_DATABASE_FULL = "database space exceeded"
#: The message of a LimitRange about a claim that is too large or too small.
_OUT_OF_LIMITS = "storage usage per PersistentVolumeClaim"
_TERMINATING = "NamespaceTerminating"
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
#: The role of pods in their namespace: deploy, call, read logs. The chart makes it.
ROLE = "kubetorch-edit"
_VIOLATED = "violates PodSecurity"
#: The account that Kubernetes makes in every namespace, a moment after the namespace.
_DEFAULT_ACCOUNT = "default"


def explain(namespace: str, error: KubernetesRequestError) -> KubetorchError:
    """A more precise error about a namespace in place of this error, or else this error."""
    if isinstance(error, KubernetesNotFoundError) and (
        f'namespaces "{namespace}" not found' in error.message
    ):
        return no_namespace(namespace, error)
    if any(cause["reason"] == _TERMINATING for cause in error.causes):
        return _about_namespace(
            error,
            f"the namespace {namespace!r} is being deleted",
            "wait until it is gone and make it again, or name another",
        )
    if failures.is_quota(error.message):
        return StorageFullError(
            f"a quota of the namespace {namespace!r} is full: {_server_message(error)}",
            hint=f"kubectl describe resourcequota -n {namespace} says how much is used; free some "
            "of it, or ask for less",
        )
    if _OUT_OF_LIMITS in error.message:
        return SpecError(
            f"a limit of the namespace {namespace!r} forbids it: {_server_message(error)}",
            hint=f"kubectl describe limitrange -n {namespace} says what is allowed",
        )
    if _DATABASE_FULL in error.message:
        return StorageFullError(
            f"the cluster has no space left for objects: {_server_message(error)}",
            hint="an administrator has to compact and defragment etcd",
        )
    return error


def check_watched(namespace: str, watched: Collection[str]) -> None:
    """Refuse a namespace in which the controller has no rights."""
    if watched and namespace not in watched:
        wider = ",".join((*watched, namespace))
        raise SpecError(
            f"this installation of Kubetorch does not work in namespace {namespace!r}: its "
            f"watchNamespaces has {', '.join(watched)}",
            hint="name one of those: namespace=, --namespace, KT_NAMESPACE; or let an "
            f"administrator add it: kt upgrade --set 'watchNamespaces={{{wider}}}'",
        )


async def get(client: Client, ref: Ref, watched: Collection[str]) -> Object | None:
    """Get an object in a namespace in which the controller has rights; `None` if it is missing."""
    check_watched(str(ref.namespace), watched)
    try:
        return await client.get(ref)
    except KubernetesNotFoundError:
        return None


def no_namespace(namespace: str, error: KubernetesRequestError) -> KubernetesRequestError:
    """The error for a namespace that does not exist; Kubetorch makes none."""
    return _about_namespace(
        error,
        f"the namespace {namespace!r} does not exist",
        f"kubectl create namespace {namespace}; or name another: namespace=, --namespace, "
        "KT_NAMESPACE",
    )


def _about_namespace(
    error: KubernetesRequestError, message: str, hint: str
) -> KubernetesRequestError:
    namespace_error = KubernetesNotFoundError(message, hint=hint)
    namespace_error.verb, namespace_error.resource = error.verb, error.resource
    namespace_error.namespace, namespace_error.name = error.namespace, error.name
    namespace_error.status_code, namespace_error.reason = error.status_code, error.reason
    return namespace_error


def _server_message(error: KubernetesRequestError) -> str:
    """The message of the API server, without the client's words about the request."""
    return error.message.partition(": the API server answered ")[2] or error.message


class Namespaces:
    def __init__(
        self,
        client: Client,
        annotations: Mapping[str, str] | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._annotations = dict(annotations or {})
        self._now = now
        # By namespace: whether it is restricted, and until when that is remembered.
        self._levels: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        # By namespace: the uid of the account that has its binding.
        self._ready: dict[str, str] = {}

    async def prepare(self, namespace: str, account: str = SERVICE_ACCOUNT) -> None:
        """Make the account of pods and its rights, where they are missing.

        Raises:
            KubernetesNotFoundError: The namespace, or an account of the user, does not exist.
        """
        try:
            account_object = await self._client.get(Ref(ACCOUNTS, account, namespace))
        except KubernetesNotFoundError as error:
            if account != SERVICE_ACCOUNT:
                await self._check_namespace(namespace)
                if account == _DEFAULT_ACCOUNT:
                    return
                raise _no_account(namespace, account) from error
            await self._create(namespace, _account(namespace))
            account_object = await self._client.get(Ref(ACCOUNTS, account, namespace))
        uid = account_object["metadata"]["uid"]
        # A new uid shows that the namespace was deleted and made again, without the binding.
        if account == SERVICE_ACCOUNT and self._ready.get(namespace) != uid:
            await self._annotate(account_object)
            await self._create(namespace, _binding(namespace))
            self._ready[namespace] = uid

    async def _annotate(self, account: Object) -> None:
        """Give Kubetorch's account the annotations of the chart, without those of earlier charts.

        An account of an administrator stays as it is, and so do annotations of other writers.
        """
        metadata = account["metadata"]
        present = metadata.get("annotations") or {}
        is_ours = labels.MANAGED.items() <= (metadata.get("labels") or {}).items()
        if not is_ours or not (present or self._annotations):
            return
        namespace = metadata["namespace"]
        try:
            await self._client.apply(_account(namespace, self._annotations))
        except KubernetesConflictError as error:
            _log.warning(
                "annotations of others stay namespace=%s account=%s: %s",
                namespace,
                SERVICE_ACCOUNT,
                error.message,
            )
            fields = {cause["field"] for cause in error.causes}
            without_conflicts = {
                key: value
                for key, value in self._annotations.items()
                if f".metadata.annotations.{key}" not in fields
            }
            await self._client.apply(_account(namespace, without_conflicts))

    async def is_restricted(
        self, namespace: str, account: str = SERVICE_ACCOUNT, *, is_asked_anew: bool = False
    ) -> bool:
        """True if a namespace admits only pods of the Pod Security level `restricted`.

        A dry run of a pod shows it: the label of the namespace would not show the defaults and the
        policies of the cluster.
        """
        cached_level = self._levels.get(namespace)
        if cached_level is not None and self._now() < cached_level[1] and not is_asked_anew:
            return cached_level[0]
        refusal = await self._refusal(_pod(namespace, account, None))
        is_restricted = refusal is not None and (
            _VIOLATED in refusal.message
            or await self._refusal(_pod(namespace, account, pod_security.USER)) is None
        )
        self._levels[namespace] = is_restricted, self._now() + TIMING.security_level_recheck_seconds
        self._levels.move_to_end(namespace)
        while len(self._levels) > LIMITS.remembered_security_levels:
            self._levels.popitem(last=False)
        return is_restricted

    async def admits_volume(self, namespace: str, account: str, volume: Object) -> bool:
        pod = _pod(namespace, account, None)
        pod["spec"]["volumes"] = [volume]
        return await self._refusal(pod) is None

    async def _refusal(self, pod: Object) -> KubernetesRequestError | None:
        """The refusal of a pod by the API server in a dry run; `None` if it accepts the pod."""
        try:
            await self._client.create(pod, dry_run=True)
        except KubernetesRequestError as error:
            if error.status_code not in (400, 403, 422):
                raise
            return error
        return None

    async def _create(self, namespace: str, manifest: Object) -> None:
        """Make an object; an object that exists stays as it is."""
        try:
            await self._client.create(manifest)
        except KubernetesConflictError:
            return
        except KubernetesRequestError as error:
            refusal = explain(namespace, error)
            if refusal is error:
                raise
            raise refusal from error

    async def _check_namespace(self, namespace: str) -> None:
        """Raise an error about the namespace if the whole namespace is missing."""
        with contextlib.suppress(KubernetesForbiddenError):
            try:
                await self._client.get(Ref(NAMESPACES, namespace))
            except KubernetesNotFoundError as error:
                raise no_namespace(namespace, error) from error


def _pod(namespace: str, account: str, user: int | None) -> Object:
    """A pod like those of Kubetorch; with `user` it complies with the level `restricted`."""
    amounts = {"cpu": "10m", "memory": "16Mi"}  # a quota may demand them
    resources = {"requests": amounts, "limits": amounts}
    container: Object = {"name": "kubetorch", "image": "kubetorch", "resources": resources}
    spec = {"serviceAccountName": account, "containers": [container]}
    if user is not None:
        container["securityContext"] = {**pod_security.complying(None), "runAsUser": user}
    metadata = {"name": "kubetorch-dry-run", "namespace": namespace, "labels": dict(labels.MANAGED)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _account(namespace: str, annotations: Mapping[str, str] | None = None) -> Object:
    metadata = _metadata(namespace)
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": ACCOUNTS.api_version, "kind": ACCOUNTS.kind, "metadata": metadata}


def _binding(namespace: str) -> Object:
    return {
        "apiVersion": BINDINGS.api_version,
        "kind": BINDINGS.kind,
        "metadata": _metadata(namespace),
        "roleRef": {"apiGroup": BINDINGS.group, "kind": "ClusterRole", "name": ROLE},
        "subjects": [
            {"kind": ACCOUNTS.kind, "name": SERVICE_ACCOUNT, "namespace": namespace},
        ],
    }


def _metadata(namespace: str) -> Object:
    return {"name": SERVICE_ACCOUNT, "namespace": namespace, "labels": dict(labels.MANAGED)}


def _no_account(namespace: str, account: str) -> KubernetesNotFoundError:
    error = KubernetesNotFoundError(
        f"service_account_name is {account!r}, and the namespace {namespace!r} has no such service "
        "account",
        hint=f"kubectl create serviceaccount {account} -n {namespace}; or leave it out, for "
        f"{SERVICE_ACCOUNT}",
    )
    error.verb, error.resource = "get", str(ACCOUNTS)
    error.namespace, error.name = namespace, account
    error.status_code, error.reason = 404, "NotFound"
    return error


async def list_labelled(
    client: Client, resource: Resource, namespace: str | None, watched: tuple[str, ...], label: str
) -> list[Object]:
    """List the objects with a label, ordered by namespace and name."""
    if namespace is not None:
        check_watched(namespace, watched)
    listed_namespaces: tuple[str | None, ...] = (
        (namespace,) if namespace is not None else watched or (None,)
    )
    selections = [Selection(resource, name, labels=label) for name in listed_namespaces]
    listings = await asyncio.gather(*map(client.list, selections))
    return sorted(
        (labelled_object for listing in listings for labelled_object in listing.items), key=key
    )
