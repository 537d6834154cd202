"""Where calls of a service go: `kt.Endpoint`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kubetorch.errors import SpecError

_CLUSTER_HOST = re.compile(
    r"^(?:https?://)?(?P<service>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)\.svc(?:\.cluster\.local)?"
    r"(?::(?P<port>\d+))?(?P<path>/.*)?$"
)


@dataclass(frozen=True, init=False, repr=False)
class Endpoint:
    """A URL of the user's own, or a selector of those pods that take calls.

    Args:
        url: Where calls go; a scheme is optional. No Service is created.
        selector: Labels of the pods that calls are routed to.

    Raises:
        SpecError: Both were given, or one of them is impossible.
    """

    url: str | None
    _selector: tuple[tuple[str, str], ...] | None

    def __init__(self, url: str | None = None, selector: Mapping[str, str] | None = None) -> None:
        if url is not None and selector is not None:
            raise SpecError("an Endpoint has a url or a selector, not both")
        given: object = url
        if given is not None and not (isinstance(given, str) and re.fullmatch(r"\S+", given)):
            raise SpecError(
                f"url is {url!r}; it must be a host with an optional scheme, port and path",
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
        """Which of the two was given; `auto` when none was."""
        if self.url is not None:
            return "url"
        return "auto" if self._selector is None else "selector"

    @property
    def base_url(self) -> str | None:
        """The URL with a scheme, and no slash at its end; `None` when none was given."""
        if self.url is None:
            return None
        return (self.url if "://" in self.url else f"http://{self.url}").rstrip("/")

    def to_service_config(self) -> dict[str, Any] | None:
        """As a deploy carries it."""
        if self.url is not None:
            return {"type": "url", "url": self.url}
        if self._selector is not None:
            return {"type": "selector", "selector": dict(self._selector)}
        return None

    def get_proxied_url(self, port: int) -> str:
        """The URL through a proxy on this port of the machine, for a host inside a cluster."""
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


def _check_selector(selector: object) -> None:
    ok = (
        isinstance(selector, Mapping)
        and selector
        and all(isinstance(key, str) and isinstance(value, str) for key, value in selector.items())
    )
    if not ok:
        raise SpecError(
            f"selector is {selector!r}; it must be a dict of labels",
            hint='for example {"app": "workers", "role": "head"}',
        )
