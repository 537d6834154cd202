"""URLs of pods behind a controller that passes requests on: `URL/namespace/service/…`. Pure.

Which pod of the service is meant stands behind `#` in the URL, which is not sent, and in a header,
which is.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

from kubetorch.wire import routes

#: Name of the controller's Service and Deployment, and its port.
NAME, PORT = "kubetorch-controller", 8080


def relay_url(base_url: str, namespace: str, service: str, pod: str) -> str:
    """What stands for a pod behind a controller."""
    return f"{service_url(base_url, namespace, service)}#{quote(pod, safe='')}"


def service_url(base_url: str, namespace: str, service: str) -> str:
    """Where a service is called behind a controller."""
    return f"{base_url.rstrip('/')}/{quote(namespace, safe='')}/{quote(service, safe='')}"


def pod_headers(url: str) -> Mapping[str, str]:
    """What tells the relay which pod is meant."""
    pod = unquote(urlsplit(url).fragment)
    return {routes.POD: pod} if pod else {}
