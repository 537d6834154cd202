"""A service that nobody uses for its `inactivity_ttl` stops; whatever runs keeps it."""

import json
import re
import time

import pytest

import kubetorch as kt
from kubetorch.controller.workload import idle_patience
from kubetorch.errors import KubetorchError, ServiceNotFoundError
from tests.local.calling import InThread, until
from tests.local.commands import kt as kt_command
from tests.local.user_project import UserProject

SOURCE = """
import os, time

def work():
    return "done"

def hold(path, pod=None):
    # Ends when the file is there; at once in all pods but one, if one is named.
    open(path + ".begun", "w").close()
    while pod in (None, os.environ["POD_NAME"]) and not os.path.exists(path):
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

    def deploy(function="work", ttl=TTL, **compute):
        handle = kt.fn(getattr(jobs, function))
        handles.append(handle)
        return handle.to(kt.Compute(cpus="0.1", inactivity_ttl=f"{ttl:.0f}s", **compute))

    yield deploy
    for handle in handles:
        handle.teardown()


def is_there(name):
    try:
        kt.fn(name=name)
    except ServiceNotFoundError:
        return False
    return True


def in_time(begin):
    """What `begin` returns, which deploys a service and uses it before its time is over.

    It begins anew where this program stood for so long that the service had stopped.
    """
    while True:
        begun = time.monotonic()
        try:
            return begin()
        except KubetorchError:
            assert time.monotonic() - begun >= TTL


def assert_stops(name, last_used):
    """The service stops, and not before its time is over; its last use ended after `last_used`."""
    deadline = time.monotonic() + 60
    while is_there(name):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.1)
    assert time.monotonic() - last_used >= TTL


def test_a_service_that_was_never_called_stops_after_its_ttl(deploy):
    begun = time.monotonic()
    deploy()
    assert_stops("work", begun)


def test_time_counts_from_the_end_of_the_last_call(deploy):
    def call_again_and_again():
        remote, last_used = deploy(), []
        for _ in range(3):
            time.sleep(TTL * 0.5)
            last_used.append(time.monotonic())
            assert remote() == "done"
        return last_used[-1]

    assert_stops("work", in_time(call_again_and_again))


def test_a_call_that_runs_longer_than_the_ttl_is_no_idleness(deploy, tmp_path):
    end = tmp_path / "end"
    call = InThread(in_time, lambda: deploy("hold")(str(end)))
    until((tmp_path / "end.begun").exists, 60)
    time.sleep(TTL * 1.5)
    assert is_there("hold")
    last_used = time.monotonic()
    end.touch()
    assert call.join().value == "done"
    assert_stops("hold", last_used)


def test_a_spawned_call_keeps_its_service_until_it_has_ended(deploy, tmp_path):
    end = tmp_path / "end"
    handle = in_time(lambda: deploy("hold").spawn(str(end)))
    time.sleep(TTL * 1.5)
    assert is_there("hold")
    last_used = time.monotonic()
    end.touch()
    assert handle.get(timeout=60) == "done"
    assert_stops("hold", last_used)


def test_a_generator_that_waits_for_its_reader_is_no_idleness(deploy):
    def begin():
        values = deploy("count")(1000)
        assert next(values) == "0" * 1_000_000
        return values

    values = in_time(begin)
    time.sleep(TTL * 1.5)
    assert is_there("count")
    last_used = time.monotonic()
    values.close()
    assert_stops("count", last_used)


def test_one_busy_pod_keeps_all_of_a_service(deploy, tmp_path):
    end = tmp_path / "end"

    def begin():
        remote = deploy("hold", replicas=2)
        return remote.spawn(str(end), remote.service_config["pods"][1]["name"])

    handle = in_time(begin)
    time.sleep(TTL * 1.5)
    assert is_there("hold")
    last_used = time.monotonic()
    end.touch()
    assert handle.get(timeout=60) == ["done", "done"]
    assert_stops("hold", last_used)


def test_a_call_of_a_service_that_has_stopped_says_that_it_is_gone(deploy):
    def call():
        remote, last_used = deploy(), time.monotonic()
        remote()
        return remote, last_used

    remote, last_used = in_time(call)
    assert_stops("work", last_used)
    with pytest.raises(ServiceNotFoundError, match=r"no call for 3s \(inactivity_ttl\)"):
        remote()


def test_readers_of_its_logs_hear_that_a_service_stops_before_it_does(deploy, service):
    deploy(ttl=9)
    lines = kt_command("logs", "work", "-f").stdout
    assert re.search(
        r"work stops in [123] s unless something calls it \(inactivity_ttl=9s\)", lines
    )
    stop = "work stops: no call for 9s (inactivity_ttl); the next .to() starts it again"
    assert stop in lines
    assert stop in (service / "log" / "service.log").read_text()
    in_time(deploy)
    assert is_there("work")


def test_a_list_has_the_time_that_is_left(jobs, tmp_path):
    handle = kt.fn(jobs.hold, name="listed").to(kt.Compute(cpus="0.1", inactivity_ttl="1h"))

    def seconds_left():
        services = json.loads(kt_command("list", "--json").stdout)
        (listed,) = (service for service in services if service["name"] == "listed")
        return listed["idle_seconds_left"]

    until(lambda: seconds_left() is not None, seconds=60)
    assert 3000 < seconds_left() <= idle_patience("1h")
    assert re.search(r"listed .* 1h \((59m|1h) left\)", kt_command("list").stdout)
    call = InThread(handle, str(tmp_path / "end"))
    until(lambda: seconds_left() is None, seconds=60)
    (tmp_path / "end").touch()
    call.join()
    until(lambda: seconds_left() is not None, seconds=60)
    handle.teardown()
