"""Who may reach an app, and what of their request it gets to see. Pure.

A token may come in `Authorization`, in `X-Kubetorch-Token` where the app wants the former for
itself, in a cookie, or in the query, which a browser can be sent to and which is exchanged for the
cookie. The app never sees it: its log, or what it calls, would give it away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import unquote_plus

from kubetorch.lib.proxying import Header
from kubetorch.wire import routes

#: Seconds that a browser keeps the cookie; the token in it may end earlier.
COOKIE_AGE = 12 * 3600

_QUERY = re.compile(rb"(?:^|&)" + routes.APP_TOKEN_QUERY.encode() + rb"=([^&]*)")
_HEADER = routes.APP_TOKEN.lower().encode()


class Passage(NamedTuple):
    """A request to an app.

    Attributes:
        tokens: What may be a token in it, the most explicit first.
        query_token: The one of the query.
        query: The query without it.
        headers: What the app gets to see.
    """

    tokens: tuple[str, ...]
    query_token: str | None
    query: bytes
    headers: list[Header]


def inspect(headers: Iterable[Header], query: bytes, *, is_token: Callable[[str], bool]) -> Passage:
    """Take a request apart.

    Args:
        headers: Its headers, names in lower case.
        query: Its query, undecoded.
        is_token: Whether a text is a token of ours.
    """
    passed: list[Header] = []
    explicit: list[str] = []
    others: list[str] = []
    for name, value in headers:
        if name == _HEADER:
            explicit.append(value.decode("latin-1").strip())
        elif name == b"authorization":
            scheme, _, token = value.decode("latin-1").strip().partition(" ")
            is_ours = scheme.lower() == "bearer" and is_token(token.strip())
            if is_ours:
                others.append(token.strip())
            else:
                passed.append((name, value))
        elif name == b"cookie":
            kept, found = _cookies(value)
            others += found
            if kept:
                passed.append((name, kept))
        else:
            passed.append((name, value))
    match = _QUERY.search(query)
    in_query = unquote_plus(match[1].decode("latin-1")) if match else None
    tokens = (*explicit, *([in_query] if in_query else []), *others)
    return Passage(tokens, in_query, _QUERY.sub(b"", query).lstrip(b"&"), passed)


def _cookies(value: bytes) -> tuple[bytes, list[str]]:
    """A `Cookie` header without our own, which those of other pods are too, and their values."""
    kept, found = [], []
    for pair in value.split(b";"):
        name, _, text = pair.strip().partition(b"=")
        if name.startswith(routes.APP_COOKIE.encode()):
            found.append(text.decode("latin-1"))
        elif pair.strip():
            kept.append(pair.strip())
    return b"; ".join(kept), found


def cookie(name: str, token: str) -> str:
    """The value of a `Set-Cookie` header.

    Args:
        name: What tells the cookies of several apps on one host apart.
        token: The token.
    """
    from http.cookies import CookieError, SimpleCookie  # noqa: PLC0415  # 1 ms, for browsers

    jar: SimpleCookie = SimpleCookie()
    try:
        jar[name] = token
    except CookieError as error:
        raise ValueError(name) from error
    jar[name]["path"] = "/"
    jar[name]["max-age"] = COOKIE_AGE
    jar[name]["httponly"] = True
    jar[name]["samesite"] = "Strict"
    return jar[name].OutputString()


def is_foreign(headers: dict[str, str], method: str) -> bool:
    """Whether a page of another site made the browser send this, other than by a link to it."""
    is_link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return headers.get("sec-fetch-site") == "cross-site" and not is_link
