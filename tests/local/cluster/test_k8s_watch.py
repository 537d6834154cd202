"""Informers against a scripted API server: cuts, forgotten versions, servers that come and go."""

import asyncio
import contextlib
import time

import pytest

from kubetorch import errors
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.resources import PODS, Selection
from local.fake_apiserver import FakeApiServer, failure, listing, pod

TEAM = Selection(PODS, "team", labels="app=web")


def event(kind, item):
    return {"type": kind, "object": item}


def bookmark(version):
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


class Script:
    """Answers lists and watches with what a test gives; each watch has its own turn."""

    def __init__(self, lists, *watches):
        self.lists = list(lists)
        self.watches = list(watches)
        self.requests_seen = []

    async def __call__(self, exchange):
        query = exchange.request.query
        if "watch" not in query:
            self.requests_seen.append("list")
            listed = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
            exchange.answer(200, listed) if isinstance(listed, dict) else await listed(exchange)
            return
        assert query["allowWatchBookmarks"] == "true"
        assert query["labelSelector"] == "app=web"
        self.requests_seen.append(int(query["resourceVersion"]))
        if self.watches:
            await self.watches.pop(0)(exchange)
        else:
            await exchange.say()
            await exchange.hang()


@contextlib.asynccontextmanager
async def watching(script, on_change=None):
    async with (
        FakeApiServer(script) as server,
        Client(server.access(), variables={}) as client,
        Informer(client, TEAM, on_change) as informer,
    ):
        yield informer, server


class ChangeLog:
    """Remembers what changed."""

    def __init__(self):
        self.changes = []

    def __call__(self, change):
        self.changes.append((change.kind, change.object["metadata"]["name"]))


def has(*names):
    return lambda objects: {name for _, name in objects} == set(names)


def test_what_is_listed_and_what_changes_is_told_in_order():
    async def watch(exchange):
        await exchange.say(
            event("ADDED", pod("b", 6)),
            event("MODIFIED", pod("a", 7)),
            event("DELETED", pod("b", 8)),
        )
        await exchange.hang()

    async def scenario():
        change_log = ChangeLog()
        async with watching(Script([listing(5, pod("a", 3))], watch), change_log) as (informer, _):
            await informer.listed(timeout=30)
            assert informer.get("a", "team") is not None
            await informer.until(lambda _: len(change_log.changes) == 4, timeout=30)
        assert change_log.changes == [
            ("added", "a"),
            ("added", "b"),
            ("modified", "a"),
            ("deleted", "b"),
        ]
        assert informer.get("a", "team")["metadata"]["resourceVersion"] == "7"

    asyncio.run(scenario())


def test_a_watch_that_is_cut_in_mid_line_goes_on_at_the_last_bookmark():
    async def watch(exchange):
        await exchange.say(event("ADDED", pod("b", 6)), bookmark(40), b'{"type": "ADD')
        exchange.cut()

    async def next_watch(exchange):
        await exchange.say(event("ADDED", pod("c", 41)))
        await exchange.hang()

    async def scenario():
        change_log = ChangeLog()
        script = Script([listing(5)], watch, next_watch)
        async with watching(script, change_log) as (informer, _):
            await informer.until(has("b", "c"), timeout=30)
            assert informer.error is None
        assert script.requests_seen == ["list", 5, 40]
        assert change_log.changes == [("added", "b"), ("added", "c")]

    asyncio.run(scenario())


@pytest.mark.parametrize("as_event", [True, False])
def test_a_forgotten_version_is_listed_anew_and_deletions_are_told(as_event):
    async def watch(exchange):
        if as_event:
            await exchange.say(bookmark(6), event("ERROR", failure(410, "Expired")))
            exchange.end()
        else:
            exchange.refuse(410, "Expired")

    async def scenario():
        change_log = ChangeLog()
        script = Script([listing(5, pod("a", 1), pod("b", 2)), listing(90, pod("b", 2))], watch)
        async with watching(script, change_log) as (informer, _):
            await informer.until(has("b"), timeout=30)
            await informer.until(lambda _: len(script.requests_seen) == 4, timeout=30)
        assert script.requests_seen == ["list", 5, "list", 90]
        assert change_log.changes == [("added", "a"), ("added", "b"), ("deleted", "a")]

    asyncio.run(scenario())


