"""The state of a controller in a cluster, against an API server that keeps objects and fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import replace

from kubetorch.controller.access import Grant, User
from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import WORKLOADS, Content
from kubetorch.controller.cluster.state import KubernetesState
from kubetorch.controller.state import Generation, Summary, WorkloadRecord
from kubetorch.errors import (
    KubernetesForbiddenError,
    KubernetesNotFoundError,
    KubernetesUnavailableError,
    ServiceNotFoundError,
    SpecError,
    VersionMismatchError,
)
from kubetorch.k8s.client import Client
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec, freeze
from kubetorch.specs.workload import WorkloadSpec
from local.fake_apiserver import FakeApiServer
from local.object_server import ObjectServer

TEAM = "apis/kubetorch.com/v1alpha1/kubetorchworkloads/team"
SPEC = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), tree="0" * 64)
RECORD = WorkloadRecord("team", "f", 1, created=1.0, updated=2.0)
KEY = ("team", "f")


class Watcher:
    """What the controller is, for the state."""

    def __init__(self) -> None:
        self.ready = 0
        self.deleted: list[tuple[str, str]] = []

    def summary(self, namespace: str, name: str) -> Summary:
        phase = "Ready" if self.ready == 2 else "Creating"
        return Summary(phase, "Deployment", self.ready, 2, self.ready == 2, "", "", "", 5.0)

    def on_deleted_elsewhere(self, namespace: str, name: str) -> None:
        self.deleted.append((namespace, name))


class World:
    def __init__(self, server: ObjectServer, client: Client) -> None:
        self.server = server
        self.client = client
        self.watcher = Watcher()

    @contextlib.asynccontextmanager
    async def state(self, **options: Any) -> AsyncIterator[KubernetesState]:
        state = KubernetesState(self.client, **options)
        await state.load(timeout=30)
        state.observe(self.watcher)
        try:
            yield state
        finally:
            await state.close()

    @property
    def object(self) -> dict[str, Any]:
        return self.server.objects[TEAM, "f"]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [body for _, path, body in self.server.writes if path.endswith("/events")]

    @property
    def statuses(self) -> list[dict[str, Any]]:
        """Each status that was written."""
        return [body[-1]["value"] for _, path, body in self.server.writes if "/status" in path]


def run(body: Callable[[World], Awaitable[None]], *more_kinds: tuple[str, str, str]) -> None:
    async def main() -> None:
        server = ObjectServer(
            (WORKLOADS.api_version, WORKLOADS.plural, WORKLOADS.kind), *more_kinds
        )
        async with (
            FakeApiServer(server) as listening,
            Client(listening.access(), patience=0.0, variables={}) as client,
        ):
            await body(World(server, client))

    asyncio.run(asyncio.wait_for(main(), 110))


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


async def deploy(
    state: KubernetesState, number: int = 1, spec: WorkloadSpec = SPEC, **fields: Any
) -> WorkloadRecord:
    record = replace(RECORD, generation=number, **fields)
    keep = sorted({number, number - 1} - {0})
    state.put_workload(record, generation=Generation(number, spec), keep=keep)
    await state.flush(*KEY)
    return record


def test_what_was_flushed_is_there_for_the_next_controller() -> None:
    async def body(world: World) -> None:
        newer = changed(SPEC, tree="1" * 64)
        async with world.state() as state:
            await deploy(state)
            await deploy(state, 2, newer, good=1)
            assert state.uid(*KEY) == world.object["metadata"]["uid"]
        async with world.state() as state:
            contents = state.contents()
        (record,) = contents.workloads
        assert (record.generation, record.good, record.updated) == (2, 1, 2.0)
        assert contents.generations[KEY] == (Generation(1, SPEC), Generation(2, newer))

    run(body)


def test_what_is_put_is_seen_at_once_and_a_delete_is_durable_once_it_is_flushed() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            state.put_workload(RECORD, generation=Generation(1, SPEC), keep=[1])
            assert [workload.name for workload in state.contents().workloads] == ["f"]
            await state.flush(*KEY)
            state.delete_workload(*KEY)
            assert state.contents().workloads == ()
            assert world.server.names() == ["f"]
            await state.flush(*KEY)
            assert world.server.names() == []
            # What comes too late does not bring it back.
            state.put_workload(replace(RECORD, epoch=9))
            await state.flush(*KEY)
            await asyncio.sleep(0.05)
            assert world.server.names() == []
            assert world.watcher.deleted == []

    run(body)


def test_many_changes_of_a_status_are_written_once_a_second() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            begun = time.monotonic()
            record = await deploy(state)
            await until(lambda: len(world.statuses) == 1)
            for number in range(200):
                world.watcher.ready = number % 2 + 1
                state.put_workload(replace(record, epoch=number, good=1))
                state.touch(*KEY)
                await asyncio.sleep(0.001)
            assert len(world.statuses) <= 1 + (time.monotonic() - begun)
            await until(lambda: world.object["status"].get("epoch") == 199)
            assert world.object["status"]["ready"] == "2/2"
            assert world.object["status"]["good"] == 1
            assert len(world.statuses) <= 1 + (time.monotonic() - begun)

    run(body)


def test_a_status_is_an_event_also_where_the_watch_is_faster_than_the_answer() -> None:
    async def body(world: World) -> None:
        world.server.answers_late = True
        async with world.state() as state:
            await deploy(state)
            await until(lambda: len(world.events) == 2)
        assert [event["reason"] for event in world.events] == ["Deployed", "Creating"]

    run(body, ("v1", "events", "Event"))


def test_the_last_status_is_written_when_the_controller_stops() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            record = await deploy(state)
            await until(lambda: world.statuses)
            state.put_workload(replace(record, good=1))
            await asyncio.sleep(0.02)
        assert world.object["status"]["good"] == 1

    run(body)


def test_a_deploy_waits_for_an_api_server_that_comes_back() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            world.server.go_away()
            deploying = asyncio.ensure_future(deploy(state))
            await asyncio.sleep(0.5)
            assert not deploying.done()
            world.server.is_away = False
            await deploying
            assert world.server.names() == ["f"]

    run(body)


def test_a_generation_that_cannot_be_stored_is_forgotten() -> None:
    async def body(world: World) -> None:
        async with world.state(patience=1.0) as state:
            world.server.go_away()
            with pytest.raises(KubernetesUnavailableError):
                await deploy(state)
            assert state.contents().workloads == ()
            world.server.is_away = False
            await deploy(state)
            world.server.go_away()
            with pytest.raises(KubernetesUnavailableError):
                await deploy(state, 2, changed(SPEC, tree="1" * 64))
            assert state.contents().generations[KEY] == (Generation(1, SPEC),)
            with pytest.raises(KubernetesUnavailableError):
                state.delete_workload(*KEY)
                await state.flush(*KEY)
            assert state.contents().generations[KEY] == (Generation(1, SPEC),)
            world.server.is_away = False
            await asyncio.sleep(0.5)
            assert world.object["spec"]["generation"] == 1

    run(body)


def test_a_write_whose_answer_was_lost_is_looked_for() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            world.server.loses_answers = True
            deploying = asyncio.ensure_future(deploy(state))
            await until(world.server.names)
            world.server.loses_answers = False
            await deploying
            assert world.server.writes[0][0] == "POST"
            assert sum(method == "POST" for method, _, _ in world.server.writes) == 1

    run(body)


def test_a_write_that_had_an_effect_after_it_was_given_up_is_taken_back() -> None:
    async def body(world: World) -> None:
        async with world.state(patience=0.3) as state:
            world.server.loses_answers = True
            state.put_workload(RECORD, generation=Generation(1, SPEC), keep=[1])
            await until(world.server.names)
            world.server.go_away()
            with pytest.raises(KubernetesUnavailableError):
                await state.flush(*KEY)
            world.server.loses_answers = world.server.is_away = False
            await until(lambda: not world.server.names())

    run(body)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [((403, "Forbidden"), KubernetesForbiddenError), ((404, "NotFound"), KubernetesNotFoundError)],
)
def test_what_is_refused_fails_at_once_and_says_what_to_do(
    refusal: tuple[int, str], error: type[Exception]
) -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            world.server.refusals.append(refusal)
            with pytest.raises(error, match="hint: "):
                await deploy(state)
            await asyncio.sleep(0.3)
            assert (world.server.names(), state.contents().workloads) == ([], ())

    run(body)


def test_what_is_too_large_is_refused_before_it_is_sent() -> None:
    async def body(world: World) -> None:
        compute = ComputeSpec(env_vars=(("A", "x" * 2**20),))
        async with world.state() as state:
            with pytest.raises(SpecError, match="bytes"):
                await deploy(state, 1, changed(SPEC, compute=compute))
            assert state.contents().workloads == ()

    run(body)


def test_a_definition_that_drops_fields_is_said_to_be_too_old() -> None:
    async def body(world: World) -> None:
        keep = world.server.put

        def prune(collection: str, stored: dict[str, Any]) -> dict[str, Any]:
            return keep(collection, {**stored, "spec": {**stored["spec"], "tree": None}})

        world.server.put = prune  # type: ignore[method-assign]
        async with world.state() as state:
            with pytest.raises(VersionMismatchError, match="older than the controller"):
                await deploy(state)
            await until(lambda: not world.server.names())

    run(body)


def test_an_object_that_somebody_deletes_tears_its_workload_down() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            await deploy(state)
            world.server.remove(TEAM, "f")
            await until(lambda: world.watcher.deleted == [KEY])
            assert state.contents().workloads == ()
            state.put_workload(replace(RECORD, epoch=5))
            await asyncio.sleep(0.05)
            assert world.server.names() == []

    run(body)


def test_an_object_that_somebody_deleted_while_nobody_watched_is_noticed() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            await deploy(state)
            world.server.go_away()
            world.server.objects.clear()
            world.server.is_away = False
            with pytest.raises(ServiceNotFoundError, match="deleted meanwhile"):
                await deploy(state, 2)
            assert world.watcher.deleted == [KEY]

    run(body)


def test_an_object_that_somebody_edits_is_put_right() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            await deploy(state)
            edited = {**world.object, "spec": {**world.object["spec"], "tree": "f" * 64}}
            world.server.put(TEAM, edited)
            await until(lambda: world.object["spec"]["tree"] == "0" * 64)
            labelled = {**world.object}
            labelled["metadata"] = {**labelled["metadata"], "labels": {"mine": "1"}}
            labelled["spec"] = {**labelled["spec"], "tree": "f" * 64}
            world.server.put(TEAM, labelled)
            await until(lambda: world.object["spec"]["tree"] == "0" * 64)
            assert world.object["metadata"]["labels"]["mine"] == "1"

    run(body)


def test_an_object_that_cannot_be_read_is_left_alone() -> None:
    async def body(world: World) -> None:
        strange = {"metadata": {"name": "f", "namespace": "team"}, "spec": {"generation": "x"}}
        world.server.put(TEAM, strange)
        async with world.state() as state:
            assert state.contents().workloads == ()
            assert world.server.names() == ["f"]
            await deploy(state)
            assert world.object["spec"]["generation"] == 1

    run(body)


def test_nothing_is_written_by_one_that_does_not_lead() -> None:
    async def body(world: World) -> None:
        leads: list[bool] = []
        async with world.state(may_write=lambda: bool(leads)) as state:
            deploying = asyncio.ensure_future(deploy(state))
            await asyncio.sleep(0.3)
            assert world.server.writes == []
            leads.append(True)
            await deploying
            assert world.server.names() == ["f"]

    run(body)


def test_an_object_that_cannot_be_taken_up_keeps_no_other_from_it() -> None:
    async def body(world: World) -> None:
        async with world.state() as state:
            await deploy(state)
        large = {**world.object["spec"], "compute": {"manifest": "x" * 1_100_000}}
        odd = {**world.object["spec"], "deployedAt": "99999-01-01T00:00:00Z", "generation": 10**30}
        for name, spec in (("a", large), ("b", odd), ("c", {"previous": 7}), ("d", None)):
            metadata = {"name": name, "namespace": "team"}
            world.server.put(TEAM, {**world.object, "metadata": metadata, "spec": spec})
        async with world.state() as state:
            assert [workload.name for workload in state.contents().workloads] == ["f"]
            await deploy(state, 2)
        assert sorted(world.server.names()) == ["a", "b", "c", "d", "f"]

    run(body)


MANIFEST = freeze(
    {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "victim"},
        "spec": {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}},
    },
    parameter="manifest",
)
BEYOND = [
    ComputeSpec(manifest=MANIFEST),
    ComputeSpec(service_template='{"spec":{"replicas":3}}'),
    ComputeSpec(service_account_name="root"),
    ComputeSpec(selector=(("app", "victim"),)),
    ComputeSpec(selector=(("app", "victim"),), cpus="1"),
]


@pytest.mark.parametrize("compute", BEYOND, ids=str)
def test_what_is_written_by_hand_is_taken_up_only_if_it_needs_no_right(
    compute: ComputeSpec,
) -> None:
    async def body(world: World) -> None:
        spec = changed(SPEC, compute=compute)
        grant = Grant(User("ann"))
        async with world.state() as state:
            record = replace(RECORD, generation=1)
            state.put_workload(record, generation=Generation(1, spec, grant), keep=[1])
            await state.flush(*KEY)
            await until(lambda: "grants" in (world.object.get("status") or {}))
        deployed = world.object
        async with world.state() as state:  # as it was deployed
            assert state.contents().generations[KEY] == (Generation(1, spec, grant),)
        by_hand = {name: part for name, part in deployed.items() if name != "status"}
        world.server.put(TEAM, by_hand)
        async with world.state() as state:
            assert state.contents().workloads == ()
            assert state.uid(*KEY) == ""
        assert "status" not in world.object
        # An earlier generation, to which pods could go back, is nobody's either.
        plain = resource.spec(Content(RECORD, (Generation(1, SPEC),)))
        earlier = {**by_hand["spec"], "generation": 0}
        world.server.put(TEAM, {**by_hand, "spec": {**plain, "previous": [earlier]}})
        async with world.state() as state:
            assert state.contents().workloads == ()
        world.server.put(TEAM, {**by_hand, "spec": plain})
        for _ in range(2):  # by then the controller has written a status
            async with world.state() as state:
                assert state.contents().generations[KEY] == (Generation(1, SPEC, Grant()),)
                await until(lambda: "grants" in (world.object.get("status") or {}))

    run(body)


def test_what_was_edited_while_no_controller_looked_is_nobodys() -> None:
    async def body(world: World) -> None:
        grant = Grant(User("ann"), secrets=(("s", "1"),))
        async with world.state() as state:
            record = replace(RECORD, generation=1)
            state.put_workload(record, generation=Generation(1, SPEC, grant), keep=[1])
            await state.flush(*KEY)
            await until(lambda: "grants" in (world.object.get("status") or {}))
        before = world.object
        for compute, is_taken in (({"cpus": "2"}, True), ({"serviceAccountName": "root"}, False)):
            world.server.put(TEAM, {**before, "spec": {**before["spec"], "compute": compute}})
            async with world.state() as state:
                generations = state.contents().generations
                assert [generation.grant for generation in generations.get(KEY, ())] == [
                    Grant()
                ] * is_taken

    run(body)
