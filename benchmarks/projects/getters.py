"""A function of a service whose pods get a key at the same time."""

from __future__ import annotations

import os
import time

import kubetorch as kt


def get(key: str, folder: str) -> float:
    """Get a key into a folder of this pod; gives the seconds that it took."""
    target = f"{folder}/{os.environ['POD_NAME']}"
    began = time.perf_counter()
    kt.get(key, target, contents=True)
    return time.perf_counter() - began
