"""The reports of a pod's load: when they come, and what they sum up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from clock_loop import pause, run
from kubetorch.pod.load import LoadReports, Metrics, Usage
from kubetorch.pod.tuning import LIMITS, TIMING
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import freeze
from kubetorch.wire import metrics as wire_metrics
from kubetorch.wire.messages import PodLoad
from kubetorch.wire.metrics import MetricValue
from tests.unit.pod.fakes import spec

PLAIN = spec()


def scaled(**autoscaling):
    compute = replace(PLAIN.compute, autoscaling=AutoscalingSpec(**autoscaling))
    return replace(PLAIN, compute=compute)


class Pod:
    """The calls of a pod, and the reports of its load with their times."""

    def __init__(self, path: Path, served=None) -> None:
        self.calls = self.waiting = self.came = 0
        self.reports: list[tuple[float, PodLoad]] = []
        self.loop = asyncio.get_running_loop()
        self.living_processes = {"1:a", "2:b"}
        self.metrics = Metrics(path, lambda process: process in self.living_processes)
        self.load = LoadReports(
            calls=lambda: self.calls,
            waiting=lambda: self.waiting,
            came=lambda: self.came,
            metrics=self.metrics,
            usage=Usage(is_container=False),
            send=self._send,
            clock=self.loop.time,
        )
        self.metrics.on_change = self.load.metrics_changed
        self.load.configure(scaled() if served is None else served)
        self.begun = self.loop.time()

    def _send(self, report: PodLoad) -> None:
        self.reports.append((self.loop.time() - self.begun, report))

    def begin(self, count: int = 1) -> None:
        self.calls += count
        self.came += count
        self.load.calls_changed()

    def end(self, count: int = 1) -> None:
        self.calls -= count
        self.load.calls_changed()

    def set_metric(self, process: str, name: str, value: float) -> None:
        self.metrics._take(MetricValue(process, name, value))
        self.metrics.on_change()

    def take(self) -> list[tuple[float, PodLoad]]:
        reports, self.reports = self.reports, []
        return [(round(seconds, 6), report) for seconds, report in reports]

    def counts(self) -> list[tuple[float, int]]:
        """The times of the reports since the last time, and the calls in each."""
        return [(seconds, report.calls) for seconds, report in self.take()]


def scenario(path, behave, served=None):
    async def main():
        pod = Pod(path, served)
        await pause(10)
        pod.take()
        pod.begun = pod.loop.time()
        await behave(pod)
        pod.load.close()

    run(main())


def test_a_change_is_reported_at_once_and_the_next_ones_after_a_pause(tmp_path):
    async def behave(pod):
        pod.begin()
        await pause(0)
        assert pod.counts() == [(0.0, 1)]
        for _ in range(10):
            pod.begin()
            await pause(0.01)
        pod.end(11)
        await pause(0.5)
        assert pod.counts() == [(TIMING.load_change_seconds, 0)]

    scenario(tmp_path / "p", behave)


def test_a_load_that_stays_is_reported_each_second_and_none_is_not(tmp_path):
    async def behave(pod):
        pod.begin()
        await pause(3.5)
        assert pod.counts() == [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1)]
        pod.end()
        await pause(3600)
        assert pod.counts() == [(3.5, 0)]

    scenario(tmp_path / "p", behave)


def test_calls_that_come_and_end_between_two_looks_are_reported_within_a_second(tmp_path):
    async def behave(pod):
        pod.begin()
        pod.end()
        await pause(0.1)
        ((seconds, report),) = pod.take()
        assert (seconds, report.calls, report.started) == (0.0, 0, 1)
        pod.begin()
        pod.end()
        await pause(3600)
        ((seconds, report),) = pod.take()
        assert (seconds, report.calls, report.started) == (1.0, 0, 2)

    scenario(tmp_path / "p", behave)


def test_the_integral_of_the_calls_is_exact_whenever_it_is_reported(tmp_path):
    async def behave(pod):
        pod.begin(2)
        await pause(0.05)
        pod.begin(3)
        await pause(0.1)
        pod.end(5)
        await pause(20)
        pod.begin()
        await pause(0.25)
        report = pod.load.report()
        assert report.call_seconds == pytest.approx(2 * 0.05 + 5 * 0.1 + 0.25)
        assert report.started == 6

    scenario(tmp_path / "p", behave)


def test_a_call_that_is_taken_back_does_not_count_twice_and_the_count_never_falls(tmp_path):
    async def behave(pod):
        pod.begin(3)
        assert pod.load.report().started == 3
        pod.came -= 1  # as `Call.take_back`
        assert pod.load.report().started == 3
        pod.begin()
        assert pod.load.report().started == 3
        pod.begin()
        assert pod.load.report().started == 4

    scenario(tmp_path / "p", behave)


def test_waiting_calls_are_a_change_of_their_own(tmp_path):
    async def behave(pod):
        pod.begin(2)
        pod.waiting = 1
        await pause(0.3)
        pod.waiting = 0
        pod.load.calls_changed()
        await pause(0.3)
        assert [report.waiting for _, report in pod.take()] == [1, 0]

    scenario(tmp_path / "p", behave)


def test_a_service_that_is_not_scaled_reports_nothing_until_a_deploy_changes_that(tmp_path):
    async def behave(pod):
        pod.begin()
        pod.load.configure(PLAIN)
        assert not pod.load.is_on
        assert pod.load.report() is None
        await pause(5)
        pod.set_metric("1:a", "queue", 1)
        await pause(5)
        assert pod.take() == []
        pod.load.configure(scaled())
        await pause(0)
        ((_, report),) = pod.take()
        assert (report.calls, report.call_seconds) == (1, 0.0)

    scenario(tmp_path / "p", behave)


def test_a_knative_service_of_the_users_manifest_is_scaled():
    manifest = freeze({"apiVersion": "serving.knative.dev/v1"}, parameter="manifest")
    assert replace(PLAIN.compute, manifest=manifest).is_autoscaled
    deployment = freeze({"apiVersion": "apps/v1"}, parameter="manifest")
    assert not replace(PLAIN.compute, manifest=deployment).is_autoscaled


def test_a_metric_is_the_sum_over_the_processes_that_live_and_is_reported_without_calls(tmp_path):
    async def behave(pod):
        pod.set_metric("1:a", "queue", 3)
        await pause(0)
        pod.set_metric("2:b", "queue", 4)
        pod.set_metric("1:a", "queue", 5)
        await pause(0.5)
        assert [(s, r.metrics["queue"][0]) for s, r in pod.take()] == [(0.0, 3.0)]
        await pause(10)
        assert [(s, r.metrics["queue"][0]) for s, r in pod.take()] == [(1.0, 9.0)]
        pod.living_processes.discard("1:a")
        await pause(10)
        assert [r.metrics["queue"][0] for _, r in pod.take()] == [4.0]
        pod.living_processes.clear()
        await pause(3600)
        assert [r.metrics for _, r in pod.take()] == [{}]

    scenario(tmp_path / "p", behave)


def test_a_pod_has_no_more_names_and_processes_than_the_limits(tmp_path):
    values = Metrics(tmp_path / "p", lambda process: process != "gone")
    for number in range(LIMITS.metric_names + 5):
        values._take(MetricValue(f"{number % 2}:a", f"m{number}", 1.0))
    assert len(values.sums()) == LIMITS.metric_names
    for number in range(LIMITS.metric_processes + 5):
        values._take(MetricValue(f"{number}:b", "m1", 1.0))
    assert values.sums()["m1"][0] == LIMITS.metric_processes - 2 + 1


def test_sums_beyond_all_numbers_can_be_reported(tmp_path):
    values = Metrics(tmp_path / "p", lambda process: True)
    for process in ("1:a", "2:b"):
        values._take(MetricValue(process, "m", 1e308))
    assert values.sums()["m"][0] < float("inf")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"no json",
        b"[]",
        b'["1:a","queue"]',
        b'["1:a","queue","7"]',
        b'["1:a","queue",null]',
        b'["1:a","queue",NaN]',
        b'["1:a","queue",1e999]',
        b'["1:a","a b",1]',
        b'["1:a","cpu",1]',
        b'["1:a","Memory",1]',
        b'[1,"queue",1]',
        b'{"process":1,"name":2,"value":3}',
        b"[" * 500,
        b"\xff\xfe",
    ],
)
def test_what_is_no_value_is_ignored(line):
    assert wire_metrics.parse(line) is None


@pytest.mark.parametrize("metric", ["cpu", "memory"])
def test_use_is_reported_without_load_more_rarely(tmp_path, metric):
    async def behave(pod):
        pauses = TIMING.idle_usage_report_seconds
        await pause(3.5 * pauses)
        reports = pod.take()
        assert len(reports) == 3
        assert all(report.memory_bytes > 0 for _, report in reports)
        pod.load.configure(scaled())
        await pause(0)
        assert pod.take()[-1][1].memory_bytes == 0

    scenario(tmp_path / "p", behave, scaled(metric=metric))
