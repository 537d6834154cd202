"""A service that is torn down while it is called."""

import threading

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.user_project import UserProject

JOBS = """
import time

def nap(seconds):
    time.sleep(seconds)
    return seconds

def count():
    while True:
        yield 1
        time.sleep(0.01)
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.mark.parametrize("mine", [True, False], ids=["here", "elsewhere"])
def test_a_map_says_that_its_service_was_torn_down(tmp_path, mine):
    project = UserProject(tmp_path / "shop")
    nap = kt.fn(project.module(JOBS).nap)
    nap.to(kt.Compute(cpus="0.1"))
    client = kt.globals.controller_client()
    end = nap.teardown if mine else lambda: client.delete_workload("default", nap.service_name)
    results = nap.map([0.1] * 10_000)
    next(results)
    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises((kt.PodTerminatedError, kt.ServiceNotFoundError), match="torn down"):
        for _ in results:
            pass
    ending.join()
    project.forget()


def test_what_is_open_says_that_its_service_was_torn_down(tmp_path):
    project = UserProject(tmp_path / "shop")
    jobs = project.module(JOBS)
    count = kt.fn(jobs.count).to(kt.Compute(cpus="0.1"))
    values = count()
    next(values)
    # The program forgets the service before its pod has said anything.
    backend.forget(backend.session(), "default", count.service_name)
    with pytest.raises(kt.ServiceNotFoundError, match="torn down"):
        for _ in values:
            pass
    count.teardown()
    project.forget()


@pytest.mark.parametrize("mine", [True, False], ids=["here", "elsewhere"])
def test_a_spawn_says_that_its_service_was_torn_down(tmp_path, mine):
    project = UserProject(tmp_path / "shop")
    nap = kt.fn(project.module(JOBS).nap)
    nap.to(kt.Compute(cpus="0.1"))
    nap(0)
    client = kt.globals.controller_client()
    end = nap.teardown if mine else lambda: client.delete_workload("default", nap.service_name)
    errors = []

    def spawn():
        with pytest.raises(kt.KubetorchError) as caught:
            while True:
                nap.spawn(0)
        errors.append(caught.value)

    threads = [threading.Thread(target=spawn) for _ in range(4)]
    for thread in threads:
        thread.start()
    end()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, kt.ServiceNotFoundError) for error in errors), errors
    assert all("torn down while it was called" in str(error) for error in errors), errors
    project.forget()
