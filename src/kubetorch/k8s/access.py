"""Which API server, as whom: what a kubeconfig or a pod's service account comes to. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pem:
    """A certificate or key: a file that is read when it is needed, or the data itself.

    Attributes:
        path: The file, whose content may change.
        data: What it would contain; stands before `path`.
    """

    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return self.path is not None or self.data is not None


#: No certificate, no key.
ABSENT = Pem()


@dataclass(frozen=True)
class Cluster:
    """An API server.

    Attributes:
        server: Its URL, perhaps with a path in front of all others.
        authority: Who signs its certificate; the system's authorities when not given.
        is_insecure: Whether its certificate is not checked at all.
        tls_name: The name that its certificate has, when that is not the host of the URL.
        proxy: URL of the proxy in front of it; `None` means what the environment says.
        config: What the extension `client.authentication.k8s.io/exec` has for credential plugins.
    """

    server: str
    authority: Pem = ABSENT
    is_insecure: bool = False
    tls_name: str | None = None
    proxy: str | None = None
    config: Any = None


@dataclass(frozen=True)
class Plugin:
    """A program that gives credentials (`client.authentication.k8s.io`).

    Attributes:
        command: Its path, or its name on `PATH`.
        arguments: What it is called with.
        environment: Added to the environment.
        api_version: Version of the protocol that it speaks.
        install_hint: What to tell the user when it is not there.
        wants_cluster: Whether it is told about the cluster.
        interaction: `Never`, `IfAvailable` or `Always`: whether it may use the terminal.
        timeout: Seconds that it may take when it does not use the terminal.
    """

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_version: str = "client.authentication.k8s.io/v1"
    install_hint: str | None = None
    wants_cluster: bool = False
    interaction: str = "IfAvailable"
    timeout: float = 30.0


@dataclass(frozen=True)
class Impersonation:
    """Whom to act as.

    Attributes:
        user: Name of the user; empty for nobody else.
        uid: Their uid.
        groups: Their groups.
        extra: Further attributes, each with its values.
    """

    user: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class User:
    """Who asks. At most one of token, password and plugin is used, in this order.

    Attributes:
        certificate, key: For TLS.
        token: A bearer token.
        token_file: A file with one, which is read again and again; stands before `token`.
        username, password: For basic authentication.
        plugin: Gives a token or a certificate.
        impersonation: Whom to act as.
    """

    certificate: Pem = ABSENT
    key: Pem = ABSENT
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    plugin: Plugin | None = None
    impersonation: Impersonation = Impersonation()


@dataclass(frozen=True)
class Access:
    """Everything that a client needs to know.

    Attributes:
        cluster: Where.
        user: As whom.
        namespace: The one that is meant when none is named.
        context: Name of the kubeconfig's context; `None` in a pod.
        origin: Where this was found, for messages.
    """

    cluster: Cluster
    user: User = User()
    namespace: str = "default"
    context: str | None = None
    origin: str = "the program"
