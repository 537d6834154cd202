"""Which pod an agent serves: from its variables, its token, or the options of `kt server start`.

A backend names the pods that it makes in variables. Knative lets no variable be a field of the pod,
and a pod that Kubetorch did not make has no such variables: this module finds out what they lack.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.errors import ConfigError
from kubetorch.wire import podenv, routes
from kubetorch.wire.podenv import PodEnv

#: Where the agent listens by default.
HOST, PORT = "0.0.0.0", 32300
#: Where a token is mounted: the pod's own, or that of its namespace.
TOKEN_FILES = (
    "/var/run/secrets/kubetorch.com/token",
    "/var/run/secrets/kubetorch-pod-token/token",
)
#: Folders for the agent's files, the first that it may write to.
ROOTS = ("/var/run/kubetorch", "/tmp/kubetorch")
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def complete(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of an agent with its pod's name and address, and where its container began."""
    url = environ.get(podenv.CONTROLLER_URL)
    if not url:
        return environ  # no agent of a cluster; the reader of the variables names missing ones
    if not environ.get(podenv.WORKING_DIR):
        environ = {**environ, podenv.WORKING_DIR: str(Path.cwd())}
    if environ.get(podenv.POD) and environ.get(podenv.HOST):
        return environ
    name = environ.get(podenv.POD) or name_in(environ.get(podenv.TOKEN_FILE, ""))
    identity = {
        podenv.POD: name or socket.gethostname(),
        podenv.HOST: environ.get(podenv.HOST) or address(url),
    }
    return {**environ, **identity}


def name_in(file: str) -> str:
    """The pod that a service account token is bound to; empty if the token names none.

    The host name would not do: it is cut off after 63 characters.
    """
    try:
        payload = Path(file).read_text().split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return str(claims["kubernetes.io"]["pod"]["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def address(url: str) -> str:
    """The pod's address, as seen from the controller."""
    parts = urlsplit(url)
    try:
        # No packet is sent: the kernel only chooses the address that packets would leave from.
        family, kind, proto, _, socket_address = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(socket_address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"the controller's host {parts.hostname!r} is not known here: {error.strerror}",
            hint="kt server start --controller-url URL, or KT_INSTALL_NAMESPACE, if Kubetorch is "
            "installed in another namespace",
        ) from error


class Options(msgspec.Struct, frozen=True):
    workload: str | None = None
    controller_url: str | None = None
    host: str = HOST
    port: int = PORT


def environ_of(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    def first_value(*variables: str) -> str:
        return next((environ[name] for name in variables if environ.get(name)), "")

    workload = options.workload or first_value(podenv.WORKLOAD, "KT_SERVICE", "KT_SERVICE_NAME")
    if not workload:
        raise ConfigError(
            "the service is not known that this pod is one of",
            hint="kt server start --workload, or the variable KT_SERVICE, says it: the name that "
            "the Compute with this pod's labels is deployed with",
        )
    namespace = first_value(podenv.NAMESPACE, "POD_NAMESPACE") or _read(
        f"{_SERVICE_ACCOUNT}/namespace"
    )
    if not namespace:
        raise ConfigError(
            "the pod's namespace is not known",
            hint="set POD_NAMESPACE from the field metadata.namespace",
        )
    install_namespace = first_value("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE
    url = options.controller_url or first_value(podenv.CONTROLLER_URL, "KT_CONTROLLER_URL")
    url = url or routes.controller_url(install_namespace)
    token, file = first_value(podenv.TOKEN), first_value(podenv.TOKEN_FILE)
    file = file or next((path for path in TOKEN_FILES if Path(path).exists()), "")
    if not (token or file):
        raise ConfigError(
            "this pod has no token for the controller",
            hint="mount the key token of the Secret kubetorch-pod-token at "
            f"{Path(TOKEN_FILES[1]).parent}, or project a service account token for the audience "
            f"kubetorch to {TOKEN_FILES[0]}; docs/byo.md shows both",
        )
    root = first_value(podenv.ROOT) or _writable(ROOTS)
    pod_env = PodEnv(
        namespace=namespace,
        workload=workload,
        pod=first_value(podenv.POD, "POD_NAME") or socket.gethostname(),
        host=first_value(podenv.HOST, "POD_IP") or address(url),
        port=options.port,
        root=root,
        working_dir=first_value(podenv.WORKING_DIR) or str(Path.cwd()),
        environments=first_value(podenv.ENVIRONMENTS) or f"{root}/environments",
        backend="kubernetes",
        controller_url=url,
        token_file=file,
        token=token,
        listen=options.host,
        is_joined=True,
    )
    return {**environ, **pod_env.write()}


def _read(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def _writable(folders: Sequence[str]) -> str:
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise ConfigError(
        f"none of {', '.join(folders)} can be written to",
        hint=f"mount an emptyDir at {folders[0]}, or set {podenv.ROOT}",
    )
