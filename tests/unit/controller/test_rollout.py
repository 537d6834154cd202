"""The state machine of a rollout: scenarios, and any order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kubetorch.controller.rollout import (
    Connected,
    Deployed,
    Effect,
    GaveUp,
    Lost,
    NotReached,
    Observed,
    PodsChanged,
    Reached,
    Recovered,
    Reload,
    Retried,
    Rollout,
)
from kubetorch.wire.exceptions import Failure

FAILURE = Failure("ImportError", "no module")


def run(state: Rollout, *events: object) -> list[Effect]:
    return [effect for event in events for effect in state.handle(event)]  # type: ignore[arg-type]


def rolled_out(*pods: str, generation: int = 1) -> Rollout:
    state = Rollout()
    run(state, PodsChanged(frozenset(pods)), Deployed(generation))
    for pod in pods:
        run(state, Connected(pod, 0), Observed(pod, generation, generation))
    assert state.good == generation
    return state


def test_a_pod_is_told_to_load_when_it_connects() -> None:
    state = Rollout()
    assert run(state, PodsChanged(frozenset("a")), Deployed(1)) == []
    assert run(state, Connected("a", 0)) == [Reload("a", 1)]


def test_a_connected_pod_is_told_when_a_generation_is_deployed() -> None:
    assert run(rolled_out("a"), Deployed(2)) == [Reload("a", 2)]


def test_a_generation_is_reached_when_the_last_pod_serves_it() -> None:
    state = rolled_out("a", "b")
    run(state, Deployed(2))
    assert run(state, Observed("a", 2, 2)) == []
    assert run(state, Observed("b", 2, 2)) == [Reached(2)]


def test_a_generation_is_reached_once_however_often_pods_say_so() -> None:
    state = rolled_out("a")
    later_events = [Observed("a", 1, 1), Lost("a"), Connected("a", 1), PodsChanged(frozenset("a"))]
    assert run(state, *later_events) == []


def test_nothing_is_reached_without_pods() -> None:
    assert run(Rollout(), Deployed(1), PodsChanged(frozenset())) == []


def test_a_pod_that_comes_back_with_the_generation_is_not_told_again() -> None:
    assert run(rolled_out("a"), Lost("a"), Connected("a", 1)) == []


def test_a_pod_that_comes_back_empty_is_told_again() -> None:
    assert run(rolled_out("a"), Lost("a"), Connected("a", 0)) == [Reload("a", 1)]


def test_a_pod_that_is_lost_serves_nothing_and_is_told_nothing_until_it_is_back() -> None:
    state = rolled_out("a", "b")
    assert run(state, Lost("b")) == []
    assert (state.serving("b"), state.lagging(), state.is_served) == (None, ["b"], False)
    assert run(state, Deployed(2), Observed("a", 2, 2)) == [Reload("a", 2)]
    assert state.is_undecided
    assert run(state, Connected("b", 1), Observed("b", 2, 2)) == [Reload("b", 2), Reached(2)]


def test_an_import_error_gives_the_generation_up_and_the_pod_keeps_the_last_good_one() -> None:
    state = rolled_out("a")
    run(state, Deployed(2))
    assert run(state, Observed("a", 2, 1, FAILURE)) == [NotReached(2, FAILURE)]
    assert state.target("a") == 1


def test_pods_that_were_faster_go_back_when_one_fails() -> None:
    state = rolled_out("a", "b")
    run(state, Deployed(2), Observed("a", 2, 2))
    effects = run(state, Observed("b", 2, 1, FAILURE))
    assert effects == [NotReached(2, FAILURE), Reload("a", 1)]


def test_a_failed_first_generation_is_loaded_again_by_an_agent_that_starts_again() -> None:
    state = Rollout()
    run(state, PodsChanged(frozenset("a")), Deployed(1), Connected("a", 0))
    assert run(state, Observed("a", 1, 0, FAILURE)) == [NotReached(1, FAILURE)]
    assert run(state, Lost("a"), Connected("a", 0)) == [Reload("a", 1)]
    assert run(state, Observed("a", 1, 0, FAILURE)) == []


def test_a_generation_that_was_given_up_can_still_be_reached() -> None:
    state = Rollout()
    run(state, PodsChanged(frozenset("a")), Deployed(1), Connected("a", 0), GaveUp(1, FAILURE))
    assert run(state, Observed("a", 1, 1)) == [Recovered(1)]
    assert state.failure is None


def test_a_later_deploy_supersedes_one_that_is_under_way() -> None:
    state = rolled_out("a")
    run(state, Deployed(2))
    assert run(state, Deployed(3)) == [Reload("a", 3)]
    assert run(state, Observed("a", 2, 2)) == []
    assert run(state, Observed("a", 3, 3)) == [Reached(3)]


def test_a_later_deploy_supersedes_nothing_that_is_decided() -> None:
    assert run(rolled_out("a"), Deployed(2)) == [Reload("a", 2)]


def test_giving_up_an_older_generation_changes_nothing() -> None:
    state = rolled_out("a")
    run(state, Deployed(2))
    assert run(state, GaveUp(1, FAILURE)) == []
    assert state.is_undecided


def test_retiring_pods_keep_what_they_serve_until_the_new_ones_are_ready() -> None:
    state = rolled_out("old")
    run(state, PodsChanged(frozenset({"new"}), frozenset({"old"})))
    assert run(state, Deployed(2)) == []
    assert run(state, Connected("new", 0)) == [Reload("new", 2)]
    assert run(state, Observed("new", 2, 2)) == [Reached(2)]


def test_a_new_pod_that_fails_beside_an_old_one_is_left_alone() -> None:
    state = rolled_out("old")
    run(state, PodsChanged(frozenset({"new"}), frozenset({"old"})), Deployed(2))
    run(state, Connected("new", 0))
    assert run(state, Observed("new", 2, 0, FAILURE)) == [NotReached(2, FAILURE)]
    assert state.target("old") == 1


def test_a_pod_more_is_waited_for() -> None:
    state = rolled_out("a")
    run(state, Deployed(2), PodsChanged(frozenset("ab")))
    assert run(state, Observed("a", 2, 2)) == []
    assert state.lagging() == ["b"]


# ------------------------------------------------------------------------------------ property

PODS = ("a", "b", "c")
_pod = st.sampled_from(PODS)
_generation = st.integers(1, 4)
_event = st.one_of(
    st.builds(Deployed, _generation),
    st.builds(
        PodsChanged,
        st.frozensets(_pod),
        st.just(frozenset()),
    ),
    st.builds(Connected, _pod, st.integers(0, 4)),
    st.builds(Observed, _pod, _generation, st.integers(0, 4), st.sampled_from([None, FAILURE])),
    st.builds(Lost, _pod),
    st.builds(GaveUp, _generation, st.just(FAILURE)),
)


@given(st.lists(st.tuples(_event, st.integers(1, 2)), max_size=40))
def test_any_order_and_duplication_of_events_converges(
    events: list[tuple[object, int]],
) -> None:
    state = Rollout()
    effects: list[Effect] = []
    for event, times in events:
        for _ in range(times):
            effects += run(state, event)
    # From here on the world behaves: the last deploy comes, its pods connect and do as told.
    effects += run(state, Deployed(5), PodsChanged(frozenset(PODS)))
    for pod in PODS:
        pending = run(state, Connected(pod, 0))
        while pending:
            effect = pending.pop(0)
            effects.append(effect)
            if isinstance(effect, Reload):
                pending += run(state, Observed(effect.pod, effect.generation, effect.generation))
    assert {state.serving(pod) for pod in PODS} == {5}
    assert effects.count(Reached(5)) == 1
    decided = [e.generation for e in effects if isinstance(e, (Reached, NotReached))]
    assert len(decided) == len(set(decided)), "a generation was decided twice"


def test_a_generation_is_reached_only_when_there_are_as_many_pods_as_there_should_be() -> None:
    state = rolled_out("a")
    assert run(state, PodsChanged(frozenset("a"), expected=2), Deployed(2)) == [Reload("a", 2)]
    assert run(state, Observed("a", 2, 2)) == []
    assert (state.is_served, state.total) == (False, 2)
    assert run(state, PodsChanged(frozenset("ab"), expected=2), Connected("b", 0)) == [
        Reload("b", 2)
    ]
    assert run(state, Observed("b", 2, 2)) == [Reached(2)]


def test_more_pods_than_there_should_be_all_have_to_serve() -> None:
    state = rolled_out("a", "b")
    run(state, PodsChanged(frozenset("ab"), expected=1), Deployed(2))
    assert run(state, Observed("a", 2, 2)) == []
    assert run(state, PodsChanged(frozenset("a"), frozenset("b"), expected=1)) == [Reached(2)]


def test_nothing_is_reached_while_nobody_knows_how_many_pods_there_should_be() -> None:
    state = rolled_out("a")
    run(state, PodsChanged(frozenset("a"), expected=None), Deployed(2))
    assert run(state, Observed("a", 2, 2)) == []
    assert run(state, PodsChanged(frozenset("a"), expected=1)) == [Reached(2)]


RESTS = PodsChanged(frozenset(), expected=0)


def test_a_workload_that_rests_needs_no_pod_for_a_new_generation() -> None:
    state = rolled_out("a")
    assert run(state, RESTS) == []
    assert state.is_served
    assert run(state, Deployed(2)) == [Reached(2)]
    assert run(state, PodsChanged(frozenset("b"))) == []
    assert not state.is_served
    assert run(state, Connected("b", 0)) == [Reload("b", 2)]
    assert run(state, Observed("b", 2, 2)) == []
    assert state.is_served


def test_without_pods_that_nobody_needs_nothing_is_served() -> None:
    state = rolled_out("a")
    run(state, PodsChanged(frozenset()))
    assert not state.is_served
    assert run(state, Deployed(2)) == []


def test_what_the_first_pod_after_a_rest_cannot_load_is_given_up_but_not_for_older_code() -> None:
    state = rolled_out("a")
    run(state, RESTS, Deployed(2), PodsChanged(frozenset("b")), Connected("b", 0))
    assert run(state, Observed("b", 2, 0, FAILURE)) == [NotReached(2, FAILURE)]
    assert state.target("b") == 2
    assert run(state, RESTS) == []
    assert state.failure == FAILURE  # it is shown while there is no pod
    assert run(state, PodsChanged(frozenset("c"))) == [Retried(2)]
    assert state.failure is None
    assert run(state, Connected("c", 0)) == [Reload("c", 2)]
    assert run(state, Observed("c", 2, 0, FAILURE)) == [NotReached(2, FAILURE)]
    assert run(state, Observed("c", 2, 2)) == [Recovered(2)]


def test_a_failure_is_that_of_the_pods_that_are_there() -> None:
    state = rolled_out("a")
    run(state, RESTS, PodsChanged(frozenset(), expected=1))
    assert run(state, GaveUp(1, FAILURE)) == [NotReached(1, FAILURE)]  # no pod can be made
    assert run(state, PodsChanged(frozenset(), expected=1)) == []
    assert run(state, PodsChanged(frozenset("b"))) == [Retried(1)]
    assert run(state, GaveUp(1, FAILURE)) == [NotReached(1, FAILURE)]
    assert run(state, PodsChanged(frozenset("bc"), expected=2)) == []
    assert run(state, PodsChanged(frozenset("c"), expected=2)) == [Retried(1)]


def test_what_has_been_served_since_the_rest_is_not_given_up() -> None:
    state = rolled_out("a")
    run(state, RESTS, Deployed(2), PodsChanged(frozenset("b")), Connected("b", 0))
    run(state, Observed("b", 2, 2), PodsChanged(frozenset("bc")), Connected("c", 0))
    assert run(state, Observed("c", 2, 0, FAILURE)) == []


def test_where_a_quorum_suffices_its_pods_have_to_serve_and_no_others() -> None:
    state = Rollout()
    needed = frozenset({"a", "b"})
    run(state, PodsChanged(frozenset("abc"), expected=3, needed=frozenset()), Deployed(1))
    assert run(state, Connected("a", 0), Observed("a", 1, 1)) == [Reload("a", 1)]
    run(state, PodsChanged(frozenset("abc"), expected=3, needed=needed))
    run(state, Connected("b", 0))
    assert run(state, Observed("b", 1, 1)) == [Reached(1)]
