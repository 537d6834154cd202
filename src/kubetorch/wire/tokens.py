"""Tokens of calls to a pod: signed, for one workload, checked without a request to the controller.

A token is `kt1.<claims>.<signature>`, both parts base64url without padding: the claims are a JSON
object with `aud` (`namespace/name`), `iat` and `exp` (when it was issued and when it ends, seconds
since the epoch), `sub` (the user who asked for it), unless it is for calls alone, `verbs` (the
allowed uses) and, for the data store, `pod` (the pod that asked); the signature is HMAC-SHA256 of
`kt1.<claims>` under the workload's own key. That key is derived from the installation's secret, so
a pod, which knows only its own key, can neither check nor make a token for another workload.

The controller's clock dates a token, and mostly a pod's clock checks it. On a cluster the clocks
may differ by `clock_skew_seconds`. A token from further in the future is refused, too: it would
last too long, and users should notice the wrong clock while the difference is small. On one machine
there is one clock: a token without `iat` ends exactly at its `exp`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import unquote_plus

import msgspec

from kubetorch.errors import UnauthorizedError
from kubetorch.wire import routes
from kubetorch.wire.tuning import TIMING

_PREFIX = "kt1"
#: The command that prints a token; an answer to a stranger names no service.
COMMAND = "kt token, with the service's name,"
_HINT = f"{COMMAND} prints a fresh one"
_CLOCK_HINT = (
    "the clocks of the controller's node and the pod's may differ by "
    f"{TIMING.clock_skew_seconds:.0f} s: set both by NTP "
    "(timedatectl, on each node, says what it has)"
)

#: The uses of a token: calls and apps, shells and commands in the pod, its log.
CALL, EXEC, LOGS = VERBS = ("call", "exec", "logs")
#: A use that only the controller gives tokens for: blobs of keys that the pod publishes.
DATA = "data"
#: Stands for the name of the workload in the audience of tokens for a store of its own; no name of
#: a workload has this character.
STORE = "#store"


class Claims(msgspec.Struct, frozen=True):
    """The content of a token; times are seconds since the epoch.

    Attributes:
        audience: The workload, `namespace/name`.
        verbs: The allowed uses, of `VERBS`, or `DATA`; for the data store, verbs of RBAC.
        issued: 0 if issuer and checker have one clock.
        pod: `namespace/name` of the pod of a service that asks the data store; empty for a user.
    """

    audience: str
    expires: float
    subject: str = "user"
    verbs: tuple[str, ...] = (CALL,)
    issued: float = 0.0
    pod: str = ""


def audience(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def command(audience: str) -> str:
    """The command that prints a token for this audience."""
    return f"kt token {audience.partition('/')[2] or audience}"


def workload_key(secret: bytes, audience: str) -> bytes:
    """The key of one workload, 32 bytes, derived from the installation's secret."""
    return hmac.digest(secret, b"kubetorch workload\0" + audience.encode(), "sha256")


def is_signed(token: str) -> bool:
    """True if a token looks like one of ours."""
    return token.startswith(f"{_PREFIX}.")


def fingerprint(token: str) -> str:
    """The SHA-256 of the user's own token, in hex, by which a pod recognises the token."""
    return hashlib.sha256(token.encode()).hexdigest()


def sign(key: bytes, claims: Claims) -> str:
    content = {"aud": claims.audience, "exp": claims.expires, "sub": claims.subject}
    if claims.issued:
        content["iat"] = claims.issued
    if claims.verbs != (CALL,):
        content["verbs"] = claims.verbs
    if claims.pod:
        content["pod"] = claims.pod
    body = json.dumps(content, separators=(",", ":"))
    signed = f"{_PREFIX}.{_encode(body.encode())}"
    return f"{signed}.{_encode(hmac.digest(key, signed.encode(), 'sha256'))}"


