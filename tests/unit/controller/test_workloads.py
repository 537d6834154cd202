"""Workloads on a backend that breaks, and with a state that cannot be read."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from kubetorch.controller import database
from kubetorch.controller.access import Grant, PodIdentity, User
from kubetorch.controller.backends.base import (
    Backend,
    EventLine,
    Listener,
    Manifest,
    Phase,
    PodStatus,
    Trouble,
)
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.calls import Calls
from kubetorch.controller.state import (
    CallRecord,
    Contents,
    Generation,
    Observer,
    SqliteState,
    State,
    WorkloadRecord,
)
from kubetorch.controller.tuning import TIMING
from kubetorch.controller.workloads import Workloads
from kubetorch.errors import (
    KubernetesUnavailableError,
    SpecError,
    StartupError,
    StorageFullError,
    UnauthorizedError,
    WorkloadError,
)
from kubetorch.manifests.desired_pods import MountedNames
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.image import CopyStep, ImageSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire import exceptions, messages, tokens, versions
from kubetorch.wire import tuning as wire_tuning
from kubetorch.wire.messages import (
    CallReport,
    Creator,
    Deploy,
    DeployEvent,
    Failed,
    FromController,
    Hello,
)
from manual_clock import ManualClock

ME = Creator("")
SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"))


class BreakingBackend(Backend):
    """A backend that raises what is no error of our own."""

    name = "local"

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.started: list[str] = []
        self.taken_up: list[Sequence[WorkloadSpec]] = []
        self.applied_spec: WorkloadSpec | None = None
        self.looked_at: list[str] = []
        self.go_on = asyncio.Event()

    def watch(self, listener: Listener) -> None:
        pass

    async def start(self, specs: Sequence[Sequence[WorkloadSpec]]) -> None:
        self.started = [spec.name for spec, *_ in specs]
        self.taken_up = list(specs)

    async def apply(self, spec: WorkloadSpec) -> None:
        await self.go_on.wait()
        raise KeyError("spec")

    async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
        return []

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        self.looked_at.append(name)
        if name == "bad":
            raise KeyError("metadata")
        return []

    def trouble(self, namespace: str, name: str) -> Trouble:
        return Trouble()

    def expected(self, namespace: str, name: str) -> int | None:
        return 1

    def event_lines(self, namespace: str, name: str) -> list[EventLine]:
        return []

    def mounted(self, namespace: str, name: str, pod: str) -> MountedNames:
        return MountedNames()

    def mark_ready(self, namespace: str, name: str, pods: Set[str]) -> None:
        pass

    def prepare(self) -> None:
        pass

    def check(self, spec: WorkloadSpec) -> None:
        pass

    def warnings(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        return ()

    def applied(self, spec: WorkloadSpec) -> WorkloadSpec:
        return self.applied_spec or spec

    def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        return ""

    def scaler(self, spec: WorkloadSpec, manifest: Manifest) -> str:
        return ""

    def equipment(self, namespace: str, name: str) -> None:
        return None

    def notes(self, compute: ComputeSpec, manifest: Manifest) -> tuple[str, ...]:
        return ()

    async def log_tail(self, namespace: str, pod: str, count: int) -> list[bytes]:
        return []

    async def close(self, *, pods: bool) -> None:
        pass


class BackendWithPods(BreakingBackend):
    """A backend that finds the pods of an earlier one, and says so after each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names
        self._pods: list[PodStatus] = []
        self._listener: Listener = lambda namespace, name: None
        self.failed = ""
        self.reason = ""

    def trouble(self, namespace: str, name: str) -> Trouble:
        return Trouble(self.reason)

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    async def start(self, specs: Sequence[WorkloadSpec]) -> None:
        for name in self._names:
            self.come(name)

    def come(self, name: str) -> None:
        phase: Phase = "Failed" if name == self.failed else "Running"
        self._pods.append(PodStatus(name, len(self._pods), phase, ""))
        self._listener("ns", "f")

    def go(self, name: str) -> None:
        self._pods = [pod for pod in self._pods if pod.name != name]
        self._listener("ns", "f")

    def pods(self, namespace: str, name: str) -> list[PodStatus]:
        return list(self._pods)


