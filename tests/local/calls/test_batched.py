"""`@kt.batched`: calls that run together as one call with a list, through everything."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from tests.local.calling import InThread, until

MODULE = """
import os, time
import kubetorch as kt

class Model:
    def __init__(self):
        self.sizes = []

    # No batch of these is full before so many calls are there: a test never waits for the end.
    @kt.batched(max_size=4, wait=30)
    def double(self, numbers):
        self.sizes.append(len(numbers))
        return [number * 2 for number in numbers]

    @kt.batched(max_size=4, wait=30)
    async def double_on_loop(self, numbers):
        return [[number * 2, len(numbers)] for number in numbers]

    @kt.batched(max_size=100, wait=30)
    def sizes_of(self, items):
        return [len(items)] * len(items)

    @kt.batched(max_size=1)
    def alone(self, items):
        return items

    @kt.batched(max_size=3, wait=30)
    def invert(self, numbers):
        def inverted(number):
            try:
                return 1 / number
            except ZeroDivisionError as error:
                return error
        return [inverted(number) for number in numbers]

    @kt.batched(max_size=3, wait=30)
    def fail(self, items):
        raise KeyError("all of them")

    @kt.batched(max_size=3, wait=30)
    def shorter(self, items):
        return items[1:]

    @kt.batched(max_size=3, wait=30)
    def no_list(self, items):
        return {item: item for item in items}

    @kt.batched(max_size=3, wait=30)
    def speak(self, items):
        print("a batch of", len(items))
        kt.progress(1, 2)
        return items

    @kt.batched(max_size=3, wait=30)
    def hold(self, items):
        folder = items[0]
        open(os.path.join(folder, "began"), "w").close()
        while not os.path.exists(os.path.join(folder, "end")):
            time.sleep(0.01)
        return items

    def seen(self):
        return self.sizes

@kt.batched(max_size=3, wait=30)
def count(items: list[int]) -> list[int]:
    if -1 in items:
        os._exit(3)
    return [len(items)] * len(items)
