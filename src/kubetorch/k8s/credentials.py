"""Keeps the credentials of requests fresh: rotated tokens, plugins, certificates, the proxy.

Plugins are programs that print an `ExecCredential`. The TLS context is made by hand, because
`ssl.create_default_context` refuses, from Python 3.13 on, certificate authorities without
extensions that clusters in use do not have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import os
import re
import signal
import ssl
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s.kubeconfig import ABSENT, Access, Cluster, Impersonation, Pem, Plugin
from kubetorch.k8s.tuning import LIMITS, TIMING
from kubetorch.lib import deadlines
from kubetorch.lib.transports import Route


@dataclass(frozen=True)
class Credential:
    token: str | None = field(default=None, repr=False)
    certificate: Pem = ABSENT
    key: Pem = ABSENT
    expires: float | None = None


async def run_plugin(
    plugin: Plugin, cluster: Cluster, environment: Mapping[str, str]
) -> Credential:
    interactive = plugin.interaction != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interaction == "Always" and not interactive:
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} needs a terminal, and there is none",
            hint="log in from a terminal first, or use credentials that need no user",
        )
    info = json.dumps(exec_info(plugin, cluster, interactive=interactive))
    variables = {**environment, **plugin.environment, "KUBERNETES_EXEC_INFO": info}
    timeout = (
        max(plugin.timeout, TIMING.interactive_plugin_seconds) if interactive else plugin.timeout
    )
    output = await _output_of(plugin, variables, interactive=interactive, timeout=timeout)
    return parse_credential(plugin, output)


def exec_info(plugin: Plugin, cluster: Cluster, *, interactive: bool) -> dict[str, Any]:
    """The content of `KUBERNETES_EXEC_INFO`, which plugins read."""
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.wants_cluster:
        authority = cluster.authority
        data = authority.data
        if data is None and authority.path is not None:
            with contextlib.suppress(OSError):  # a missing file fails when the TLS context is made
                data = authority.path.read_bytes()
        fields = {
            "server": cluster.server,
            "tls-server-name": cluster.tls_name,
            "insecure-skip-tls-verify": cluster.is_insecure or None,
            "certificate-authority-data": base64.b64encode(data).decode() if data else None,
            "proxy-url": cluster.proxy,
            "config": cluster.config,
        }
        spec["cluster"] = {name: value for name, value in fields.items() if value is not None}
    return {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}


def parse_credential(plugin: Plugin, output: bytes) -> Credential:
    try:
        document = json.loads(output)
        status = document["status"]
        version, token = document["apiVersion"], status.get("token")
        certificate, key = (status.get(f"client{part}Data") for part in ("Certificate", "Key"))
        stamp = status.get("expirationTimestamp")
        expires = None if stamp is None else _seconds(stamp)
        is_sound = document["kind"] == "ExecCredential" and version == plugin.api_version
        is_complete = bool(certificate) == bool(key) and (token or certificate)
        if not is_sound or not is_complete or not isinstance(token or "", str):
            raise ValueError
        return Credential(token, _pem(certificate), _pem(key), expires)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} printed no credential of version "
            f"{plugin.api_version}",
            hint="run it by hand: it should print an ExecCredential with a status",
        ) from error


def _pem(text: str | None) -> Pem:
    return Pem(data=text.encode()) if text else ABSENT


def _seconds(stamp: str) -> float:
    # Without its fraction: Python 3.10 reads those of 3 and 6 digits only.
    stamp = re.sub(r"\.\d+", "", stamp).replace("Z", "+00:00")
    return datetime.fromisoformat(stamp).timestamp()


async def _output_of(
    plugin: Plugin, variables: Mapping[str, str], *, interactive: bool, timeout: float
) -> bytes:
    try:
        # A plugin that uses the terminal stays in its session; any other has a process group of its
        # own, which is killed as a whole.
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *plugin.arguments,
            stdin=None if interactive else DEVNULL,
            stdout=PIPE,
            stderr=None if interactive else PIPE,
            env=variables,
            start_new_session=not interactive,
        )
    except OSError as error:
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} cannot be started: {error.strerror}",
            hint=plugin.install_hint or "install it, or correct the kubeconfig",
        ) from error
    try:
        async with deadlines.timeout(timeout):
            output, stderr = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            status = await process.wait()
    except BaseException as error:
        await _kill(process, whole_group=not interactive)
        if isinstance(error, TimeoutError):
            raise KubernetesCredentialsError(
                f"the credential plugin {plugin.command} did not end within {timeout:g} s",
                hint="run it by hand to see what it waits for",
            ) from error
        raise
    if status != 0:
        stderr_text = stderr.decode(errors="replace").strip()[-500:]
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} failed with status {status}"
            + (f": {stderr_text}" if stderr_text else ""),
            hint="log in again, or run it by hand to see why",
        )
    return output


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    output = bytearray()
    while stream is not None and (piece := await stream.read(64 * 1024)):
        output += piece[: LIMITS.plugin_output_bytes - len(output)]
    return bytes(output)


async def _kill(process: Process, *, whole_group: bool) -> None:
    # macOS forbids to signal a group whose members have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
    # `wait` ends with the pipes, which a process that has left the group may have.
    await deadlines.wait_at_most(
        TIMING.plugin_pipe_close_seconds,
        asyncio.gather(process.wait(), _read(process.stdout), _read(process.stderr)),
    )
    process._transport.close()  # type: ignore[attr-defined]  # nothing public closes the pipes


def pem_signature(*materials: Pem) -> tuple[object, ...]:
    """A value that changes when the content of a certificate or key does."""
    return tuple(_content_signature(pem) for pem in materials)


def _content_signature(pem: Pem) -> object:
    if pem.data is not None or pem.path is None:
        return pem.data
    try:
        file_status = pem.path.stat()
    except OSError:
        return None
    return file_status.st_ino, file_status.st_mtime_ns, file_status.st_size


def tls_context(cluster: Cluster, certificate: Pem, key: Pem) -> ssl.SSLContext:
    """A TLS context with the trusted authorities and the certificate of the client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if cluster.is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif cluster.authority.is_given:
        _load_authority(context, cluster.authority)
    else:
        context.load_default_certs()
    if certificate.is_given:
        _load_client_certificate(context, certificate, key)
    return context


