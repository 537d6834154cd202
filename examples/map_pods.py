"""A map over a service that grows with its items: from one pod to four, and what each pod ran.

Items that wait count as load, so pods come while the map runs, and take their part of what is left.
"""

import os
import time
from collections import Counter

import kubetorch as kt


def score(number: int) -> tuple[int, str]:
    time.sleep(0.1)
    return number * number, os.environ["POD_NAME"]


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", inactivity_ttl="30m").autoscale(
        min_scale=1, max_scale=4, concurrency=1
    )
    service = kt.fn(score).to(compute)

    results = list(service.map(range(200)))
    values = [value for value, _ in results]
    print("in order:", values[:5], "sum:", sum(values))

    shares = Counter(pod for _, pod in results)
    print("several pods took part:", 2 <= len(shares) <= 4, "items:", shares.total())
    service.teardown()
