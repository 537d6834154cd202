"""Finds the largest batch that fits: memory that does not suffice is an error like any other."""

import resource
from pathlib import Path

import kubetorch as kt

ROOM = 1024**3


def step(batch: int) -> int:
    """One step of a training that needs a megabyte for each item; a rank has a gigabyte."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        return len(bytearray(batch * 1024**2)) // 1024**2
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def search(service: kt.Fn, low: int, high: int) -> int:
    """The largest batch between a size that fits and one that does not."""
    while high - low > 1:
        middle = (low + high) // 2
        try:
            service(middle)
            low = middle
        except (MemoryError, kt.OutOfMemoryError):
            high = middle
    return low


if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", memory="512Mi", inactivity_ttl="30m")
    service = kt.fn(step).to(compute.distribute("spmd", workers=2))
    largest = search(service, 1, 8192)
    print("between 900 and 1100:", 900 < largest < 1100)
    try:
        service(largest * 2)
    except MemoryError as error:
        print("too much, on one of the ranks:", error.rank in (0, 1))
    service.teardown()
