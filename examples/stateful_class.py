"""A class keeps its state in the pod between calls, and between runs of this program.

Deploying it again makes a new instance; `get_if_exists=True` finds the one that is there.
"""

import kubetorch as kt


class Cache:
    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.values: dict[str, int] = {}

    def put(self, key: str, value: int) -> int:
        if len(self.values) >= self.limit and key not in self.values:
            raise ValueError(f"the cache is full: {self.limit} values")
        self.values[key] = value
        return len(self.values)

    def get(self, key: str) -> int:
        return self.values[key]


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", inactivity_ttl="30m")
    handle = kt.cls(Cache)
    cache = handle.to(compute, init_args={"limit": 2})

    print("values:", cache.put("a", 1), cache.put("b", 2))
    print("a =", cache.get("a"))
    try:
        cache.put("c", 3)
    except ValueError as error:
        print("refused:", error)

    same = kt.cls(Cache).to(compute, get_if_exists=True)
    print("still there: b =", same.get("b"))

    fresh = kt.cls(Cache).to(compute, init_args={"limit": 2})
    print("deployed again:", fresh.put("z", 26), "value")
    handle.teardown()
