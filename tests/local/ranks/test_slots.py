"""Calls on all ranks of a service that bounds how many run at once: all run them in one order."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.calling import InThread, until, with_longer_timeouts
from tests.local.user_project import UserProject
from tests.shared import WHOLE

SOURCE = """
import os, time
import kubetorch as kt

RANK = int(os.environ.get("RANK", "-1"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))

def barrier(folder, name):
    open(os.path.join(folder, f"{name}-{RANK}"), "w").close()
    while not all(os.path.exists(os.path.join(folder, f"{name}-{rank}")) for rank in range(RANKS)):
        time.sleep(0.002)

def together(folder, name):
    barrier(folder, f"{name}-begin")
    with open(os.path.join(folder, f"order-{RANK}"), "a") as file:
        file.write(name + "\\n")
    barrier(folder, f"{name}-end")
    return RANK

def hold(folder, end):
    open(os.path.join(folder, f"held-{RANK}"), "w").close()
    while not os.path.exists(end):
        time.sleep(0.01)
    return RANK

def rank():
    return RANK

def nested(folder):
    return kt.fn(name="ordered")("together", folder, f"inner-{RANK}")

def work(name, *args):
    return globals()[name](*args)
"""


@pytest.fixture(scope="module")
def work(shared_service_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    jobs = UserProject(tmp_path_factory.mktemp("ordered") / "work").module(SOURCE)
    compute = kt.Compute(cpus="0.01", launch_timeout=120, concurrency=1)
    handle = kt.fn(jobs.work, name="ordered")
    yield handle.to(compute.distribute("spmd", workers=2, num_proc=2))
    handle.teardown()


def pod_urls(work: Any) -> list[str]:
    service_key = ("default", work.service_name)
    view = backend.session().ask(lambda session: session.get_workload(*service_key))
    return [pod.url for pod in view.pods]


def post(work: Any, url: str, *args: object, **more: object) -> Any:
    body = json.dumps({"args": args, **more}).encode()
    request = urllib.request.Request(f"{url}/work", body, work.request_headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def answer_to(request: urllib.request.Request) -> Any:
    """The value of a call, or the failure."""
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return json.loads(error.read())


def test_programs_that_reach_different_pods_run_their_calls_on_all_ranks_in_one_order(
    work: Any, tmp_path: Path
) -> None:
    calls_per_program = 250 if WHOLE else 10
    answers: list[list[int]] = []

    def program(url: str, name: str) -> None:
        for number in range(calls_per_program):
            answers.append(post(work, url, "together", str(tmp_path), f"{name}-{number}"))

    urls = pod_urls(work) * 2
    threads = [
        threading.Thread(target=program, args=(url, str(number))) for number, url in enumerate(urls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[0, 1, 2, 3]] * (4 * calls_per_program)
    orders = [(tmp_path / f"order-{rank}").read_text().split() for rank in range(4)]
    assert len(orders[0]) == 4 * calls_per_program
    assert all(order == orders[0] for order in orders)


def test_a_call_that_each_rank_makes_inside_a_call_on_all_ranks_runs_in_its_slots(
    work: Any, tmp_path: Path
) -> None:
    assert work.options(timeout=120)("nested", str(tmp_path)) == [[0, 1, 2, 3]] * 4


def test_the_time_that_a_call_on_ranks_waits_elsewhere_is_no_part_of_its_timeout(
    work: Any, tmp_path: Path
) -> None:
    def attempt(timeout: float) -> bool:
        folder = tmp_path / str(timeout)
        folder.mkdir()
        held_call = InThread(work, "hold", str(folder), str(folder / "end"))
        until((folder / "held-3").exists)
        waiting = []
        for number, url in enumerate(pod_urls(work)):
            headers = {**work.request_headers, "X-Kubetorch-Timeout": str(timeout)}
            body = json.dumps({"args": ["together", str(folder), f"late-{number}"]}).encode()
            request = urllib.request.Request(f"{url}/work", body, headers)
            waiting.append(InThread(answer_to, request))
            impatient = {**work.request_headers, "X-Kubetorch-Queue-Timeout": "0.3"}
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(urllib.request.Request(f"{url}/work", body, impatient))
            assert json.loads(caught.value.read())["error_type"] == "CallTimeoutError"
        time.sleep(timeout + 1)
        (folder / "end").touch()
        assert held_call.join().value == [0, 1, 2, 3]
        return [call.join().value for call in waiting] == [[0, 1, 2, 3]] * 2

    with_longer_timeouts(attempt)


def test_a_call_for_any_pod_needs_the_slots_of_one_that_has_them_wherever_it_comes_in(
    work: Any, tmp_path: Path
) -> None:
    end = tmp_path / "end"
    any_pod = work.options(workers="any")
    held_call = InThread(any_pod, "hold", str(tmp_path), str(end))
    until(lambda: len(list(tmp_path.glob("held-*"))) == 2)
    assert any_pod("rank") == [2, 3]
    for url in pod_urls(work):
        assert post(work, url, "rank", workers="any") == [2, 3]
    end.touch()
    assert held_call.join().value == [0, 1]
    for url in pod_urls(work):
        assert post(work, url, "rank", workers="any") == [0, 1]
