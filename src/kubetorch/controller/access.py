"""Who sends a request, and whether it may.

Two kinds of tokens are known here: the user's own, which may do everything, and the session token
of a pod, which may do what pods must: keep their session, fetch and store blobs. Tokens for calls
(`kt token`) are for agents and open nothing here.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

import msgspec

from kubetorch.errors import ForeignOriginError, UnauthorizedError
from kubetorch.lib import origins
from kubetorch.wire import tokens

_POD = "pod:"
_HINT = "send the user's token as Authorization: Bearer <token>"


class User(msgspec.Struct, frozen=True):
    """The user, who may do everything."""


class PodIdentity(msgspec.Struct, frozen=True):
    """A pod of a workload."""

    namespace: str
    workload: str
    pod: str


Principal = User | PodIdentity


class Access:
    """Checks requests.

    Args:
        user: Fingerprint of the user's token.
        secret: Secret of the installation.
        clock: Seconds since the epoch.
        is_known: Whether there is such a pod; the token of one that is gone opens nothing.
    """

    def __init__(
        self,
        *,
        user: str,
        secret: bytes,
        clock: Callable[[], float],
        is_known: Callable[[PodIdentity], bool],
    ) -> None:
        self._user = user
        self._secret = secret
        self._clock = clock
        self._is_known = is_known

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what the page of another site made a browser send.

        Raises:
            ForeignOriginError: It did.
        """
        if not origins.is_local_host(headers.get("host")):
            host = headers.get("host")
            raise ForeignOriginError(f"the Host header {host!r} is not one of this machine")
        if not origins.is_local_origin(headers.get("origin")):
            raise ForeignOriginError(f"requests of pages from {headers['origin']!r} are refused")

    def identify(self, headers: Mapping[str, str]) -> Principal:
        """Who sends a request.

        Raises:
            UnauthorizedError: Nobody that is known. The message never repeats the token.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise UnauthorizedError("this needs a token", hint=_HINT)
        if hmac.compare_digest(tokens.fingerprint(token), self._user):
            return User()
        return self._pod(token)

    def _pod(self, token: str) -> PodIdentity:
        audience = tokens.claimed_audience(token)
        key = tokens.workload_key(self._secret, audience)
        claims = tokens.verify(key, token, audience=audience, now=self._clock())
        namespace, _, workload = audience.partition("/")
        pod = PodIdentity(namespace, workload, claims.subject.removeprefix(_POD))
        if not claims.subject.startswith(_POD) or not self._is_known(pod):
            raise UnauthorizedError("this token is not for the controller", hint=_HINT)
        return pod
