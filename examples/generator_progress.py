"""A generator streams its values while it runs, and says how far it is."""

from collections.abc import Iterator

import kubetorch as kt


def train(epochs: int) -> Iterator[dict[str, float]]:
    loss = 1.0
    for epoch in range(1, epochs + 1):
        loss /= 2
        kt.progress(epoch, epochs, message=f"loss {loss:.3f}")
        yield {"epoch": epoch, "loss": loss}


if __name__ == "__main__":
    remote = kt.fn(train, name="progress").to(kt.Compute(cpus="0.1"))
    for metrics in remote(5):
        print(metrics)
    remote.teardown()
