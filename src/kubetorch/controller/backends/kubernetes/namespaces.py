"""What a namespace needs before pods of ours run in it: the account that they run as.

It is made on the first deploy there and stays when the last workload goes: it has no secret and
costs nothing, and other pods may run as it. `kt uninstall` removes it, by its labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from kubetorch.controller.backends.kubernetes import refusals
from kubetorch.errors import (
    KubernetesConflictError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref, Resource
from kubetorch.manifests import labels
from kubetorch.manifests.container import SERVICE_ACCOUNT

ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
#: What pods may do in their own namespace: deploy, call, read logs; the chart makes it.
ROLE = "kubetorch-edit"
#: Kubernetes makes it in every namespace, though not at once.
_EVERYWHERE = "default"


class Namespaces:
    """Makes namespaces ready for pods.

    Args:
        client: Asks the API server.
        annotations: Annotations of the accounts that it makes, such as those by which a cloud
            gives them its own rights.
    """

    def __init__(self, client: Client, annotations: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._annotations = dict(annotations or {})
        # By namespace, the `uid` of the account whose binding was seen to.
        self._ready: dict[str, str] = {}

    async def prepare(self, namespace: str, account: str = SERVICE_ACCOUNT) -> None:
        """See to it that pods can run as an account; asks once if everything is there.

        Args:
            namespace: The namespace of the pods.
            account: Name of the account; any but the default one is the user's own, and has to
                exist.

        Raises:
            KubernetesNotFoundError: There is no such namespace, or no such account in it.
            KubernetesForbiddenError: The controller may not make what is missing.
        """
        try:
            found = await self._client.get(Ref(ACCOUNTS, account, namespace))
        except KubernetesNotFoundError as error:
            if account != SERVICE_ACCOUNT:
                await self._check_namespace(namespace)
                if account == _EVERYWHERE:
                    return
                raise _no_account(namespace, account) from error
            await self._create(namespace, _account(namespace, self._annotations))
            found = await self._client.get(Ref(ACCOUNTS, account, namespace))
        uid = found["metadata"]["uid"]
        # An account with another `uid` is in a namespace that was deleted and made again.
        if account == SERVICE_ACCOUNT and self._ready.get(namespace) != uid:
            await self._create(namespace, _binding(namespace))
            self._ready[namespace] = uid

    async def _create(self, namespace: str, manifest: Object) -> None:
        """Make an object; one that is there stays as it is, whoever made it."""
        try:
            await self._client.create(manifest)
        except KubernetesConflictError:
            return
        except KubernetesRequestError as error:
            refused = refusals.explain(namespace, error)
            if refused is error:
                raise
            raise refused from error

    async def _check_namespace(self, namespace: str) -> None:
        """Raise what says more than that something in it is missing, if all of it is."""
        with contextlib.suppress(KubernetesForbiddenError):
            try:
                await self._client.get(Ref(NAMESPACES, namespace))
            except KubernetesNotFoundError as error:
                raise refusals.no_namespace(namespace, error) from error


def _account(namespace: str, annotations: Mapping[str, str]) -> Object:
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
