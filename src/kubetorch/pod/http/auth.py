"""Decides whose requests an agent answers.

Each request brings a token: one that is signed for this workload, which the agent checks offline
with the workload's own key, or on the local backend the user's own, which it recognises by its
fingerprint and which opens everything. In a cluster the key comes with the first session; until
then all are refused. `Host` and `Origin` are checked too: a page in a browser can be made to send
requests to loopback addresses (DNS rebinding), and must not reach user code even if it has a token.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from kubetorch.errors import CallRefusedError, ConfigError, KubetorchError, UnauthorizedError
from kubetorch.lib import asgi
from kubetorch.lib.http_server import Refusal
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.wire import exceptions, tokens


class Credentials(msgspec.Struct, frozen=True):
    key: bytes = b""
    session: str = ""
    user: str = ""

    @classmethod
    def read(cls, path: str) -> Credentials:
        try:
            fields = json.loads(Path(path).read_bytes())
            return cls(bytes.fromhex(fields["key"]), str(fields["session"]), str(fields["user"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the credentials in {path} cannot be read: {type(error).__name__}"
            ) from None


def refused(error: KubetorchError, pod_name: str) -> Refusal:
    """The answer to a request to upgrade that is refused."""
    failure = exceptions.describe_refusal(error, pod_name=pod_name, started=False)
    return Refusal(failure.status, failure.to_json())


class Guard:
    def __init__(
        self, credentials: Credentials, *, audience: str, host: str, clock: Callable[[], float]
    ) -> None:
        self._key, self._user = credentials.key, credentials.user
        self._audience = audience
        self.token_command = tokens.command(audience)
        #: True if the agent listens on loopback, where pages of other sites could reach it.
        self.is_local = asgi.is_loopback(host)
        self._clock = clock
        # The genuine tokens: when each expires, and the verbs that it allows.
        self._verified_tokens: dict[str, tuple[float, tuple[str, ...]]] = {}

    def set_key(self, key: bytes) -> None:
        if key != self._key:
            self._key = key
            self._verified_tokens.clear()

    def own_token(self) -> str | None:
        """A token for calls of this workload; `None` without a key."""
        if not self._key:
            return None
        now = self._clock()
        claims = tokens.Claims(self._audience, now + TIMING.own_token_seconds, issued=now)
        return tokens.sign(self._key, claims)

    def check_origin(self, host: str | None, origin: str | None) -> None:
        """Refuse what a foreign page sent, when the agent listens on loopback."""
        if self.is_local:
            asgi.check_local(host, origin)

    def check_token(self, authorization: str | None, *verbs: str) -> None:
        scheme, _, token = (authorization or "").strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise UnauthorizedError(
                "this needs a token",
                hint=f"send it as Authorization: Bearer <token>; {self.token_command} prints one",
            )
        opened = self._verify(token)
        if verbs and not any(verb in opened for verb in verbs):
            if self._user and verbs[0] == tokens.EXEC:
                text = "this needs the user's own token; one for calls is not enough"
            else:
                text = f"this token does not open {verbs[0]!r}"
            raise UnauthorizedError(text)

    def is_token(self, token: str) -> bool:
        """True for a valid token for calls."""
        try:
            return tokens.CALL in self._verify(token)
        except UnauthorizedError:
            return False

    def _verify(self, token: str) -> tuple[str, ...]:
        """The verbs that a token allows."""
        now = self._clock()
        expires, verbs = self._verified_tokens.get(token, (0.0, ()))
        if expires > now:
            return verbs
        if self._user and hmac.compare_digest(tokens.fingerprint(token), self._user):
            expires, verbs = now + TIMING.user_token_seconds, tokens.VERBS
        elif self._key:
            claims = tokens.verify(self._key, token, audience=self._audience, now=now)
            expires, verbs = claims.expires, claims.verbs
        else:
            raise CallRefusedError(
                "this pod is not ready: its controller has not said yet whom to let in"
            )
        if len(self._verified_tokens) >= LIMITS.verified_tokens:
            self._verified_tokens.clear()
        self._verified_tokens[token] = expires, verbs
        return verbs