class BackendLackingPods(BackendWithPods):
    """A backend that has only some of the pods that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    async def apply(self, spec: WorkloadSpec) -> None:
        self.requests.append(f"apply {spec.compute.pods}")

    async def release(self, namespace: str, name: str) -> None:
        self.requests.append("release")

    def expected(self, namespace: str, name: str) -> int | None:
        return 2


class UnavailableState:
    """A state that writes behind, and does not get through while it is away."""

    def __init__(self) -> None:
        self.is_away = False
        self.durable_records: dict[tuple[str, str], WorkloadRecord] = {}
        self._next: dict[tuple[str, str], WorkloadRecord] = {}

    def contents(self) -> Contents:
        return Contents()

    def put_workload(
        self,
        workload: WorkloadRecord,
        *,
        generation: Generation | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self._next[workload.namespace, workload.name] = workload

    def delete_workload(self, namespace: str, name: str) -> None:
        self._next.pop((namespace, name), None)

    def reject_workload(self, namespace: str, name: str, reason: str) -> None:
        raise NotImplementedError

    def observe(self, observer: Observer) -> None:
        pass

    def touch(self, namespace: str, name: str) -> None:
        pass

    async def flush(self, namespace: str, name: str) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            self._next = dict(self.durable_records)
            raise KubernetesUnavailableError("the API server did not answer")
        self.durable_records = dict(self._next)


def deploy(deploy_id: str, spec: WorkloadSpec = SPEC) -> Deploy:
    return Deploy(id=deploy_id, spec=spec, protocol=versions.PROTOCOL, version="0")


def of(**compute: Any) -> dict[str, Any]:
    return {"compute": ComputeSpec(**compute)}


def run(
    folder: Path,
    body: Callable[[Workloads, BreakingBackend], Awaitable[Any]],
    durable_state: State | None = None,
    *,
    backend: BreakingBackend | None = None,
) -> None:
    """With the state in a folder."""
    backend = backend or BreakingBackend()

    async def main() -> None:
        clock = backend.clock
        path = folder / "state.sqlite"
        state, blobs = SqliteState(path, database.open_database(path)), BlobStores(folder / "blobs")
        workloads = Workloads(
            backend=backend,
            state=durable_state or state,
            blob_stores=blobs,
            calls=Calls(state, blobs, clock),
            clock=clock,
            secret=b"secret",
        )
        await workloads.start()
        try:
            await body(workloads, backend)
        finally:
            await workloads.close(pods=True)
            state.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_fault_while_a_manifest_is_applied_ends_every_deploy_that_waits(tmp_path: Path) -> None:
    async def collect(workloads: Workloads, deploy_id: str) -> list[DeployEvent]:
        return [event async for event in await workloads.deploy(deploy(deploy_id), ME)]

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        first = asyncio.ensure_future(collect(workloads, "1"))
        repeated = asyncio.ensure_future(collect(workloads, "1"))
        second = asyncio.ensure_future(collect(workloads, "2"))
        await asyncio.sleep(0)
        backend.go_on.set()
        for task in (first, repeated, second):
            last = (await task)[-1]
            assert isinstance(last, Failed)
            error = exceptions.rebuild(exceptions.parse(last.failure))
            assert isinstance(error, StartupError)
            assert "the manifest of f could not be applied: KeyError: 'spec'" in str(error)
        assert [view.status for view in workloads.list()] == ["Failed"]

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("pods", "error"), [(True, "StartupError"), (False, "ControllerUnavailableError")]
)
def test_a_deploy_whose_controller_stops_may_be_sent_to_the_next_one_if_the_pods_stay(
    tmp_path: Path, pods: bool, error: str
) -> None:
    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        events = await workloads.deploy(deploy("d1"), ME)
        await anext(events)
        await workloads.close(pods=pods)
        *_, last = [event async for event in events]
        assert isinstance(last, Failed)
        assert last.failure["error_type"] == error

    run(tmp_path, body)


@pytest.mark.parametrize(
    "changed",
    [
        {"username": "eve\nkubetorch: all is well"},
        {"origin": Origin("1111", "github.com/acme/shop\x1b[2J", "train.py:train")},
        {"origin": Origin("1111", "shop", "train.py:\u202etrain")},
        {"origin": Origin("1" * 5000, "shop", "train.py:train")},
    ],
    ids=["username", "project", "callable", "digest"],
)
def test_names_that_people_see_are_printable_and_have_an_end(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        with pytest.raises(SpecError, match="is no name of a user, a project or a callable"):
            workloads.check(deploy("1", replace(SPEC, **changed)), "ns", "f")

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tree": "0" * 63}, "names no code or arguments"),
        ({"tree": "../" + "0" * 61}, "names no code or arguments"),
        ({"init_args": "A" * 64}, "names no code or arguments"),
        (of(image=ImageSpec(steps=(CopyStep("/a", "a", digest="x"),))), "names no code"),
        (of(replicas=0), "replicas is 0"),
        (of(replicas=10_001), "replicas is 10001"),
        (of(launch_timeout=0), "launch_timeout is 0"),
        (of(autoscaling=AutoscalingSpec(min_schedule=(("noon", 1),))), "'noon', which is no cron"),
        (of(autoscaling=AutoscalingSpec(window="60")), "window must be a valid duration"),
        (of(distribution=DistributionSpec("spmd", workers=10_001)), "10,000 are the most"),
        (of(inactivity_ttl="soon"), "soon"),
        (of(secrets=(SecretRef("s", "s", "env", ("K",)),) * 201), "201 secrets and volumes"),
    ],
)
def test_what_no_client_sends_is_refused_with_the_value(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        with pytest.raises(SpecError, match=message):
            workloads.check(deploy("1", replace(SPEC, **changed)), "ns", "f")

    run(tmp_path, body)


def test_a_call_whose_pod_is_out_of_reach_is_not_said_to_be_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    state.put_workload(WorkloadRecord("ns", "f", 1), generation=Generation(1, SPEC))
    state.close()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        now = backend.clock.time()
        for name in ("f", "gone"):
            pod = PodIdentity("ns", name, f"{name}-0")
            workloads.on_call(pod, CallReport(f"of-{name}", "f", "running", 1.0))
            with pytest.raises(WorkloadError, match=f"pod {name}-0, which runs .* has no session"):
                workloads.cancel_call(f"of-{name}")
            workloads.on_call(pod, CallReport(f"of-{name}", "f", "failed", 1.0, now))
            assert workloads.cancel_call(f"of-{name}").state == "failed"

    run(tmp_path, body)


@pytest.mark.parametrize("name", ["F", "a_b", "-a", "a" * 64, "a/b"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        with pytest.raises(SpecError, match="is no name"):
            workloads.check(deploy("1", replace(SPEC, name=name)), "ns", name)
        with pytest.raises(SpecError, match="is no name"):
            workloads.check(deploy("1", replace(SPEC, namespace=name)), name, "f")
        with pytest.raises(SpecError, match="the spec is of ns/f, the request for ns/g"):
            workloads.check(deploy("1"), "ns", "g")

    run(tmp_path, body)


def test_what_cannot_be_rendered_is_refused_before_it_is_stored(tmp_path: Path) -> None:
    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        fleet = '{"apiVersion":"example.com/v1","kind":"Fleet","spec":{}}'
        spec = replace(SPEC, compute=ComputeSpec(manifest=fleet))
        with pytest.raises(SpecError, match="'Fleet'"):
            workloads.check(deploy("1", spec), "ns", "f")

    run(tmp_path, body)


@pytest.mark.parametrize(
    "statement",
    [
        "delete from generations where name = 'bad'",
        "update generations set spec = '{}' where name = 'bad'",
        'update generations set spec = replace(spec, \'"replicas":2\', \'"replicas":"2"\')'
        " where name = 'bad'",
        "update workloads set generation = 7 where name = 'bad'",
    ],
)
def test_a_workload_that_cannot_be_read_does_not_keep_the_others_from_starting(
    tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    for name in ("bad", "good"):
        spec = replace(SPEC, name=name, compute=ComputeSpec(replicas=2))
        state.put_workload(WorkloadRecord("ns", name, 1), generation=Generation(1, spec))
    state.close()
    connection = sqlite3.connect(path)
    assert connection.execute(statement).rowcount == 1
    connection.commit()
    connection.close()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert backend.started == ["good"]
        assert [view.spec.name for view in workloads.list()] == ["good"]

    run(tmp_path, body)
    run(tmp_path, body)


@pytest.mark.parametrize(
    "compute",
    [
        ComputeSpec(inactivity_ttl="soon"),
        ComputeSpec(replicas=0),
        ComputeSpec(service_template='{"metadata":{"namespace":"other"}}'),
    ],
)
def test_what_a_deploy_may_not_bring_is_not_taken_up_either(
    tmp_path: Path, compute: ComputeSpec
) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    for spec in (replace(SPEC, name="bad", compute=compute), replace(SPEC, name="good")):
        state.put_workload(WorkloadRecord("ns", spec.name, 1), generation=Generation(1, spec))
    state.close()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert backend.started == ["good"]
        with pytest.raises(SpecError):
            workloads.check(deploy("1", replace(SPEC, compute=compute)), "ns", "f")

    run(tmp_path, body)


def test_a_workload_whose_pods_cannot_be_understood_keeps_no_other_from_starting(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    for name in ("bad", "good"):
        spec = replace(SPEC, name=name)
        state.put_workload(WorkloadRecord("ns", name, 1), generation=Generation(1, spec))
    state.close()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert [view.spec.name for view in workloads.list()] == ["bad", "good"]
        assert backend.looked_at == ["bad", "good"]

    run(tmp_path, body)


def test_a_workload_is_shown_as_what_there_is_of_it_where_the_wanted_one_was_refused(
    tmp_path: Path,
) -> None:
    specs = remember_generations(tmp_path)

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert backend.taken_up == [specs[::-1]]
        backend.applied_spec = specs[0]
        (view,) = workloads.list()
        assert (view.generation, view.spec) == (2, specs[0])

    run(tmp_path, body)


def test_a_generation_that_does_not_become_durable_fails_its_deploy_and_changes_nothing(
    tmp_path: Path,
) -> None:
    state = UnavailableState()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        state.is_away = True
        with pytest.raises(KubernetesUnavailableError):
            await workloads.deploy(deploy("1"), ME)
        assert workloads.is_empty
        state.is_away = False
        backend.go_on.set()
        await workloads.deploy(deploy("2"), ME)
        state.is_away = True
        with pytest.raises(KubernetesUnavailableError):
            await workloads.deploy(deploy("3", replace(SPEC, username="somebody")), ME)
        with pytest.raises(KubernetesUnavailableError):
            await workloads.delete("ns", "f")
        (view,) = workloads.list()
        assert (view.generation, view.spec) == (1, SPEC)
        state.is_away = False
        await workloads.delete("ns", "f")
        assert workloads.is_empty
        assert state.durable_records == {}

    run(tmp_path, body, state)


def test_a_workload_is_terminating_while_its_pods_end(tmp_path: Path) -> None:
    class SlowBackend(BackendWithPods):
        async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
            self.go("f-1")
            await self.go_on.wait()
            return []

    backend = SlowBackend("f-1")

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        deleting = asyncio.create_task(workloads.delete("ns", "f"))
        while backend.pods("ns", "f"):
            await asyncio.sleep(0)
        (view,) = workloads.list()
        assert view.status == messages.TERMINATING
        backend.go_on.set()
        await deleting
        assert workloads.is_empty

    remember_generations(tmp_path)
    run(tmp_path, body, backend=backend)


def test_a_workload_is_not_scaled_while_it_is_torn_down(tmp_path: Path) -> None:
    class ScalingBackend(BackendWithPods):
        sizes: tuple[int, ...] = ()

        async def scales(self, spec: WorkloadSpec) -> bool:
            return True

        def scale(self, namespace: str, name: str, size: int, leaving: Sequence[str] = ()) -> None:
            self.sizes = (*self.sizes, size)

        async def delete(self, namespace: str, name: str, *, grace: float) -> list[str]:
            self.go("f-1")
            self.clock.advance(1000.0)
            return []

    backend = ScalingBackend("f-1")

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        await workloads.delete("ns", "f")
        assert backend.sizes == (1,)

    compute = ComputeSpec(autoscaling=AutoscalingSpec(min_scale=0, max_scale=2))
    state = SqliteState(path := tmp_path / "state.sqlite", database.open_database(path))
    record = WorkloadRecord("ns", "f", 1, good=1, scaling='{"size":1}')
    generation = Generation(1, replace(SPEC, compute=compute))
    state.put_workload(record, generation=generation)
    state.close()
    run(tmp_path, body, backend=backend)


def test_a_workload_whose_keys_cannot_be_deleted_is_gone_all_the_same(tmp_path: Path) -> None:
    async def raise_full(namespace: str, name: str) -> int:
        raise StorageFullError(f"no space left for {namespace}/{name}")

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        workloads.on_torn_down = raise_full
        assert (await workloads.delete("ns", "f")).keys == 0
        assert workloads.is_empty

    remember_generations(tmp_path)
    run(tmp_path, body)


def remember_generations(folder: Path) -> list[WorkloadSpec]:
    """Let a controller have ended when the first of two generations was reached."""
    path = folder / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    specs = [replace(SPEC, compute=ComputeSpec(replicas=number)) for number in (1, 2)]
    for number, spec in enumerate(specs, start=1):
        record = WorkloadRecord("ns", "f", number, good=1)
        state.put_workload(record, generation=Generation(number, spec), keep=[1, 2])
    state.close()
    return specs


def remember_calls(folder: Path, *calls: tuple[str, str, str]) -> None:
    """Let a controller have ended while these ran, of a workload and a pod each."""
    path = folder / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    state.put_workload(WorkloadRecord("ns", "f", 1), generation=Generation(1, SPEC))
    for call_id, workload, pod in calls:
        state.put_call(CallRecord(call_id, "ns", workload, pod, "f", "running", started=1.0))
    state.close()


def states(folder: Path) -> dict[str, str]:
    path = folder / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    call_states = {call.id: call.state for call in state.calls()}
    state.close()
    return call_states


def test_calls_whose_pods_are_found_again_go_on(tmp_path: Path) -> None:
    remember_calls(tmp_path, ("a", "f", "f-1"), ("b", "f", "f-2"))

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        backend.clock.advance(2 * TIMING.call_sweep_delay_seconds)

    run(tmp_path, body, backend=BackendWithPods("f-1", "f-2"))
    assert states(tmp_path) == {"a": "running", "b": "running"}


def test_calls_whose_pods_are_not_found_again_fail_once_all_had_their_time(tmp_path: Path) -> None:
    remember_calls(tmp_path, ("a", "f", "f-1"), ("b", "f", "f-2"), ("c", "gone", "gone-1"))

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert set(states(tmp_path).values()) == {"running"}
        backend.clock.advance(TIMING.call_sweep_delay_seconds)

    run(tmp_path, body, backend=BackendWithPods("f-1"))
    assert states(tmp_path) == {"a": "running", "b": "failed", "c": "failed"}


def test_calls_whose_pod_has_failed_meanwhile_fail(tmp_path: Path) -> None:
    remember_calls(tmp_path, ("a", "f", "f-1"), ("b", "f", "f-2"))
    backend = BackendWithPods("f-1", "f-2")

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        backend.clock.advance(TIMING.call_sweep_delay_seconds)
        assert states(tmp_path) == {"a": "running", "b": "failed"}

    backend.failed = "f-2"
    run(tmp_path, body, backend=backend)


def test_calls_of_pods_that_are_not_known_yet_may_go_on(tmp_path: Path) -> None:
    remember_calls(tmp_path, ("a", "f", "f-1"), ("b", "rejected", "r-1"))
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    spec = replace(SPEC, name="rejected", compute=ComputeSpec(replicas=0))
    state.put_workload(WorkloadRecord("ns", "rejected", 1), generation=Generation(1, spec))
    state.close()
    backend = BackendWithPods()
    backend.reason = "the API server answered 429"

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        backend.clock.advance(TIMING.call_sweep_delay_seconds)
        assert states(tmp_path) == {"a": "running", "b": "running"}
        backend.reason = ""
        backend.clock.advance(TIMING.call_sweep_interval_seconds)
        assert states(tmp_path) == {"a": "failed", "b": "running"}

    run(tmp_path, body, backend=backend)


def test_calls_whose_pod_goes_fail_at_once(tmp_path: Path) -> None:
    remember_calls(tmp_path, ("a", "f", "f-1"), ("b", "f", "f-2"))
    backend = BackendWithPods("f-1", "f-2")

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        backend.go("f-2")
        assert states(tmp_path) == {"a": "running", "b": "failed"}

    run(tmp_path, body, backend=backend)


def test_pods_of_what_was_before_are_not_taken_for_a_generation_that_is_not_applied_yet(
    tmp_path: Path,
) -> None:
    specs = remember_generations(tmp_path)
    backend = BackendWithPods("f-1")
    backend.applied_spec = specs[0]

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        session = RecordingSession()
        hello = Hello(
            namespace="ns",
            workload="f",
            pod="f-1",
            incarnation="i",
            url="http://127.0.0.1:1",
            protocol=versions.PROTOCOL,
            version="0",
            generation=1,
        )
        workload = workloads.get("ns", "f")
        workload.connected(hello, session)
        assert not [text for text in session.texts if b"reload" in text]
        backend.applied_spec = specs[1]
        backend.come("f-2")
        assert [text for text in session.texts if b"reload" in text]

    run(tmp_path, body, backend=backend)


class RecordingSession:
    """The session of a pod, which notes what it is told."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def send(self, message: FromController) -> None:
        self.texts.append(messages.encode(message))

    def send_text(self, text: bytes) -> None:
        self.texts.append(text)

    def close(self, reason: str) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("backend", "late"), [("local", 0), ("kubernetes", wire_tuning.TIMING.clock_skew_seconds)]
)
def test_a_token_ends_when_it_says_but_for_the_clocks_of_a_cluster(
    tmp_path: Path, backend: str, late: float
) -> None:
    """Pods on this machine have the clock of their controller."""

    async def body(workloads: Workloads, runs: BreakingBackend) -> None:
        runs.name = backend
        view = workloads.token("ns", "f", ttl=1, subject="ann")
        audience = tokens.audience("ns", "f")
        key = tokens.workload_key(b"secret", audience)
        ends = view.expires + late
        assert tokens.verify(key, view.token, audience=audience, now=ends - 0.1).subject == "ann"
        with pytest.raises(UnauthorizedError, match="expired"):
            tokens.verify(key, view.token, audience=audience, now=ends)

    run(tmp_path, body)


