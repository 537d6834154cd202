"""Deploys on the process backend, with agents that only speak the protocol."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from kubetorch.datastore import trees
from kubetorch.datastore.blobs import digest_of
from kubetorch.datastore.trees import Entry
from kubetorch.wire import messages, routes
from kubetorch.wire.messages import Accepted, DeployLog, Failed, Missing, Ready, Stage
from tests.local.service_harness import Service, deploy, in_background, is_ready, spec


@pytest.fixture
def service(fake_service: Service) -> Service:
    return fake_service


def kinds(events: list[object]) -> list[str]:
    return [type(event).__name__ for event in events if not isinstance(event, Stage)]


def error_of(events: list[object]) -> tuple[str, str]:
    assert isinstance(events[-1], Failed), events
    return events[-1].failure["error_type"], events[-1].failure["message"]


def test_a_deploy_ends_when_every_pod_is_ready(service: Service) -> None:
    events = service.deploy("f", replicas=3)
    assert kinds(events) == ["Accepted", "Ready"]
    view = events[-1].workload
    assert [pod.ordinal for pod in view.pods] == [0, 1, 2]
    assert all(pod.is_ready and pod.generation == 1 for pod in view.pods)
    assert view.url == view.pods[0].url
    assert view.token


def test_pods_are_named_like_those_of_a_deployment(service: Service) -> None:
    (pod,) = service.deploy("train-it")[-1].workload.pods
    name, template, suffix = pod.name.rsplit("-", 2)
    assert (name, len(template), len(suffix)) == ("train-it", 5, 5)


def test_an_unchanged_deploy_is_ready_at_once(service: Service) -> None:
    service.deploy("f")
    events = service.deploy("f")
    assert events[0] == Accepted(generation=1, changed=False)
    assert kinds(events) == ["Accepted", "Ready"]


def test_other_code_keeps_the_pods(service: Service) -> None:
    before = service.deploy("f")[-1].workload.pods[0]
    blob = b'{"a": 1}'
    events = service.deploy("f", blobs=[blob], init_args=digest_of(blob))
    assert events[0] == Accepted(generation=2)
    after = events[-1].workload.pods[0]
    assert (after.name, after.pid, after.url) == (before.name, before.pid, before.url)


def test_another_environment_replaces_the_pod_once_its_successor_serves(service: Service) -> None:
    (before,) = service.deploy("f")[-1].workload.pods
    view = service.deploy("f", env={"A": "1"})[-1].workload
    ready = [pod.name for pod in view.pods if pod.is_ready]
    assert before.name not in ready
    assert len(ready) == 1
    view = service.until("f", lambda view: len(view.pods) == 1)
    assert view.pods[0].name == ready[0]


def test_several_replicas_are_recreated_with_another_environment(service: Service) -> None:
    before = {pod.name for pod in service.deploy("f", replicas=2)[-1].workload.pods}
    after = {pod.name for pod in service.deploy("f", replicas=2, env={"A": "1"})[-1].workload.pods}
    assert len(after) == 2
    assert not before & after


def test_replicas_grow_and_shrink_by_their_ordinals(service: Service) -> None:
    (first,) = service.deploy("f")[-1].workload.pods
    grown = service.deploy("f", replicas=3)[-1].workload
    assert grown.pods[0].name == first.name
    assert len(grown.pods) == 3
    service.deploy("f", replicas=1)
    view = service.until("f", lambda view: len(view.pods) == 1)
    assert view.pods[0].name == first.name


def test_a_failed_import_ends_the_deploy_and_the_generation_before_goes_on(
    service: Service,
) -> None:
    service.deploy("f", env={"FAKE_FAIL": "2"})
    blob = b"{}"
    events = service.deploy("f", env={"FAKE_FAIL": "2"}, blobs=[blob], init_args=digest_of(blob))
    assert error_of(events) == ("ImportError", "no module named nonsense")
    view = service.get("f")
    assert view.failure is not None
    assert view.status == "Ready"
    assert (view.pods[0].generation, view.pods[0].is_ready) == (1, True)


def test_a_failed_generation_is_tried_again_by_the_same_deploy(service: Service) -> None:
    events = service.deploy("f", env={"FAKE_FAIL": "1"})
    assert isinstance(events[-1], Failed)
    events = service.deploy("f", env={"FAKE_FAIL": "1"})
    assert events[0] == Accepted(generation=2)
    assert isinstance(events[-1], Ready)
    assert service.get("f").failure is None


def test_a_crash_loop_ends_the_deploy_with_the_agents_last_words(service: Service) -> None:
    events = service.deploy("f", env={"FAKE_CRASH": "1"})
    kind, message = error_of(events)
    assert kind == "ServiceHealthError"
    assert "the fake agent cannot start" in message
    assert "exit code 3" in message
    assert service.get("f").status == "Failed"


def test_a_fixed_workload_deploys_after_a_crash_loop(service: Service) -> None:
    service.deploy("f", env={"FAKE_CRASH": "1"})
    assert isinstance(service.deploy("f")[-1], Ready)
    view = service.until("f", lambda view: len(view.pods) == 1)
    assert is_ready(view)


def test_a_deploy_that_takes_too_long_says_what_it_waited_for(service: Service) -> None:
    slow, blob = {"FAKE_SLOW": "2"}, b"{}"
    service.deploy("f", env=slow)
    events = service.deploy(
        "f", env=slow, blobs=[blob], init_args=digest_of(blob), launch_timeout=5
    )
    kind, message = error_of(events)
    assert kind == "ServiceTimeoutError"
    assert "0 of 1 pods serve generation 2" in message
    assert "it loads generation 2: importing" in message


def test_a_later_deploy_supersedes_the_earlier_one(service: Service) -> None:
    first = deploy(spec("f", env={"FAKE_SLOW": "1"}))
    events = service.events(first)
    assert next(events) == Accepted(generation=1)
    blob = b"{}"
    second = spec("f", env={"FAKE_SLOW": "1"}, init_args=digest_of(blob))
    assert isinstance(list(service.events(deploy(second), [blob]))[-1], Ready)
    kind, message = error_of(list(events))
    assert kind == "StartupError"
    assert "superseded by generation 2" in message


def test_two_clients_that_deploy_the_same_at_once_get_the_same_generation(
    service: Service,
) -> None:
    barrier = threading.Barrier(2)

    def deploy_once() -> list[object]:
        barrier.wait(60)
        return service.deploy("f")

    with in_background(deploy_once) as first, in_background(deploy_once) as second:
        pass
    for (events,) in (first, second):
        assert events[0].generation == 1
        assert isinstance(events[-1], Ready)
    assert len(service.get("f").pods) == 1


def test_many_clients_that_deploy_different_code_end_in_one_generation(service: Service) -> None:
    blobs = [str(index).encode() for index in range(6)]

    def deploy_blob(blob: bytes) -> list[object]:
        return service.deploy("f", blobs=[blob], init_args=digest_of(blob))

    threads = [threading.Thread(target=deploy_blob, args=(blob,)) for blob in blobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    view = service.until("f", lambda view: view.pods[0].generation == view.generation)
    assert view.generation == len(blobs)
    assert view.failure is None


def test_a_repeated_request_joins_the_deploy(service: Service) -> None:
    request = deploy(spec("f"), "one-id")
    *first, ready = service.events(request)
    *repeated, last = service.events(request)
    assert repeated == first
    # Whoever asks gets a token of their own.
    assert replace(last.workload, token="", token_expires=0.0) == replace(
        ready.workload, token="", token_expires=0.0
    )


def test_a_client_that_goes_away_leaves_the_generation_to_itself(service: Service) -> None:
    events = service.events(deploy(spec("f")))
    assert next(events) == Accepted(generation=1)
    events.close()
    assert service.until("f", is_ready).generation == 1


def test_lines_of_an_import_are_events_if_they_are_wanted(service: Service) -> None:
    events = service.deploy("f", env={"FAKE_LOGS": "1"})
    assert [event.text for event in events if isinstance(event, DeployLog)] == ["loading 1"]
    request = messages.decode(
        messages.Deploy,
        messages.encode(deploy(spec("g", env={"FAKE_LOGS": "1"}))).replace(
            b'"version":"0"', b'"version":"0","stream_logs":false'
        ),
    )
    assert not any(isinstance(event, DeployLog) for event in service.events(request))


# --------------------------------------------------------------------------------------- blobs


def test_a_deploy_names_what_is_missing_and_starts_nothing(service: Service) -> None:
    source = b"def f(): pass"
    tree = trees.build([Entry("m.py", "file", len(source), digest_of(source))])
    assert service.deploy("f", tree=tree.digest) == [Missing(blobs=(tree.digest,))]
    events = service.deploy("f", tree=tree.digest, blobs=[tree.encoded])
    assert events == [Missing(blobs=(digest_of(source),))]
    assert service.request("GET", routes.workload("default", "f"))[0] == 404
    events = service.deploy("f", tree=tree.digest, blobs=[source])
    assert isinstance(events[-1], Ready)


def test_a_client_of_another_protocol_is_told_so(service: Service) -> None:
    body = messages.encode(deploy(spec("f"))).replace(b'"protocol":1', b'"protocol":99') + b"\n"
    path = routes.workload("default", "f", "deploy")
    status, answer = service.request("POST", path, body)
    assert (status, answer["error_type"]) == (409, "VersionMismatchError")


@pytest.mark.parametrize(
    "change",
    [{"replicas": 0}, {"launch_timeout": 0}, {"inactivity_ttl": "soon"}],
    ids=lambda change: next(iter(change)),
)
def test_an_impossible_spec_is_refused(service: Service, change: dict[str, object]) -> None:
    body = messages.encode(deploy(spec("f", **change))) + b"\n"
    path = routes.workload("default", "f", "deploy")
    status, answer = service.request("POST", path, body)
    assert (status, answer["error_type"]) == (400, "SpecError")


def test_the_spec_must_be_of_the_workload_in_the_path(service: Service) -> None:
    body = messages.encode(deploy(spec("f"))) + b"\n"
    status, _ = service.request("POST", routes.workload("default", "g", "deploy"), body)
    assert status == 400
