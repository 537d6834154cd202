"""A function and a class in the ways that Modal and Ray call them."""

import kubetorch as kt


def square(n: int) -> int:
    return n * n


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, n: int) -> int:
        self.total += n
        return self.total


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1")
    remote = kt.fn(square).to(compute)
    handle = kt.cls(Counter, name="totals")
    counter = handle.to(compute)

    print(remote(3))
    print(list(remote.map([1, 2, 3])))
    call = remote.spawn(4)
    print(call.get())
    print(counter.add(2), counter.add(3))

    remote.teardown()
    handle.teardown()
