from __future__ import annotations

from typing import Any

from kubetorch.controller.backends.kubernetes.launch_failures import events, snapshot
from kubetorch.controller.backends.kubernetes.launch_failures.events import ReportedEvents
from kubetorch.controller.tuning import LIMITS
from unit.controller.backends.kubernetes.launch_failures import recorded


def story(*names: str, since: float = 0.0) -> list[str]:
    """The lines of a launch whose pods are those of some records."""
    reported_events = ReportedEvents(since)
    events = [event for name in names for event in recorded.read(name)["events"]]
    lines = [reported_events.new(event) for event in sorted(events, key=snapshot.first_time)]
    return [line.line for line in lines if line is not None]


def event(reason: str, message: str, *, kind: str = "Warning", **about: str) -> dict[str, Any]:
    return {
        "type": kind,
        "reason": reason,
        "message": message,
        "firstTimestamp": "2026-11-21T15:50:17Z",
        "lastTimestamp": "2026-11-21T15:50:17Z",
        "involvedObject": {"kind": "Pod", "name": "web-0", **about},
        "metadata": {"name": "web-0.1", "namespace": "team"},
    }


def test_a_launch_is_told_step_by_step() -> None:
    assert story("pull-not-found") == [
        "Scheduled: assigned to node node1",
        'Pulling: Pulling image "198.18.0.1:5000/nope:1"',
    ]


def test_what_a_scheduler_says_is_short() -> None:
    assert story("big-cpu") == [
        "FailedScheduling: 0/2 nodes are available: 2 Insufficient cpu",
    ]


def test_a_probe_that_kills_is_told_and_one_that_waits_is_not() -> None:
    assert story("probe-startup") == [
        "Scheduled: assigned to node node1",
        "Started: Started container c",
        "Killing: Container c failed startup probe, will be restarted",
    ]
    assert "Unhealthy: Liveness probe failed: sick" in story("probe-liveness")


def test_what_happens_to_all_pods_is_told_once() -> None:
    lines = story("crash-loop", "out-of-memory", "no-secret-env")
    assert [line for line in lines if line.startswith("Scheduled")] == [lines[0]]
    assert lines.count("Started: Started container c") == 1


def test_what_is_older_than_the_launch_is_not_told() -> None:
    record = recorded.read("pull-not-found")
    end = max(map(snapshot.last_time, record["events"]))
    assert story("pull-not-found", since=end + 1) == []


def test_an_event_that_is_counted_up_is_told_once() -> None:
    reported_events, mount_failure = ReportedEvents(0.0), event("FailedMount", "no such volume")
    assert reported_events.new(mount_failure) is not None
    assert (
        reported_events.new({**mount_failure, "count": 7, "lastTimestamp": "2026-11-21T15:59:00Z"})
        is None
    )


def test_the_next_launch_within_the_second_does_not_repeat_it() -> None:
    started = event("Started", "Started container kubetorch", kind="Normal")
    moment = snapshot.last_time(started)
    first = ReportedEvents(moment + 0.1)
    assert first.new(started) is not None
    second = ReportedEvents(moment + 0.5, first)
    assert second.new(started) is None
    assert second.new(event("Started", "Started container other", kind="Normal")) is not None


def test_routine_and_containers_of_others_are_not_told() -> None:
    quiet_events = [
        event("Created", "Created container: c", kind="Normal"),
        event("Killing", "Stopping container c", kind="Normal"),
        event("Unhealthy", "Readiness probe failed: 503", fieldPath="spec.containers{queue-proxy}"),
        event("Unhealthy", "Startup probe failed: HTTP probe failed with statuscode: 503"),
        event("Started", "Started", kind="Normal", fieldPath="spec.init{kubetorch-runtime}"),
        event("BackOff", "Back-off restarting failed container"),
    ]
    assert [events.read(quiet_event) for quiet_event in quiet_events] == [None] * len(quiet_events)


def test_a_warning_is_marked_as_one() -> None:
    line = events.read(event("NodeNotReady", "Node is not ready"))
    assert line is not None
    assert line.is_warning
    assert line.object_name == "web-0"


def test_the_story_has_an_end() -> None:
    reported_events = ReportedEvents(0.0)
    lines = [
        reported_events.new(event("Odd", "a" * number))
        for number in range(1, 2 * LIMITS.reported_events)
    ]
    assert sum(line is not None for line in lines) == LIMITS.reported_events
