"""When the object of a workload is written again."""

from __future__ import annotations

from msgspec.structs import replace

from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import Content
from kubetorch.controller.cluster.state import Create, PendingWrite, Read, ReplaceStatus, Wait
from kubetorch.controller.state import Generation, WorkloadRecord
from kubetorch.errors import KubernetesUnavailableError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec

SPEC = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), tree="0" * 64)
CONTENT = Content(WorkloadRecord("team", "f", 1), (Generation(1, SPEC),))


def step(writing: PendingWrite, now: float) -> object:
    return writing.step(now, lambda namespace, name: None)


def test_who_deploys_does_not_wait_for_what_failed_before() -> None:
    writing = PendingWrite("team", "f")
    writing.observe(None)
    writing.put(CONTENT, is_new=True)
    begun = step(writing, 100.0)
    assert isinstance(begun, Create)
    for _ in range(8):
        writing.failed(begun, KubernetesUnavailableError("away"), 100.0)
    assert isinstance(step(writing, 100.0), Wait)
    writing.put(CONTENT, is_new=False)
    assert isinstance(step(writing, 100.0), Wait)
    writing.put(CONTENT, is_new=True)
    assert isinstance(step(writing, 100.0), Read)


def test_a_world_of_ranks_is_written_at_once_before_pods_are_told_of_it() -> None:
    writing = PendingWrite("team", "f")
    stored_object = {**resource.manifest(CONTENT), "metadata": {"uid": "1", "resourceVersion": "1"}}
    writing.put(CONTENT, is_new=True)
    writing.observe(stored_object)
    first = step(writing, 100.0)
    assert isinstance(first, ReplaceStatus)
    status = first.patch[-1]["value"]
    writing.written(first, {**stored_object, "status": status}, 100.0)
    assert writing.has_worlds
    formed = Content(replace(CONTENT.record, worlds="one"), CONTENT.generations)
    writing.put(formed, is_new=False)
    assert not writing.has_worlds
    assert isinstance(step(writing, 100.1), Wait)
    writing.write_worlds_now()
    written = step(writing, 100.1)
    assert isinstance(written, ReplaceStatus)
    assert written.patch[-1]["value"]["worlds"] == "one"
    writing.written(written, {**stored_object, "status": {**status, "worlds": "one"}}, 100.1)
    assert writing.has_worlds


def test_why_a_generation_was_given_up_is_written_at_once() -> None:
    writing = PendingWrite("team", "f")
    stored_object = {**resource.manifest(CONTENT), "metadata": {"uid": "1", "resourceVersion": "1"}}
    writing.put(CONTENT, is_new=True)
    writing.observe(stored_object)
    assert isinstance(step(writing, 100.0), ReplaceStatus)
    writing.put(Content(replace(CONTENT.record, epoch=1), CONTENT.generations), is_new=False)
    assert isinstance(step(writing, 100.1), Wait)
    given_up = Content(replace(CONTENT.record, failure='{"message": "no"}'), CONTENT.generations)
    writing.put(given_up, is_new=False)
    written = step(writing, 100.1)
    assert isinstance(written, ReplaceStatus)
    assert '"failure": {"message": "no"}' in str(written.patch).replace("'", '"')
    writing.put(given_up, is_new=False)
    assert isinstance(step(writing, 100.2), Wait)
