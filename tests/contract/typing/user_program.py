"""A user's program: pyright knows every type in it, and finds nothing wrong."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from typing_extensions import assert_type

import kubetorch as kt


def train(steps: int, lr: float = 0.1) -> dict[str, float]:
    return {"loss": lr / steps}


async def fetch(page: int) -> str:
    return f"page {page}"


def epochs(count: int) -> Iterator[int]:
    yield from range(count)


async def ticks(count: int) -> AsyncIterator[float]:
    for tick in range(count):
        yield tick / 2


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.n = start

    def add(self, k: int) -> int:
        self.n += k
        return self.n


compute = kt.Compute(cpus=0.1, memory="1Gi", env_vars={"STAGE": "test"}, replicas=2)

f = kt.fn(train)
assert_type(f(10), dict[str, float])
assert_type(f(10, lr=0.5), dict[str, float])
assert_type(f.to(compute)(10), dict[str, float])
assert_type(f.options(timeout=10, retries=2)(10), dict[str, float])
assert_type(f(10, stream_logs=False), dict[str, float])
assert_type(f(10, serialization="pickle"), dict[str, float])
assert_type(list(f.map(range(3))), list[dict[str, float]])
assert_type(list(f.options(timeout=1).starmap([(1, 0.5)])), list[dict[str, float]])
assert_type(f.spawn(10, lr=0.1), kt.CallHandle)

assert_type(kt.fn(fetch)(3), str)
assert_type(list(kt.fn(epochs)(3)), list[int])
assert_type(list(kt.fn(ticks)(3)), list[float])

c = kt.cls(Counter)
counter = c.to(compute, init_args={"start": 5})
assert_type(counter, Counter)
assert_type(counter.add(2), int)
assert_type(c.add.options(timeout=3)(2), Any)
c.teardown()


@kt.async_
@kt.compute(cpus="0.5", name="half", get_if_exists=True)
@kt.autoscale(min_scale=1, max_scale=3)
def halve(n: int) -> float:
    return n / 2


@kt.compute(gpus=1, tolerations=[{"key": "spot", "operator": "Exists"}])
@kt.distribute("pytorch", workers=4)
class Model:
    def predict(self, text: str) -> int:
        return len(text)


assert_type(halve(3), float)
assert_type(list(halve.map([1, 2])), list[float])
assert_type(Model.deploy().predict("x"), int)


@kt.batched(max_size=8, wait=0.01)
def embed(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@kt.batched()
async def embed_on_loop(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


@kt.compute(cpus=1)
@kt.batched()
def embed_as_service(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


class Embedder:
    @kt.batched()
    def embed(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


assert_type(embed(["a"]), list[int])
assert_type(kt.fn(embed)("a"), int)
assert_type(kt.fn(embed_on_loop)("a"), int)
assert_type(list(kt.fn(embed).map(["a"])), list[int])
assert_type(embed_as_service("a"), int)
assert_type(Embedder().embed(["a"]), list[int])

pool = kt.Compute(gpus="1", gpu_type="L4", volumes=["data"], secrets=["token"], queue="batch")
assert_type(pool.autoscale(min_scale=0, target_burst_capacity=5), kt.Compute)
assert_type(kt.Compute().distribute("ray", workers="2", port=1234), kt.Compute)
assert_type(kt.Compute.from_manifest({"kind": "Job"}, image=None), kt.Compute)
assert_type(pool.cpus, str | None)
assert_type(pool.replicas, int)
assert_type(pool.node_selector, dict[str, str])
pool.cpus = 0.5
pool.gpus = None
pool.node_selector = {"disk": "ssd"}
pool.replicas = 3


async def main() -> None:
    remote = await f.to_async(compute)
    assert_type(await remote(10, async_=True), dict[str, float])
    assert_type(await kt.fn(fetch)(3, async_=True), str)
    assert_type((await kt.cls(Counter).to_async(compute)).add(1), int)
    async for tick in kt.fn(ticks)(3, async_=True):
        assert_type(tick, float)
    async for result in f.map_async(range(3)):
        assert_type(result, dict[str, float])


by_name = kt.fn(name="train")
assert_type(by_name(1, 2, x=3), Any)
assert_type(kt.cls(name="counter").anything(1), Any)
assert_type(kt.config.namespace, str)
kt.progress(1, total=2, message="half")

try:
    f(10)
except kt.CallTimeoutError as error:
    assert_type(error.hint, str | None)
