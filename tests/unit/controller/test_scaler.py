"""The number of pods of a service: each option and each fault, and any order of events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetorch.controller.scaler import Scaler, ScalerSettings
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.wire.messages import PodLoad

START = 1_800_000_000.0
#: A step of the simulated time; a power of two, so that sums of it are exact.
STEP = 1 / 16
PLAIN = ScalerSettings.of(
    AutoscalingSpec(target=10, target_utilization=100, min_scale=0),
    cpu_cores=None,
    memory_bytes=None,
)


@dataclass
class Agent:
    """What an agent counts since its start."""

    calls: int = 0
    call_seconds: float = 0.0
    started: int = 0
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: Calls per second that last no time, and CPU time per second.
    rate: float = 0.0
    cores: float = 0.0
    reported: PodLoad | None = None

    def step(self) -> None:
        self.call_seconds += self.calls * STEP
        self.started += round(self.rate * STEP)
        self.cpu_seconds += self.cores * STEP

    def load(self) -> PodLoad:
        return PodLoad(
            self.calls,
            call_seconds=self.call_seconds,
            started=self.started,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_bytes,
            metrics=dict(self.metrics),
        )


class Service:
    """A service whose pods start at once, and whose clock moves when a test says so."""

    def __init__(self, size: int = 0, *, are_pods_there: bool = True, **changes: Any) -> None:
        self.now = START
        self.settings = msgspec.structs.replace(PLAIN, **changes)
        self.scaler = Scaler(self.settings, size=size, now=START)
        self.agents: dict[str, Agent] = {}
        self.are_pods_there = are_pods_there
        self.is_reporting = True
        self.decided_sizes: list[int] = []
        self._names = 0
        self.follow_size()

    def follow_size(self) -> None:
        surplus = len(self.agents) - self.scaler.size
        if not self.are_pods_there or not surplus:
            return
        for name in self.scaler.leaving(self.scaler.size):
            del self.agents[name]
        for _ in range(-surplus):
            self._names += 1
            self.agents[f"pod-{self._names:03}"] = Agent()
        self.scaler.pods_changed(list(self.agents), list(self.agents), self.now)

    def configure(self, **changes: Any) -> None:
        self.settings = msgspec.structs.replace(self.settings, **changes)
        self.scaler.configure(self.settings, self.now)

    def decide(self) -> int:
        size = self.scaler.decide(self.now)
        self.decided_sizes.append(size)
        self.follow_size()
        return size

    def run(self, seconds: float) -> int:
        """Let so much time pass, with reports each second, and decisions when they are due."""
        for step in range(round(seconds / STEP)):
            self.now += STEP
            for agent in self.agents.values():
                agent.step()
            if self.is_reporting and step % round(1 / STEP) == 0:
                self.report()
            delay = self.scaler.next_decision(self.now)
            if delay is not None and delay <= 0:
                self.decide()
        return self.scaler.size

    def report(self) -> None:
        """Send the loads that have changed, and those of pods with calls."""
        for name, agent in self.agents.items():
            load = agent.load()
            if agent.calls or load != agent.reported:
                agent.reported = load
                self.scaler.report(name, load, self.now)

    def share(self, calls: int) -> None:
        """Let the pods have so many calls, and report them."""
        for index, agent in enumerate(self.agents.values()):
            count = calls // len(self.agents) + (index < calls % len(self.agents))
            agent.started += max(0, count - agent.calls)
            agent.calls = count
        self.report()

    def hold(self, calls: int, seconds: float) -> int:
        """Have so many calls in flight for a time, spread anew each second."""
        for _ in range(round(seconds)):
            self.share(calls)
            self.run(1)
        return self.scaler.size

    @property
    def reason(self) -> str:
        return self.scaler.view(self.now).reason


# -------------------------------------------------------------------------------------- settings


def numbers(**fields: Any) -> ScalerSettings:
    return ScalerSettings.of(AutoscalingSpec(**fields), cpu_cores=2.0, memory_bytes=1024)


def test_the_defaults_are_those_of_knative() -> None:
    assert numbers() == ScalerSettings(
        metric="concurrency",
        target=100,
        utilization=70,
        window=60,
        panic_window=6,
        panic_threshold=2,
        minimum=1,
        maximum=0,
        delay=0,
        retention=0,
    )
    assert numbers(metric="rps").share == pytest.approx(140)
    assert numbers(metric="cpu").share == 80


def test_a_target_counts_no_more_than_the_hard_limit() -> None:
    assert numbers(concurrency=4).target == 4
    assert numbers(concurrency=4, target=3).target == 3
    assert numbers(concurrency=4, target=30).target == 4
    assert numbers(concurrency=4, target=30, metric="rps").target == 30


def test_all_of_a_spec_is_in_the_settings() -> None:
    settings = numbers(
        target=5,
        window="30s",
        target_utilization=50,
        min_scale=2,
        max_scale=9,
        scale_down_delay="1m30s",
        scale_to_zero_pod_retention_period="5m",
        activation_scale=3,
        panic_window_percentage=20.0,
        panic_threshold_percentage=300.0,
        buffer=1,
        min_schedule=(("0 8 * * *", 4),),
        timezone="Europe/Berlin",
    )
    assert settings == ScalerSettings(
        metric="concurrency",
        target=5,
        utilization=50,
        window=30,
        panic_window=6,
        panic_threshold=3,
        minimum=2,
        maximum=9,
        activation=3,
        buffer=1,
        delay=90,
        retention=300,
        schedule=(("0 8 * * *", 4),),
        timezone="Europe/Berlin",
    )


@pytest.mark.parametrize(("metric", "request_amount"), [("cpu", 2.0), ("memory", 1024.0)])
def test_resources_are_compared_to_the_request(metric: str, request_amount: float) -> None:
    assert numbers(metric=metric).request == request_amount


# ---------------------------------------------------------------------------- what the load needs


def test_pods_are_added_at_a_part_of_the_target() -> None:
    service = Service(1, target=10, utilization=70)
    assert service.hold(28, 5) == 4
    assert service.reason == "load of 28 calls needs 4 pods at 70 % of the target 10 per pod"


def test_load_that_fits_exactly_needs_no_further_pod() -> None:
    assert Service(1).hold(30, 90) == 3


def test_a_step_from_idle_is_decided_whole_within_half_a_second() -> None:
    service = Service(1, minimum=1)
    service.run(100)
    service.share(200)
    assert service.run(0.5) == 20


def test_a_step_from_zero_starts_a_pod_at_once_and_the_others_within_half_a_second() -> None:
    service = Service(are_pods_there=False)
    service.scaler.wait(200, service.now)
    assert service.scaler.next_decision(service.now) == 0
    assert service.decide() == 1
    assert service.scaler.decisions[-1].reason == "a call waits for the first pod"
    assert service.run(0.5) == 20


def test_a_blip_of_a_few_milliseconds_starts_nothing() -> None:
    service = Service(1, minimum=1)
    service.run(100)
    service.share(50)
    service.agents["pod-001"].calls = 0
    service.agents["pod-001"].call_seconds = 50 * 0.01
    assert service.run(10) == 1


def test_load_is_averaged_over_the_window() -> None:
    service = Service(2, window=20, panic_threshold=100)
    service.hold(20, 30)
    service.share(60)
    service.run(10)
    assert service.scaler.size == 4


def test_a_call_that_runs_keeps_a_pod_however_small_its_share_is() -> None:
    service = Service(1, target=1000)
    assert service.hold(1, 1000) == 1


def test_bursts_between_two_reports_count_in_full() -> None:
    service = Service(1, panic_threshold=100)
    agent = service.agents["pod-001"]
    for _ in range(90):
        # 50 calls for half of each second, none of which runs when a report is made.
        agent.call_seconds += 25
        agent.started += 50
        service.run(1)
    assert service.scaler.size == 3


def test_waiting_callers_are_load_beside_the_calls_in_pods() -> None:
    service = Service(2, are_pods_there=False)
    service.scaler.pods_changed(["a"], ["a"], service.now)
    service.scaler.report("a", PodLoad(10), service.now)
    service.scaler.wait(30, service.now)
    service.run(0.5)
    assert service.scaler.size == 4
    view = service.scaler.view(service.now)
    assert (view.calls, view.waiting) == (40, 30)


def test_calls_per_second_count_whether_or_not_they_are_short() -> None:
    service = Service(1, metric="rps", target=100, utilization=70)
    service.agents["pod-001"].rate = 336.0
    service.run(90)
    assert service.scaler.size == 5
    assert service.reason.startswith("load of 33")


def test_a_caller_that_comes_to_a_pod_counts_once() -> None:
    service = Service(1, metric="rps", target=10, utilization=100, minimum=1)
    service.run(100)
    service.scaler.wait(30, service.now)
    service.agents["pod-001"].started += 30
    service.scaler.wait(0, service.now)
    service.report()
    service.run(10)
    assert service.scaler.view(service.now).calls == 0
    # 30 calls in 10 s.
    assert max(service.decided_sizes[-5:]) == 1


def test_the_use_of_cpu_is_compared_to_the_request() -> None:
    service = Service(2, metric="cpu", target=80, utilization=100, request=2.0, minimum=1)
    for agent in service.agents.values():
        agent.cores = 3.2
        agent.calls = 1
    service.run(30)
    # 6.4 of 2 cores per pod are 320 % for 80 % each; the pods that came have no work.
    assert service.scaler.size == 4
    assert service.reason.startswith("cpu use of 79 % per pod")


def test_a_use_near_the_target_changes_nothing() -> None:
    service = Service(2, metric="memory", target=80, utilization=100, request=100.0, minimum=1)
    for agent in service.agents.values():
        agent.calls, agent.memory_bytes = 1, 87
    assert service.run(90) == 2
    assert "% per pod is within 10 % of the target 80 %" in service.reason
    for agent in service.agents.values():
        agent.memory_bytes = 89
    assert service.run(90) == 3


def test_pods_that_have_not_reported_their_use_are_not_taken_for_idle() -> None:
    service = Service(4, metric="memory", target=80, utilization=100, request=100.0, minimum=1)
    service.is_reporting = False
    service.scaler.report("pod-001", PodLoad(1, memory_bytes=80), service.now)
    assert service.run(300) == 4


def test_a_resource_that_pods_do_not_ask_for_holds_the_size_and_says_so() -> None:
    service = Service(3, metric="cpu", target=80, minimum=1)
    service.hold(100, 90)
    assert service.scaler.size == 3
    assert service.reason.startswith("the pods ask for no cpu")


def test_the_last_report_of_less_memory_is_decided_on_once_the_average_has_it() -> None:
    service = Service(4, metric="memory", target=50, utilization=100, request=100.0, window=6)
    for agent in service.agents.values():
        agent.memory_bytes = 50
    service.run(10)
    for agent in service.agents.values():
        agent.memory_bytes = 10
    service.run(1)
    service.is_reporting = False
    while (delay := service.scaler.next_decision(service.now)) is not None:
        service.now += delay
        service.scaler.decide(service.now)
    assert service.scaler.size == service.scaler.decide(service.now + 3600)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308])
def test_a_metric_that_is_too_large_or_no_number_is_not_in_the_state(value: float) -> None:
    service = Service(1)
    metrics = {"queue": (value, 0.0), "rows": (5.0, 0.0)}
    service.scaler.report("pod-001", PodLoad(0, metrics=metrics), service.now)
    assert service.scaler.view(service.now).metrics == {"rows": 5.0}


def test_memory_that_no_pod_has_reported_holds_the_size() -> None:
    service = Service(3, metric="memory", target=80, request=100.0, minimum=1)
    assert service.run(200) == 3
    assert service.reason == "no pod has reported its memory: the size is held"


def test_pods_without_calls_are_taken_to_use_no_cpu() -> None:
    service = Service(3, metric="cpu", target=80, request=1.0, minimum=1)
    assert service.run(200) == 1


def queue(service: Service, *lengths: float) -> None:
    for agent, length in zip(service.agents.values(), lengths, strict=False):
        agent.metrics["queue"] = (length, service.now)


def test_a_metric_of_the_user_is_summed_over_the_pods() -> None:
    service = Service(2, metric="queue", target=10, utilization=100)
    for _ in range(70):
        queue(service, 25, 15)
        service.run(1)
    assert service.scaler.size == 4
    assert service.reason == "queue of 40 needs 4 pods at the target 10 per pod"
    assert service.scaler.view(service.now).metrics == {"queue": 40}


def test_a_metric_that_nobody_has_reported_yet_holds_the_size() -> None:
    service = Service(2, metric="queue", target=10, utilization=100)
    service.run(10)
    assert service.scaler.size == 2
    assert service.reason == "no pod has reported queue yet: the size is held"


def test_a_metric_that_nobody_has_reported_for_a_window_holds_the_size_and_says_so() -> None:
    service = Service(3, metric="queue", target=10, utilization=100)
    queue(service, 40)
    service.run(10)
    assert service.scaler.size == 4
    # An agent repeats the old value in each report.
    service.share(1)
    assert service.run(600) == 4
    assert service.reason == "no pod has reported queue for 60 s: the size is held"
    service.share(0)
    assert service.run(100) == 4
    assert service.scaler.next_decision(service.now) is None


def test_a_pod_whose_metric_is_old_counts_nothing_while_others_report() -> None:
    service = Service(2, metric="queue", target=10, utilization=100)
    queue(service, 100, 10)
    assert service.run(1) == 11
    agent = service.agents["pod-002"]
    for _ in range(150):
        agent.metrics["queue"] = (20, service.now)
        service.run(1)
    assert service.scaler.size == 2


def test_at_zero_a_call_wakes_a_service_with_a_metric_of_its_own() -> None:
    service = Service(metric="queue", target=10, utilization=100)
    service.scaler.wait(50, service.now)
    assert service.run(5) == 1


def test_a_value_that_is_no_number_counts_nothing() -> None:
    service = Service(1, metric="queue", target=10, utilization=100)
    for value in (math.nan, math.inf, -math.inf):
        queue(service, value)
        service.run(1)
    queue(service, 30)
    assert service.run(2) == 3


# ----------------------------------------------------------------------- reports that go astray


def outcome(deliver: Callable[[int], Iterable[int]], *, seconds: int = 120) -> tuple[int, str]:
    """The size after uneven load, of whose reports some are delivered at each second."""
    scaler = Scaler(msgspec.structs.replace(PLAIN, panic_threshold=1e9), size=1, now=START)
    scaler.pods_changed(["a"], ["a"], START)
    loads = []
    total = 0.0
    for second in range(seconds):
        calls = 40 if second % 4 < 2 else 10
        loads.append(PodLoad(calls, call_seconds=total, started=second * 10))
        total += calls
    scaler.report("a", loads[0], START)
    for second in range(seconds):
        for index in deliver(second):
            scaler.report("a", loads[index], START + second + 0.001 * index)
        scaler.decide(START + second + 0.5)
    return scaler.size, scaler.view(START + seconds).reason


@pytest.mark.parametrize(
    "deliver",
    [
        pytest.param(lambda second: [second] if second % 10 == 9 else [], id="lost"),
        pytest.param(lambda second: [second] * 3, id="repeated"),
        pytest.param(lambda second: [second, max(0, second - 1)], id="late"),
    ],
)
def test_reports_that_are_astray_change_nothing(deliver: Callable[[int], list[int]]) -> None:
    assert outcome(deliver) == (3, "load of 25 calls needs 3 pods at the target 10 per pod")


def test_lost_reports_of_a_long_time_are_no_burst() -> None:
    service = Service(1, target=100)
    service.hold(90, 60)
    service.is_reporting = False
    service.run(14)
    service.is_reporting = True
    service.run(30)
    assert service.decided_sizes[-1] == max(service.decided_sizes) == 1


def test_an_agent_that_starts_anew_counts_from_there() -> None:
    service = Service(1)
    service.hold(10, 90)
    service.agents["pod-001"] = Agent(calls=10, call_seconds=3.0)
    assert service.run(90) == 1
    assert service.hold(20, 90) == 2


def test_a_controller_that_starts_anew_does_not_count_what_was_before() -> None:
    service = Service(1)
    service.agents["pod-001"].call_seconds = 1e6
    service.agents["pod-001"].started = 10**6
    assert service.hold(5, 10) == 1
    assert service.scaler.view(service.now).rate < 10


def test_the_calls_of_a_pod_that_is_gone_count_no_more() -> None:
    service = Service(2, are_pods_there=False)
    service.scaler.pods_changed(["a", "b"], ["a", "b"], service.now)
    service.scaler.report("a", PodLoad(50), service.now)
    service.run(1)
    service.scaler.pods_changed(["b"], ["b"], service.now)
    service.scaler.report("a", PodLoad(50, call_seconds=50.0), service.now)
    assert service.scaler.view(service.now).calls == 0
    service.run(700)
    assert service.scaler.next_decision(service.now) is None


def test_the_calls_of_a_silent_pod_end_after_the_silence_of_a_session() -> None:
    service = Service(1)
    service.share(50)
    service.is_reporting = False
    service.run(TIMING.load_silence_seconds + 1)
    assert service.scaler.view(service.now).calls == 0
    service.run(100)
    assert service.scaler.next_decision(service.now) is None


def test_each_pod_is_silent_from_its_own_last_report_on() -> None:
    service = Service(2, are_pods_there=False)
    service.scaler.pods_changed(["a", "b"], ["a", "b"], service.now)
    service.scaler.report("a", PodLoad(5), service.now)
    service.run(10)
    service.scaler.report("b", PodLoad(3), service.now)
    service.run(10)
    assert service.scaler.view(service.now).calls == 3
    service.run(6)
    assert service.scaler.view(service.now).calls == 0


def test_reports_that_come_a_little_late_and_early_need_no_further_pod() -> None:
    service = Service(1, are_pods_there=False, target=2, window=6.0, panic_window=0.6)
    service.scaler.pods_changed(["a"], ["a"], service.now)
    for second in range(30):
        service.now = START + second + (0.03 if second % 2 else 0.0)
        service.scaler.report("a", PodLoad(4, call_seconds=4.0 * second), service.now)
        service.decide()
    assert max(service.decided_sizes) == 2


def test_a_metric_of_the_user_needs_a_pod_for_each_part_of_its_target() -> None:
    service = Service(1, metric="queue")
    service.agents["pod-001"].metrics = {"queue": (20.5, START)}
    assert service.run(55) == 3


# ----------------------------------------------------------------------------------------- bursts


def test_a_burst_is_seen_in_the_panic_window() -> None:
    calm = Service(1, panic_threshold=1000)
    alarmed = Service(1)
    for service in (calm, alarmed):
        service.hold(8, 90)
        service.hold(100, 10)
    assert calm.scaler.size == 3
    assert alarmed.scaler.size == 10
    assert alarmed.reason == "a burst: load of 100 calls needs 10 pods at the target 10 per pod"


def test_a_longer_panic_window_sees_a_burst_later() -> None:
    service = Service(1, panic_window=30.0)
    service.hold(8, 90)
    service.hold(100, 7)
    assert 1 < service.scaler.size < 5


def test_less_than_the_threshold_is_no_burst() -> None:
    service = Service(4, panic_threshold=2.0)
    service.hold(40, 90)
    service.hold(70, 7)
    assert service.scaler.size == 5


def test_no_pod_goes_until_a_window_after_a_burst() -> None:
    service = Service(1)
    service.hold(8, 90)
    service.hold(100, 10)
    service.share(8)
    service.run(50)
    assert service.scaler.size == 10
    assert service.reason == "a burst: no pod goes until 60 s after it"
    assert service.run(30) < 10


def test_one_decision_asks_for_a_bounded_multiple_of_the_ready_pods() -> None:
    service = Service(are_pods_there=False)
    service.scaler.wait(10**6, service.now)
    service.run(5)
    assert service.scaler.size == LIMITS.scale_up_factor


# ------------------------------------------------------------------------------------------ holds


def test_pods_stay_for_the_delay_after_they_were_needed() -> None:
    service = Service(5, window=6, panic_window=0.6, delay=30, panic_threshold=100)
    service.hold(50, 20)
    service.share(10)
    assert service.run(29) == 5
    assert service.reason == "5 pods needed within the last 30 s (scale_down_delay)"
    assert service.run(10) < 5


def test_the_delay_counts_from_the_time_at_which_pods_were_needed_last() -> None:
    """Also where nothing was decided for long before, since nothing changed."""
    service = Service(
        3,
        metric="memory",
        target=80,
        utilization=100,
        request=100.0,
        minimum=1,
        delay=30,
        window=6,
        panic_window=0.6,
    )
    for agent in service.agents.values():
        agent.memory_bytes = 80
    service.report()
    service.is_reporting = False
    service.run(1000)
    assert service.scaler.next_decision(service.now) is None
    for agent in service.agents.values():
        agent.memory_bytes = 10
    service.is_reporting = True
    for agent in service.agents.values():
        agent.calls = 1
    assert service.run(30) == 3
    assert service.run(20) == 1


def test_at_most_half_of_the_ready_pods_go_every_two_seconds() -> None:
    service = Service(64, window=6, panic_window=0.6, minimum=1)
    service.run(60)
    sizes = [change.after for change in service.scaler.decisions]
    times = [change.time for change in service.scaler.decisions]
    assert sizes == [32, 16, 8, 4, 2, 1]
    assert all(later - earlier >= 2 for earlier, later in pairwise(times))


def test_pods_that_do_not_go_hold_the_next_step_without_a_clock() -> None:
    service = Service(64, window=6, panic_window=0.6)
    service.are_pods_there = False
    assert service.run(60) == 32
    assert service.scaler.next_decision(service.now) is None
    assert service.reason == "0 pods needed; at most half of 64 go at once"


def test_no_pod_goes_before_a_window_was_seen() -> None:
    service = Service(5, minimum=1)
    assert service.run(59) == 5
    assert service.reason == "no pod goes before the load of 60 s is known"
    assert service.run(10) == 1


def test_the_last_pod_goes_after_the_window_and_its_retention() -> None:
    service = Service(3, retention=600)
    service.hold(5, 10)
    service.share(0)
    service.run(100)
    assert service.scaler.size == 1
    assert service.reason == (
        "no calls: the last pod stays for 10 m (scale_to_zero_pod_retention_period)"
    )
    service.run(59 + 600 - 100)
    assert service.scaler.size == 1
    service.run(2)
    assert service.scaler.size == 0
    assert service.scaler.decisions[-1].reason == "idle for 10 m"
    assert service.scaler.next_decision(service.now) is None


def test_without_retention_the_last_pod_goes_after_the_window() -> None:
    service = Service(1)
    service.hold(5, 10)
    service.share(0)
    assert service.run(59) == 1
    assert service.run(2) == 0
    assert service.scaler.decisions[-1].reason == "no calls for 60 s"


def test_a_call_in_the_retention_begins_it_anew() -> None:
    service = Service(1, retention=100)
    service.run(150)
    service.hold(1, 1)
    service.share(0)
    assert service.run(150) == 1
    assert service.run(20) == 0


def test_a_service_with_a_minimum_is_at_rest_at_it() -> None:
    service = Service(1, minimum=1, retention=600)
    service.run(200)
    assert service.scaler.next_decision(service.now) is None
    assert service.reason == "min_scale is 1"


# ----------------------------------------------------------------------------------------- bounds


def test_the_size_stays_between_the_bounds() -> None:
    service = Service(1, minimum=2, maximum=5)
    service.run(1)
    assert service.scaler.size == 2
    assert service.hold(310, 5) == 5
    assert service.reason == "max_scale is 5, 31 pods would be needed"


def test_new_bounds_hold_at_once() -> None:
    service = Service(1, maximum=5, delay=300)
    service.hold(100, 10)
    service.configure(maximum=8)
    assert service.run(1) == 8
    service.configure(maximum=3)
    assert service.decide() == 3
    service.configure(maximum=0, minimum=12)
    assert service.decide() == 12
    assert service.reason == "min_scale is 12"


def test_another_metric_counts_from_its_beginning() -> None:
    service = Service(1, panic_threshold=1000)
    service.hold(20, 90)
    service.configure(metric="rps", target=5)
    agent = service.agents["pod-001"]
    agent.rate = 32
    service.run(70)
    assert service.reason.startswith("load of 3")
    assert service.scaler.size == 7
    service.configure(metric="concurrency", target=10)
    service.run(70)
    assert service.reason == "load of 20 calls needs 2 pods at the target 10 per pod"


def test_a_hold_adds_no_pods_when_the_maximum_rises() -> None:
    service = Service(1, maximum=3, delay=300, window=6, panic_window=0.6)
    service.hold(100, 20)
    service.share(1)
    service.run(60)
    service.configure(maximum=50)
    assert service.run(10) == 3


def test_the_maximum_wins_where_the_bounds_exclude_each_other() -> None:
    service = Service(1, minimum=5, maximum=3)
    assert service.decide() == 3


def test_while_there_is_load_the_activation_scale_is_the_least() -> None:
    service = Service(activation=3, are_pods_there=False)
    assert service.decide() == 0
    service.scaler.wait(1, service.now)
    assert service.decide() == 3
    assert service.reason == "activation_scale is 3"
    service.scaler.wait(0, service.now)
    assert service.run(200) == 0


def test_a_buffer_is_free_while_there_is_work() -> None:
    service = Service(1, buffer=2)
    service.run(61)
    assert service.scaler.size == 0
    service.scaler.wait(1, service.now)
    service.decide()
    service.scaler.wait(0, service.now)
    assert service.hold(20, 90) == 4
    assert service.reason.endswith("needs 2 pods at the target 10 per pod, and 2 free (buffer)")
    service.share(0)
    assert service.run(90) == 0


def test_a_buffer_beside_a_use_near_the_target_does_not_grow() -> None:
    service = Service(
        *(2,), metric="memory", target=80, utilization=100, request=100.0, minimum=1, buffer=1
    )
    for _ in range(20):
        for agent, memory in zip(service.agents.values(), (80, 80, 0, 0, 0, 0), strict=False):
            agent.calls, agent.memory_bytes = 1, memory
        service.run(10)
    assert service.scaler.size == 3


# --------------------------------------------------------------------------------------- schedule


def unix_time(text: str, zone: str = "UTC", *, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def minimum_at(
    now: float, schedule: tuple[tuple[str, int], ...], timezone: str = "UTC"
) -> tuple[int, str]:
    settings = msgspec.structs.replace(PLAIN, schedule=schedule, timezone=timezone)
    scaler = Scaler(settings, size=0, now=now)
    scaler.decide(now)
    view = scaler.view(now)
    return view.minimum, view.reason


OFFICE = (("0 8 * * 1-5", 4), ("0 20 * * *", 0))


@pytest.mark.parametrize(
    ("time", "minimum"),
    [
        ("2027-03-01T07:59:59", 0),
        ("2027-03-01T08:00:00", 4),
        ("2027-03-01T19:59:59", 4),
        ("2027-03-01T20:00:00", 0),
        # Saturday.
        ("2027-03-06T12:00:00", 0),
    ],
)
def test_the_value_of_the_expression_that_fired_last_is_the_minimum(
    time: str, minimum: int
) -> None:
    assert minimum_at(unix_time(time), OFFICE)[0] == minimum
    assert minimum_at(unix_time(time, "Asia/Tokyo"), OFFICE, "Asia/Tokyo")[0] == minimum


def test_of_two_expressions_that_fired_at_once_the_larger_value_holds() -> None:
    schedule = (("0 8 * * *", 3), ("0 8 * * 1", 7), ("0 */8 * * *", 5))
    assert minimum_at(unix_time("2027-03-01T09:00:00"), schedule) == (
        7,
        "min_scale of the schedule '0 8 * * 1' is 7",
    )


@pytest.mark.parametrize(
    ("time", "fold", "minimum"),
    [
        ("2027-10-31T02:29:00", 0, 1),
        ("2027-10-31T02:30:00", 0, 2),
        ("2027-10-31T02:50:00", 0, 3),
        # The clock goes back from 3:00 to 2:00: nothing fires again.
        ("2027-10-31T02:10:00", 1, 3),
        ("2027-10-31T02:40:00", 1, 3),
        ("2027-10-31T04:00:00", 0, 1),
        # It goes forward from 2:00 to 3:00: what is due between fires then, the larger value holds.
        ("2027-03-28T01:59:59", 0, 1),
        ("2027-03-28T03:00:00", 0, 3),
    ],
)
def test_in_the_nights_of_a_clock_change_each_expression_fires_once(
    time: str, fold: int, minimum: int
) -> None:
    schedule = (("30 2 * * *", 2), ("45 2 * * *", 3), ("0 4 * * *", 1))
    now = unix_time(time, "Europe/Berlin", fold=fold)
    assert minimum_at(now, schedule, "Europe/Berlin")[0] == minimum


def test_a_schedule_fires_without_an_event() -> None:
    now = unix_time("2027-03-01T07:58:30")
    settings = msgspec.structs.replace(PLAIN, schedule=OFFICE)
    scaler = Scaler(settings, size=0, now=now)
    changes = []
    while now < unix_time("2027-03-01T21:00:00"):
        if scaler.decide(now) != (changes[-1][1] if changes else 0):
            changes.append((now, scaler.size))
        delay = scaler.next_decision(now)
        assert delay is not None
        assert 0 < delay <= 60
        now += delay
    assert [time for time, _ in changes[:2]] == [
        unix_time("2027-03-01T08:00:00"),
        unix_time("2027-03-01T20:00:00"),
    ]
    assert changes[-1][1] == 0


def test_a_proof_has_the_minimum_by_the_clock_also_when_that_rises_meanwhile() -> None:
    now = unix_time("2027-03-01T07:59:30")
    schedule = (("0 20 * * *", 2), ("0 8 * * *", 4))
    scaler = Scaler(msgspec.structs.replace(PLAIN, schedule=schedule), size=0, now=now)
    scaler.begin_proof(1, "a deploy proves its code", now)
    assert scaler.size == 2
    assert scaler.view(now).reason == "a deploy proves its code"
    while now < unix_time("2027-03-01T08:00:01"):
        scaler.decide(now)
        now += min(scaler.next_decision(now) or 1.0, 1.0)
    assert [decision.after for decision in scaler.decisions] == [2, 4]
    assert scaler.view(now).reason == "min_scale of the schedule '0 8 * * *' is 4"


def test_without_a_schedule_min_scale_holds_again() -> None:
    service = Service(1, schedule=(("* * * * *", 4),))
    assert service.run(1) == 4
    service.configure(schedule=(), minimum=2)
    service.run(70)
    assert service.scaler.size == 2
    assert service.reason == "min_scale is 2"


# ------------------------------------------------------------------------------------ the clock


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 8.0, -8.0])
def test_a_clock_that_jumps_decides_nothing(jump: float) -> None:
    service = Service(3, retention=600, delay=120, panic_threshold=1000)
    service.hold(30, 70)
    service.now += jump
    service.run(30)
    service.share(30)
    assert set(service.decided_sizes) == {3}
    # What waits goes on waiting: two minutes later there are no more pods than needed.
    service.share(10)
    service.run(100)
    assert service.scaler.size == 3
    assert service.run(100) == 1


def test_a_clock_that_jumps_far_lets_nobody_wait_for_a_day() -> None:
    service = Service(1, minimum=0, retention=600)
    service.hold(5, 10)
    service.now -= 86400
    service.share(200)
    assert service.run(7) == 20


# ------------------------------------------------------------------------------------ deploys


def test_a_proof_has_its_size_whatever_the_load_is() -> None:
    service = Service(are_pods_there=False)
    service.scaler.begin_proof(2, "the first deploy starts 2 pods", service.now)
    assert service.scaler.size == 2
    assert service.reason == "the first deploy starts 2 pods"
    service.scaler.wait(500, service.now)
    assert service.run(300) == 2
    service.scaler.end_proof(service.now)
    assert service.run(1) == 50


def test_a_proven_service_without_calls_shrinks_after_its_retention() -> None:
    service = Service(retention=100)
    service.run(1000)
    service.scaler.begin_proof(1, "a deploy proves its code", service.now)
    service.follow_size()
    service.run(30)
    service.scaler.end_proof(service.now)
    assert service.run(155) == 1
    assert service.run(10) == 0


# ---------------------------------------------------------------------------------- pods that go


def test_pods_that_do_not_serve_go_first_then_the_least_busy_then_the_newest() -> None:
    scaler = Scaler(PLAIN, size=5, now=START)
    scaler.pods_changed(["a"], [], START)
    scaler.pods_changed(["a", "b", "c", "d", "e"], ["a", "b", "c", "d"], START)
    scaler.report("b", PodLoad(3), START)
    scaler.report("c", PodLoad(1), START)
    assert scaler.leaving(0) == ["e", "d", "a", "c", "b"]
    assert scaler.leaving(3) == ["e", "d"]
    assert scaler.leaving(5) == scaler.leaving(9) == []


# ----------------------------------------------------------------------- what users see of it


def test_the_last_decisions_are_remembered_with_their_reasons() -> None:
    service = Service(1, minimum=1)
    for number in range(LIMITS.scaling_decisions):
        service.configure(minimum=2 + number % 2, maximum=2 + number % 2)
        service.decide()
    decisions = service.scaler.view(service.now).decisions
    assert len(decisions) == LIMITS.scaling_decisions
    assert [decision.after for decision in decisions[-2:]] == [2, 3]
    assert decisions[-1].before == 2
    assert decisions[-1].time == service.now
    assert decisions[-1].reason == "min_scale is 3"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    service = Service(1)
    service.agents["pod-001"].calls = 1
    service.agents["pod-001"].rate = 48
    service.run(20)
    assert service.scaler.view(service.now).rate == pytest.approx(48, rel=0.25)
    service.agents["pod-001"].rate = 0
    service.run(20)
    assert service.scaler.view(service.now).rate == 0


# ---------------------------------------------------------------------------- any order of events

NAMES = ["a", "b", "c"]
loads = st.builds(
    PodLoad,
    calls=st.integers(0, 200),
    waiting=st.integers(0, 10),
    call_seconds=st.floats(0, 1e5),
    started=st.integers(0, 10**6),
    cpu_seconds=st.floats(0, 1e5),
    memory_bytes=st.integers(0, 10**6),
    metrics=st.dictionaries(
        st.just("queue"), st.tuples(st.floats(allow_nan=True), st.floats(0, 1e9)), max_size=1
    ),
)
some_settings = st.builds(
    ScalerSettings,
    metric=st.sampled_from(["concurrency", "rps", "cpu", "memory", "queue"]),
    target=st.sampled_from([0.5, 4.0, 100.0]),
    utilization=st.sampled_from([70.0, 100.0]),
    request=st.sampled_from([0.0, 1.5, 1000.0]),
    window=st.sampled_from([6.0, 60.0]),
    panic_window=st.sampled_from([0.06, 6.0]),
    minimum=st.integers(0, 5),
    maximum=st.sampled_from([0, 5, 30]),
    activation=st.integers(0, 3),
    buffer=st.integers(0, 2),
    delay=st.sampled_from([0.0, 60.0]),
    retention=st.sampled_from([0.0, 600.0]),
    schedule=st.sampled_from([(), (("*/2 * * * *", 3), ("1-59/2 * * * *", 1))]),
)
pod_sets = st.sets(st.sampled_from(NAMES)).map(sorted)
events = st.one_of(
    st.tuples(st.just("report"), st.sampled_from(NAMES), loads),
    st.tuples(st.just("wait"), st.integers(0, 300)),
    st.tuples(st.just("pods_changed"), pod_sets, pod_sets),
    st.tuples(st.just("configure"), some_settings),
    st.tuples(st.just("begin_proof"), st.integers(0, 3), st.just("a deploy")),
    st.tuples(st.just("end_proof")),
    st.tuples(st.just("decide")),
)
moments = st.one_of(st.floats(0, 2), st.sampled_from([0.0, 15.0, 61.0, 700.0, -5.0, 1e6, -1e6]))
histories = st.lists(st.tuples(moments, events), max_size=60)


def play(scaler: Scaler, history: list[tuple[float, tuple[Any, ...]]], now: float) -> float:
    for delay, (name, *arguments) in history:
        now += delay
        getattr(scaler, name)(*arguments, now)
    return now


@given(some_settings, histories)
@settings(max_examples=150, deadline=None)
def test_the_size_is_never_out_of_its_bounds(
    first_settings: ScalerSettings, history: list[tuple[float, tuple[Any, ...]]]
) -> None:
    scaler = Scaler(first_settings, size=1, now=START)
    now = START
    is_proving = False
    maximum = first_settings.maximum
    for event in history:
        now = play(scaler, [event], now)
        name, *arguments = event[1]
        if name in ("begin_proof", "end_proof"):
            is_proving = name == "begin_proof"
        if name == "configure":
            maximum = arguments[0].maximum
        size = scaler.decide(now)
        view = scaler.view(now)
        assert min(view.minimum, maximum or view.minimum) <= size
        assert size == view.wanted
        if is_proving:
            continue
        assert not maximum or size <= maximum
        assert view.reason
        # A load that waits has a pod.
        assert size or not view.calls
        # Nothing has happened since.
        assert scaler.decide(now) == size


@given(some_settings, histories)
@settings(max_examples=50, deadline=None)
def test_a_service_whose_load_has_ended_comes_to_rest(
    first_settings: ScalerSettings, history: list[tuple[float, tuple[Any, ...]]]
) -> None:
    scaler = Scaler(first_settings, size=1, now=START)
    now = play(scaler, history, START)
    scaler.end_proof(now)
    all_settings = [first_settings, *(event[1] for _, event in history if event[0] == "configure")]
    scaler.configure(msgspec.structs.replace(all_settings[-1], schedule=()), now)
    scaler.wait(0, now)
    scaler.pods_changed(NAMES, NAMES, now)
    for name in NAMES:
        scaler.report(name, PodLoad(0, call_seconds=1e6, started=10**7), now)
    for _ in range(10_000):
        scaler.decide(now)
        # They need not all start.
        scaler.pods_changed(NAMES[: scaler.size], NAMES[: scaler.size], now)
        delay = scaler.next_decision(now)
        if delay is None:
            break
        now += delay
    size = scaler.size
    assert scaler.next_decision(now) is None
    assert scaler.decide(now + 1e5) == size


@given(some_settings, histories)
@settings(max_examples=50, deadline=None)
def test_the_same_events_have_the_same_decisions(
    first_settings: ScalerSettings, history: list[tuple[float, tuple[Any, ...]]]
) -> None:
    first = Scaler(first_settings, size=1, now=START)
    second = Scaler(first_settings, size=1, now=START)
    now = play(first, history, START)
    assert play(second, history, START) == now
    assert first.decisions == second.decisions
    assert first.view(now) == second.view(now)
