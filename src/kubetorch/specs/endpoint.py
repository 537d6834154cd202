"""The address to which calls of a service go: `kt.Endpoint`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from kubetorch.errors import SpecError

_CLUSTER_HOST = re.compile(
    r"^(?:https?://)?(?P<service>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)\.svc(?:\.cluster\.local)?"
    r"(?::(?P<port>\d+))?(?P<path>/.*)?$"
)

# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9][a-z0-9.-]{{0,252}}/)?{_WORD}")
_VALUE = re.compile(rf"(?:{_WORD})?")


@dataclass(frozen=True)
class Endpoint:
    """A URL of the user's own, or a selector of those pods that take calls.

    Args:
        url: The address of calls; a scheme is optional. No Service is created.
        selector: Labels of the pods that calls are routed to.

    Raises:
        SpecError: Both were given, or one of them is impossible.
    """

    url: str | None
    _selector: tuple[tuple[str, str], ...] | None

    def __init__(self, url: str | None = None, selector: Mapping[str, str] | None = None) -> None:
        if url is not None and selector is not None:
            raise SpecError("an Endpoint has a url or a selector, not both")
        if url is not None and not _is_url(url):
            raise SpecError(
                f"url is {url!r}; it must be a host with an optional port and path, and http:// or "
                "https:// before it or nothing",
                hint='for example kt.Endpoint(url="my-svc.my-ns.svc.cluster.local:8080")',
            )
        if selector is not None:
            _check_selector(selector)
        object.__setattr__(self, "url", url)
        pairs = None if selector is None else tuple(sorted(selector.items()))
        object.__setattr__(self, "_selector", pairs)

    @property
    def selector(self) -> dict[str, str] | None:
        """Labels of the pods that calls are routed to."""
        return None if self._selector is None else dict(self._selector)

    @property
    def mode(self) -> Literal["url", "selector", "auto"]:
        """Whether the endpoint has a URL or a selector; `auto` for neither."""
        if self.url is not None:
            return "url"
        return "auto" if self._selector is None else "selector"

    @property
    def base_url(self) -> str | None:
        """The URL with a scheme, and no slash at its end; `None` without a URL."""
        if self.url is None:
            return None
        return (self.url if "://" in self.url else f"http://{self.url}").rstrip("/")

    def to_service_config(self) -> dict[str, Any] | None:
        """The dictionary that a deploy carries; `None` for neither URL nor selector."""
        if self.url is not None:
            return {"type": "url", "url": self.url}
        if self._selector is not None:
            return {"type": "selector", "selector": dict(self._selector)}
        return None

    def get_proxied_url(self, port: int | None = None, *, proxy_port: int | None = None) -> str:
        """The URL through a proxy on this port of the machine, for a host inside a cluster.

        Args:
            port: The port.
            proxy_port: The same.
        """
        port = proxy_port if port is None else port
        if port is None:
            raise TypeError("get_proxied_url() needs the port of the proxy")
        match = _CLUSTER_HOST.match(self.url or "")
        if match is None:
            return self.url or ""
        path = match["path"] or ""
        return (
            f"http://localhost:{port}/{match['namespace']}/{match['service']}:"
            f"{match['port'] or 8080}{path}"
        )

    def __repr__(self) -> str:
        if self.url is not None:
            return f"Endpoint(url={self.url!r})"
        return (
            f"Endpoint(selector={self.selector!r})" if self._selector is not None else "Endpoint()"
        )


def _is_url(url: object) -> bool:
    if not isinstance(url, str) or not re.fullmatch(r"[!-~]+", url):
        return False
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.query
            and not parts.fragment
            and "@" not in parts.netloc
        )
    except ValueError:  # the port is none, or the host a broken IPv6 address
        return False


def _check_selector(selector: object) -> None:
    ok = (
        isinstance(selector, Mapping)
        and selector
        and all(isinstance(value, str) for value in selector.values())
        and all(isinstance(key, str) and _LABEL.fullmatch(key) for key in selector)
        and all(_VALUE.fullmatch(value) for value in selector.values())
    )
    if not ok:
        raise SpecError(
            f"selector is {selector!r}; it must be a dict of labels",
            hint='for example {"app": "workers", "role": "head"}',
        )
