"""When the object of a workload is written again."""

from __future__ import annotations

from kubetorch.controller.cluster.resource import Content
from kubetorch.controller.cluster.writing import Create, Read, Wait, Writing
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
