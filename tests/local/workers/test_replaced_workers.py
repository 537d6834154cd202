"""Workers that are replaced: calls that come meanwhile, and the state of a class."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
import warnings

import pytest

import kubetorch as kt
from kubetorch.sdk import backend
from shared import WHOLE
from tests.local import commands
from tests.local.calling import until, with_longer_timeouts

JOBS = """
import os
import time

def nap(seconds):
    print("naps", flush=True)
    time.sleep(seconds)
    return os.getpid()

def hang(begun):
    open(begun, "w").close()
    end = time.monotonic() + 600
    while time.monotonic() < end:
        try:
            time.sleep(600)
        except BaseException:  # an interruption that came before the sleep
            pass

def work(name, *args):
    return globals()[name](*args)

class Notes:
    def __init__(self):
        self.kept = []
        if os.path.exists("slow"):
            time.sleep(1)

    def add(self, note, seconds=0.0):
        self.kept.append(note)
        if seconds:
            print("naps", flush=True)
            time.sleep(seconds)
        return list(self.kept)

    def hang(self, begun):
        self.kept.append("lost")
        hang(begun)

    def die(self, slow=False):
        if slow:
            open("slow", "w").close()
        os._exit(3)

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return os.getpid()
"""

CALLER = """
import sys
import kubetorch as kt

print(kt.fn(name=sys.argv[1])(float(sys.argv[2])), flush=True)
"""

WRITER = """
import sys
import kubetorch as kt

