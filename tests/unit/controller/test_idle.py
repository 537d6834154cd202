"""When a workload is idle."""

from __future__ import annotations

from kubetorch.controller.tuning import TIMING
from kubetorch.controller.workload import Activities, IdleWatch, idle_patience
from kubetorch.wire.messages import Activity
from manual_clock import ManualClock


def seconds_left(
    *activities: Activity | None, now: float = 1000.0, since: float = 0.0
) -> float | None:
    known_activities = Activities()
    pods = {f"pod-{number}": activity for number, activity in enumerate(activities)}
    known_activities.set_pods(pods.keys())
    for pod, activity in pods.items():
        known_activities.reported(pod, activity)
    return known_activities.seconds_left(ttl=60.0, since=since, now=now)


def test_the_time_counts_from_the_last_call_of_any_pod() -> None:
    assert seconds_left(Activity(calls=0, last=980.0), Activity(calls=0, last=970.0)) == 40.0


def test_the_time_counts_from_the_deploy_when_there_was_no_call() -> None:
    assert seconds_left(Activity(calls=0, last=0.0), since=990.0) == 50.0


def test_nothing_is_left_when_it_was_idle_for_long() -> None:
    assert seconds_left(Activity(calls=0, last=10.0)) == 0.0


def test_news_of_a_call_that_is_on_its_way_is_waited_for() -> None:
    assert idle_patience("1m") == 60.0 + TIMING.call_report_seconds


def test_a_running_call_is_not_idle() -> None:
    assert seconds_left(Activity(calls=0, last=10.0), Activity(calls=1, last=10.0)) is None


def test_a_pod_that_is_away_may_be_busy() -> None:
    assert seconds_left(Activity(calls=0, last=10.0), None) is None


def test_a_clock_that_was_set_back_costs_at_most_one_ttl() -> None:
    assert seconds_left(Activity(calls=0, last=5000.0)) == 60.0


class Watched:
    """A workload whose only pod was active at `last`."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.activity: Activity | None = Activity(calls=0, last=1000.0)
        self.idle = 0
        self.announced: list[float] = []
        self.watch = IdleWatch(
            self.clock,
            seconds_left=self.seconds_left,
            notice_seconds=lambda: 20.0,
            on_notice=self.announced.append,
            on_idle=self.on_idle,
        )

    def seconds_left(self) -> float | None:
        return seconds_left(self.activity, now=self.clock.time())

    def on_idle(self) -> None:
        self.idle += 1


def test_idleness_is_noticed_when_the_time_is_over_and_not_before() -> None:
    watched = Watched()
    watched.watch.update()
    watched.clock.advance(59.0)
    assert watched.idle == 0
    watched.clock.advance(1.0)
    assert watched.idle == 1


def test_a_call_in_between_starts_the_time_again() -> None:
    watched = Watched()
    watched.watch.update()
    watched.clock.advance(30.0)
    watched.activity = Activity(calls=0, last=1030.0)
    watched.clock.advance(30.0)
    assert watched.idle == 0
    watched.clock.advance(30.0)
    assert watched.idle == 1


def test_the_end_is_announced_once_unless_a_call_comes_in_between() -> None:
    watched = Watched()
    watched.watch.update()
    watched.clock.advance(39.0)
    assert watched.announced == []
    watched.clock.advance(1.0)
    assert watched.announced == [20.0]
    watched.clock.advance(10.0)
    watched.watch.update()  # a pod reports that nothing has happened
    watched.clock.advance(1.0)
    assert watched.announced == [20.0]
    watched.activity = Activity(calls=0, last=1051.0)
    watched.watch.update()
    watched.clock.advance(40.0)
    assert watched.announced == [20.0, 20.0]
    assert watched.idle == 0
    watched.clock.advance(20.0)
    assert watched.idle == 1


def test_the_end_is_announced_also_when_a_pod_reports_as_it_is_due() -> None:
    watched = Watched()
    watched.watch.update()
    watched.watch.close()  # as where the timer comes late
    watched.clock.advance(41.0)
    watched.watch.update()
    watched.clock.advance(0.0)
    assert watched.announced == [19.0]
    watched.clock.advance(19.0)
    assert watched.idle == 1


def test_a_closed_watch_notices_nothing() -> None:
    watched = Watched()
    watched.watch.update()
    watched.watch.close()
    watched.clock.advance(100.0)
    assert watched.idle == 0


def test_pods_are_quiet_when_each_of_them_said_so() -> None:
    activities = Activities()
    activities.set_pods(frozenset("ab"))

    def seconds_left() -> float | None:
        return activities.seconds_left(ttl=10.0, since=0.0, now=5.0)

    assert seconds_left() is None
    activities.reported("a", Activity(calls=0, last=1.0))
    assert seconds_left() is None
    activities.reported("b", Activity(calls=0, last=3.0))
    assert seconds_left() == 8.0
    activities.reported("a", Activity(calls=1, last=4.0))
    assert seconds_left() is None
    activities.reported("a", Activity(calls=0, last=4.0))
    assert seconds_left() == 9.0
    activities.reported("b", None)
    assert seconds_left() is None
    activities.set_pods(frozenset("a"))
    assert seconds_left() == 9.0
    activities.set_pods(frozenset("ac"))
    assert seconds_left() is None
