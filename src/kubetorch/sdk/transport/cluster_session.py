"""Sessions with controllers of clusters: from outside, from a pod, and by a URL.

Whether there is a cluster with Kubetorch: asked once, and only for a moment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import (
    ConfigError,
    KubernetesCredentialsError,
    KubernetesForbiddenError,
    KubernetesUnavailableError,
    KubetorchError,
)
from kubetorch.lib.http_client import Credential, Dialler, HttpClient
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.transport import login
from kubetorch.sdk.transport.login import PodToken
from kubetorch.sdk.transport.pod_transport import DIRECT, NAME, PORT, PodTransport
from kubetorch.sdk.transport.session import ClusterSettings, Session

if TYPE_CHECKING:
    from kubetorch.sdk.transport.port_forward import PortForwardTransport

#: Seconds for which a question is asked again while a controller is away.
_PATIENCE = 15.0
_HINT = "kt check"
_TOKEN_HINT = (
    "api_url says where the controller is, and a kubeconfig who you are, by the token of its user; "
    "its API server need not be reached: set KUBECONFIG to one"
)


class Inside(NamedTuple):
    """A controller, as a program in a pod of its cluster reaches it."""

    url: str
    credential: PodToken

    def answers(self, patience: float) -> bool:
        """Whether there is one."""
        try:
            with HttpClient(self.url, timeout=patience) as http:
                http.request("GET", "/health").close()
        except KubetorchError:
            return False
        return True


def open_session(cluster: ClusterSettings) -> Session:
    """A session with the controller of a cluster."""
    if cluster.api_url is not None:
        return _relayed(cluster, cluster.api_url)
    found = inside(cluster)
    if found is not None:
        return _session(found.url, found.credential, DIRECT, None)
    transport = _take(cluster)
    dialler = functools.partial(transport.connect, transport.controller_url)
    return _session(
        transport.controller_url,
        transport.login,
        transport,
        dialler,
        prepare=transport.prepare,
        forget=transport.forget_controller,
    )


def inside(cluster: ClusterSettings) -> Inside | None:
    """The controller of the cluster that this program runs in a pod of, if that is meant."""
    if cluster.kubeconfig is not None or environment.kubernetes_service() is None:
        return None
    credential = login.find()
    if credential is None:
        return None
    namespace = cluster.install_namespace
    url = environment.controller_url() or f"http://{NAME}.{namespace}.svc.cluster.local:{PORT}"
    return Inside(url, credential)


#: Ways that were tried when a backend was chosen, for the sessions that follow.
_tried: dict[ClusterSettings, PortForwardTransport] = {}


def _take(cluster: ClusterSettings) -> PortForwardTransport:
    return _tried.pop(cluster, None) or _make(cluster)


def _make(cluster: ClusterSettings) -> PortForwardTransport:
    from kubetorch.k8s import kubeconfig  # noqa: PLC0415  # a program in a pod does without
    from kubetorch.sdk.transport.port_forward import PortForwardTransport  # noqa: PLC0415  # as above

    listed = cluster.kubeconfig
    is_usual = listed is None or listed == environment.kubeconfig_list()
    access = kubeconfig.find(None if is_usual else listed)
    return PortForwardTransport(access, cluster.install_namespace, config.namespace)


def _relayed(cluster: ClusterSettings, url: str) -> Session:
    found = inside(cluster)
    _check(url, is_inside=found is not None)
    from kubetorch.sdk.transport.ingress import IngressTransport  # noqa: PLC0415  # as in `_make`

    transport = IngressTransport(url)
    try:
        credential = _take(cluster).login if found is None else found.credential
    except KubernetesCredentialsError as error:
        raise KubernetesCredentialsError(error.message, hint=_TOKEN_HINT) from error
    return _session(url, credential, transport, None)


def _check(url: str, *, is_inside: bool) -> None:
    """A token goes nowhere unencrypted, but for this machine and the network of a cluster."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_near = host in ("localhost", "::1") or host.startswith("127.") or is_inside
    if parts.scheme != "https" and not is_near:
        raise ConfigError(
            f"api_url is {url!r}: your token would travel unencrypted",
            hint="give the controller's ingress TLS, and begin the URL with https://",
        )


def _session(
    url: str,
    credential: Credential,
    transport: PodTransport,
    dialler: Dialler | None,
    *,
    prepare: Callable[[], None] = lambda: None,
    forget: Callable[[], None] = lambda: None,
) -> Session:
    def connect() -> Controller:
        prepare()
        headers = transport.headers(url)
        http = HttpClient(url, credential, hint=_HINT, headers=headers, dialler=dialler)
        return Controller(http)

    is_again = False

    def begin() -> Callable[[], Controller]:
        nonlocal is_again
        if is_again:  # the last one did not answer
            forget()
        is_again = True
        return connect

    return Session(begin, transport, patience=_PATIENCE, is_local=False)


def detect(cluster: ClusterSettings, *, patience: float) -> tuple[bool, str]:
    """Whether pods are to run in a cluster, and why or why not."""
    origin = "the kubeconfig"
    try:
        found = inside(cluster)
        if found is not None:
            answers = found.answers(patience)
            return answers, f"{found.url} {'answers' if answers else 'does not answer'}"
        transport = _tried[cluster] = _make(cluster)
        origin = transport.access.origin
        if transport.is_installed(timeout=patience):
            return True, f"Kubetorch is installed in {origin}"
    except KubernetesForbiddenError as error:
        return False, f"whether Kubetorch is installed is not known: {error.message}"
    except KubernetesUnavailableError:
        return False, f"the API server does not answer ({origin})"
    except KubetorchError as error:
        return False, error.message
    return (
        False,
        f"Kubetorch is not installed in namespace {transport.install_namespace} ({origin})",
    )
