"""One function on all ranks: two pods with two processes each, one list in rank order."""

import os

import kubetorch as kt


def part_of_pi(terms: int) -> float:
    """The share of one rank of the series 4 - 4/3 + 4/5 - …"""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return sum(4 * (-1) ** n / (2 * n + 1) for n in range(rank, terms, world))


def node_and_local_rank() -> tuple[int, int]:
    return int(os.environ["NODE_RANK"]), int(os.environ["LOCAL_RANK"])


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", inactivity_ttl="30m").distribute(workers=2, num_proc=2)
    share = kt.fn(part_of_pi).to(compute)
    shares = share(100_000)
    print(f"pi is {sum(shares):.4f}, from {len(shares)} ranks")

    ranks = kt.fn(node_and_local_rank).to(kt.Compute(cpus="0.1").distribute(workers=2, num_proc=2))
    print("node and local rank:", ranks())
    print("of the second pod:", ranks(workers=[1]))
    share.teardown()
    ranks.teardown()
