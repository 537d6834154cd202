"""Which pod an agent serves: from its variables, its token, or the options of `kt server start`.

A backend names the pod that it made in variables. Knative lets no variable be a field of the pod,
and a pod that somebody else made has none: then the rest is found out here.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.errors import ConfigError
from kubetorch.wire import podenv, routes
from kubetorch.wire.podenv import PodEnv

#: Where the agent listens unless it is told otherwise.
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
        return environ  # no agent of a cluster; whoever reads it says what is missing
    if not environ.get(podenv.WORKING_DIR):
        environ = {**environ, podenv.WORKING_DIR: str(Path.cwd())}
    if environ.get(podenv.POD) and environ.get(podenv.HOST):
        return environ
    name = environ.get(podenv.POD) or name_in(environ.get(podenv.TOKEN_FILE, ""))
    found = {
        podenv.POD: name or socket.gethostname(),
        podenv.HOST: environ.get(podenv.HOST) or address(url),
    }
    return {**environ, **found}


def name_in(file: str) -> str:
    """The pod that a service account token is bound to; empty if it does not say.

    The host's name would be cut off after 63 characters.
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
        # No packet is sent: this only asks which way it would go.
        family, kind, proto, _, found = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as sock:
            sock.connect(found)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"the controller's host {parts.hostname!r} is not known here: {error.strerror}",
            hint="kt server start --controller-url URL, or KT_INSTALL_NAMESPACE, if Kubetorch is "
            "installed in another namespace",
        ) from error


@dataclass(frozen=True)
class Options:
    workload: str | None = None
    controller_url: str | None = None
    host: str = HOST
    port: int = PORT


def environ_of(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    def given(*variables: str) -> str:
        return next((environ[name] for name in variables if environ.get(name)), "")

    workload = options.workload or given(podenv.WORKLOAD, "KT_SERVICE", "KT_SERVICE_NAME")
    if not workload:
        raise ConfigError(
            "the service is not known that this pod is one of",
            hint="kt server start --workload, or the variable KT_SERVICE, says it: the name that "
            "the Compute with this pod's labels is deployed with",
        )
    namespace = given(podenv.NAMESPACE, "POD_NAMESPACE") or _read(f"{_SERVICE_ACCOUNT}/namespace")
    if not namespace:
        raise ConfigError(
            "the pod's namespace is not known",
            hint="set POD_NAMESPACE from the field metadata.namespace",
        )
    installed = given("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE
    url = options.controller_url or given(podenv.CONTROLLER_URL, "KT_CONTROLLER_URL")
    url = url or routes.controller_url(installed)
    token, file = given(podenv.TOKEN), given(podenv.TOKEN_FILE)
    file = file or next((each for each in TOKEN_FILES if Path(each).exists()), "")
    if not (token or file):
        raise ConfigError(
            "this pod has no token for the controller",
            hint="mount the key token of the Secret kubetorch-pod-token at "
            f"{Path(TOKEN_FILES[1]).parent}, or project a service account token for the audience "
            f"kubetorch to {TOKEN_FILES[0]}; docs/byo.md shows both",
        )
    root = given(podenv.ROOT) or _writable(ROOTS)
    own = PodEnv(
        namespace=namespace,
        workload=workload,
        pod=given(podenv.POD, "POD_NAME") or socket.gethostname(),
        host=given(podenv.HOST, "POD_IP") or address(url),
        port=options.port,
        root=root,
        working_dir=given(podenv.WORKING_DIR) or str(Path.cwd()),
        environments=given(podenv.ENVIRONMENTS) or f"{root}/environments",
        backend="kubernetes",
        controller_url=url,
        token_file=file,
        token=token,
        listen=options.host,
        is_joined=True,
    )
    return {**environ, **own.write()}


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
