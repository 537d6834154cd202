"""What a token says of itself, what everywhere means, and which command grants a right."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any, cast

import pytest

from kubetorch.controller.access import Need, User
from kubetorch.controller.cluster.reviews import Claims, Reviews, claims, grant
from kubetorch.k8s.client import Client


def jwt(payload: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(payload).encode()).rstrip(b"=").decode()
    return f"eyJ.{body}.c2ln"


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (jwt({"aud": ["kubetorch"], "exp": 12}), Claims(("kubetorch",), 12.0)),
        (jwt({"aud": "api"}), Claims(("api",), None)),
        (jwt({"aud": [1, None, "x"], "exp": "soon"}), Claims(("x",), None)),
        (jwt({"exp": 1e300}), Claims((), None)),
        (jwt([1]), Claims()),
        ("opaque", Claims()),
        ("a.b.c", Claims()),
        ("..", Claims()),
        ("a.\u00fc.c", Claims()),
        (f"a.{base64.urlsafe_b64encode(b'[' * 100_000).decode()}.c", Claims()),
    ],
)
def test_what_a_token_says_of_itself_is_read_whatever_it_is(token: str, expected: Claims) -> None:
    assert claims(token) == expected


@pytest.mark.parametrize(
    ("user", "need", "command"),
    [
        (
            "ann",
            Need("create", "team"),
            "kubectl create rolebinding NAME-kubetorch-edit --clusterrole=kubetorch-edit "
            "--user=ann -n team",
        ),
        (
            "system:serviceaccount:team:bot",
            Need("list", ""),
            "kubectl create clusterrolebinding bot-kubetorch-view --clusterrole=kubetorch-view "
            "--serviceaccount=team:bot",
        ),
    ],
)
def test_a_refusal_has_the_command_that_grants_the_right(
    user: str, need: Need, command: str
) -> None:
    assert grant(User(user), need) == command


class Server:
    """Allows everything in some namespaces; the empty one is all of them."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        where = manifest["spec"]["resourceAttributes"].get("namespace", "")
        return {"status": {"allowed": where in self.allowed, "reason": f"of {where}"}}


@pytest.mark.parametrize(
    ("allowed", "watched", "expected"),
    [
        (("a", "b"), ("a", "b"), True),
        (("a",), ("a", "b"), False),
        (("a", "b"), (), False),
        (("",), (), True),
    ],
)
def test_everywhere_is_where_the_controller_works(
    allowed: tuple[str, ...], watched: tuple[str, ...], expected: bool
) -> None:
    reviews = Reviews(cast("Client", Server(*allowed)), watched)
    verdict = asyncio.run(reviews.verdict(User("ann"), Need("list", "")))
    assert verdict.is_allowed is expected
    if watched and not expected:
        assert verdict.reason == "of b"
