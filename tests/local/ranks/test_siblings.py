"""What code in a pod learns from its agent: who its siblings are, and that the pod ends."""

from __future__ import annotations

import threading
import time

import pytest

from agent_harness import AgentProcess, FakeController, wait_until
from kubetorch.wire.messages import Member, Members, Terminate

SOURCE = """
import time
from pathlib import Path
import kubetorch as kt

class Trainer:
    def __init__(self, folder):
        self.folder = Path(folder)
        kt.on_preempt(self.save)

    def save(self):
        time.sleep(0.3)
        (self.folder / "checkpoint").write_text("saved")
        print("saved it")

    def train(self):
        self.is_over = False
        @kt.on_preempt
        def stop():
            self.is_over = True
        print("begun")
        while not self.is_over:
            time.sleep(0.01)
        return "stopped in time"

    def fail_first(self):
        self.is_over = False

        @kt.on_preempt
        def fail():
            self.is_over = True
            1 / 0
        print("begun")
        while not self.is_over:
            time.sleep(0.01)

    def forget(self):
        kt.on_preempt(lambda: (self.folder / "forgotten").touch())

    def ips(self, *args):
        return kt.distributed.pod_ips(*args)
"""


@pytest.fixture
def controller(tmp_path):
    controller = FakeController(tmp_path)
    yield controller
    controller.close()


@pytest.fixture
def agent(tmp_path, controller):
    agent = AgentProcess(tmp_path / "agent", controller)
    try:
        deploy(controller, 1, SOURCE, tmp_path)
        yield agent
    finally:
        agent.kill()


def deploy(controller, generation, source, folder):
    observed = controller.deploy(
        generation, source, "Trainer", kind="cls", init_args={"folder": str(folder)}
    )
    assert observed.failure is None, observed.failure


def begin(agent, method):
    """A call in another thread, and what it answered."""
    answers = []
    call = threading.Thread(target=lambda: answers.append(agent.post(f"/Trainer/{method}")))
    call.start()
    return call, answers


def test_a_pod_that_is_told_to_end_lets_user_code_save_and_stop(tmp_path, agent):
    call, answers = begin(agent, "train")
    wait_until(lambda: "begun" in agent.log_file.read_text())
    began = time.monotonic()
    assert agent.stop() == 0
    took = time.monotonic() - began
    call.join()
    assert answers == [(200, "stopped in time")]
    assert (tmp_path / "checkpoint").read_text() == "saved"
    assert "saved it" in agent.log_file.read_text()
    print(f"SIGTERM to exit, with a checkpoint of 0.3 s: {took:.2f} s")


def test_a_teardown_lets_user_code_save_as_well(tmp_path, agent, controller):
    controller.send(Terminate(grace=20.0, reason="the service is torn down"))
    assert agent.process.wait(30) == 0
    assert (tmp_path / "checkpoint").exists()


def test_a_callback_that_fails_does_not_keep_others_from_running(tmp_path, agent):
    call, _ = begin(agent, "fail_first")
    wait_until(lambda: "begun" in agent.log_file.read_text())
    agent.stop()
    call.join()
    assert "ZeroDivisionError" in agent.log_file.read_text()
    assert (tmp_path / "checkpoint").exists()


def test_callbacks_of_calls_that_ended_are_forgotten(tmp_path, agent):
    assert agent.post("/Trainer/forget") == (200, None)
    agent.stop()
    assert (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "forgotten").exists()


def test_a_callback_has_no_more_time_than_the_grace(agent, controller, tmp_path):
    deploy(controller, 2, SOURCE.replace("time.sleep(0.3)", "time.sleep(3600)"), tmp_path)
    began = time.monotonic()
    controller.send(Terminate(grace=0.5, reason="the service is torn down"))
    assert agent.process.wait(20) == 0
    assert time.monotonic() - began >= 0.5


def test_code_in_a_pod_knows_the_addresses_of_its_siblings_as_they_are_now(agent, controller):
    assert agent.post("/Trainer/ips") == (200, [])
    members = [Member(f"demo-{n}", n, f"http://10.0.0.{9 - n}:80") for n in range(2)]
    controller.send(Members(epoch=1, members=(*members, Member("demo-2", 2, ""))))
    assert agent.post("/Trainer/ips", 2, 20) == (200, ["10.0.0.8", "10.0.0.9"])
    controller.send(Members(epoch=2, members=(*members, Member("demo-2", 2, "http://[fd::7]:80"))))
    assert agent.post("/Trainer/ips", 3, 20) == (200, ["10.0.0.8", "10.0.0.9", "fd::7"])
    began = time.monotonic()
    assert agent.post("/Trainer/ips", 4, 0.3) == (200, ["10.0.0.8", "10.0.0.9", "fd::7"])
    assert time.monotonic() - began >= 0.3
