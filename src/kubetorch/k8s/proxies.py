"""Which proxy stands before a server, by the variables that every client of Kubernetes obeys."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def proxy_for(server: str, environment: Mapping[str, str]) -> str | None:
    """The proxy for a URL by `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, as Go reads them.

    Args:
        server: What is to be reached, `http://…` or `https://…`.
        environment: The variables; lower-case names count when upper-case ones are not set.
    """
    parts = urlsplit(server)
    host = (parts.hostname or "").rstrip(".")
    proxy = _variable(environment, f"{parts.scheme}_proxy")
    if not proxy or host == "localhost" or _is_loopback(host):
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


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _excludes(exception: str, host: str, port: int) -> bool:
    """Whether an item of `NO_PROXY` covers a host: `*`, address, network, domain, `.domain`."""
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
