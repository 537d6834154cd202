"""Sessions with controllers of clusters: from outside, from a pod, and by a URL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import ConfigError, KubernetesCredentialsError, KubetorchError
from kubetorch.lib.http import Credential, Dialler, HttpClient
from kubetorch.sdk.controller import Controller
from kubetorch.sdk.reach import choosing, podtoken
from kubetorch.sdk.reach.addresses import NAME, PORT
from kubetorch.sdk.reach.podtoken import PodToken
from kubetorch.sdk.reach.way import DIRECT, Way
from kubetorch.sdk.session import Session

if TYPE_CHECKING:
    from kubetorch.sdk.reach.cluster import Cluster

#: Seconds for which a question is asked again while a controller is away.
_PATIENCE = 15.0
_HINT = "kt check"
_TOKEN_HINT = (
    "api_url says where the controller is, and a kubeconfig who you are, by the token of its user; "
    "its API server need not be reached: set KUBECONFIG to one"
)


class Inside(NamedTuple):
    """A controller, as a program in a pod of its cluster reaches it.

    Attributes:
        url: Where it answers.
        credential: By what it knows the program.
    """

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


def open_session(cluster: choosing.Cluster) -> Session:
    """A session with the controller of a cluster.

    Raises:
        KubetorchError: The cluster that is meant cannot be used.
    """
    if cluster.api_url is not None:
        return _relayed(cluster, cluster.api_url)
    found = inside(cluster)
    if found is not None:
        return _session(found.url, found.credential, DIRECT, None)
    way = _take(cluster)
    dialler = functools.partial(way.connect, way.controller_url)
    return _session(
        way.controller_url,
        way.login,
        way,
        dialler,
        prepare=way.prepare,
        forget=way.forget_controller,
    )


def inside(cluster: choosing.Cluster) -> Inside | None:
    """The controller of the cluster that this program runs in a pod of, if that is meant."""
    if cluster.kubeconfig is not None or environment.kubernetes_service() is None:
        return None
    credential = podtoken.find()
    if credential is None:
        return None
    namespace = cluster.install_namespace
    url = environment.controller_url() or f"http://{NAME}.{namespace}.svc.cluster.local:{PORT}"
    return Inside(url, credential)


#: Ways that were tried when a backend was chosen, for the sessions that follow.
_tried: dict[choosing.Cluster, Cluster] = {}


def way_to(cluster: choosing.Cluster) -> Cluster:
    """The way into a cluster through its API server, which the next session there takes.

    Raises:
        KubernetesCredentialsError: There is no kubeconfig, or it cannot be used.
    """
    way = _tried[cluster] = _make(cluster)
    return way


def _take(cluster: choosing.Cluster) -> Cluster:
    return _tried.pop(cluster, None) or _make(cluster)


def _make(cluster: choosing.Cluster) -> Cluster:
    from kubetorch.k8s import locating  # noqa: PLC0415  # a program in a pod does without
    from kubetorch.sdk.reach.cluster import Cluster  # noqa: PLC0415  # as above

    listed = cluster.kubeconfig
    is_usual = listed is None or listed == environment.kubeconfig_list()
    access = locating.find(None if is_usual else listed)
    return Cluster(access, cluster.install_namespace, config.namespace)


def _relayed(cluster: choosing.Cluster, url: str) -> Session:
    found = inside(cluster)
    _check(url, is_inside=found is not None)
    from kubetorch.sdk.reach.relayed import Relayed  # noqa: PLC0415  # as in `_make`

    way = Relayed(url)
    credential: Credential
    credential = _login(cluster) if found is None else found.credential
    return _session(url, credential, way, None)


def _login(cluster: choosing.Cluster) -> Credential:
    """The user's tokens for a controller that is not reached through the API server."""
    try:
        return _take(cluster).login
    except KubernetesCredentialsError as error:
        raise KubernetesCredentialsError(error.message, hint=_TOKEN_HINT) from error


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
    way: Way,
    dialler: Dialler | None,
    *,
    prepare: Callable[[], None] = lambda: None,
    forget: Callable[[], None] = lambda: None,
) -> Session:
    def connect() -> Controller:
        prepare()
        headers = way.headers(url)
        http = HttpClient(url, credential, hint=_HINT, headers=headers, dialler=dialler)
        return Controller(http)

    is_again = False

    def begin() -> Callable[[], Controller]:
        nonlocal is_again
        if is_again:  # the last one did not answer
            forget()
        is_again = True
        return connect

    return Session(begin, way, patience=_PATIENCE, is_local=False)
