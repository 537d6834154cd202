"""Threads may decode a type for the first time at the same time: msgspec alone crashes then."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import dataclasses, sys, threading
from kubetorch.lib.decoders import json_decoder

sys.setswitchinterval(1e-6)
THREADS = 4

for number in range(300):
    inner = dataclasses.make_dataclass("Inner", [(f"f{i}", "int", 0) for i in range(20)])
    kind = dataclasses.make_dataclass("Kind", [("one", inner), ("more", list[inner])])
    start, found = threading.Barrier(THREADS), []

    def decode():
        start.wait(60)
        found.append(json_decoder(kind).decode(b'{"one": {"f1": 1}, "more": [{"f2": 2}]}'))

    threads = [threading.Thread(target=decode) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(one.one.f1, one.more[0].f2) for one in found] == [(1, 2)] * THREADS
"""


@pytest.mark.timeout(300)  # seconds on a machine with time
def test_threads_may_decode_a_type_for_the_first_time_at_the_same_time() -> None:
    completed = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
