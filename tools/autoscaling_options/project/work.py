"""Functions of the services whose options are tried."""

import asyncio
import os
import time

import kubetorch as kt

_memory = []


def work(seconds=0.0):
    time.sleep(seconds)
    return os.environ["POD_NAME"]


async def hold():
    """Be a call that lasts until its client leaves it."""
    while True:
        yield os.environ["POD_NAME"]
        await asyncio.sleep(0.2)


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def fill(mebibytes):
    _memory.append(b"x" * (mebibytes * 2**20))


def queue(length):
    kt.metric("queue", length)


@kt.batched(max_size=8, wait=0.2)
def halve(numbers):
    time.sleep(1.0)
    return [(n / 2, len(numbers)) if n >= 0 else ValueError("below zero") for n in numbers]


class Slow:
    """A class whose instances are never ready."""

    def __init__(self):
        time.sleep(600)

    def work(self):
        return 1
