"""One function over 200 items, in order, and as the results come."""

import kubetorch as kt


def score(item: int) -> int:
    if item == 13:
        raise ValueError("13 is not scored")
    return item * item


if __name__ == "__main__":
    remote = kt.fn(score).to(kt.Compute(cpus="0.1"))

    results = list(remote.map(range(200), return_exceptions=True))
    failed = [result for result in results if isinstance(result, Exception)]
    print("results:", len(results), "of which failed:", len(failed), failed[0])
    print("first:", results[:5], "last:", results[-1])

    squares = (item for item in range(200) if item != 13)
    print("sum:", sum(remote.map(squares, ordered=False)))
    remote.teardown()