def _load_authority(context: ssl.SSLContext, authority: Pem) -> None:
    text = _read_pem(authority, "certificate authority").decode("ascii", errors="replace")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise _unusable("certificate authority", authority, error) from error


def _load_client_certificate(context: ssl.SSLContext, certificate: Pem, key: Pem) -> None:
    chain = _read_pem(certificate, "client certificate") + b"\n" + _read_pem(key, "client key")
    # OpenSSL reads files only; only the user can read this file, and it is deleted at once.
    try:
        with tempfile.NamedTemporaryFile(prefix="kt-", suffix=".pem") as file:
            file.write(chain)
            file.flush()
            # An encrypted key is refused; without the password OpenSSL would ask on the terminal.
            context.load_cert_chain(file.name, password="")
    except (ssl.SSLError, ValueError) as error:
        raise _unusable("client certificate or key", certificate, error) from error
    except OSError as error:
        raise KubernetesCredentialsError(
            f"the client certificate cannot be handed to OpenSSL in a file: {error.strerror}",
            hint="have TMPDIR name a folder that can be written and has room",
        ) from error


def _read_pem(pem: Pem, pem_name: str) -> bytes:
    if pem.data is not None or pem.path is None:
        return pem.data or b""
    try:
        return pem.path.read_bytes()
    except OSError as error:
        raise KubernetesCredentialsError(
            f"the {pem_name} {pem.path} cannot be read: {error.strerror}",
            hint="correct the path in the kubeconfig",
        ) from error


def _unusable(pem_name: str, pem: Pem, error: Exception) -> KubernetesCredentialsError:
    where = f" {pem.path}" if pem.data is None else ""
    return KubernetesCredentialsError(
        f"the {pem_name}{where} cannot be used: {error}",
        hint="it should be unencrypted PEM, with the certificate and the key belonging together",
    )


def proxy_for(server: str, environment: Mapping[str, str]) -> str | None:
    """The proxy for a URL by `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, as Go reads them."""
    parts = urlsplit(server)
    host = (parts.hostname or "").rstrip(".")
    proxy = _variable(environment, f"{parts.scheme}_proxy")
    address = _address(host)
    is_loopback = address is not None and address.is_loopback
    if not proxy or host == "localhost" or is_loopback:
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    exceptions = _variable(environment, "no_proxy").split(",")
    if any(_excludes(exception.strip().lower(), host, port) for exception in exceptions):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _excludes(exception: str, host: str, port: int) -> bool:
    """True if an item of `NO_PROXY` covers a host: `*`, address, network, domain, `.domain`."""
    if not exception:
        return False
    if exception == "*":
        return True
    address = _address(host)
    if "/" in exception:
        try:
            return address is not None and address in ipaddress.ip_network(exception, strict=False)
        except ValueError:
            return False
    name, only_port = _split_port(exception)
    if only_port is not None and only_port != port:
        return False
    listed = _address(name)
    if listed is not None:
        return address == listed
    name = name.removeprefix("*")
    if name.startswith("."):
        return host.endswith(name)
    return host == name or host.endswith(f".{name}")


def _split_port(exception: str) -> tuple[str, int | None]:
    if exception.startswith("["):
        name, _, rest = exception[1:].partition("]")
        port = rest.removeprefix(":")
    elif exception.count(":") == 1:
        name, _, port = exception.partition(":")
    else:
        name, port = exception, ""
    return name, int(port) if port.isdigit() else None