kt.cls(name=sys.argv[1]).add("lost", seconds=float(sys.argv[2]))
"""
#: Rounds of the loop of timeouts and interruptions.
ROUNDS = 100 if WHOLE else 2


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def jobs(project):
    return project.module(JOBS)


@pytest.fixture
def deploy():
    """Deploys a function or a class; it is torn down at the end."""
    deployed = []

    def deploy(module, **compute_options):
        module.to(kt.Compute(cpus="0.1", **compute_options))
        deployed.append(module)
        return module

    yield deploy
    for module in deployed:
        module.teardown()


def test_a_call_after_a_timeout_does_not_meet_the_worker_that_goes(jobs, deploy, tmp_path):
    work = deploy(kt.fn(jobs.work))
    before = work("nap", 0)

    def attempt(timeout):
        begun = tmp_path / f"begun {timeout}"
        with pytest.raises(kt.CallTimeoutError):
            work.options(timeout=timeout)("hang", str(begun))
        return begun.exists()

    with_longer_timeouts(attempt)
    assert work("nap", 3) != before


def test_a_call_after_one_that_can_be_interrupted_stays_there(jobs, deploy):
    spin = deploy(kt.fn(jobs.spin))
    before = spin(0)
    with pytest.raises(kt.CallTimeoutError):
        spin.options(timeout=0.5)(60)
    assert spin(0) == before


def test_a_program_that_follows_one_that_was_interrupted_runs(project, jobs, deploy):
    nap = deploy(kt.fn(jobs.nap))
    program = project.write("program.py", CALLER)
    interrupt(program, nap, "60")
    next_run = project.run(program, nap.service_name, "3")
    assert next_run.returncode == 0, next_run.stderr


def interrupt(program, service, *arguments):
    """Run a program until its call prints, then press Ctrl-C."""
    first = subprocess.Popen(
        [sys.executable, program, service.service_name, *arguments],
        cwd=program.parent,
        env={**os.environ, "KT_STREAM_LOGS": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with first:
        assert "naps" in first.stdout.readline()
        first.send_signal(signal.SIGINT)
        first.wait(30)


def stuck(notes, folder):
    """Have the worker be replaced: a call that cannot be interrupted."""
    begun = folder / "begun"
    call = notes.hang.spawn(str(begun))
    until(begun.exists)
    call.cancel()
    with pytest.raises(kt.CallCancelledError):
        call.get(timeout=60)


def added(notes, note):
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notes_kept = notes.add(note)
    return notes_kept, [
        str(warning.message) for warning in caught if warning.category is kt.InstanceReplacedWarning
    ]


def test_asking_for_a_name_takes_no_warning_from_the_next_call(jobs, deploy, tmp_path):
    notes = deploy(kt.cls(jobs.Notes))
    assert added(notes, 1) == ([1], [])
    stuck(notes, tmp_path)
    assert not hasattr(notes, "missing")
    notes_kept, warned = added(notes, 2)
    assert (notes_kept, len(warned)) == ([2], 1)


def test_an_instance_that_is_replaced_says_so_to_the_next_call(jobs, deploy, tmp_path):
    notes = deploy(kt.cls(jobs.Notes))
    assert [added(notes, 1), added(notes, 2)] == [([1], []), ([1, 2], [])]
    stuck(notes, tmp_path)
    notes_kept, (warned,) = added(notes, 4)
    assert notes_kept == [4]
    assert "could not be interrupted" in warned
    assert added(notes, 5) == ([4, 5], [])
    # A deploy makes a new instance, too, but that was asked for.
    notes.deploy()
    assert added(notes, 6) == ([6], [])


def test_so_does_one_whose_worker_or_pod_dies(jobs, deploy):
    notes = deploy(kt.cls(jobs.Notes))
    assert added(notes, 1) == ([1], [])
    with pytest.raises(kt.WorkerDiedError):
        notes.die()
    notes_kept, (warned,) = added(notes, 2)
    assert notes_kept == [2]
    assert "exit code 3" in warned
    (pod,) = kt.globals.controller_client().get_workload("default", notes.service_name).pods
    os.kill(pod.pid, signal.SIGKILL)
    while True:
        with contextlib.suppress(kt.AgentDiedError):  # of a call that was sent meanwhile
            notes_kept, (warned,) = added(notes, 3)
            break
    assert notes_kept == [3]
    assert "SIGKILL" in warned
    assert added(notes, 4) == ([3, 4], [])


@pytest.mark.timeout(900)
def test_what_was_acknowledged_is_kept_or_said_to_be_gone(project, jobs, deploy):
    notes = deploy(kt.cls(jobs.Notes))
    program = project.write("program.py", WRITER)
    acknowledged, lost_count, number = [], 0, 0
    for turn in range(ROUNDS):
        for _ in range(20):
            number += 1
            notes_kept, warned = added(notes, number)
            if warned:
                lost_count += len(acknowledged)
                acknowledged = []
            acknowledged.append(number)
            assert [note for note in notes_kept if note != "lost"] == acknowledged
        # It can be interrupted, or not.
        seconds = 60 if turn % 4 < 2 else 0.5
        if turn % 2:
            interrupt(program, notes, str(seconds))
        else:
            with pytest.raises(kt.CallTimeoutError):
                notes.add.options(timeout=0.2)("lost", seconds=seconds)
    print(f"acknowledged {number}, kept {len(acknowledged)}, said to be gone {lost_count}")
    assert number == len(acknowledged) + lost_count


def test_curl_is_told_in_a_header(jobs, deploy):
    notes = deploy(kt.cls(jobs.Notes))
    with pytest.raises(kt.WorkerDiedError):
        notes.die()
    answers = []
    for _ in range(2):
        request = urllib.request.Request(
            notes.endpoint("add"), b'{"args": [1]}', notes.request_headers, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answers.append(answer.headers["X-Kubetorch-Instance-Replaced"])
    assert "exit code 3" in answers[0]
    assert answers[1] is None


def test_the_log_says_it_too(jobs, deploy):
    notes = deploy(kt.cls(jobs.Notes))
    with pytest.raises(kt.WorkerDiedError):
        notes.die()
    added(notes, 1)
    end, log_text = time.monotonic() + 20, ""
    while "is a new instance (" not in log_text and time.monotonic() < end:
        log_text = commands.kt("logs", notes.service_name).stdout
    assert log_text.count("is a new instance (") == 1, log_text


def test_a_class_may_have_the_next_call_fail(jobs, deploy, tmp_path):
    notes = deploy(kt.cls(jobs.Notes, on_replace="error"))
    assert notes.add(1) == [1]
    stuck(notes, tmp_path)
    with pytest.raises(kt.InstanceReplacedError, match="could not be interrupted"):
        notes.add(2)
    assert added(notes, 3) == ([3], [])


def spawned(notes, note):
    """What a spawned call returns whose caller waits for it, and what it or its handle raises."""
    try:
        return notes.add.spawn(note).get(timeout=30)
    except kt.InstanceReplacedError as error:
        return error


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "at once"])
def test_spawned_calls_fail_once_for_each_replacement(jobs, deploy, waits):
    notes = deploy(kt.cls(jobs.Notes, on_replace="error"))
    assert spawned(notes, 1) == [1]
    for turn in range(2):
        with pytest.raises(kt.WorkerDiedError):
            notes.die()
        if not waits:
            with contextlib.suppress(AttributeError):
                notes.missing  # noqa: B018  # asks the new instance what it has
        assert isinstance(spawned(notes, 2), kt.InstanceReplacedError)
        assert [spawned(notes, 3), spawned(notes, 4)] == [[3], [3, 4]], turn


@pytest.mark.parametrize("on_replace", ["warn", "error"])
def test_a_spawned_call_that_nobody_asks_for_takes_no_notice_away(jobs, deploy, on_replace):
    notes = deploy(kt.cls(jobs.Notes, on_replace=on_replace))
    with pytest.raises(kt.WorkerDiedError):
        notes.die(slow=True)
    # As of a program that knows no instance, and while there is none.
    backend.forget(backend.session(), "default", notes.service_name)
    unread = notes.add.spawn(1)
    while kt.CallHandle.from_id(unread.id).status() in ("waiting", "running"):
        time.sleep(0.05)
    backend.forget(backend.session(), "default", notes.service_name)
    if on_replace == "error":
        with pytest.raises(kt.InstanceReplacedError):
            notes.add(2)
        assert notes.add(3) == [3]
    else:
        notes_kept, warned = added(notes, 2)
        assert (notes_kept, len(warned)) == ([1, 2], 1)


@pytest.mark.parametrize(
    "compute",
    [kt.Compute(cpus="0.1", replicas=2), kt.Compute(cpus="0.1").autoscale(max_scale=2)],
    ids=["replicas", "autoscale"],
)
def test_that_is_for_one_instance(jobs, compute):
    with pytest.raises(kt.SpecError, match="one instance"):
        kt.cls(jobs.Notes, on_replace="error").to(compute)
    with pytest.raises(kt.SpecError, match="'warn' or 'error'"):
        kt.cls(jobs.Notes, on_replace="no")