"""


@pytest.fixture(scope="module")
def module(shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("batched")
    (folder / "pyproject.toml").touch()
    (folder / "batched_module.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("batched_module")
    finally:
        sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def model(module: Any) -> Iterator[Any]:
    handle = kt.cls(module.Model, name="batched-model")
    handle.to(kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"]))
    yield handle
    handle.teardown()


def errors_of(method: Any, items: list[Any]) -> list[Exception]:
    return list(method.map(items, return_exceptions=True))


def test_the_decorated_function_itself_is_the_plain_function(module: Any) -> None:
    assert module.count([5, 6]) == [2, 2]
    assert module.Model().double([5, 6]) == [10, 12]


def test_calls_of_several_callers_run_as_one(model: Any) -> None:
    callers = [InThread(model.double, number) for number in range(8)]
    assert sorted(caller.join().value for caller in callers) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert model.seen()[-2:] == [4, 4]


def test_async_calls_of_an_async_method_run_as_one(model: Any) -> None:
    async def four() -> list[Any]:
        return await asyncio.gather(*(model.double_on_loop(n, async_=True) for n in range(4)))

    assert asyncio.run(four()) == [[0, 4], [2, 4], [4, 4], [6, 4]]


def test_http_calls_spawned_calls_and_those_of_other_codecs_share_a_batch(model: Any) -> None:
    body = json.dumps({"kwargs": {"numbers": 21}}).encode()
    headers = {**model.request_headers, "Content-Type": "application/json"}
    request = urllib.request.Request(model.endpoint("double"), body, headers)

    def post() -> Any:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    posted = InThread(post)
    spawned = model.double.spawn(1)
    pickled = InThread(model.double.options(serialization="pickle"), 2)
    assert model.double(3) == 6
    assert (posted.join().value, spawned.result(), pickled.join().value) == (42, 2, 4)
    assert model.seen()[-1] == 4


def test_a_map_offers_enough_items_for_full_batches(model: Any) -> None:
    assert list(model.sizes_of.map(["x" * 20_000] * 300)) == [100] * 300
    # As a handle by name does, which has no class.
    assert list(kt.cls(name="batched-model").sizes_of.map(range(200))) == [100] * 200


def test_a_failing_item_fails_alone_with_its_own_traceback(model: Any) -> None:
    half, error, quarter = errors_of(model.invert, [2, 0, 4])
    assert (half, quarter) == (0.5, 0.25)
    assert isinstance(error, ZeroDivisionError)
    assert "return 1 / number" in str(error.__cause__)


def test_what_the_function_raises_is_raised_for_all(model: Any) -> None:
    errors = errors_of(model.fail, [1, 2, 3])
    assert [str(error) for error in errors] == ["'all of them'"] * 3


@pytest.mark.parametrize(
    ("method", "returned"), [("shorter", "a list of 2"), ("no_list", "a value of type dict")]
)
def test_another_number_of_results_fails_all_and_says_so(
    model: Any, method: str, returned: str
) -> None:
    for error in errors_of(model[method], [1, 2, 3]):
        assert isinstance(error, kt.BatchError)
        assert f"Model.{method} is batched, and returned {returned} for a list of 3" in str(error)


def test_a_call_without_exactly_one_argument_fails_alone(model: Any) -> None:
    with pytest.raises(kt.BatchError, match=r"Model\.alone\(items\) is batched.*has 2 positional"):
        model.alone(1, 2)
    with pytest.raises(kt.BatchError, match=r"this call has none"):
        model.alone()
    with pytest.raises(kt.BatchError, match=r"this call has item="):
        model.alone(item=1)
    assert model.alone(items=1) == 1
    # The others of its batch run without it.
    wrong = InThread(model.invert, 1, 2)
    assert errors_of(model.invert, [2, 4]) == [0.5, 0.25]
    assert isinstance(wrong.join().error, kt.BatchError)


def test_lines_and_progress_are_those_of_one_call(
    model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    reports: list[Any] = []
    speak = model.speak.options(on_progress=lambda *report: reports.append(report))
    assert sorted(speak.map([1, 2, 3])) == [1, 2, 3]
    assert capfd.readouterr().out.count("a batch of 3") == 1
    assert reports == [(1, 2, None)]


def test_a_run_goes_on_for_others_when_a_caller_cancels_or_its_time_is_over(
    model: Any, tmp_path: Path
) -> None:
    cancelled = model.hold.spawn(str(tmp_path))
    late = InThread(model.hold.options(timeout=0.5), str(tmp_path))
    patient = InThread(model.hold, str(tmp_path))
    until(lambda: (tmp_path / "began").exists())
    cancelled.cancel()
    with pytest.raises(kt.CallCancelledError):
        cancelled.result()
    assert isinstance(late.join().error, kt.CallTimeoutError)
    (tmp_path / "end").touch()
    assert patient.join().value == str(tmp_path)


@pytest.fixture(scope="module")
def count(module: Any) -> Iterator[Any]:
    handle = kt.fn(module.count, name="batched-count")
    yield handle.to(kt.Compute(cpus="0.1", concurrency=1, max_queue=50))
    handle.teardown()


def test_a_batch_of_a_function_takes_one_slot(count: Any) -> None:
    assert list(count.map(range(12))) == [3] * 12


def test_an_item_that_ends_the_process_is_alone_when_it_runs_again(count: Any) -> None:
    first, deadly, last = errors_of(count.options(retries=1), [12, -1, 14])
    assert (first, last) == (1, 1)
    assert isinstance(deadly, kt.WorkerDiedError)


def test_a_distributed_service_of_a_batched_function_is_refused(module: Any) -> None:
    with pytest.raises(kt.SpecError, match=r"count is batched and .* is distributed"):
        kt.fn(module.count).to(kt.Compute(cpus="0.1").distribute("spmd", workers=2))