Pair = tuple[str, str]


class Credentials:
    """Headers and TLS settings of the requests to one cluster."""

    def __init__(self, access: Access, environment: Mapping[str, str]) -> None:
        self._access = access
        self._environment = environment
        self._token: str | None = None
        self._token_time: float | None = None
        self._credential: Credential | None = None
        self._last_headers: tuple[Pair, ...] = ()
        self._plugin_lock = asyncio.Lock()
        self._context: ssl.SSLContext | None = None
        self._context_signature: tuple[object, ...] = ()
        server = urlsplit(access.cluster.server)
        self._is_tls = server.scheme == "https"
        self._host = server.hostname or ""
        self._port = server.port or (443 if self._is_tls else 80)
        self._proxy = access.cluster.proxy or proxy_for(access.cluster.server, environment)

    @property
    def can_change(self) -> bool:
        """True if a token file or a plugin may have other credentials after a refusal."""
        return self._access.user.token_file is not None or self._access.user.plugin is not None

    def reject(self, headers: tuple[Pair, ...]) -> None:
        """Get other credentials for the next request: the server refused these headers."""
        if headers == self._last_headers:  # else another request has rejected them already
            self._token_time = None
            self._credential = None

    def reject_token(self, token: str) -> None:
        current_token = self._token if self._credential is None else self._credential.token
        if token == current_token:
            self._token_time = None
            self._credential = None

    async def bearer_token(self) -> str | None:
        """The user's token; `None` for a user without a token, or with impersonation."""
        return None if self._access.user.impersonation.user else await self._token_of_user()

    async def headers(self) -> tuple[Pair, ...]:
        user = self._access.user
        pairs = impersonation_headers(user.impersonation)
        token = await self._token_of_user()
        if token is not None:
            pairs = (("Authorization", f"Bearer {token}"), *pairs)
        elif user.username is not None:
            login = f"{user.username}:{user.password or ''}".encode()
            pairs = (("Authorization", f"Basic {base64.b64encode(login).decode()}"), *pairs)
        self._last_headers = pairs
        return pairs

    async def _token_of_user(self) -> str | None:
        user = self._access.user
        if user.token_file is not None:
            return self._read_token()
        if user.token is not None or user.username is not None:
            return user.token
        credential = await self._ask_plugin()
        return (credential.token or None) if credential is not None else None

    def _read_token(self) -> str:
        file = self._access.user.token_file
        assert file is not None
        now = time.monotonic()
        if (
            self._token_time is not None
            and now - self._token_time < TIMING.token_file_reread_seconds
        ):
            return self._token or ""
        try:
            token = file.read_text(encoding="utf-8").strip()
            if not token:
                raise ValueError("it is empty")
            self._token, self._token_time = token, now
        except (OSError, ValueError) as error:
            # A token that was read before may still be good: the file may be being replaced.
            if self._token is None:
                reason = error.strerror if isinstance(error, OSError) else error
                raise KubernetesCredentialsError(
                    f"the token file {file} cannot be read: {reason}"
                ) from error
        return self._token or ""

    async def _ask_plugin(self) -> Credential | None:
        plugin = self._access.user.plugin
        if plugin is None:
            return None
        async with self._plugin_lock:  # requests that wait meanwhile use the same credential
            credential = self._credential
            expires = credential.expires if credential is not None else None
            is_expiring = (
                expires is not None and time.time() > expires - TIMING.credential_renewal_seconds
            )
            if credential is None or is_expiring:
                cluster = self._access.cluster
                credential = self._credential = await run_plugin(plugin, cluster, self._environment)
            return credential

    async def route(self) -> Route:
        """The address of the server, with the certificates as they are now."""
        cluster = self._access.cluster
        context = await self._tls() if self._is_tls else None
        return Route(self._host, self._port, context, cluster.tls_name, self._proxy)

    async def _tls(self) -> ssl.SSLContext:
        certificate, key = self._access.user.certificate, self._access.user.key
        if not certificate.is_given:
            certificate, key = await self._plugin_certificate()
        authority = self._access.cluster.authority
        signature = pem_signature(authority, certificate, key)
        if self._context is None or signature != self._context_signature:
            self._context = tls_context(self._access.cluster, certificate, key)
            self._context_signature = signature
        return self._context

    async def _plugin_certificate(self) -> tuple[Pem, Pem]:
        user = self._access.user
        if user.token or user.token_file or user.username:
            return ABSENT, ABSENT
        credential = await self._ask_plugin()
        return (credential.certificate, credential.key) if credential else (ABSENT, ABSENT)


def impersonation_headers(impersonation: Impersonation) -> tuple[Pair, ...]:
    """The headers that name the user to act as."""
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
