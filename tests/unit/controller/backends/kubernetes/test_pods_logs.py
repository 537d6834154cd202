"""What a kubelet keeps of a container's output, as lines of a pod's log."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest

from kubetorch.controller.backends.kubernetes import pods
from kubetorch.k8s.client import Client
from kubetorch.k8s.failures import Action
from kubetorch.k8s.resources import PODS, Object, Ref
from kubetorch.k8s.session import Call

NOON = "2026-01-01T12:00:00.123456789Z"
LATER = "2026-01-01T12:00:01.5+00:00"
SECONDS = 1767268800.0


POD: Object = {
    "metadata": {"name": "f-0", "namespace": "team"},
    "spec": {"containers": [{"name": "main"}]},
}


class Kubelet:
    """Has this of every container's output."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.session = self

    def action(self, verb: str, ref: Ref) -> Action:
        return Action(verb, PODS)

    def path(self, ref: Ref) -> str:
        return "/"

    async def fetch(self, call: Call) -> bytes:
        return self._text


def parsed(text: bytes) -> list[tuple[float, str]]:
    lines = asyncio.run(pods.log_tail(cast("Client", Kubelet(text)), POD, 10))
    records = [json.loads(line) for line in lines]
    return [(line["time"], line["text"]) for line in records]


def test_each_line_has_its_moment() -> None:
    text = f"{NOON} one  two\n{NOON} \n{LATER} three\n".encode()
    assert parsed(text) == [(SECONDS, "one  two"), (SECONDS, ""), (SECONDS + 1, "three")]


@pytest.mark.parametrize("written", [" 1%\r 50%\r100%", " 1%\r100%\r", "100%\r"])
def test_of_text_that_is_written_over_the_last_state_is_taken(written: str) -> None:
    text = f"{NOON} {written}\n{LATER} done\r\n".encode()
    assert parsed(text) == [(SECONDS, "100%"), (SECONDS + 1, "done")]


@pytest.mark.parametrize(
    "odd", ["failed to watch file: no such file", "x", "2026-13-01T12:00:00Z text", "2026-01-0"]
)
def test_a_line_without_a_moment_has_that_of_the_one_before(odd: str) -> None:
    assert parsed(f"{NOON} one\n{odd}".encode()) == [(SECONDS, "one"), (SECONDS, odd)]
    assert parsed(odd.encode()) == [(0.0, odd)]


def test_text_with_other_line_ends_than_the_kubelets_is_one_line() -> None:
    text = f"{NOON} a\x0bb\u2028c\x85d\n".encode()
    assert parsed(text) == [(SECONDS, "a\x0bb\u2028c\x85d")]
    assert parsed(NOON.encode() + b" \xff\n") == [(SECONDS, "\ufffd")]
