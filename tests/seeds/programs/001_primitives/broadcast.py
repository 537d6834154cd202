"""How calls work: on several replicas each call runs on all pods, and returns a list."""

import asyncio

import kubetorch as kt


def where(value):
    import os

    print(f"value is {value}")
    return [value, os.environ["POD_NAME"]]


# "By default, for pools with multiple replicas, calls are broadcast to every pod in the pool (SPMD
# pattern), with results returned as a list."
remote_fn = kt.fn(where).to(kt.Compute(cpus="0.1", replicas=3))
results = remote_fn(7)
assert [value for value, _ in results] == [7, 7, 7]
assert len({pod for _, pod in results}) == 3
remote_fn.teardown()

# "You can also make async calls for non-blocking execution"
remote_fn = kt.fn(where).to(kt.Compute(cpus="0.1"))


async def main():
    return await remote_fn(8, async_=True)


assert asyncio.run(main())[0] == 8
remote_fn.teardown()
