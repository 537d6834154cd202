"""Calls that run again after an error: which errors, how often, for how long, and what is said."""

import importlib
import os
import sys
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from tests.local.calling import until, with_longer_timeouts

FLAKY = """
import abc, os, time
from pathlib import Path

class Busy(ConnectionError):
    pass

class Passing(Exception, metaclass=abc.ABCMeta):
    pass

class Odd(Exception):
    pass

Passing.register(Odd)

def flaky(trace, fails, how):
    with open(trace, "a") as file:
        file.write("ran\\n")
    attempt = len(Path(trace).read_text().splitlines())
    if attempt <= fails:
        if how == "exit":
            os._exit(3)
        if how == "sleep":
            end = time.monotonic() + 100
            while time.monotonic() < end:
                time.sleep(0.01)
        if how == "object":
            return object()
        raise {"busy": Busy, "value": ValueError, "odd": Odd}[how]("not now")
    return attempt

def numbers(trace, first):
    with open(trace, "a") as file:
        file.write("ran\\n")
    for number in range(first, 3):
        yield number
    if len(Path(trace).read_text().splitlines()) == 1:
        raise Busy("not now")
"""


@pytest.fixture(scope="module")
def program(shared_service_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flaky")
    (folder / "pyproject.toml").touch()
    (folder / "flaky_module.py").write_text(FLAKY)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("flaky_module")
    sys.path.remove(str(folder))
    del sys.modules["flaky_module"]


@pytest.fixture(scope="module")
def flaky(program):
    declared = {"retries": 2, "retry_on": (ConnectionError,), "backoff": 0.01}
    yield kt.fn(program.flaky, options=declared).to(kt.Compute(cpus="0.1"))
    backend.route(backend.session(), "default", "flaky").close()


@pytest.fixture(params=["call", "spawn"])
def run(request, tmp_path):
    """Runs a call of `flaky`; its value or error, and how often the function ran."""

    def run(remote, fails, how, name="trace"):
        trace = tmp_path / name
        trace.touch()
        try:
            is_spawned = request.param == "spawn"
            call = remote.spawn if is_spawned else remote
            value = call(str(trace), fails, how)
            value = value.result(timeout=200) if is_spawned else value
        except Exception as error:
            value = error
        return value, len(trace.read_text().splitlines())

    return run


def test_a_named_error_of_the_users_runs_again_by_its_base_too(flaky, run):
    assert run(flaky, 2, "busy") == (3, 3)


def test_the_error_of_the_last_attempt_is_raised_and_says_how_many_there_were(flaky, run, program):
    error, count = run(flaky, 9, "busy")
    assert (type(error), error.attempts, count) == (program.Busy, 3, 3)


@pytest.mark.parametrize(("how", "kind"), [("value", ValueError), ("exit", kt.WorkerDiedError)])
def test_an_error_that_is_not_named_is_raised_at_once(flaky, run, how, kind):
    error, count = run(flaky, 9, how)
    assert (type(error), error.attempts, count) == (kind, 1, 1)


def test_lost_workers_run_again_when_nothing_is_named(flaky, run):
    assert run(flaky.options(retry_on=None), 2, "exit") == (3, 3)


def test_the_users_errors_do_not_run_again_when_nothing_is_named(flaky, run, program):
    error, count = run(flaky.options(retry_on=None), 2, "busy")
    assert (type(error), count) == (program.Busy, 1)


def test_a_class_that_is_registered_with_the_named_one_counts(flaky, run, program):
    assert run(flaky.options(retry_on=program.Passing), 1, "odd") == (2, 2)


def test_a_class_can_be_named_by_text(flaky, run):
    assert run(flaky.options(retry_on="flaky_module.Busy"), 1, "busy") == (2, 2)


@pytest.mark.parametrize(
    ("how", "kind"), [("sleep", kt.CallTimeoutError), ("object", kt.SerializationError)]
)
def test_timeouts_and_values_that_cannot_travel_run_again_only_if_they_are_named(
    flaky, run, how, kind
):
    def attempt(timeout):
        patient = flaky.options(timeout=timeout, retry_on=(Exception,))
        error, count = run(patient, 1, how, f"trace {timeout}")
        return (type(error), count) == (kind, 1)

    with_longer_timeouts(attempt)


@pytest.mark.parametrize(
    ("how", "kind"), [("sleep", kt.CallTimeoutError), ("object", kt.SerializationError)]
)
def test_each_attempt_after_a_named_timeout_has_its_own_timeout(flaky, run, how, kind):
    def attempt(timeout):
        remote = flaky.options(timeout=timeout, retry_on=(kind,))
        return run(remote, 2, how, f"trace {timeout}") == (3, 3)

    with_longer_timeouts(attempt)


def test_an_idempotency_key_keeps_the_end_of_the_last_attempt(flaky, run):
    keyed = flaky.options(idempotency_key=os.urandom(8).hex())
    assert run(keyed, 2, "busy") == (3, 3)
    assert run(keyed, 2, "busy") == (3, 3)


def test_each_item_of_a_map_runs_again(flaky, tmp_path):
    traces = [str(tmp_path / name) for name in "ab"]
    assert list(flaky.map(traces, [1, 2], ["busy", "busy"])) == [2, 3]


def test_a_generator_runs_again_only_before_its_first_value(program, tmp_path):
    numbers = kt.fn(program.numbers, options={"retries": 1, "retry_on": OSError}).to(
        kt.Compute(cpus="0.1")
    )
    numbers = numbers.options(backoff=0.01)
    assert list(numbers(str(tmp_path / "none"), 3)) == []
    received = []
    with pytest.raises(program.Busy):
        received.extend(numbers(str(tmp_path / "some"), 1))
    assert (tmp_path / "none").read_text() == "ran\n" * 2
    assert (tmp_path / "some").read_text() == "ran\n"
    backend.route(backend.session(), "default", "numbers").close()


def test_a_spawned_call_that_waits_to_run_again_can_be_cancelled_and_counts_its_attempts(
    flaky, tmp_path
):
    trace = tmp_path / "trace"
    handle = flaky.options(backoff=1000, max_backoff=1000).spawn(str(trace), 9, "busy")

    def view():
        return backend.session().ask(lambda session: session.get_call(handle.id))

    until(lambda: view().attempts == 2)
    assert view().state == "running"
    handle.cancel()
    with pytest.raises(kt.CallCancelledError) as raised:
        handle.result(timeout=60)
    assert raised.value.attempts == 2
    until(lambda: view().state == "cancelled")
    assert view().attempts == 2
    assert Path(trace).read_text() == "ran\n"


def test_declared_options_hold_for_calls_of_classes_and_decorated_functions(program):
    declared = {"retries": 4, "retry_on": (KeyError,)}
    for handle in (
        kt.cls(program.Busy, name="declared", options=declared),
        kt.compute(cpus="0.1", name="declared", options=declared)(program.flaky),
    ):
        options = handle._options
        assert (options.retries, options.retry_names) == (4, ("builtins.KeyError",))
    with pytest.raises(TypeError, match="there is no call option 'retry'"):
        kt.fn(program.flaky, options={"retry": 3})


def test_a_spawned_call_that_waits_to_run_again_holds_no_slot(program, tmp_path):
    narrow = kt.fn(program.flaky, name="narrow").to(kt.Compute(cpus="0.1", concurrency=1))
    patient = narrow.options(retries=1, retry_on=OSError, backoff=1000, max_backoff=1000)
    handle = patient.spawn(str(tmp_path / "first"), 9, "busy")
    until((tmp_path / "first").exists)
    assert narrow.options(queue_timeout=100)(str(tmp_path / "second"), 0, "") == 1

    def attempt(timeout):
        interrupted = narrow.options(
            retries=1, retry_on=kt.CallTimeoutError, timeout=timeout, backoff=0.1
        )
        third = interrupted.spawn(str(tmp_path / f"third {timeout}"), 1, "sleep")
        try:
            return third.result(timeout=200) == 2
        except kt.CallTimeoutError:
            return False

    with_longer_timeouts(attempt)
    handle.cancel()
    backend.route(backend.session(), "default", "narrow").close()