def test_a_server_that_goes_and_comes_back_is_listened_to_again():
    async def next_watch(exchange):
        await exchange.say(event("ADDED", pod("late", 9)))
        await exchange.hang()

    async def hang(exchange):
        await exchange.say()
        await exchange.hang()

    async def scenario():
        script = Script([listing(5)], hang, next_watch)
        async with watching(script) as (informer, server):
            await informer.listed(timeout=30)
            while len(script.requests_seen) < 2:
                await asyncio.sleep(0.01)
            await server.stop()
            while informer.error is None:
                await asyncio.sleep(0.01)
            assert isinstance(informer.error, errors.KubernetesUnavailableError)
            await server.start()
            await informer.until(has("late"), timeout=30)
            assert informer.error is None
            assert script.requests_seen == ["list", 5, 5]

    asyncio.run(scenario())


def test_a_missing_permission_is_an_error_at_once():
    async def forbidden(exchange):
        exchange.refuse(403, "Forbidden", "User cannot list")

    async def scenario():
        async with watching(Script([forbidden])) as (informer, _):
            begun = time.monotonic()
            with pytest.raises(errors.KubernetesForbiddenError, match="cannot list pods"):
                await informer.listed(timeout=60)
            assert time.monotonic() - begun < 30

    asyncio.run(scenario())


def test_a_server_that_does_not_list_is_an_error_when_the_time_is_over():
    async def hang(exchange):
        await exchange.hang()

    async def scenario():
        async with watching(Script([hang])) as (informer, _):
            with pytest.raises(errors.KubernetesUnavailableError, match="not listed within"):
                await informer.listed(timeout=0.3)

    asyncio.run(scenario())


def test_garbage_in_a_watch_is_an_error_and_the_watch_goes_on():
    async def watch(exchange):
        await exchange.say(event("ADDED", pod("a", 6)), b"<html>\n")
        exchange.end()

    async def next_watch(exchange):
        await exchange.say(event("ADDED", pod("b", 7)))
        await exchange.hang()

    async def scenario():
        script = Script([listing(5)], watch, next_watch)
        async with watching(script) as (informer, _):
            await informer.until(has("a", "b"), timeout=30)
        assert script.requests_seen == ["list", 5, 6]

    asyncio.run(scenario())


def test_a_watch_that_the_server_forgets_to_end_is_given_up():
    async def scenario():
        script = Script([listing(5)])
        async with FakeApiServer(script) as server:
            access = server.access()
            async with Client(access, timeout=1.5, variables={}) as client:
                events = client.watch(TEAM, "5", seconds=0.2)
                with pytest.raises(errors.KubernetesUnavailableError, match="no more of the"):
                    await asyncio.wait_for(anext(events), 60)

    asyncio.run(scenario())


def test_a_callback_that_fails_does_not_stop_the_watch(caplog):
    def fail(change):
        raise RuntimeError("the owner's bug")

    async def watch(exchange):
        await exchange.say(event("ADDED", pod("b", 6)))
        await exchange.hang()

    async def scenario():
        async with watching(Script([listing(5, pod("a", 1))], watch), fail) as (informer, _):
            await informer.until(has("a", "b"), timeout=30)

    asyncio.run(scenario())
    assert "the owner's bug" in caplog.text


def test_an_informer_that_is_closed_leaves_the_server():
    async def scenario():
        client_left = asyncio.Event()

        async def watch(exchange):
            await exchange.say()
            await exchange.hang()
            client_left.set()

        async with watching(Script([listing(5)], watch)) as (informer, server):
            await informer.listed(timeout=30)
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            await informer.close()
            await asyncio.wait_for(client_left.wait(), 30)

    asyncio.run(scenario())
