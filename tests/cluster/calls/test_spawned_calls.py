"""Spawned calls on a cluster whose program or pod ends: each runs, or its record says why not."""

from __future__ import annotations

import json

import pytest

from cluster.faults import pods, until
from shared import WHOLE

pytestmark = pytest.mark.cluster

#: Programs, and what each of them spawns.
PROGRAMS, CALLS = (100, 1000) if WHOLE else (2, 300)
SERVICE = """
import sys, time
import kubetorch as kt

class Notes:
    def __init__(self):
        self.numbers = []

    def note(self, number, *rest):
        self.numbers.append(number)

    def noted(self, count):
        end = time.monotonic() + 60
        while len(self.numbers) < count and time.monotonic() < end:
            time.sleep(0.05)
        return sorted(self.numbers)

def sleep(seconds):
    time.sleep(seconds)
"""


def test_calls_that_a_program_spawns_last_run(installed, tmp_path):
    body = """
if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    # A deploy makes the instance anew.
    if first:
        notes = kt.cls(name="notes")
    else:
        notes = kt.cls(Notes, name="notes").to(kt.Compute(cpus="0.01"))
    for number in range(first, first + count - 1):
        notes.note.spawn(number)
    notes.note.spawn(number + 1, "x" * 3_000_000)
"""
    for turn in range(PROGRAMS):
        installed.python(SERVICE + body, tmp_path, str(turn * CALLS), str(CALLS))
    read_back = """
if __name__ == "__main__":
    print(kt.cls(name="notes").noted(int(sys.argv[1])))
"""
    printed = installed.python(SERVICE + read_back, tmp_path, str(PROGRAMS * CALLS))
    assert json.loads(printed) == list(range(PROGRAMS * CALLS))


def test_a_call_whose_pod_is_killed_at_once_ends_with_an_error(installed, kubectl, tmp_path):
    body = """
if __name__ == "__main__":
    handle = kt.fn(sleep, name="killed").to(kt.Compute(cpus="0.01")).spawn(600)
    print(handle.id)
"""
    call = installed.python(SERVICE + body, tmp_path).split()[-1]
    [pod] = pods(kubectl, installed.namespace, "killed")
    kubectl("delete", "pod", "-n", installed.namespace, pod, "--force", "--grace-period=0")
    until(lambda: '"running"' not in installed.run("kt", "calls", "show", call, "--json"))
    ask = """
if __name__ == "__main__":
    try:
        kt.CallHandle.from_id(sys.argv[1]).get(timeout=60)
    except kt.PodTerminatedError as error:
        print(error.reason)
"""
    assert installed.python(SERVICE + ask, tmp_path, call).strip() == "Deleted"
