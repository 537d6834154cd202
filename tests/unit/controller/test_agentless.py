from __future__ import annotations

from kubetorch.controller import agentless
from kubetorch.controller.backends.base import Phase, PodStatus
from kubetorch.controller.progress import Progress
from kubetorch.errors import KubetorchError, PodContainerError
from kubetorch.lib.clock import ManualClock
from kubetorch.wire.messages import Failed

NOW = 1000.0


class Deploy:
    """A deploy that selects pods; each is of a name, a start, and a phase."""

    def __init__(self, *pods: tuple[str, float, Phase]) -> None:
        self.clock = ManualClock(NOW)
        self.progress = Progress(1)
        self.pods = [PodStatus(name, 0, phase, "", started=at) for name, at, phase in pods]
        self.connected: set[str] = set()
        self.errors: list[KubetorchError] = []
        agentless.expect(self.clock, self.progress, self, self.give_up)

    def has_session(self, pod: str) -> bool:
        return pod in self.connected

    def give_up(self, progress: Progress, error: KubetorchError) -> None:
        self.errors.append(error)
        progress.add(Failed(failure={}))


def test_a_pod_that_has_run_for_long_without_an_agent_ends_the_deploy() -> None:
    deploy = Deploy(("old", NOW - 100, "Running"))
    deploy.clock.advance(agentless.CONNECTING)
    (error,) = deploy.errors
    assert isinstance(error, PodContainerError)
    assert error.message.startswith("the pod old runs no agent")
    assert error.pod_name == "old"
    assert "kt server start" in str(error.hint)


def test_an_agent_has_a_moment_to_connect() -> None:
    deploy = Deploy(("old", NOW - 100, "Running"))
    deploy.connected.add("old")
    deploy.clock.advance(100)
    assert not deploy.errors


def test_a_container_has_a_moment_to_start_one() -> None:
    deploy = Deploy(("new", NOW, "Running"))
    deploy.clock.advance(agentless.STARTING - 0.1)
    assert not deploy.errors
    deploy.clock.advance(0.1)
    assert deploy.errors


def test_pods_that_do_not_run_or_do_not_exist_are_waited_for() -> None:
    deploy = Deploy(("later", 0.0, "Pending"))
    deploy.clock.advance(100)
    deploy.pods = []
    deploy.clock.advance(100)
    assert not deploy.errors
    deploy.pods = [PodStatus("a", 0, "Running", ""), PodStatus("b", 1, "Running", "")]
    deploy.clock.advance(agentless.CONNECTING)
    assert [error.message[:17] for error in deploy.errors] == ["the pods a, b run"]


def test_a_deploy_that_is_over_is_not_looked_at() -> None:
    deploy = Deploy(("old", NOW - 100, "Running"))
    deploy.progress.add(Failed(failure={}))
    deploy.clock.advance(100)
    assert not deploy.errors
