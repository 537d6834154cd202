"""Who led a browser here: `Host` and `Origin` headers of servers that only this machine may use.

A page of another site can make a browser send requests to loopback addresses, under a name of its
own that resolves to one (DNS rebinding). Neither header can be set by the page.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_NAME_AND_PORT = re.compile(r"^(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::\d{1,5})?$")
_IPV4 = re.compile(r"127(?:\.\d{1,3}){3}")


def is_local_host(header: str | None) -> bool:
    """Whether a `Host` header names this machine's loopback interface."""
    match = _NAME_AND_PORT.match(header.strip()) if header else None
    return match is not None and _is_loopback(match[1] or match[2])


def is_local_origin(header: str | None) -> bool:
    """Whether a request comes from a page of this machine, or from no page: it has no `Origin`."""
    if header is None:
        return True
    try:
        parts = urlsplit(header)
        return parts.scheme in ("http", "https") and _is_loopback(parts.hostname or "")
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    return host.lower() in ("localhost", "::1") or _IPV4.fullmatch(host) is not None
