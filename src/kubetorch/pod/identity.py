"""Who a pod is, where its variables do not say: Knative lets no variable be a field of the pod."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from kubetorch.errors import ConfigError
from kubetorch.wire import podenv


def complete(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The variables of an agent with its pod's name and address, and where its container began.

    Raises:
        ConfigError: The controller's host is not known, so neither is the way to it.
    """
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
    """The pod's address, as seen from the controller.

    Raises:
        ConfigError: The controller's host is not known.
    """
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
