"""The token by which a controller in a cluster knows this user.

It is the bearer token of the kubeconfig, if there is one. A user who is known to the API server by
a certificate has none: the API server is asked for a token of a service account that Kubetorch's
installation made for this, first that of the namespace, then that of the administrators. Who may
ask for an account's tokens may act as the account.

No token is ever part of a message, and none is sent but through a port-forward, TLS or loopback.

A controller knows a program in a pod by the token of the pod's service account.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kubetorch.errors import (
    KubernetesCredentialsError,
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesRequestError,
)
from kubetorch.k8s import resources
from kubetorch.k8s.resources import SERVICE_ACCOUNTS, Ref
from kubetorch.lib import processes
from kubetorch.sdk.tuning import TIMING

if TYPE_CHECKING:
    from kubetorch.k8s.client import Client
    from kubetorch.sdk.transport.tunnel import Tunnel

#: Audience of the tokens: only the controller accepts them.
AUDIENCE = "kubetorch"
#: Accounts of a namespace's users and of administrators.
USER, ADMINISTRATOR = "kubetorch-user", "kubetorch-admin"
_NAMESPACE = re.compile(
    r"/v1/(?:workloads|secrets|volumes)/([a-z0-9-]+)|[?&]namespace=([a-z0-9-]+)"
)


class _Token(NamedTuple):
    text: str
    #: When to ask again, by the monotonic clock.
    until: float


class Login:
    """The user's tokens for one controller (a `kubetorch.lib.http_client.Credential`)."""

    def __init__(self, tunnel: Tunnel, namespace: str, install_namespace: str) -> None:
        self._tunnel = tunnel
        self._namespace = namespace
        self._install_namespace = install_namespace
        self._lock = threading.Lock()
        #: The tokens by namespace.
        self._tokens: dict[str, _Token] = {}
        processes.at_fork(self.abandon)

    def token(self, path: str) -> str:
        match = _NAMESPACE.search(path)
        namespace = self._namespace if match is None else match[1] or match[2]
        with self._lock:
            namespace_token = self._tokens.get(namespace)
            if namespace_token is None or namespace_token.until < time.monotonic():
                namespace_token = self._tunnel.ask(lambda client: self._fetch(client, namespace))
                self._tokens[namespace] = namespace_token
            return namespace_token.text

    def reject(self, token: str) -> bool:
        """Forget a token that the controller refused; true, for there may be another."""
        with self._lock:
            for namespace, namespace_token in list(self._tokens.items()):
                if namespace_token.text == token:
                    del self._tokens[namespace]
        self._tunnel.ask(lambda client: _reject(client, token))
        return True

    def abandon(self) -> None:
        """Replace the lock in a forked child, where it may be held for ever."""
        self._lock = threading.Lock()

    async def _fetch(self, client: Client, namespace: str) -> _Token:
        now = time.monotonic()
        bearer_token = await client.session.bearer_token()
        if bearer_token is not None:
            return _Token(bearer_token, now + TIMING.kubeconfig_token_seconds)
        accounts = (
            Ref(SERVICE_ACCOUNTS, USER, namespace, "token"),
            Ref(SERVICE_ACCOUNTS, ADMINISTRATOR, self._install_namespace, "token"),
        )
        refusals: list[KubernetesRequestError] = []
        for account in accounts:
            try:
                answer = await client.post(account, _REQUEST)
            except (KubernetesForbiddenError, KubernetesNotFoundError) as error:
                refusals.append(error)
            else:
                return _Token(
                    answer["status"]["token"],
                    now + _remaining_seconds(answer["status"]) * TIMING.token_renewal_share,
                )
        raise self._refused_error(namespace, refusals) from refusals[-1]

    def _refused_error(
        self, namespace: str, refusals: list[KubernetesRequestError]
    ) -> KubernetesCredentialsError:
        reasons = "; ".join(error.message for error in refusals)
        return KubernetesCredentialsError(
            f"{self._tunnel.access.origin} has no bearer token, and the API server gives none for "
            f"Kubetorch: {reasons}",
            hint=f"an administrator of the cluster grants the right with: kubectl create role "
            f"kubetorch-login -n {self._install_namespace} --verb=create "
            f"--resource=serviceaccounts/token --resource-name={ADMINISTRATOR} && kubectl create "
            f"rolebinding kubetorch-login -n {self._install_namespace} --role=kubetorch-login "
            f"--user=YOU; or, for namespace {namespace} alone, with a service account {USER} there",
        )


_REQUEST: dict[str, Any] = {
    "apiVersion": "authentication.k8s.io/v1",
    "kind": "TokenRequest",
    "spec": {"audiences": [AUDIENCE], "expirationSeconds": TIMING.token_seconds},
}


async def _reject(client: Client, token: str) -> None:
    client.session.reject_token(token)


def _remaining_seconds(status: dict[str, Any]) -> float:
    try:
        end = resources.seconds(status["expirationTimestamp"])
    except (KeyError, ValueError):
        return float(TIMING.token_seconds)
    return min(max(end - time.time(), 0.0), float(TIMING.token_seconds))


class PodToken:
    """The token in a file, which is read again and again (a `lib.http_client.Credential`)."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._text = ""
        self._read = -TIMING.token_file_seconds

    def token(self, path: str) -> str:
        del path
        with self._lock:
            if time.monotonic() - self._read >= TIMING.token_file_seconds:
                try:
                    self._text = self._file.read_text(encoding="utf-8").strip()
                except OSError as error:
                    raise KubernetesCredentialsError(
                        f"the token of this pod, {self._file}, cannot be read: {error.strerror}",
                        hint="is the service account's token mounted, and readable for this user?",
                    ) from error
                self._read = time.monotonic()
            return self._text

    def reject(self, token: str) -> bool:
        """True if the file has another token by now."""
        self._read = -TIMING.token_file_seconds
        return self.token("") != token
