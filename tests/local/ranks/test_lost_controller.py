"""Training goes on whatever becomes of the controller, until it is torn down."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import kubetorch as kt
from kubetorch.local import lifetime

SOURCE = """
import os
import time

class Steps:
    def __init__(self):
        self.n = 0

    def run(self, seconds):
        time.sleep(seconds)
        self.n += 1
        return os.environ["RANK"], os.getpid(), self.n
"""


@pytest.fixture
def steps(project, service_home):
    handle = kt.cls(project.module(SOURCE).Steps)
    yield handle.to(kt.Compute(cpus="0.01").distribute("spmd", workers=2, num_proc=2))
    handle.teardown()


def view(handle):
    return kt.globals.session().get_workload(handle.namespace, handle.service_name)


def test_ranks_go_on_when_their_controller_is_killed(steps):
    before, world = steps.run(0), view(steps).world
    running = lifetime.status().running
    threading.Timer(0.5, os.kill, (running.pid, signal.SIGKILL)).start()

    after = steps.run(2)

    assert after == [[rank, pid, 2] for rank, pid, _ in before]
    assert view(steps).world == world  # which starts the service again
    assert lifetime.status().running.pid != running.pid
    time.sleep(4.0)  # in which nobody may be taken for lost
    assert view(steps).world == world
    assert steps.run(0) == [[rank, pid, 3] for rank, pid, _ in before]


def test_ranks_go_on_while_their_controller_does_not_run(steps):
    before, world = steps.run(0), view(steps).world
    pid = lifetime.status().running.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        after = steps.run(4)
    finally:
        os.kill(pid, signal.SIGCONT)

    time.sleep(3.0)
    assert view(steps).world == world
    assert after == [[rank, pid, 2] for rank, pid, _ in before]
    assert steps.run(0) == [[rank, pid, 3] for rank, pid, _ in before]


def test_ranks_say_that_their_service_was_torn_down(steps):
    steps.run(0)
    threading.Timer(2.0, steps.teardown).start()
    with pytest.raises((kt.PodTerminatedError, kt.ServiceNotFoundError), match="torn down"):
        steps.run(30)
