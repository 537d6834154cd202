"""Who hears of a spawned call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kubetorch.controller import database
from kubetorch.controller.access import Need
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls
from kubetorch.controller.routes.calls import CallRoutes
from kubetorch.controller.state import SqliteState
from kubetorch.errors import ResultExpiredError
from kubetorch.wire.messages import CallReport
from manual_clock import ManualClock


class Asking:
    """Somebody with some rights who asks, and what was answered."""

    def __init__(self, *rights: str) -> None:
        self._rights = rights
        self.needed: list[Need] = []
        self.answers: list[Any] = []
        self.asker = self

    async def may(self, need: Need) -> bool:
        self.needed.append(need)
        return need.kind in self._rights

    async def respond_message(self, message: object) -> None:
        self.answers.append(message)


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[CallRoutes]:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    stores = BlobStores(tmp_path / "blobs")
    calls = Calls(state, stores, ManualClock(), first_report_timeout=0.0)
    calls.report("ns", "w", "w-0", CallReport("c", "f", "running", 1.0))
    workloads = SimpleNamespace(cancel_call=lambda call_id: f"cancelled {call_id}")
    yield CallRoutes(calls, cast("Any", workloads), stores)
    state.close()


def ask(routes: CallRoutes, action: str, call_id: str, *rights: str) -> Asking:
    asking = Asking(*rights)
    asyncio.run(getattr(routes, action)(asking, call_id=call_id))
    return asking


KIND = "kubetorchworkloads"


def test_who_may_see_the_workload_may_see_its_calls_and_not_touch_them(routes: CallRoutes) -> None:
    asking = ask(routes, "get", "c", KIND)
    assert [call.id for call in asking.answers] == ["c"]
    assert [(need.verb, need.namespace, need.name) for need in asking.needed] == [
        ("get", "ns", "w")
    ]
    for action in ("cancel", "result", "record", "arguments"):
        with pytest.raises(ResultExpiredError, match="no call has the id c"):
            ask(routes, action, "c", KIND)
    assert ask(routes, "cancel", "c", f"{KIND}/call").answers == ["cancelled c"]


@pytest.mark.security
@pytest.mark.parametrize("action", ["get", "cancel", "result", "record", "arguments"])
def test_a_call_of_others_is_as_unknown_as_one_that_never_was(
    routes: CallRoutes, action: str
) -> None:
    messages = []
    for call_id, rights in (("c", ()), ("d", (KIND, f"{KIND}/call"))):
        with pytest.raises(ResultExpiredError) as caught:
            ask(routes, action, call_id, *rights)
        messages.append(str(caught.value).replace(f"id {call_id}", "id"))
    assert messages[0] == messages[1]
