from hypothesis import given
from hypothesis import strategies as st

from kubetorch.pod.reload import (
    Abandon,
    Died,
    Failed,
    Hold,
    Load,
    Loaded,
    Reconciler,
    Refuse,
    Report,
    Requested,
    Restart,
    RestartDue,
    Stopped,
    Switch,
)
from kubetorch.pod.tuning import TIMING

DELAYS = TIMING.restart_delays_seconds


def serving(generation: int) -> Reconciler:
    machine = Reconciler()
    machine.handle(Requested(generation))
    machine.handle(Loaded(generation))
    return machine


def test_the_first_generation_is_loaded_while_calls_wait_and_then_served():
    machine = Reconciler()
    assert machine.handle(Requested(1)) == [Hold(1), Load(1)]
    assert machine.handle(Loaded(1)) == [Switch(1), Report(1, serving=1)]
    assert (machine.serving, machine.loading, machine.has_worker) == (1, None, True)


def test_a_newer_generation_is_loaded_while_the_old_one_serves():
    machine = serving(1)
    assert machine.handle(Requested(2)) == [Load(2)]
    assert machine.handle(Loaded(2)) == [Switch(2), Report(2, serving=2)]


def test_a_generation_that_fails_leaves_the_one_before_it_serving():
    machine = serving(1)
    machine.handle(Requested(2))
    assert machine.handle(Failed(2)) == [Report(2, serving=1, is_failure=True)]
    assert machine.serving == 1


def test_calls_are_refused_when_the_first_generation_fails():
    machine = Reconciler()
    machine.handle(Requested(1))
    assert machine.handle(Failed(1)) == [Report(1, serving=0, is_failure=True), Refuse(1)]
    assert machine.handle(Requested(1)) == [Hold(1), Load(1)]


def test_a_newer_generation_supersedes_what_is_being_loaded():
    machine = serving(1)
    machine.handle(Requested(2))
    assert machine.handle(Requested(3)) == [Abandon(2), Load(3)]
    assert machine.handle(Failed(2)) == []
    assert machine.handle(Loaded(2)) == []
    assert machine.handle(Loaded(3)) == [Switch(3), Report(3, serving=3)]


def test_going_back_to_what_is_served_abandons_what_is_being_loaded():
    machine = serving(1)
    machine.handle(Requested(2))
    assert machine.handle(Requested(1)) == [Abandon(2), Report(1, serving=1)]


def test_what_is_asked_for_twice_is_confirmed_or_left_alone():
    machine = serving(1)
    assert machine.handle(Requested(1)) == [Report(1, serving=1)]
    machine.handle(Requested(2))
    assert machine.handle(Requested(2)) == []


def test_a_worker_that_dies_is_replaced_at_once():
    machine = serving(1)
    assert machine.handle(Died(1, lived=100, had_calls=False)) == [Hold(1), Restart(1, 0.0)]
    assert machine.handle(RestartDue(1)) == [Hold(1), Load(1)]
    assert machine.handle(Loaded(1)) == [Switch(1), Report(1, serving=1)]
    assert machine.restarts == 1


def delays_of_deaths(lived: float, *, had_calls: bool) -> list[float]:
    machine = serving(1)
    delays = []
    for _ in range(len(DELAYS) + 2):
        effects = machine.handle(Died(1, lived=lived, had_calls=had_calls))
        delays += [effect.delay for effect in effects if isinstance(effect, Restart)]
        machine.handle(RestartDue(1))
        machine.handle(Loaded(1))
    return delays


def test_a_worker_that_dies_young_by_itself_is_replaced_ever_more_slowly():
    assert delays_of_deaths(0.1, had_calls=False) == [*DELAYS, DELAYS[-1], DELAYS[-1]]


def test_a_worker_that_lived_or_that_a_call_ended_is_replaced_at_once():
    assert set(delays_of_deaths(60, had_calls=False)) == {0.0}
    assert set(delays_of_deaths(0.1, had_calls=True)) == {0.0}


def test_a_restart_that_fails_is_tried_again_and_refuses_calls_meanwhile():
    machine = serving(1)
    machine.handle(Died(1, lived=100, had_calls=False))
    machine.handle(RestartDue(1))
    assert machine.handle(Failed(1)) == [
        Report(1, serving=0, is_failure=True),
        Refuse(1),
        Restart(1, 0.5),
    ]
    assert machine.handle(RestartDue(1)) == [Hold(1), Load(1)]


def test_a_worker_that_dies_while_the_next_generation_is_loaded_is_not_replaced():
    machine = serving(1)
    machine.handle(Requested(2))
    assert machine.handle(Died(1, lived=1, had_calls=False)) == [Hold(2)]
    assert machine.handle(Loaded(2)) == [Switch(2), Report(2, serving=2)]


def test_but_it_is_when_the_next_generation_fails():
    machine = serving(1)
    machine.handle(Requested(2))
    machine.handle(Died(1, lived=1, had_calls=False))
    assert machine.handle(Failed(2)) == [
        Report(2, serving=0, is_failure=True),
        Hold(1),
        Restart(1, 0.0),
    ]


def test_late_news_of_older_generations_changes_nothing():
    machine = serving(1)
    machine.handle(Requested(2))
    machine.handle(Loaded(2))
    assert machine.handle(Died(1, lived=1, had_calls=False)) == []
    assert machine.handle(RestartDue(1)) == []
    assert machine.handle(Loaded(1)) == []


events = st.one_of(
    st.builds(Requested, st.integers(1, 4)),
    st.builds(Loaded, st.integers(1, 4)),
    st.builds(Failed, st.integers(1, 4)),
    st.builds(Died, st.integers(1, 4), st.floats(0, 100), st.booleans()),
    st.builds(RestartDue, st.integers(1, 4)),
)


@given(st.lists(events, max_size=40))
def test_any_order_of_events_keeps_one_load_under_way_and_ends_with_what_was_asked_for(sequence):
    machine = Reconciler()
    under_way: int | None = None
    due: int | None = None
    for event in sequence:
        if isinstance(event, Loaded | Failed) and event.generation != under_way:
            assert machine.handle(event) == []
            continue
        for effect in machine.handle(event):
            match effect:
                case Load(generation):
                    assert under_way is None or isinstance(event, Loaded | Failed)
                    under_way = generation
                case Abandon(generation):
                    assert under_way == generation
                    under_way = None
                case Switch(generation):
                    assert event == Loaded(generation)
                case Restart(generation):
                    due = generation
        if isinstance(event, Loaded | Failed):
            under_way = machine.loading
        if event == RestartDue(due or 0):
            due = None
        assert machine.loading == under_way
        if machine.serving and not machine.has_worker and machine.loading is None:
            assert due == machine.serving, "nobody brings the worker back"
    machine.handle(Requested(9))
    assert machine.loading == 9
    assert Switch(9) in machine.handle(Loaded(9))
    assert machine.serving == 9


def test_what_was_ended_to_make_room_comes_back_when_the_newer_one_fails():
    machine = serving(1)
    machine.handle(Requested(2))
    assert machine.handle(Stopped(2)) == [Hold(2)]
    assert not machine.has_worker
    effects = machine.handle(Failed(2))
    assert effects == [Report(2, serving=0, is_failure=True), Hold(1), Restart(1, DELAYS[0])]
    assert machine.handle(RestartDue(1)) == [Hold(1), Load(1)]
    assert machine.handle(Loaded(1)) == [Switch(1), Report(1, serving=1)]
    assert machine.restarts == 0
