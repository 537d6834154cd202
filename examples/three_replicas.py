"""A service on three pods: every call goes to all of them, and returns a list in pod order.

Each pod has an instance of its own. An error of one pod says which one it was.
"""

import os
import random
from statistics import mean

import kubetorch as kt


class Darts:
    def __init__(self) -> None:
        self.random = random.Random(os.environ["POD_NAME"])
        self.thrown = self.hits = 0

    def throw(self, count: int) -> int:
        for _ in range(count):
            self.hits += self.random.random() ** 2 + self.random.random() ** 2 < 1
        self.thrown += count
        return self.thrown

    def pi(self) -> float:
        return 4 * self.hits / self.thrown

    def pod(self) -> str:
        return os.environ["POD_NAME"]

    def drop(self, pod: str) -> None:
        if pod == os.environ["POD_NAME"]:
            raise RuntimeError("the darts fell")


if __name__ == "__main__":
    handle = kt.cls(Darts)
    darts = handle.to(kt.Compute(cpus="0.1", replicas=3, inactivity_ttl="30m"))

    print("thrown:", darts.throw(20_000))
    print("thrown:", darts.throw(20_000))
    print("pi is between 3.1 and 3.2:", 3.1 < mean(darts.pi()) < 3.2)

    pods = darts.pod()
    try:
        darts.drop(pods[1])
    except RuntimeError as error:
        print("failed:", error, "in pod", pods.index(error.pod_name))
    handle.teardown()
