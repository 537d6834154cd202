"""Calls are blocking by default: pyright and mypy refuse in every line that ends with `# wrong`."""

import kubetorch as kt


def train(steps: int) -> float:
    return 1 / steps


async def fetch(page: int) -> str:
    return f"page {page}"


class Counter:
    def add(self, k: int) -> int:
        return k


f = kt.fn(train).to(kt.Compute(cpus=1))
g = kt.fn(fetch).to(kt.Compute(cpus=1))
counter = kt.cls(Counter).to(kt.Compute(cpus=1))


async def main() -> None:
    loss: float = await f(10, async_=True)
    text: str = await g(3, async_=True)
    loss, text = f(10), g(3)
    total: int = counter.add(2)
    print(loss, text, total)
    await f(10)  # wrong
    await g(3)  # wrong
    await f(10, stream_logs=False)  # wrong
    await f.options(timeout=1)(10)  # wrong
    await counter.add(2)  # wrong
