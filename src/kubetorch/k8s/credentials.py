"""What a request needs to be let in, kept fresh: tokens that are rotated, plugins, certificates."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import plugins, proxies, tls
from kubetorch.k8s.access import ABSENT, Access, Impersonation, Pem
from kubetorch.lib.dialing import Route

#: A token file is read again after so many seconds; kubelets rotate tokens long before they end.
TOKEN_FILE_SECONDS = 60.0
#: A plugin is asked again so many seconds before what it gave is void.
EXPIRY_MARGIN = 10.0

Pair = tuple[str, str]


class Credentials:
    """Headers and TLS settings of the requests to one cluster.

    Args:
        access: Who and where.
        environment: Variables for plugins and about proxies.
    """

    def __init__(self, access: Access, environment: Mapping[str, str]) -> None:
        self._access = access
        self._environment = environment
        self._token: str | None = None
        self._token_time: float | None = None
        self._credential: plugins.Credential | None = None
        self._given: tuple[Pair, ...] = ()
        self._asking = asyncio.Lock()
        self._context: ssl.SSLContext | None = None
        self._context_signature: tuple[object, ...] = ()
        server = urlsplit(access.cluster.server)
        self._is_tls = server.scheme == "https"
        self._host = server.hostname or ""
        self._port = server.port or (443 if self._is_tls else 80)
        self._proxy = access.cluster.proxy or proxies.proxy_for(access.cluster.server, environment)

    @property
    def can_change(self) -> bool:
        """Whether others could be had, after the server refused these."""
        return self._access.user.token_file is not None or self._access.user.plugin is not None

    def reject(self, headers: tuple[Pair, ...]) -> None:
        """The server does not know these headers: have others for the next request."""
        if headers == self._given:  # else another request was told so before
            self._token_time = None
            self._credential = None

    def reject_token(self, token: str) -> None:
        """Somebody does not know this token: have another one next time."""
        known = self._token if self._credential is None else self._credential.token
        if token == known:
            self._token_time = None
            self._credential = None

    async def bearer_token(self) -> str | None:
        """The token of a user who is known by one and acts as nobody else.

        Raises:
            KubernetesCredentialsError: The token file or the plugin fails.
        """
        if self._access.user.impersonation.user:
            return None
        for _, value in await self._authorization():
            kind, _, token = value.partition(" ")
            return token if kind == "Bearer" else None
        return None

    async def headers(self) -> tuple[Pair, ...]:
        """What says who asks.

        Raises:
            KubernetesCredentialsError: The token file or the plugin fails.
        """
        acting = impersonation_headers(self._access.user.impersonation)
        self._given = (*await self._authorization(), *acting)
        return self._given

    async def _authorization(self) -> tuple[Pair, ...]:
        user = self._access.user
        if user.token_file is not None:
            return (("Authorization", f"Bearer {self._read_token()}"),)
        if user.token is not None:
            return (("Authorization", f"Bearer {user.token}"),)
        if user.username is not None:
            pair = f"{user.username}:{user.password or ''}".encode()
            return (("Authorization", f"Basic {base64.b64encode(pair).decode()}"),)
        credential = await self._ask_plugin()
        if credential is not None and credential.token:
            return (("Authorization", f"Bearer {credential.token}"),)
        return ()

    def _read_token(self) -> str:
        file = self._access.user.token_file
        assert file is not None
        now = time.monotonic()
        if self._token_time is not None and now - self._token_time < TOKEN_FILE_SECONDS:
            return self._token or ""
        try:
            token = file.read_text(encoding="utf-8").strip()
            if not token:
                raise KubernetesCredentialsError(f"the token file {file} is empty")
            self._token, self._token_time = token, now
        except OSError as error:
            if self._token is None:
                raise KubernetesCredentialsError(
                    f"the token file {file} cannot be read: {error.strerror}"
                ) from error
        return self._token or ""

    async def _ask_plugin(self) -> plugins.Credential | None:
        plugin = self._access.user.plugin
        if plugin is None:
            return None
        async with self._asking:  # one answer serves all who ask meanwhile
            if self._credential is None or _is_void(self._credential, time.time()):
                cluster = self._access.cluster
                self._credential = await plugins.run(plugin, cluster, self._environment)
            return self._credential

    async def route(self) -> Route:
        """How to reach the server, with the certificates as they are now.

        Raises:
            KubernetesCredentialsError: A certificate, a key or the plugin fails.
        """
        cluster = self._access.cluster
        context = await self._tls() if self._is_tls else None
        return Route(self._host, self._port, context, cluster.tls_name, self._proxy)

    async def _tls(self) -> ssl.SSLContext:
        certificate, key = self._access.user.certificate, self._access.user.key
        if not certificate.is_given:
            certificate, key = await self._plugin_certificate()
        authority = self._access.cluster.authority
        signature = tls.signature(authority, certificate, key)
        if self._context is None or signature != self._context_signature:
            self._context = tls.context(self._access.cluster, certificate, key)
            self._context_signature = signature
        return self._context

    async def _plugin_certificate(self) -> tuple[Pem, Pem]:
        user = self._access.user
        if user.token or user.token_file or user.username:
            return ABSENT, ABSENT
        credential = await self._ask_plugin()
        return (credential.certificate, credential.key) if credential else (ABSENT, ABSENT)


def _is_void(credential: plugins.Credential, now: float) -> bool:
    return credential.expires is not None and now > credential.expires - EXPIRY_MARGIN


def impersonation_headers(impersonation: Impersonation) -> tuple[Pair, ...]:
    """What says whom to act as."""
    if not impersonation.user:
        return ()
    pairs = [("Impersonate-User", impersonation.user)]
    if impersonation.uid:
        pairs.append(("Impersonate-Uid", impersonation.uid))
    pairs += [("Impersonate-Group", group) for group in impersonation.groups]
    for name, values in impersonation.extra.items():
        header = f"Impersonate-Extra-{quote(name.lower(), safe='')}"
        pairs += [(header, value) for value in values]
    return tuple(pairs)
