"""A sweep over hyperparameters, two trials at a time, some of which fail."""

import itertools
import math

import kubetorch as kt


def train(rate: float, batch: int) -> float:
    """Stands for a training; returns its loss."""
    if rate > 1:
        raise FloatingPointError(f"the loss is not finite at a rate of {rate}")
    return math.log10(rate / 0.1) ** 2 + math.log2(batch / 64) ** 2


if __name__ == "__main__":
    trials = list(itertools.product([0.01, 0.1, 1.0, 3.0], [32, 64]))
    remote = kt.fn(train, name="sweep").to(kt.Compute(cpus="0.2", num_proc=2))
    losses = list(remote.starmap(trials, return_exceptions=True))

    done = []
    for (rate, batch), loss in zip(trials, losses, strict=True):
        print(f"rate {rate:<4}  batch {batch}  ->  {loss}")
        if not isinstance(loss, Exception):
            done.append((loss, rate, batch))
    print("best:", min(done))
    remote.teardown()
