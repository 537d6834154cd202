"""The tokens of namespaces, for pods that somebody else made."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from kubetorch.controller.cluster.access import Clocks, PodTokens
from kubetorch.controller.tuning import TIMING
from kubetorch.errors import (
    ControllerUnavailableError,
    KubernetesConflictError,
    KubernetesNotFoundError,
    KubernetesUnavailableError,
    UnauthorizedError,
)
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.wire import tokens
from manual_clock import ManualClock

SECRET = b"s" * 32


class Secrets:
    """An API server with the Secrets of namespaces."""

    def __init__(self) -> None:
        self.secrets_of_namespaces: dict[str | None, Object] = {}
        self.is_away = False
        self.clock = ManualClock()
        clocks = Clocks(self.clock.time, self.clock.time)
        self.tokens = PodTokens(cast("Client", self), secret=SECRET, clocks=clocks)

    async def get(self, ref: Ref) -> Object:
        if self.is_away:
            raise KubernetesUnavailableError("no answer")
        if ref.namespace not in self.secrets_of_namespaces:
            raise KubernetesNotFoundError("no such Secret")
        return self.secrets_of_namespaces[ref.namespace]

    async def create(self, manifest: Object) -> Object:
        if manifest["metadata"]["namespace"] in self.secrets_of_namespaces:
            raise KubernetesConflictError("it exists")
        return await self.apply(manifest, force=True)

    async def apply(self, manifest: Object, *, force: bool) -> Object:
        self.secrets_of_namespaces[manifest["metadata"]["namespace"]] = manifest
        return manifest

    def token(self) -> str:
        return base64.b64decode(self.secrets_of_namespaces["team"]["data"]["token"]).decode()

    def sign(self, audience: str, subject: str) -> str:
        claims = tokens.Claims(audience, self.clock.time() + 60, subject)
        return tokens.sign(tokens.workload_key(SECRET, audience), claims)


def run(body: Callable[[Secrets], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await body(Secrets())

    asyncio.run(main())


def test_a_token_is_made_anew_long_before_its_end_and_the_one_before_is_void() -> None:
    async def body(secrets: Secrets) -> None:
        await secrets.tokens.ensure("team")
        first = secrets.token()
        assert await secrets.tokens.check(first) == "team"
        secrets.clock.advance(
            TIMING.namespace_token_seconds - TIMING.namespace_token_renewal_seconds - 1
        )
        await secrets.tokens.ensure("team")
        assert secrets.token() == first
        assert await secrets.tokens.check(first) == "team"
        secrets.clock.advance(1)
        await secrets.tokens.ensure("team")
        assert secrets.token() != first
        with pytest.raises(UnauthorizedError, match="is void"):
            await secrets.tokens.check(first)
        assert await secrets.tokens.check(secrets.token()) == "team"

    run(body)


@pytest.mark.parametrize("data", [{}, {"token": "%"}, {"token": "w7w="}, {"token": "eA=="}, None])
def test_a_secret_that_somebody_spoilt_is_made_anew(data: Any) -> None:
    async def body(secrets: Secrets) -> None:
        secrets.secrets_of_namespaces["team"] = {"data": data}
        await secrets.tokens.ensure("team")
        assert await secrets.tokens.check(secrets.token()) == "team"

    run(body)


@pytest.mark.parametrize(
    ("audience", "subject"),
    [("team/f", "namespace-pods"), ("team/*", "user"), ("team/*", "")],
)
def test_what_else_is_signed_here_opens_nothing(audience: str, subject: str) -> None:
    async def body(secrets: Secrets) -> None:
        token = secrets.sign(audience, subject)
        secrets.secrets_of_namespaces["team"] = {
            "data": {"token": base64.b64encode(token.encode()).decode()}
        }
        with pytest.raises(UnauthorizedError, match="not for the controller"):
            await secrets.tokens.check(token)

    run(body)


def test_a_token_without_its_secret_is_void_and_one_that_cannot_be_looked_at_waits() -> None:
    async def body(secrets: Secrets) -> None:
        await secrets.tokens.ensure("team")
        token = secrets.token()
        secrets.is_away = True
        with pytest.raises(ControllerUnavailableError, match="cannot read the Secret"):
            await secrets.tokens.check(token)
        secrets.is_away = False
        secrets.secrets_of_namespaces.clear()
        with pytest.raises(UnauthorizedError, match="is void"):
            await secrets.tokens.check(token)

    run(body)
