"""Where the pods of a service are, and which of them is which."""

from __future__ import annotations

from kubetorch.sdk.calls.route import Location, Route
from kubetorch.wire.messages import Ending, PodView

PODS = Location(("http://a", "http://b", "http://c"), "token", (0, 2, 2))


def test_one_pod_is_found_by_its_number() -> None:
    assert PODS.of(0) == Location(("http://a",), "token", (0,))


def test_of_two_with_a_number_the_first_is_meant() -> None:
    assert PODS.of(2).urls == ("http://b",)


def test_a_pod_that_is_not_ready_has_no_url() -> None:
    assert PODS.of(1) == Location((), "token", (1,))


def test_pods_that_are_left_out_take_their_numbers_with_them() -> None:
    assert PODS.only(["http://c", "http://a"]) == Location(
        ("http://a", "http://c"), "token", (0, 2)
    )
    unnumbered = PODS._replace(ordinals=())
    assert unnumbered.only(["http://b"]) == Location(("http://b",), "token")


def test_of_named_pods_the_first_of_the_service_that_has_not_ended_is_the_nearest() -> None:
    ended = PodView(name="x", ordinal=1, phase="Gone", ended=Ending(reason="Evicted"))
    running = PodView(name="a", ordinal=0, phase="Running")
    pods = {"x": ended, "a": running}
    route = Route("service", lambda: PODS, PODS._replace(pods=pods))
    assert route.nearest(["another-service", "x", "a"]) is route.pod(0)
    assert route.nearest(["another-service", "x"]) is None