def test_an_exception_in_one_workload_reaches_no_other(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    for name in ("bad", "good"):
        state.put_workload(
            WorkloadRecord("ns", name, 1), generation=Generation(1, replace(SPEC, name=name))
        )
        state.put_call(CallRecord(name, "ns", name, "gone", "f", "running", started=1.0))
    state.close()

    class Listened(BreakingBackend):
        listener: Listener

        def watch(self, listener: Listener) -> None:
            self.listener = listener

        def trouble(self, namespace: str, name: str) -> Trouble:
            if name == "bad":
                raise KeyError("status")
            return Trouble()

        def url(self, spec: WorkloadSpec, manifest: Manifest) -> str:
            if spec.name == "bad":
                raise KeyError("status")
            return ""

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert isinstance(backend, Listened)
        before = len(backend.looked_at)
        for name in ("bad", "good"):
            backend.listener("ns", name)
        assert backend.looked_at[before:] == ["bad", "good"]
        assert [view.spec.name for view in workloads.list()] == ["good"]
        backend.clock.advance(TIMING.call_sweep_delay_seconds)
        assert workloads.cancel_call("good").ended is not None

    run(tmp_path, body, backend=Listened())


def test_an_earlier_generation_that_no_deploy_may_bring_is_never_served(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.sqlite"
    state = SqliteState(path, database.open_database(path))
    wrong = replace(SPEC, compute=ComputeSpec(service_template='{"metadata":{"namespace":"x"}}'))
    record = WorkloadRecord("ns", "f", 1, good=1)
    state.put_workload(record, generation=Generation(1, wrong))
    state.put_workload(replaced(record, generation=2), generation=Generation(2, SPEC), keep=[1, 2])
    state.close()

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        assert backend.taken_up == [[SPEC]]

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("distribution", "pods", "requests"),
    [
        (DistributionSpec(workers=2), ["f-0"], ["apply 2", "release"]),
        (DistributionSpec(workers=2), [], ["apply 2", "release"]),
        (None, ["f-0"], ["apply 2"]),
    ],
)
def test_a_part_of_the_pods_of_distributed_ranks_is_given_back_when_the_launch_is_given_up(
    tmp_path: Path, distribution: DistributionSpec | None, pods: list[str], requests: list[str]
) -> None:
    backend = BackendLackingPods()
    spec = replace(SPEC, compute=ComputeSpec(replicas=2, distribution=distribution))

    async def body(workloads: Workloads, _: BreakingBackend) -> None:
        events = await workloads.deploy(deploy("1", spec), ME)
        await anext(events)
        while not backend.requests:
            await asyncio.sleep(0)
        for name in pods:
            backend.come(name)
        backend.clock.advance(spec.compute.launch_timeout + 1)
        *_, last = [event async for event in events]
        assert isinstance(last, Failed)
        for _ in range(10):
            await asyncio.sleep(0)
        assert backend.requests == requests

    run(tmp_path, body, backend=backend)


@pytest.mark.security
def test_code_that_a_pod_deployed_is_not_code_of_the_pods_creator(tmp_path: Path) -> None:
    class ClusterBackend(BreakingBackend):
        name = "kubernetes"

    ann, pod = Creator("ann", "annie"), User("system:serviceaccount:ns:default")

    async def body(workloads: Workloads, backend: BreakingBackend) -> None:
        for name, user, owner in (("f", User("ann"), ann), ("g", pod, Creator(pod.name))):
            spec = replace(SPEC, name=name)
            events = await workloads.deploy(deploy(name, spec), ann, Grant(user, creator=ann))
            await anext(events)
            workload = workloads.get("ns", name)
            assert workload.creator == ann  # who may replace it
            assert workload.code_of(1) == (spec, owner)

    run(tmp_path, body, backend=ClusterBackend())
