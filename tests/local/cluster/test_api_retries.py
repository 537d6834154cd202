"""What the API server does not take for the moment is asked of it again, until it is time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import clock_loop
from kubetorch.controller.backends.kubernetes.apply import Applier, ApplyRetry
from kubetorch.errors import KubernetesRequestError, KubetorchError, ServiceTimeoutError

KEY = ("team", "train")
MANIFEST: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "train", "namespace": "team"},
}


def refusal(status: int) -> KubernetesRequestError:
    error = KubernetesRequestError(f"the API server answered {status}")
    error.status_code = status
    return error


class ScriptedServer:
    """What an API server answers to each request; each of `request_times` is when it came."""

    def __init__(self, *answers: KubetorchError | str) -> None:
        self._answers = list(answers)
        self.request_times: list[float] = []
        self.reported_reasons: list[str] = []

    def retry(self) -> ApplyRetry:
        unused = cast("Applier", None)
        now = asyncio.get_running_loop().time
        retry = ApplyRetry(
            unused, now=now, on_wait=lambda _: self.reported_reasons.append(retry.reasons[KEY])
        )
        return retry

    async def __call__(self) -> str:
        self.request_times.append(asyncio.get_running_loop().time())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, str):
            return answer
        raise answer


def test_the_server_is_asked_again_ever_more_seldom_until_it_takes_it() -> None:
    server = ScriptedServer(*[refusal(429)] * 6, "taken")

    async def main() -> None:
        assert await server.retry().until_accepted(KEY, MANIFEST, server) == "taken"

    clock_loop.run(main())
    assert [
        request_time - server.request_times[0] for request_time in server.request_times[1:]
    ] == [0.5, 1.5, 3.5, 7.5, 12.5, 17.5]
    assert server.reported_reasons == ["the API server answered 429"] * 6


def test_whoever_waits_is_told_why_when_the_time_is_over() -> None:
    server = ScriptedServer(refusal(429))

    async def main() -> None:
        retry = server.retry()
        with pytest.raises(ServiceTimeoutError, match="within 60 s: the API server answered 429"):
            async with retry.within(KEY, 60):
                await retry.until_accepted(KEY, MANIFEST, server)
        assert retry.reasons == {}

    clock_loop.run(main())
    assert len(server.request_times) == 15


def test_what_it_will_never_take_is_asked_once() -> None:
    server = ScriptedServer(refusal(400))

    async def main() -> None:
        with pytest.raises(KubernetesRequestError, match="400"):
            await server.retry().until_accepted(KEY, MANIFEST, server)

    clock_loop.run(main())
    assert len(server.request_times) == 1