def verify(key: bytes, token: str, *, audience: str, now: float) -> Claims:
    """The claims of a token that is genuine, for this audience, and valid now."""
    signed, _, signature = token.rpartition(".")
    expected = _encode(hmac.digest(key, signed.encode(), "sha256"))
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise UnauthorizedError("the token is not valid for this service", hint=_HINT)
    claims, hint = _claims(signed), f"{command(audience)} prints a fresh one"
    if claims.audience != audience:
        raise UnauthorizedError(f"the token is for another service than {audience}", hint=hint)
    skew = TIMING.clock_skew_seconds if claims.issued else 0.0
    if claims.issued > now + skew:
        raise UnauthorizedError(
            f"the token is not valid yet: it was issued {claims.issued - now:.0f} s in the future "
            "of the clock that checks it",
            hint=_CLOCK_HINT,
        )
    if claims.expires + skew <= now:
        raise UnauthorizedError(
            f"the token expired {now - claims.expires:.0f} s ago, by the clock that checks it",
            hint=f"{hint}; if that one has expired too, {_CLOCK_HINT}" if claims.issued else hint,
        )
    return claims


def claimed_audience(token: str) -> str:
    """The workload that a token names, unchecked: the checker needs it to choose the key."""
    return _claims(token.rpartition(".")[0]).audience


def _claims(signed: str) -> Claims:
    prefix, _, body = signed.partition(".")
    try:
        data = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        if prefix != _PREFIX:
            raise ValueError(prefix)
        verbs = tuple(map(str, data.get("verbs", (CALL,))))
        issued = float(data.get("iat", 0.0))
        claims = Claims(
            str(data["aud"]),
            float(data["exp"]),
            str(data["sub"]),
            verbs,
            issued,
            str(data.get("pod", "")),
        )
        claims.audience.encode()  # JSON may have lone surrogates
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UnauthorizedError("the token cannot be read", hint=_HINT) from None
    return claims


_QUERY_TOKEN = re.compile(rb"(?:^|&)" + routes.APP_TOKEN_QUERY.encode() + rb"=([^&]*)")
_TOKEN_HEADER = routes.APP_TOKEN.lower().encode()


class AppRequest(NamedTuple):
    """A request to an app, without the tokens that the app must not see.

    Attributes:
        tokens: All tokens of the request.
        query_token: The token of its query; `None` without one.
        query, headers: The query and the headers that the app gets.
    """

    tokens: tuple[str, ...]
    query_token: str | None
    query: bytes
    headers: list[tuple[bytes, bytes]]


def inspect(
    headers: Iterable[tuple[bytes, bytes]],
    query: bytes,
    *,
    is_ours: Callable[[str], bool],
    is_passed: Callable[[str], bool] = lambda token: False,
) -> AppRequest:
    """Find the tokens of a request, and remove the tokens that do not go on to the app.

    An `Authorization` header may be the app's own: `is_ours` decides whether it has our token.
    """
    passed_headers: list[tuple[bytes, bytes]] = []
    explicit_tokens: list[str] = []
    other_tokens: list[str] = []
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == _TOKEN_HEADER:
            explicit_tokens.append(text)
            if is_passed(text):
                passed_headers.append((name, value))
        elif name == b"authorization":
            scheme, _, token = text.partition(" ")
            is_token = scheme.lower() == "bearer" and is_ours(token.strip())
            if is_token:
                other_tokens.append(token.strip())
            if not is_token or is_passed(token.strip()):
                passed_headers.append((name, value))
        elif name == b"cookie":
            cookies = [cookie.strip() for cookie in text.split(";") if cookie.strip()]
            our_cookies = {
                cookie: cookie.partition("=")[2]
                for cookie in cookies
                if cookie.startswith(routes.APP_COOKIE)
            }
            other_tokens += our_cookies.values()
            passed_cookies = [
                cookie
                for cookie in cookies
                if cookie not in our_cookies or is_passed(our_cookies[cookie])
            ]
            if passed_cookies:
                passed_headers.append((name, "; ".join(passed_cookies).encode("latin-1")))
        else:
            passed_headers.append((name, value))
    query_tokens = [
        unquote_plus(encoded.decode("latin-1")) for encoded in _QUERY_TOKEN.findall(query)
    ]
    if not all(map(is_passed, query_tokens)):
        query = _QUERY_TOKEN.sub(b"", query).lstrip(b"&")
    return AppRequest(
        (*explicit_tokens, *query_tokens, *other_tokens),
        query_tokens[0] if query_tokens else None,
        query,
        passed_headers,
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
