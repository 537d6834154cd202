"""A service that nobody uses for its `inactivity_ttl` stops; whatever runs keeps it."""

import time

import pytest

import kubetorch as kt
from kubetorch.errors import ServiceNotFoundError
from tests.local.user_project import UserProject

SOURCE = """
import time

def work(seconds=0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    return "done"

def count(n):
    for i in range(n):
        yield str(i) * 1_000_000
"""
TTL = 3.0


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("idle") / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture
def deploy(jobs):
    handles = []

    def deploy(function="work", **compute):
        handle = kt.fn(getattr(jobs, function))
        handles.append(handle)
        return handle.to(kt.Compute(cpus="0.1", inactivity_ttl=f"{TTL:.0f}s", **compute))

    yield deploy
    for handle in handles:
        handle.teardown()


def is_there(name):
    try:
        kt.fn(name=name)
    except ServiceNotFoundError:
        return False
    return True


def gone_after(name, limit=60.0):
    """Seconds until the service is gone."""
    begun = time.monotonic()
    while is_there(name):
        assert time.monotonic() - begun < limit, "it is still there"
        time.sleep(0.1)
    return time.monotonic() - begun


def test_a_service_that_was_never_called_stops_after_its_ttl(deploy):
    deploy()
    assert gone_after("work") > TTL * 0.3


def test_time_counts_from_the_end_of_the_last_call(deploy):
    remote = deploy()
    for _ in range(3):
        time.sleep(TTL * 0.5)
        assert remote() == "done"
    assert gone_after("work") > TTL * 0.3


def test_a_call_that_runs_longer_than_the_ttl_is_no_idleness(deploy):
    remote = deploy()
    assert remote(TTL * 1.5) == "done"
    assert is_there("work")
    assert gone_after("work") > TTL * 0.3


def test_a_spawned_call_keeps_its_service_until_it_has_ended(deploy):
    handle = deploy().spawn(TTL * 2)
    time.sleep(TTL * 1.5)
    assert is_there("work")
    assert handle.get(timeout=60) == "done"
    assert gone_after("work") > TTL * 0.3


def test_a_generator_that_waits_for_its_reader_is_no_idleness(deploy):
    values = deploy("count")(1000)
    assert next(values) == "0" * 1_000_000
    time.sleep(TTL * 1.5)
    assert is_there("count")
    values.close()
    gone_after("count")


def test_one_busy_pod_keeps_all_of_a_service(deploy):
    remote = deploy(replicas=2)
    handle = remote.spawn(TTL * 1.5).calls[1]
    assert handle.get(timeout=60) == "done"
    assert is_there("work")
    gone_after("work")


def test_a_call_of_a_service_that_has_stopped_says_that_it_is_gone(deploy):
    remote = deploy()
    remote()
    gone_after("work")
    with pytest.raises(ServiceNotFoundError):
        remote()
