"""Who may speak to an agent.

Each request brings a token: one that is signed for this workload, which the agent checks offline
with the workload's own key, or the user's own, which it recognises by its fingerprint. `Host` and
`Origin` are checked too: a page in a browser can be made to send requests to loopback addresses
(DNS rebinding), and must not reach user code even if it has a token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kubetorch.errors import ConfigError, ForeignOriginError, UnauthorizedError
from kubetorch.wire import tokens

_HINT = "send it as Authorization: Bearer <token>; kt token NAME prints one"
#: Genuine tokens that are remembered, so that each is verified once.
_CACHE_SIZE = 256


@dataclass(frozen=True)
class Credentials:
    """What a backend gives to one agent.

    Attributes:
        key: Key of the workload's tokens.
        session: Token for the session with the controller and for fetching blobs.
        user: Fingerprint of the user's own token.
    """

    key: bytes
    session: str
    user: str

    @classmethod
    def read(cls, path: str) -> Credentials:
        """What lies in a credentials file.

        Raises:
            ConfigError: It cannot be read, or is not complete. The message repeats no secret.
        """
        try:
            found = json.loads(Path(path).read_bytes())
            return cls(bytes.fromhex(found["key"]), str(found["session"]), str(found["user"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the credentials in {path} cannot be read: {type(error).__name__}"
            ) from None


class Guard:
    """Decides about requests.

    Args:
        credentials: What tokens are checked with.
        audience: The workload that tokens must be meant for.
        host: Address that the agent listens on.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, credentials: Credentials, *, audience: str, host: str, clock: Callable[[], float]
    ) -> None:
        self._credentials = credentials
        self._audience = audience
        #: Whether it listens on loopback, where pages of other sites could reach it.
        self.is_local = _is_loopback(host)
        self._clock = clock
        self._known: dict[str, float] = {}

    def check_origin(self, host: str | None, origin: str | None) -> None:
        """Refuse what a foreign page sent, when the agent listens on loopback.

        Args:
            host: The `Host` header.
            origin: The `Origin` header.

        Raises:
            ForeignOriginError: It is foreign.
        """
        if not self.is_local:
            return
        if host is None or not _is_loopback(_host_of_header(host)):
            raise ForeignOriginError(f"the Host header {host!r} is not one of this machine")
        if origin is not None and not _is_loopback(_host_of_origin(origin)):
            raise ForeignOriginError(f"requests of pages from {origin!r} are refused")

    def check_token(self, authorization: str | None) -> None:
        """Refuse a request without a valid token.

        Args:
            authorization: The `Authorization` header.

        Raises:
            UnauthorizedError: The token is missing, forged, expired, or for another workload.
        """
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise UnauthorizedError("this needs a token", hint=_HINT)
        self._verify(token)

    def is_token(self, token: str) -> bool:
        """Whether this is a valid token."""
        try:
            self._verify(token)
        except UnauthorizedError:
            return False
        return True

    def check_user(self, authorization: str | None) -> None:
        """Refuse everything but the user's own token.

        Args:
            authorization: The `Authorization` header.

        Raises:
            UnauthorizedError: It is another one, or none.
        """
        self.check_token(authorization)
        token = (authorization or "").strip().partition(" ")[2].strip()
        if not hmac.compare_digest(tokens.fingerprint(token), self._credentials.user):
            raise UnauthorizedError("this needs the user's own token; one for calls is not enough")

    def _verify(self, token: str) -> None:
        now = self._clock()
        if self._known.get(token, 0.0) > now:
            return
        if hmac.compare_digest(tokens.fingerprint(token), self._credentials.user):
            self._remember(token, now + 60.0)
            return
        claims = tokens.verify(self._credentials.key, token, audience=self._audience, now=now)
        self._remember(token, claims.expires)

    def _remember(self, token: str, expires: float) -> None:
        if len(self._known) >= _CACHE_SIZE:
            self._known.clear()
        self._known[token] = expires


_NAME_AND_PORT = re.compile(r"^(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+))(?::\d{1,5})?$")


def _host_of_header(header: str) -> str:
    """The name in a `Host` header, without port and brackets; empty when it is malformed."""
    match = _NAME_AND_PORT.match(header.strip())
    return (match[1] or match[2]) if match else ""


def _host_of_origin(origin: str) -> str:
    """The host name in an `Origin` header; empty when there is none."""
    try:
        parts = urlsplit(origin)
        return (parts.hostname or "") if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
