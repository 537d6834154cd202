from __future__ import annotations

import asyncio

from kubetorch.controller import deploys
from kubetorch.controller.backends.base import Phase, PodStatus
from kubetorch.controller.deploys import DeployProgress
from kubetorch.controller.tuning import LIMITS, TIMING
from kubetorch.errors import KubetorchError, PodContainerError
from kubetorch.wire.messages import Accepted, DeployEvent, DeployLog, Failed, Stage
from manual_clock import ManualClock


async def followed(progress: DeployProgress, *, logs: bool = True) -> list[DeployEvent]:
    return [event async for event in progress.follow(logs=logs)]


def test_whoever_joins_late_sees_everything() -> None:
    async def scenario() -> None:
        progress = DeployProgress(1, Accepted(generation=1))
        early = asyncio.ensure_future(followed(progress))
        await turn()
        progress.add(Stage(stage="importing"))
        await turn()
        progress.add(Failed(failure={}))
        expected = [Accepted(generation=1), Stage(stage="importing"), Failed(failure={})]
        assert await early == expected
        assert await followed(progress) == expected

    run(scenario())


def test_nothing_comes_after_the_last_event() -> None:
    progress = DeployProgress(1, Failed(failure={}))
    progress.add(Stage(stage="late"))
    assert run(followed(progress)) == [Failed(failure={})]


def test_lines_are_left_out_when_they_are_not_wanted() -> None:
    progress = DeployProgress(1, DeployLog(text="x", pod="p"), Failed(failure={}))
    assert run(followed(progress, logs=False)) == [Failed(failure={})]


def test_an_import_that_prints_without_end_is_cut() -> None:
    progress = DeployProgress(1)
    for index in range(2 * LIMITS.deploy_log_lines):
        progress.add(DeployLog(text=str(index), pod="p"))
    progress.add(Failed(failure={}))
    events = run(followed(progress))
    assert len(events) == LIMITS.deploy_log_lines + 1
    assert "more lines" in events[-2].text  # type: ignore[union-attr]


def test_progress_that_is_reported_without_end_is_cut() -> None:
    progress = DeployProgress(1)
    for _ in range(LIMITS.deploy_stages + 5):
        progress.add(Stage(stage="importing"))
    progress.add(Failed(failure={}))
    assert len(run(followed(progress))) == LIMITS.deploy_stages + 1


def test_long_lines_are_cut_by_their_characters() -> None:
    progress = DeployProgress(1)
    for _ in range(4):
        progress.add(DeployLog(text="x" * (LIMITS.deploy_log_characters // 2), pod="p"))
    progress.add(Failed(failure={}))
    assert [len(event.text) > 100 for event in run(followed(progress))[:-1]] == [True, True, False]


def run(coroutine):
    # Turns of the loop without a timer: no test waits.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


async def turn() -> None:
    """Let the others go on."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_soon(done.set_result, None)
    await done


NOW = 1000.0


class Deploy:
    """A deploy that selects pods; each is of a name, a start, and a phase."""

    def __init__(self, *pods: tuple[str, float, Phase]) -> None:
        self.clock = ManualClock(NOW)
        self.progress = DeployProgress(1)
        self.pods = [
            PodStatus(name, 0, phase, "", started=started) for name, started, phase in pods
        ]
        self.connected: set[str] = set()
        self.errors: list[KubetorchError] = []
        deploys.expect_agents(self.clock, self.progress, self.without_agent, self.give_up)

    def without_agent(self) -> list[PodStatus]:
        return [pod for pod in self.pods if pod.name not in self.connected]

    def give_up(self, progress: DeployProgress, error: KubetorchError) -> None:
        self.errors.append(error)
        progress.add(Failed(failure={}))


def test_a_pod_that_has_run_for_long_without_an_agent_ends_the_deploy() -> None:
    deploy = Deploy(("old", NOW - 100, "Running"))
    deploy.clock.advance(TIMING.agent_connect_seconds)
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
    deploy.clock.advance(TIMING.agent_start_seconds - 0.1)
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
    deploy.clock.advance(TIMING.agent_connect_seconds)
    assert [error.message[:17] for error in deploy.errors] == ["the pods a, b run"]


def test_a_deploy_that_is_over_is_not_looked_at() -> None:
    deploy = Deploy(("old", NOW - 100, "Running"))
    deploy.progress.add(Failed(failure={}))
    deploy.clock.advance(100)
    assert not deploy.errors
