"""Spawned calls and logs, as the controller knows them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetorch.datastore.blobs import digest_of
from kubetorch.wire import messages, routes
from kubetorch.wire.calls import Raised, unpack_outcome
from kubetorch.wire.messages import CallReport
from tests.local.service_harness import FAKE, Service, is_ready, pack


@pytest.fixture
def service(fake_service: Service) -> Service:
    fake_service.deploy("f")
    return fake_service


@pytest.fixture
def own_service(service_home: Path) -> Iterator[Service]:
    """A service that the test kills."""
    service = Service(service_home, FAKE).start()
    service.deploy("f")
    yield service
    service.terminate()


def report(service: Service, call_id: str, **fields: Any) -> None:
    """Let the workload's pod report a call, when its session begins anew."""
    (pod,) = service.get("f").pods
    message = CallReport(id=call_id, callable="f", started=time.time(), **fields)
    folder = service.home / "pods" / "default" / pod.name
    (folder / f"call-{call_id}.json").write_bytes(messages.encode(message))
    service.kill()
    service.start()
    service.until("f", is_ready)
    deadline = time.monotonic() + 60
    while service.request("GET", routes.call(call_id))[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def result(service: Service, call_id: str) -> tuple[int, bytes]:
    with (
        service.client() as client,
        client.request("GET", routes.call(call_id, "result")) as response,
    ):
        return response.status, response.read()


def test_a_reported_call_is_listed_and_found(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    status, listed = own_service.request("GET", f"{routes.CALLS}?namespace=default&workload=f")
    assert status == 200
    assert [(call["id"], call["state"]) for call in listed] == [("c1", "running")]
    assert own_service.request("GET", f"{routes.CALLS}?workload=other") == (200, [])
    _, view = own_service.request("GET", routes.call("c1"))
    assert view["pod"] == own_service.get("f").pods[0].name


def test_the_result_of_a_call_outlives_the_service(own_service: Service) -> None:
    outcome = b"a packed outcome"
    assert own_service.request("POST", routes.BLOBS, pack([outcome]))[0] == 200
    report(
        own_service,
        "c1",
        state="succeeded",
        ended=time.time(),
        result=digest_of(outcome),
        result_bytes=len(outcome),
    )
    assert result(own_service, "c1") == (200, outcome)
    own_service.kill()
    own_service.start()
    assert result(own_service, "c1") == (200, outcome)


def test_a_call_that_still_runs_has_no_result(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    assert result(own_service, "c1")[0] == 410


def test_a_result_that_is_too_old_is_gone_and_says_so(own_service: Service) -> None:
    outcome = b"old"
    own_service.request("POST", routes.BLOBS, pack([outcome]))
    ended = time.time() - 25 * 3600
    report(own_service, "c1", state="succeeded", ended=ended, result=digest_of(outcome))
    status, body = result(own_service, "c1")
    assert (status, json.loads(body)["error_type"]) == (410, "ResultExpiredError")
    assert "24 hours" in json.loads(body)["state"]["hint"]


@pytest.mark.parametrize(("method", "verb"), [("GET", ""), ("GET", "result"), ("POST", "cancel")])
def test_an_unknown_call_is_gone(service: Service, method: str, verb: str) -> None:
    status, answer = service.request(method, routes.call("unknown", verb))
    assert (status, answer["error_type"]) == (410, "ResultExpiredError")


def test_a_cancel_reaches_the_pod(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    assert own_service.request("POST", routes.call("c1", "cancel"))[0] == 200
    deadline = time.monotonic() + 60
    while own_service.request("GET", routes.call("c1"))[1]["state"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_calls_of_a_deleted_workload_have_failed(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    own_service.delete("f")
    assert own_service.request("GET", routes.call("c1"))[1]["state"] == "failed"
    status, body = result(own_service, "c1")
    outcome = unpack_outcome(body)
    assert status == 200
    assert isinstance(outcome, Raised)
    assert outcome.failure.error_type == "PodTerminatedError"


def test_a_call_has_failed_when_its_pod_is_not_there_any_more(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    old = own_service.get("f").pods[0].name
    own_service.deploy("f", env={"A": "another pod"})
    own_service.until(
        "f", lambda view: is_ready(view) and old not in [pod.name for pod in view.pods]
    )
    assert until_ended(own_service, "c1") == "failed"
    assert "reason: Deleted" in failure(own_service, "c1")


def test_a_call_has_failed_that_its_agent_knows_nothing_of(own_service: Service) -> None:
    report(own_service, "c1", state="running")
    report(own_service, "c2", state="running")
    (pod,) = own_service.get("f").pods
    (own_service.home / "pods" / "default" / pod.name / "call-c1.json").unlink()
    own_service.kill()
    own_service.start()
    assert until_ended(own_service, "c1") == "failed"
    assert "started without what it kept" in failure(own_service, "c1")
    assert own_service.request("GET", routes.call("c2"))[1]["state"] == "running"


def test_calls_go_on_when_the_service_is_started_again(own_service: Service) -> None:
    own_service.deploy("f", replicas=3)
    view = own_service.until("f", lambda view: is_ready(view) and len(view.pods) == 3)
    for number, pod in enumerate(view.pods):
        message = CallReport(id=f"c{number}", callable="f", state="running", started=time.time())
        folder = own_service.home / "pods" / "default" / pod.name
        (folder / f"call-c{number}.json").write_bytes(messages.encode(message))
    for _ in range(2):
        own_service.kill()
        own_service.start()
        own_service.until("f", is_ready)
    calls = f"{routes.CALLS}?namespace=default&workload=f"
    deadline = time.monotonic() + 60
    while len(own_service.request("GET", calls)[1]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert {call["state"] for call in own_service.request("GET", calls)[1]} == {"running"}
    assert "call not kept" not in own_service.log()


def until_ended(service: Service, call_id: str) -> str:
    deadline = time.monotonic() + 60
    while (call := service.request("GET", routes.call(call_id))[1]).get("ended") is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return call["state"]


def failure(service: Service, call_id: str) -> str:
    outcome = unpack_outcome(result(service, call_id)[1])
    assert isinstance(outcome, Raised)
    return outcome.failure.message


# ---------------------------------------------------------------------------------------- logs


def lines(service: Service, query: str = "") -> list[str]:
    with (
        service.client() as client,
        client.request("GET", routes.workload("default", "f", "logs") + query) as response,
    ):
        assert response.status == 200
        log_lines = [messages.decode(messages.DeployLog, line) for line in response.iter_lines()]
    return [line.text for line in log_lines]


def write(service: Service, pod: str, *texts: str) -> None:
    file = service.home / "pods" / "default" / pod / "log" / "current.jsonl"
    with file.open("a") as log:
        for text in texts:
            log.write(json.dumps({"time": time.time(), "pod": pod, "text": text}) + "\n")


def test_the_tail_has_the_lines_of_all_pods_in_the_order_of_their_times(service: Service) -> None:
    first, second = (pod.name for pod in service.deploy("f", replicas=2)[-1].workload.pods)
    write(service, second, "1")
    write(service, first, "2")
    write(service, second, "3")
    assert lines(service, "?tail=3") == ["1", "2", "3"]
    assert lines(service, f"?pod={first}")[-1] == "2"
    assert lines(service, "?tail=0") == []


def test_the_log_of_a_pod_whose_agent_is_dead_is_read_from_its_disk(service: Service) -> None:
    events = service.deploy("f", env={"FAKE_CRASH": "1"})
    assert type(events[-1]).__name__ == "Failed"
    (pod,) = (pod for pod in service.get("f").pods if pod.phase == "Failed")
    folder = service.home / "pods" / "default" / pod.name / "log"
    folder.mkdir()
    write(service, pod.name, "its last words")
    with (folder / "current.jsonl").open("a") as log:
        log.write('{"time": 1, "te')
    assert lines(service, f"?pod={pod.name}") == ["its last words"]


def test_lines_that_were_shown_do_not_come_again_when_they_are_followed(service: Service) -> None:
    (pod,) = service.get("f").pods
    write(service, pod.name, "1", "2")
    path = routes.workload("default", "f", "logs") + "?follow=true&tail=2"
    with service.client() as client, client.request("GET", path) as response:
        stream = response.iter_lines()
        assert [json.loads(next(stream))["text"] for _ in range(2)] == ["1", "2"]
        # The log of this agent ends with its answer; the next one comes when it is back.
        write(service, pod.name, "3")
        service.deploy("f", env={"A": "1"})
        assert json.loads(next(stream))["text"] in ("3", "started")


def test_following_ends_with_the_workload(service: Service) -> None:
    path = routes.workload("default", "f", "logs") + "?follow=true&tail=1"
    with service.client() as client, client.request("GET", path) as response:
        stream = response.iter_lines()
        next(stream)
        service.delete("f")
        list(stream)


@pytest.mark.parametrize("query", ["?tail=-1", "?tail=x", "?follow=maybe", "?pod=unknown"])
def test_an_impossible_question_about_logs_is_refused(service: Service, query: str) -> None:
    path = routes.workload("default", "f", "logs") + query
    assert service.request("GET", path)[0] == 400
