"""`kt.ref`: one value for calls of several services, of every kind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import kubetorch as kt
from kubetorch.errors import SerializationError
from tests.local.user_project import UserProject

SOURCE = """
import asyncio, dataclasses, os
import numpy
import kubetorch as kt

@dataclasses.dataclass
class Box:
    ref: object

def first(array, number=0):
    return float(array[number])

async def first_async(array, number=0):
    await asyncio.sleep(0)
    return float(array[number])

def kinds(values):
    return [type(value).__name__ for value in values]

def unboxed(box):
    return float(box.ref.get()[2])

def same(values):
    return values

def make(size):
    return {"made": kt.ref(numpy.arange(float(size)))}

def ask(other, refs, number):
    return other(refs[0], number)

def each(refs, numbers):
    for number in numbers:
        yield [refs[0], number]

def rank_first(array):
    return float(array[int(os.environ["RANK"])])

class Model:
    def __init__(self, weights):
        self.weights = weights
    def weight(self, number):
        return float(self.weights.get()[number])
"""
SIZE = 100_000


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home: Path) -> Path:
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    project = UserProject(tmp_path_factory.mktemp("references") / "shop")
    yield project.module(SOURCE)
    project.forget()


Deploy = Callable[..., Any]


@pytest.fixture(scope="module")
def deploy(jobs: Any) -> Iterator[Deploy]:
    """Services of the module, by the name of their callable."""
    handles: dict[str, Any] = {}

    def deployed(name: str, compute: kt.Compute | None = None, service: str = "") -> Any:
        service = service or name.replace("_", "-")
        if service not in handles:
            allowed = kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"])
            handles[service] = kt.fn(getattr(jobs, name), name=service).to(compute or allowed)
        return handles[service]

    yield deployed
    for handle in handles.values():
        handle.teardown()


@pytest.fixture(scope="module")
def ref() -> kt.Ref:
    return kt.ref(numpy.arange(float(SIZE)))


def test_a_reference_inside_of_a_value_arrives_as_one(deploy: Deploy, jobs: Any, ref: kt.Ref):
    assert deploy("kinds")([ref, {"a": ref}, 3]) == ["Ref", "dict", "int"]
    assert deploy("unboxed")(jobs.Box(ref)) == 2


def test_a_result_has_references_with_their_values(deploy: Deploy, ref: kt.Ref):
    [same, box] = deploy("same")([ref, {"x": [ref]}])
    assert same == ref == box["x"][0]
    assert same.get()[-1] == SIZE - 1
    made = deploy("make")(SIZE)["made"]
    assert "pod make-" in repr(made)
    assert (made.get() == ref.get()).all()
    assert deploy("first")(made, 7) == 7


def test_a_function_passes_its_reference_on_to_another_service(deploy: Deploy, ref: kt.Ref):
    assert deploy("ask")(deploy("first"), [ref], 11) == 11
    # As in a program, whose reference may be gone when the other service is called.
    made = deploy("make")(SIZE)["made"]
    assert deploy("ask")(deploy("first"), [made], 12) == 12


def test_every_kind_of_call_takes_references(deploy: Deploy, ref: kt.Ref):
    first = deploy("first")
    assert first.options(serialization="pickle")(ref, 3) == 3
    assert list(first.starmap((ref, number) for number in range(30))) == list(range(30))
    assert list(first.map([ref] * 5)) == [0.0] * 5
    call = first.spawn(ref, 9)
    assert call.result(timeout=30) == 9
    yielded = list(deploy("each")([ref], [1, 2]))
    assert [(got.get()[5], number) for got, number in yielded] == [(5, 1), (5, 2)]


def test_coroutines_take_references(deploy: Deploy, ref: kt.Ref):
    first = deploy("first_async").options(async_=True)

    async def main() -> list[float]:
        return await asyncio.gather(*(first(ref, number) for number in range(20)))

    assert asyncio.run(main()) == list(range(20))


def test_all_pods_of_a_service_and_all_ranks_get_the_value(deploy: Deploy, ref: kt.Ref):
    broadcast = deploy("first", kt.Compute(cpus="0.1", replicas=2), "twice")
    assert [broadcast(ref, number) for number in (1, 2)] == [[1, 1], [2, 2]]
    compute = kt.Compute(cpus="0.01").distribute("spmd", workers=2, num_proc=2)
    ranks = deploy("rank_first", compute)
    assert [ranks(ref) for _ in range(3)] == [[0, 1, 2, 3]] * 3
    assert ranks(kt.ref([5, 6, 7, 8])) == [5, 6, 7, 8]


def test_an_argument_of_a_constructor_carries_the_value(jobs: Any, ref: kt.Ref):
    weights = kt.ref(numpy.arange(10.0))
    model = kt.cls(jobs.Model).to(kt.Compute(cpus="0.1"), init_args={"weights": weights})
    del weights
    assert model.weight(4) == 4
    model.teardown()


@pytest.mark.parametrize("value", [b"", "", None, numpy.zeros(0), [], {"a": numpy.float32(1)}])
def test_small_and_empty_values_are_values(deploy: Deploy, value: Any):
    [back] = deploy("same")([kt.ref(value)])
    assert repr(back.get()) == repr(value)
    assert deploy("kinds")(kt.ref([value])) == [type(value).__name__]


def test_a_value_that_cannot_travel_is_named(deploy: Deploy):
    with pytest.raises(SerializationError, match=r'^value\["a"\]\[1\] is a .*lock'):
        kt.ref({"a": [1, threading.Lock()]})


def test_a_pickled_reference_has_its_value_and_copies_are_the_same(ref: kt.Ref):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(kt.ref([1, 2]), protocol)
        assert pickle.loads(data).get() == [1, 2]
    assert kt.ref(ref) is ref
    assert {ref: 1}[dataclasses.replace(_Holder(ref)).ref] == 1


@dataclasses.dataclass
class _Holder:
    ref: kt.Ref


def test_plain_http_has_no_references(deploy: Deploy):
    make = deploy("make")
    headers = {**make.request_headers, "Content-Type": "application/json"}
    request = urllib.request.Request(make.endpoint(), b'{"args": [3]}', headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        assert "sdk.refs.Ref at $.made" in json.loads(answer.read())["message"]
