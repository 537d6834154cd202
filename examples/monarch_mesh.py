"""Monarch on two pods: the function runs on the first, its actors on the hosts of both."""

from typing import Any

import kubetorch as kt


def squares(numbers: list[int], host_mesh: Any = None) -> list[tuple[int, int]]:
    """Which host squared each number, and the square."""
    from monarch.actor import Actor, current_rank, endpoint

    class Squares(Actor):
        @endpoint
        def of(self, numbers: list[int]) -> tuple[int, int]:
            rank = current_rank()
            return rank["hosts"], numbers[rank.rank] ** 2

    processes = host_mesh.spawn_procs(per_host={"processes": 2})
    results = processes.spawn("squares", Squares).of.call(numbers).get()
    processes.stop().get()
    return list(results.values())


if __name__ == "__main__":
    image = kt.Image().pip_install("torchmonarch==0.7.0")
    compute = kt.Compute(cpus="0.1", memory="1Gi", image=image, inactivity_ttl="30m")
    service = kt.fn(squares).to(compute.distribute("monarch", workers=2))
    print("hosts and squares:", service([1, 2, 3, 4]))
    service.teardown()
