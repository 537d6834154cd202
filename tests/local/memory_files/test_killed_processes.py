"""A worker or an agent that is killed in the middle of a call with large arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from agent_harness import AgentProcess, FakeController
from kubetorch.errors import KubetorchError, WorkerDiedError
from kubetorch.lib import memory_files
from tests.local.calling import InThread, until
from tests.local.memory_files.conftest import serving

pytestmark = pytest.mark.skipif(not memory_files.IS_AVAILABLE, reason="Linux alone seals files")

SIZE = 100_000
Method = Callable[..., Any]


@pytest.fixture
def agent(tmp_path: Path, controller: FakeController) -> Iterator[AgentProcess]:
    with serving(tmp_path, controller) as agent:
        yield agent


def test_a_killed_worker_ends_its_call_and_frees_its_arguments(
    method: Callable[..., Method], census: Any, agent: AgentProcess
) -> None:
    worker = method("pid")()
    call = InThread(method("sleep"), numpy.ones(SIZE), 60)
    until(lambda: census(worker))
    os.kill(worker, 9)
    assert isinstance(call.join().error, WorkerDiedError)
    assert census.falls_to(0, agent.pid)


def test_a_killed_agent_ends_its_calls_and_frees_their_files(
    method: Callable[..., Method], census: Any, agent: AgentProcess
) -> None:
    result, worker = method("bump")(numpy.ones(SIZE)), method("pid")()
    call = InThread(method("sleep", timeout=3), numpy.ones(SIZE), 60)
    until(lambda: census(worker))
    agent.kill()
    assert (result == 2).all()  # it stays as long as it is used
    del result
    assert isinstance(call.join().error, KubetorchError)
    assert census.falls_to(0)
