"""Credential plugins of a kubeconfig: programs that print an `ExecCredential`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s.access import ABSENT, Cluster, Pem, Plugin
from kubetorch.lib import deadlines

#: Seconds that a plugin may take at least when it may talk to the user.
INTERACTIVE_TIMEOUT = 300.0
#: Bytes that it may print.
_LIMIT = 1024 * 1024


@dataclass(frozen=True)
class Credential:
    """What a plugin gave.

    Attributes:
        token: A bearer token, or `None`.
        certificate, key: For TLS, if it gave them.
        expires: When it is void, in seconds since the epoch; `None` when the plugin did not say.
    """

    token: str | None = field(default=None, repr=False)
    certificate: Pem = ABSENT
    key: Pem = ABSENT
    expires: float | None = None


async def run(plugin: Plugin, cluster: Cluster, environment: Mapping[str, str]) -> Credential:
    """Ask a plugin for credentials.

    Args:
        plugin: The program.
        cluster: What it is told about, if it wants to be.
        environment: The variables that it gets, with its own added.

    Raises:
        KubernetesCredentialsError: It is not there, fails, hangs, or prints something else.
    """
    interactive = plugin.interaction != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin.interaction == "Always" and not interactive:
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} needs a terminal, and there is none",
            hint="log in from a terminal first, or use credentials that need no user",
        )
    info = json.dumps(request(plugin, cluster, interactive=interactive))
    variables = {**environment, **plugin.environment, "KUBERNETES_EXEC_INFO": info}
    timeout = max(plugin.timeout, INTERACTIVE_TIMEOUT) if interactive else plugin.timeout
    output = await _output_of(plugin, variables, interactive=interactive, timeout=timeout)
    return parse(plugin, output)


def request(plugin: Plugin, cluster: Cluster, *, interactive: bool) -> dict[str, Any]:
    """What a plugin is told in `KUBERNETES_EXEC_INFO`."""
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.wants_cluster:
        authority = cluster.authority
        data = authority.data
        if data is None and authority.path is not None:
            with contextlib.suppress(OSError):  # it is named, but not there: not ours to judge here
                data = authority.path.read_bytes()
        described = {
            "server": cluster.server,
            "tls-server-name": cluster.tls_name,
            "insecure-skip-tls-verify": cluster.is_insecure or None,
            "certificate-authority-data": base64.b64encode(data).decode() if data else None,
            "proxy-url": cluster.proxy,
            "config": cluster.config,
        }
        spec["cluster"] = {name: value for name, value in described.items() if value is not None}
    return {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}


def parse(plugin: Plugin, output: bytes) -> Credential:
    """What a plugin printed.

    Raises:
        KubernetesCredentialsError: It is no `ExecCredential` of the plugin's version.
    """
    try:
        printed = json.loads(output)
        status = printed["status"]
        version, token = printed["apiVersion"], status.get("token")
        certificate, key = (status.get(f"client{part}Data") for part in ("Certificate", "Key"))
        stamp = status.get("expirationTimestamp")
        expires = None if stamp is None else _seconds(stamp)
        is_sound = printed["kind"] == "ExecCredential" and version == plugin.api_version
        if not is_sound or bool(certificate) != bool(key) or not (token or certificate):
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
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


async def _output_of(
    plugin: Plugin, variables: Mapping[str, str], *, interactive: bool, timeout: float
) -> bytes:
    try:
        # One that uses the terminal stays in its session; any other has a group of its own, which
        # ends with it.
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
            output, complaint = await asyncio.gather(_read(process.stdout), _read(process.stderr))
            status = await process.wait()
    except BaseException as error:
        await _end(process, whole_group=not interactive)
        if isinstance(error, TimeoutError):
            raise KubernetesCredentialsError(
                f"the credential plugin {plugin.command} did not end within {timeout:g} s",
                hint="run it by hand to see what it waits for",
            ) from error
        raise
    if status != 0:
        said = complaint.decode(errors="replace").strip()[-500:]
        raise KubernetesCredentialsError(
            f"the credential plugin {plugin.command} failed with status {status}"
            + (f": {said}" if said else ""),
            hint="log in again, or run it by hand to see why",
        )
    return output


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """What a program prints, as far as it is of any interest."""
    kept = bytearray()
    while stream is not None and (piece := await stream.read(64 * 1024)):
        kept += piece[: _LIMIT - len(kept)]
    return bytes(kept)


async def _end(process: Process, *, whole_group: bool) -> None:
    # macOS forbids to signal a group whose members have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
    await process.wait()
    # The pipes close with the last process that has them, which may have left the group.
    with contextlib.suppress(TimeoutError):
        async with deadlines.timeout(1.0):
            await asyncio.gather(_read(process.stdout), _read(process.stderr))
