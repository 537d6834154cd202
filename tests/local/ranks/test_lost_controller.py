"""Training goes on whatever becomes of the controller, until it is torn down."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

import kubetorch as kt
from kubetorch.local import lifetime
from tests.local.calling import InThread, until

SOURCE = """
import os
import time

class Steps:
    def __init__(self):
        self.n = 0

    def run(self, folder=None):
        if folder is not None:
            open(os.path.join(folder, os.environ["RANK"]), "w").close()
            while not os.path.exists(os.path.join(folder, "end")):
                time.sleep(0.01)
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


def running_step(steps, folder):
    """A step that runs on all ranks until there is a file `end`."""
    folder.mkdir()
    step = InThread(steps.run, str(folder))
    until(lambda: len(list(folder.iterdir())) == 4, seconds=60)
    return step


def assert_ranks_go_on(steps, folder, disturb):
    """Assert that a step goes on, and the world stays, whatever a test does meanwhile.

    A busy machine may keep an agent from giving signs of life, so that it is lost rightly: then
    the ranks are started again, and disturbed again.
    """
    deadline = time.monotonic() + 120
    for number in itertools.count():
        before, world = steps.run(), view(steps).world
        step = running_step(steps, folder / str(number))
        disturb(lambda number=number: (folder / str(number) / "end").touch())
        step.join()
        if step.error is None and view(steps).world == world:
            assert step.value == [[rank, pid, n + 1] for rank, pid, n in before]
            assert steps.run() == [[rank, pid, n + 2] for rank, pid, n in before]
            return
        assert {loss.reason for loss in view(steps).world.lost} == {"unreachable"}
        assert time.monotonic() < deadline
        steps.run(restart_procs=True)


def test_ranks_go_on_when_their_controller_is_killed(steps, tmp_path):
    def kill(end_step):
        running = lifetime.status().running
        os.kill(running.pid, signal.SIGKILL)
        until(lambda: lifetime.status().running is None)
        end_step()
        assert view(steps).world is not None  # which starts the service again
        assert lifetime.status().running.pid != running.pid
        time.sleep(4.0)  # in which nobody may be taken for lost

    assert_ranks_go_on(steps, tmp_path, kill)


def test_ranks_go_on_while_their_controller_does_not_run(steps, tmp_path):
    def stop_for_a_while(end_step):
        pid = lifetime.status().running.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(4.0)
            end_step()
        finally:
            os.kill(pid, signal.SIGCONT)
        time.sleep(3.0)

    assert_ranks_go_on(steps, tmp_path, stop_for_a_while)


def test_ranks_say_that_their_service_was_torn_down(steps, tmp_path):
    step = running_step(steps, tmp_path / "step")
    steps.teardown()
    error = step.join().error
    assert isinstance(error, (kt.PodTerminatedError, kt.ServiceNotFoundError))
    assert "torn down" in str(error)
