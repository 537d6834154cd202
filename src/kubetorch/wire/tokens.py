"""Tokens that calls to a pod carry: signed, for one workload, checked without asking anybody.

A token is `kt1.<claims>.<signature>`, both parts base64url without padding: the claims are a JSON
object with `aud` (`namespace/name`), `iat` and `exp` (when it was issued and when it ends, seconds
since the epoch), `sub` (who asked for it) and, unless it is for calls alone, `verbs` (what it
opens); the signature is HMAC-SHA256 of `kt1.<claims>` under the workload's own key. That key is
derived from the installation's secret, so a pod, which knows only its own, can neither read nor
make a token for another workload.

The clock that issues a token is the controller's, the one that checks it mostly a pod's. On a
cluster they may differ by `SKEW`. Beyond that a token of the future is refused too: it would last
for longer than was meant, and its clock should be noticed while the difference is small. On one
machine there is one clock: a token without `iat` ends exactly at its `exp`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_plus

from kubetorch.errors import UnauthorizedError
from kubetorch.wire import routes

_PREFIX = "kt1"
#: What prints a token, for whoever has none that is genuine: answers to strangers name no service.
COMMAND = "kt token, with the service's name,"
_HINT = f"{COMMAND} prints a fresh one"
#: Seconds by which the clocks of who issues and who checks a token may differ.
SKEW = 60.0
_CLOCKS = (
    f"the clocks of the controller's node and the pod's may differ by {SKEW:.0f} s: set both by "
    "NTP (timedatectl, on each node, says what it has)"
)

#: What a token may open: calls and apps, shells and commands in the pod, its log.
CALL, EXEC, LOGS = VERBS = ("call", "exec", "logs")


@dataclass(frozen=True)
class Claims:
    """The content of a token; times are seconds since the epoch.

    Attributes:
        audience: The workload, `namespace/name`.
        verbs: What it opens, of `VERBS`.
        issued: 0 where issuer and checker have one clock.
    """

    audience: str
    expires: float
    subject: str = "user"
    verbs: tuple[str, ...] = (CALL,)
    issued: float = 0.0


def audience(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def command(audience: str) -> str:
    """What prints a token for this audience."""
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
    said = {"aud": claims.audience, "exp": claims.expires, "sub": claims.subject}
    if claims.issued:
        said["iat"] = claims.issued
    if claims.verbs != (CALL,):
        said["verbs"] = claims.verbs
    body = json.dumps(said, separators=(",", ":"))
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
    skew = SKEW if claims.issued else 0.0
    if claims.issued > now + skew:
        raise UnauthorizedError(
            f"the token is not valid yet: it was issued {claims.issued - now:.0f} s in the future "
            "of the clock that checks it",
            hint=_CLOCKS,
        )
    if claims.expires + skew <= now:
        raise UnauthorizedError(
            f"the token expired {now - claims.expires:.0f} s ago, by the clock that checks it",
            hint=f"{hint}; if that one has expired too, {_CLOCKS}" if claims.issued else hint,
        )
    return claims


def claimed_audience(token: str) -> str:
    """The workload that a token says it is for, which is not checked: it says with which key."""
    return _claims(token.rpartition(".")[0]).audience


def _claims(signed: str) -> Claims:
    prefix, _, body = signed.partition(".")
    try:
        data = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        if prefix != _PREFIX:
            raise ValueError(prefix)
        verbs = tuple(map(str, data.get("verbs", (CALL,))))
        issued = float(data.get("iat", 0.0))
        claims = Claims(str(data["aud"]), float(data["exp"]), str(data["sub"]), verbs, issued)
        claims.audience.encode()  # JSON may have lone surrogates
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UnauthorizedError("the token cannot be read", hint=_HINT) from None
    return claims


_QUERY = re.compile(rb"(?:^|&)" + routes.APP_TOKEN_QUERY.encode() + rb"=([^&]*)")
_HEADER = routes.APP_TOKEN.lower().encode()


class AppRequest(NamedTuple):
    """A request to an app, without the tokens that are not its business."""

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
    """Find the tokens of a request, and take out those that are not to be passed on.

    An `Authorization` may be the app's own: only `is_ours` says that it has a token.
    """
    passed: list[tuple[bytes, bytes]] = []
    explicit: list[str] = []
    others: list[str] = []
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == _HEADER:
            explicit.append(text)
            if is_passed(text):
                passed.append((name, value))
        elif name == b"authorization":
            scheme, _, token = text.partition(" ")
            is_token = scheme.lower() == "bearer" and is_ours(token.strip())
            if is_token:
                others.append(token.strip())
            if not is_token or is_passed(token.strip()):
                passed.append((name, value))
        elif name == b"cookie":
            pairs = [pair.strip() for pair in text.split(";") if pair.strip()]
            ours = {
                one: one.partition("=")[2] for one in pairs if one.startswith(routes.APP_COOKIE)
            }
            others += ours.values()
            kept = [one for one in pairs if one not in ours or is_passed(ours[one])]
            if kept:
                passed.append((name, "; ".join(kept).encode("latin-1")))
        else:
            passed.append((name, value))
    found = [unquote_plus(one.decode("latin-1")) for one in _QUERY.findall(query)]
    if not all(map(is_passed, found)):
        query = _QUERY.sub(b"", query).lstrip(b"&")
    return AppRequest((*explicit, *found, *others), found[0] if found else None, query, passed)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
