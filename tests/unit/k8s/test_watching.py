"""The state machine of a watch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kubetorch.errors import KubernetesError, KubernetesRequestError, KubernetesUnavailableError
from kubetorch.k8s.failures import Action
from kubetorch.k8s.informers import WatchState
from kubetorch.k8s.tuning import TIMING

Object = dict[str, Any]


def pod(name: str, version: int) -> Object:
    metadata = {"name": name, "namespace": "n", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "managedFields": [{}]}}


def event(kind: str, item: Object) -> Object:
    return {"type": kind, "object": item}


def state() -> WatchState:
    return WatchState(Action("watch", "pods"))


def changes_after(machine: WatchState, kind: str, item: Object) -> list[tuple[str, str]]:
    return [(c.kind, c.object["metadata"]["name"]) for c in machine.on_event(event(kind, item))]


def listed(machine: WatchState, version: int, *items: Object) -> list[tuple[str, str]]:
    changes = machine.on_list(list(items), str(version))
    return [(change.kind, change.object["metadata"]["name"]) for change in changes]


def expired_status(code: int = 410, reason: str = "Expired", **details: Any) -> Object:
    return {"kind": "Status", "code": code, "reason": reason, "details": details}


def test_it_lists_then_watches_from_there() -> None:
    machine = state()
    assert machine.version == ""
    assert not machine.is_listed
    assert listed(machine, 5, pod("a", 3)) == [("added", "a")]
    assert machine.version == "5"
    assert machine.is_listed


def test_events_change_what_is_known_and_move_the_moment() -> None:
    machine = state()
    listed(machine, 5)
    assert changes_after(machine, "ADDED", pod("a", 6)) == [("added", "a")]
    assert changes_after(machine, "MODIFIED", pod("a", 7)) == [("modified", "a")]
    assert machine.version == "7"
    assert changes_after(machine, "DELETED", pod("a", 8)) == [("deleted", "a")]
    assert machine.objects == {}
    assert machine.version == "8"


def test_a_bookmark_moves_the_moment_only() -> None:
    machine = state()
    listed(machine, 5, pod("a", 3))
    assert machine.on_event(event("BOOKMARK", {"metadata": {"resourceVersion": "90"}})) == []
    assert machine.version == "90"
    assert len(machine.objects) == 1


def test_what_is_repeated_is_no_change() -> None:
    machine = state()
    listed(machine, 5, pod("a", 3))
    assert changes_after(machine, "ADDED", pod("a", 3)) == []
    assert changes_after(machine, "DELETED", pod("b", 6)) == []


def test_managed_fields_are_not_kept() -> None:
    machine = state()
    listed(machine, 5, pod("a", 3))
    assert "managedFields" not in machine.objects["n", "a"]["metadata"]


@pytest.mark.parametrize(
    "status",
    [expired_status(410, ""), expired_status(410, "Expired"), expired_status(400, "Expired")],
)
def test_a_forgotten_moment_is_listed_anew_and_compared(status: Object) -> None:
    machine = state()
    listed(machine, 5, pod("a", 3), pod("b", 4), pod("c", 5))
    with pytest.raises(KubernetesRequestError) as caught:
        machine.on_event(event("ERROR", status))
    machine.on_failure(caught.value, 60.0)
    assert machine.version == ""
    assert machine.pause < 1
    changes = listed(machine, 50, pod("a", 3), pod("b", 40), pod("d", 41))
    assert changes == [("modified", "b"), ("added", "d"), ("deleted", "c")]
    assert machine.pause == 0


def test_a_moment_that_never_was_is_listed_anew() -> None:
    machine = state()
    listed(machine, 500)
    causes = [{"reason": "ResourceVersionTooLarge"}]
    with pytest.raises(KubernetesRequestError) as caught:
        machine.on_event(event("ERROR", expired_status(504, "Timeout", causes=causes)))
    machine.on_failure(caught.value)
    assert machine.version == ""


def test_a_watch_that_never_said_anything_is_followed_by_a_list() -> None:
    machine = state()
    listed(machine, 500)
    machine.on_end(240.0)
    assert machine.version == ""
    listed(machine, 7)
    machine.on_event(event("BOOKMARK", {"metadata": {"resourceVersion": "7"}}))
    machine.on_end(240.0)
    assert machine.version == "7"
    machine.on_end(10.0)
    assert machine.version == "7", "too short to be suspicious"


def test_a_broken_watch_goes_on_where_it_was() -> None:
    machine = state()
    listed(machine, 5)
    machine.on_failure(KubernetesUnavailableError("cut"), 60.0)
    assert machine.version == "5"


@pytest.mark.parametrize(
    "nonsense", [{}, {"type": "ADDED"}, {"type": "ADDED", "object": {"metadata": {}}}]
)
def test_what_is_no_event_is_an_error(nonsense: Object) -> None:
    machine = state()
    listed(machine, 5)
    with pytest.raises(KubernetesError, match="no answer of Kubernetes"):
        machine.on_event(nonsense)


def test_pauses_grow_up_to_a_limit_and_start_anew_after_a_healthy_watch() -> None:
    random.seed(1)
    machine = state()
    pauses = []
    for _ in range(12):
        machine.on_failure(KubernetesUnavailableError("away"))
        pauses.append(machine.pause)
    assert 0.05 <= pauses[0] <= 0.1
    assert (
        TIMING.watch_longest_delay_seconds / 2 <= pauses[-1] <= TIMING.watch_longest_delay_seconds
    )
    assert len(set(pauses[6:])) > 1, "many clients must not come at once"
    machine.on_end(240.0)
    assert machine.pause == 0
    machine.on_failure(KubernetesUnavailableError("away"))
    assert machine.pause <= 0.1


def test_a_watch_that_ends_at_once_is_not_repeated_at_once() -> None:
    machine = state()
    listed(machine, 5)
    machine.on_end(0.01)
    assert machine.pause > 0


def test_a_server_that_names_a_time_is_given_it() -> None:
    machine = state()
    error = KubernetesRequestError("busy")
    error.status_code, error.retry_after = 429, 9.0
    machine.on_failure(error)
    assert machine.pause == 9.0
    assert machine.version == ""
