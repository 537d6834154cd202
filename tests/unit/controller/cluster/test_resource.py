"""Workloads as objects."""

from __future__ import annotations

import json
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import replace

from kubetorch.controller.access import Grant, User
from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import Content
from kubetorch.controller.state import Generation, Summary, WorkloadRecord
from kubetorch.errors import ProtocolError, SpecError
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.workload import Origin, WorkloadSpec
from kubetorch.wire.messages import Creator

SPEC = WorkloadSpec("ns", "f", CallableRef("fn", "f", "m", "f"), tree="0" * 64, username="ann")
OLD = changed(SPEC, tree="1" * 64)
RECORD = WorkloadRecord("ns", "f", 2, good=1, epoch=7, created=5.0, updated=6.25, active=7.5)
CONTENT = Content(RECORD, (Generation(1, OLD), Generation(2, SPEC)))
SUMMARY = Summary("Ready", "Deployment", 2, 3, True, "", "", "5m", 10.0)


def stored(content: Content, summary: Summary | None = SUMMARY) -> dict[str, Any]:
    """The object, as a server gives it back."""
    manifest = resource.manifest(content) | {"status": resource.status(content, summary, {})}
    manifest["metadata"] |= {"uid": "1", "creationTimestamp": "1970-01-01T00:00:05Z"}
    answer: dict[str, Any] = json.loads(json.dumps(manifest, sort_keys=True))
    return answer


def test_a_workload_comes_back_as_it_was() -> None:
    assert resource.read(stored(CONTENT)) == CONTENT


def test_whose_a_workload_is_comes_back_too_and_of_an_edited_one_nobody() -> None:
    spec = changed(SPEC, origin=Origin("1234", "github.com/acme/shop", "train.py:f"))
    grant = Grant(User("sa"), secrets=(("s", "1"),), creator=Creator("ann", "annie"))
    content = Content(RECORD, (Generation(1, OLD), Generation(2, spec, grant)))
    stored_object = stored(content)
    assert resource.read(stored_object).generations[1] == Generation(2, spec, grant)
    stored_object["spec"]["username"] = "mallory"
    assert resource.read(stored_object).generations[1].grant == Grant()


def test_a_failure_comes_back_without_what_it_does_not_say() -> None:
    record = replace(RECORD, failure=json.dumps({"error_type": "E", "message": "no", "rank": None}))
    read_content = resource.read(stored(replace(CONTENT, record=record)))
    assert json.loads(read_content.record.failure) == {"error_type": "E", "message": "no"}


def test_a_failure_that_is_long_is_cut() -> None:
    text = "x" * 1_000_000
    record = replace(RECORD, failure=json.dumps({"message": text, "state": {"a": [text]}}))
    assert len(json.dumps(stored(replace(CONTENT, record=record))["status"])) < 70_000


def test_a_status_of_another_generation_is_not_believed() -> None:
    failed = replace(RECORD, failure='{"message":"no"}')
    stored_object = stored(replace(CONTENT, record=failed))
    stored_object["spec"]["generation"] = 3
    read = resource.read(stored_object).record
    assert (read.generation, read.failure, read.good) == (3, "", 1)


def test_a_good_generation_that_is_not_there_is_none() -> None:
    stored_object = stored(CONTENT)
    del stored_object["spec"]["previous"]
    assert resource.read(stored_object).record.good == 0


def test_people_see_what_is_wanted_and_what_became_of_it() -> None:
    stored_object = stored(CONTENT)
    assert stored_object["spec"]["callable"]["module"] == "m"
    assert stored_object["spec"]["previous"][0]["tree"] == "1" * 64
    assert stored_object["status"]["ready"] == "2/3"
    assert stored_object["metadata"]["labels"]["kubetorch.com/username"] == "ann"
    (condition,) = stored_object["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "Ready",
        "True",
        "Ready",
    )


def test_the_time_of_a_transition_stays_until_the_next_one() -> None:
    before = resource.status(CONTENT, SUMMARY, {})
    later = replace(SUMMARY, time=20.0)
    assert resource.status(CONTENT, later, before)["conditions"] == before["conditions"]
    failed = resource.status(CONTENT, replace(later, is_ready=False, phase="No pods"), before)
    (condition,) = failed["conditions"]
    assert condition["lastTransitionTime"] == "1970-01-01T00:00:20.000000Z"
    assert condition["reason"] == "Nopods"


def test_what_etcd_cannot_take_is_refused_with_its_size() -> None:
    spec = changed(SPEC, compute=ComputeSpec(env_vars=(("A", "x" * 1024 * 1024),)))
    with pytest.raises(SpecError, match=r"f has 1,04\d,\d\d\d bytes"):
        resource.spec(Content(replace(RECORD, generation=3), (Generation(3, spec),)))


@pytest.mark.parametrize(
    "invalid_object",
    [
        {"metadata": {"name": "f", "namespace": "ns"}},
        {"metadata": {"name": "f", "namespace": "ns"}, "spec": {}},
        {"metadata": {"name": "f", "namespace": "ns"}, "spec": {"generation": "x"}},
        {"metadata": {"name": "f", "namespace": "ns"}, "spec": {"generation": 1, "previous": [1]}},
    ],
)
def test_what_is_no_workload_is_refused(invalid_object: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        resource.read(invalid_object)


def test_what_becomes_of_a_workload_is_an_event_of_it() -> None:
    deployed_event = resource.event(None, stored(CONTENT, None), 10.0)
    assert deployed_event is not None
    assert (deployed_event["reason"], deployed_event["message"], deployed_event["type"]) == (
        "Deployed",
        "generation 2",
        "Normal",
    )
    regarding = deployed_event["involvedObject"]
    assert (regarding["kind"], regarding["name"], regarding["uid"]) == (
        *("KubetorchWorkload", "f", "1"),
    )
    summary = Summary("No pods", "Job", 0, 2, False, "", "the quota is full", "", 11.0)
    waits = resource.event(stored(CONTENT, None), stored(CONTENT, summary), 11.0)
    assert waits is not None
    assert (waits["reason"], waits["type"]) == ("NoPods", "Normal")
    assert waits["message"] == "No pods: 0/2 pods serve generation 2: the quota is full"
    failed = replace(summary, phase="Failed", reason="QuotaExceededError", message="x" * 5000)
    doomed = resource.event(stored(CONTENT, summary), stored(CONTENT, failed), 12.0)
    assert doomed is not None
    assert (doomed["reason"], doomed["type"]) == ("QuotaExceededError", "Warning")
    assert len(doomed["message"]) == 1024
    assert stored(CONTENT, failed)["status"]["reason"] == "QuotaExceededError"
    later_summary = replace(failed, time=13.0)
    assert resource.event(stored(CONTENT, failed), stored(CONTENT, later_summary), 13.0) is None
