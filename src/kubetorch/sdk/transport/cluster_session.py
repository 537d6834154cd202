"""Sessions with controllers of clusters: from outside, from a pod, and by a URL.

`detect` asks once, and only for a moment, whether a cluster has Kubetorch.
"""

from __future__ import annotations

import contextlib
import functools
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
from kubetorch.lib.http_client import Credential, HttpClient
from kubetorch.sdk.controller import Controller, FirstContact
from kubetorch.sdk.transport.login import PodToken
from kubetorch.sdk.transport.pod_transport import DIRECT, PodTransport
from kubetorch.sdk.transport.session import Choice, ClusterSettings, Session
from kubetorch.sdk.tuning import TIMING
from kubetorch.wire import routes

if TYPE_CHECKING:
    from kubetorch.sdk.transport.port_forward import PortForwardTransport

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
        try:
            with HttpClient(self.url, timeout=patience) as http:
                http.request("GET", "/health").close()
        except KubetorchError:
            return False
        return True


def open_session(cluster: ClusterSettings) -> Session:
    try:
        return _open(cluster)
    except KubetorchError as error:
        raise FirstContact().explain(error)  # noqa: B904  # it is the same error


def _open(cluster: ClusterSettings) -> Session:
    if cluster.api_url is not None:
        return _relayed(cluster, cluster.api_url)
    in_cluster = inside(cluster)
    if in_cluster is not None:
        return _session(in_cluster.url, in_cluster.credential, DIRECT, "the cluster of this pod")
    transport = _transport_of(cluster)
    return _session(
        transport.controller_url,
        transport.login,
        transport,
        transport.access.origin,
        forward=transport,
    )


def inside(cluster: ClusterSettings) -> Inside | None:
    """The controller of this pod's own cluster, if the settings name no other cluster."""
    if cluster.kubeconfig is not None or environment.kubernetes_service() is None:
        return None
    file = environment.pod_token_file()
    if file is None:
        return None
    url = environment.controller_url() or routes.controller_url(cluster.install_namespace)
    return Inside(url, PodToken(file))


#: Transports that `detect` opened, for the sessions that follow.
_detected_transports: dict[ClusterSettings, PortForwardTransport] = {}


def _transport_of(cluster: ClusterSettings) -> PortForwardTransport:
    return _detected_transports.pop(cluster, None) or _new_transport(cluster)


def _new_transport(cluster: ClusterSettings) -> PortForwardTransport:
    from kubetorch.k8s import kubeconfig  # noqa: PLC0415  # a program in a pod does without
    from kubetorch.sdk.transport.port_forward import PortForwardTransport  # noqa: PLC0415  # as above

    listed = cluster.kubeconfig
    is_usual = listed is None or listed == environment.kubeconfig_list()
    access = kubeconfig.find(None if is_usual else listed)
    return PortForwardTransport(access, cluster.install_namespace, config.namespace)


def _relayed(cluster: ClusterSettings, url: str) -> Session:
    in_cluster = inside(cluster)
    _check(url, is_inside=in_cluster is not None)
    from kubetorch.sdk.transport.ingress import IngressTransport  # noqa: PLC0415  # as in `_new_transport`

    transport = IngressTransport(url)
    try:
        credential = _transport_of(cluster).login if in_cluster is None else in_cluster.credential
    except KubernetesCredentialsError as error:
        raise KubernetesCredentialsError(error.message, hint=_TOKEN_HINT) from error
    return _session(url, credential, transport, f"the controller at {url}")


def _check(url: str, *, is_inside: bool) -> None:
    """Refuse to send a token unencrypted, except on this machine and in a cluster's network."""
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
    pod_location: str,
    *,
    forward: PortForwardTransport | None = None,
) -> Session:
    dialler = None if forward is None else functools.partial(forward.connect, url)
    is_relayed = forward is None and transport is not DIRECT
    contact = FirstContact(url if is_relayed else None)

    has_connected = False

    def connect() -> Controller:
        nonlocal has_connected
        failure = None
        if forward is not None:
            if has_connected:  # the last one did not answer
                forward.forget_controller()
            failure = forward.prepare()
        has_connected = True
        if isinstance(failure, KubernetesUnavailableError) and not contact.is_over:
            raise contact.explain(failure)
        headers = transport.headers(url)
        http = HttpClient(url, credential, hint=_HINT, headers=headers, dialler=dialler)
        return Controller(http, contact)

    context = None if forward is None else forward.access.context
    return Session(
        connect,
        transport,
        patience=TIMING.controller_patience_seconds,
        is_local=False,
        pod_location=pod_location,
        context=context,
    )


def detect(cluster: ClusterSettings, *, patience: float) -> Choice:
    """Decide for or against a cluster that no setting names, with the reason."""
    in_cluster = inside(cluster)
    if in_cluster is not None:
        if in_cluster.answers(patience):
            return Choice(cluster, f"{in_cluster.url} answers")
        return Choice(None, f"{in_cluster.url} does not answer", is_doubtful=True)
    try:
        transport = _new_transport(cluster)
    except KubetorchError as error:  # the kubeconfig leads nowhere
        return Choice(None, error.message)
    choice = _judge_cluster(cluster, transport, patience)
    if choice.cluster is None:
        transport.close()
    else:
        _detected_transports[cluster] = transport
    return choice


def _judge_cluster(
    cluster: ClusterSettings, transport: PortForwardTransport, patience: float
) -> Choice:
    access = transport.access
    if access.context in _deployed_contexts():
        return Choice(cluster, f"deployed to before, says {environment.contexts_file()}")
    try:
        is_installed = transport.is_installed(timeout=patience)
    except KubernetesForbiddenError as error:
        reason = f"whether Kubetorch is installed is not known: {error.message}"
    except KubernetesUnavailableError:
        reason = f"the API server does not answer: {access.origin}"
    except KubetorchError as error:
        reason = error.message
    else:
        if is_installed:
            return Choice(cluster, "Kubetorch is installed there")
        namespace = transport.install_namespace
        return Choice(None, f"Kubetorch is not installed in namespace {namespace}: {access.origin}")
    return Choice(None, reason, is_doubtful=True)


def _deployed_contexts() -> list[str]:
    try:
        text = environment.contexts_file().read_text(encoding="utf-8", errors="replace")
        return text.splitlines()
    except OSError:
        return []


def note_deploy(context: str) -> None:
    """Remember that services were deployed to this context."""
    if context in _deployed_contexts():
        return
    file = environment.contexts_file()
    with contextlib.suppress(OSError):  # without a home, nothing is kept
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{context}\n")
