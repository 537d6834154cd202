"""When the object of a workload is written again."""

from __future__ import annotations

from msgspec.structs import replace

from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import Content
from kubetorch.controller.cluster.writing import Create, Read, ReplaceStatus, Wait, Writing
from kubetorch.controller.state import Generation, WorkloadRecord
from kubetorch.errors import KubernetesUnavailableError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.workload import WorkloadSpec

SPEC = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"), tree="0" * 64)
CONTENT = Content(WorkloadRecord("team", "f", 1), (Generation(1, SPEC),))


def step(writing: Writing, now: float) -> object:
    return writing.step(now, lambda namespace, name: None)


def test_who_deploys_does_not_wait_for_what_failed_before() -> None:
    writing = Writing("team", "f")
    writing.seen(None)
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


def test_why_a_generation_was_given_up_is_written_at_once() -> None:
    writing = Writing("team", "f")
    there = {**resource.manifest(CONTENT), "metadata": {"uid": "1", "resourceVersion": "1"}}
    writing.put(CONTENT, is_new=True)
    writing.seen(there)
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
