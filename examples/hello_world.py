"""A function and a class, run in pods. Edit this file and run it again: the new code is live."""

import kubetorch as kt


def train(steps, lr=0.1):
    print("step", steps)
    return {"loss": lr / steps}


class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n


if __name__ == "__main__":
    f = kt.fn(train).to(kt.Compute(cpus="0.1"))
    print(f(10, lr=0.5))
    c = kt.cls(Counter).to(kt.Compute(cpus="0.1"), init_args={"start": 5})
    print(c.add(2), c.add(3))
