"""`kt.metric` between the processes of a pod and its agent: the named pipe, without an agent."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from decimal import Decimal

import pytest

import kubetorch as kt
from kubetorch.config.environment import METRICS_PIPE
from kubetorch.errors import SpecError
from kubetorch.lib import processes
from kubetorch.pod.load import Metrics
from kubetorch.sdk.metric import MetricReports
from kubetorch.sdk.tuning import LIMITS
from kubetorch.wire import metrics
from kubetorch.wire.metrics import MetricValue


class Pipe:
    """The agent's end."""

    def __init__(self, folder) -> None:
        self.path = str(folder / "pipe")
        os.mkfifo(self.path)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def values(self) -> list[MetricValue | None]:
        try:
            data = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        return [metrics.parse(line) for line in data.splitlines()]

    def until(self, count: int) -> list[MetricValue | None]:
        values, end = self.values(), time.monotonic() + 30
        while len(values) < count and time.monotonic() < end:
            time.sleep(0.01)
            values += self.values()
        return values


@pytest.fixture
def pipe(tmp_path, monkeypatch):
    pipe = Pipe(tmp_path)
    monkeypatch.setenv(METRICS_PIPE, pipe.path)
    yield pipe
    os.close(pipe.descriptor)


@pytest.mark.parametrize("value", [3, 2.5, Decimal(7), -1])
def test_the_value_of_this_process_is_reported(pipe, value):
    kt.metric(f"Queue-{value}".replace(".", "_"), value)
    ((process, name, number),) = pipe.until(1)
    assert (process, number) == (processes.identity(), float(value))
    assert name.startswith("Queue-")


def test_of_many_values_few_leave_the_process_and_the_last_one_does(pipe):
    begin = time.monotonic()
    for number in range(5000):
        kt.metric("many", number)
    values = pipe.until(2)
    while values[-1].value != 4999:
        values += pipe.until(1)
    most = 2 + (time.monotonic() - begin) / 0.1
    assert len(values) <= most


def test_threads_may_report_at_the_same_time(pipe):
    threads = [threading.Thread(target=kt.metric, args=(f"t{n}", n)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {value.value for value in pipe.until(20)} == set(map(float, range(20)))


def test_a_forked_process_reports_for_itself_while_its_parent_reports(pipe):
    kt.metric("forked", 1)
    kt.metric("forked", 2)  # waits, and its timer is not the child's
    child = os.fork()
    if child == 0:
        kt.metric("forked", 5)
        time.sleep(0.05)
        os._exit(0)
    os.waitpid(child, 0)
    values = pipe.until(3)
    assert {(process.partition(":")[0], value) for process, _, value in values} == {
        (str(os.getpid()), 1.0),
        (str(os.getpid()), 2.0),
        (str(child), 5.0),
    }


def test_a_process_has_no_more_names_than_the_limit(pipe):
    reports = MetricReports()
    for number in range(LIMITS.metric_names):
        reports.put(pipe.path, f"m{number}", 1.0)
    reports.put(pipe.path, "m0", 2.0)
    with pytest.raises(SpecError, match="one more than the 100"):
        reports.put(pipe.path, "other", 1.0)


def test_an_agent_that_does_not_read_or_is_gone_holds_nobody_up(pipe):
    reports = MetricReports()
    os.set_blocking(pipe.descriptor, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe.descriptor, b"\n" * 512)
    reports.put(pipe.path, "late", 1.0)
    os.read(pipe.descriptor, 1 << 20)
    assert [value.name for value in pipe.until(1) if value is not None] == ["late"]
    reports.put(pipe.path + "-gone", "late2", 1.0)


def test_values_come_through_the_pipe_whatever_else_is_written_to_it(tmp_path):
    async def main():
        values = Metrics(tmp_path / "pipe")
        changes = []
        values.on_change = lambda: changes.append(values.sums())
        values.open()
        writer = os.open(tmp_path / "pipe", os.O_WRONLY)
        packed = metrics.pack(MetricValue(processes.identity(), "queue", 7.0))
        os.write(writer, b"x" * 5000 + b"\n" + packed[:10])
        await asyncio.sleep(0.05)
        assert changes == []
        os.write(writer, packed[10:] + b"no value\n")
        os.close(writer)
        await asyncio.sleep(0.05)
        assert [sums["queue"][0] for sums in changes] == [7.0]
        values.close()

    asyncio.run(main())
