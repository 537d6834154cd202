"""Where the pods of a service are, and which of them is which."""

from __future__ import annotations

from kubetorch.sdk.calls.route import Location, Route, Scaling
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


def test_pods_that_were_not_needed_any_more_are_no_reason_for_which_none_is_ready() -> None:
    deleted = Ending(reason="Deleted", message="newer pods took its place, or fewer are needed")
    views = (
        PodView(name="a", ordinal=0, phase="Gone", ended=deleted),
        PodView(name="b", ordinal=1, phase="Terminating", reason="it is ending"),
        PodView(name="c", ordinal=2, phase="Gone", ended=Ending(reason="Evicted")),
        PodView(name="d", ordinal=3, phase="Running", reason="it loads generation 1"),
    )
    location = Location((), "token", pods={view.name: view for view in views})
    assert "pod b: it is ending" in str(location.absent(None))
    scaled = location._replace(scaling=Scaling(30, reason="a call waits for the first pod"))
    assert str(scaled.absent(None)) == (
        "pod c: Evicted; pod d: it loads generation 1; a call waits for the first pod"
    )


def test_a_time_in_an_error_is_one_for_people() -> None:
    route = Route("service", lambda: PODS)
    for seconds, text in ((0.199311, "0.2 s"), (29.9833, "30 s"), (900.0, "900 s")):
        assert str(route.refusal(seconds, None)).startswith(
            f"no pod of service could be reached within {text}"
        )


def test_a_call_waits_for_a_pod_as_long_as_a_launch_may_take_and_not_less_than_usually() -> None:
    for launch_timeout, patience in ((900.0, 900.0), (5.0, 30.0)):
        location = PODS._replace(scaling=Scaling(launch_timeout))
        assert Route("service", lambda: PODS, location).patience == patience
    assert Route("service", lambda: PODS, PODS).patience == 30.0
