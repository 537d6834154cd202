"""Calls of a service with several replicas: all of them answer, in pod order."""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest

import kubetorch as kt
from kubetorch.errors import (
    CallCancelledError,
    CallTimeoutError,
    InstanceReplacedWarning,
    KubetorchError,
    WorkerDiedError,
)
from kubetorch.sdk import backend
from tests.local.user_project import UserProject

SOURCE = """
import asyncio, os, time
from pathlib import Path

def pid(offset=0):
    return os.getpid() + offset

def say(text):
    print(text)
    return os.environ["POD_NAME"]

def fail_in(pods, me):
    number = me.index(os.environ["POD_NAME"])
    if number in pods:
        raise ValueError(f"bad {number}")
    return number

def fail_or_sleep(pods, me, folder):
    name, begun = os.environ["POD_NAME"], Path(f"{folder}.begun")
    begun.mkdir(exist_ok=True)
    if me.index(name) in pods:
        while len(list(begun.iterdir())) < len(me) - len(pods):
            time.sleep(0.01)
        raise ValueError("bad")
    try:
        (begun / name).touch()
        for _ in range(3000):
            time.sleep(0.02)
    finally:
        Path(folder, name).touch()

def sleep(seconds, folder=None):
    if folder:
        Path(folder, os.environ["POD_NAME"]).touch()
    # In small steps: a call that cannot be interrupted would cost its worker.
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    return os.getpid()

def wait_for(file):
    while file and not os.path.exists(file):
        time.sleep(0.02)
    return os.getpid()

def mark_and_wait(file, end):
    with open(file, "a") as marks:
        marks.write("x")
    while not os.path.exists(end):
        time.sleep(0.02)

def die_in(pod):
    if os.environ["POD_NAME"] == pod:
        os.kill(os.getpid(), 9)
    time.sleep(600)

def count(n):
    for i in range(n):
        yield i, os.getpid()

class Counter:
    def __init__(self):
        self.n = 0

    def add(self, k):
        self.n += k
        return self.n, os.getpid()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def jobs(service, tmp_path_factory):
    project = UserProject(tmp_path_factory.mktemp("broadcast") / "shop")
    yield project.module(SOURCE)
    project.forget()


@pytest.fixture(scope="module")
def deployed(jobs):
    """Services on three replicas, by the name of their callable."""
    handles = {}

    def deploy(name):
        if name not in handles:
            target = getattr(jobs, name)
            handle = (kt.cls if isinstance(target, type) else kt.fn)(target)
            handles[name] = handle.to(kt.Compute(cpus="0.1", replicas=3))
        return handles[name]

    yield deploy
    for handle in handles.values():
        handle.teardown()


def eventually(condition):
    """What a condition says as soon as that is something."""
    deadline = time.monotonic() + 60
    while not (outcome := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return outcome


@contextlib.contextmanager
def once_there_are(count, folder, kill):
    """Kill something as soon as so many calls say in a folder that they run."""

    def wait():
        eventually(lambda: folder.exists() and len(list(folder.iterdir())) == count)
        kill()

    killer = threading.Thread(target=wait)
    killer.start()
    try:
        yield
    finally:
        killer.join()


def stream_to(handle, pod_name):
    """The stream on which items of this process go to a pod."""
    route = backend.route(backend.session(), "default", handle.service_name)

    def connected():
        list(handle.map([0] * 3))
        return next((stream for stream in route.streams() if stream.pod == pod_name), None)

    return eventually(connected)


def pod_names(handle):
    pods = handle.service_config["pods"]
    return [pod["name"] for pod in sorted(pods, key=lambda pod: pod["ordinal"])]


def test_all_pods_answer_and_their_answers_come_in_pod_order(deployed):
    say = deployed("say")
    first = say("hello")
    assert len(set(first)) == 3
    assert first == pod_names(say)
    assert say("again") == first


def test_lines_carry_the_name_of_their_pod(deployed, capsys):
    say = deployed("say")
    names = say("hello out there", stream_logs=True)
    shown = capsys.readouterr().out
    assert all(f"({name}) hello out there" in shown for name in names)


def test_a_coroutine_gets_the_same_list(deployed):
    say = deployed("say")

    async def both():
        return await asyncio.gather(say("a", async_=True), say("b", async_=True))

    assert asyncio.run(both()) == [say("c")] * 2


def test_one_that_is_asked_for_answers_with_a_scalar(jobs):
    handle = kt.fn(jobs.pid, name="alone").to(kt.Compute(cpus="0.1", replicas=1))
    try:
        assert isinstance(handle(), int)
    finally:
        handle.teardown()


def test_each_item_of_a_map_goes_to_one_pod(deployed):
    say = deployed("say")
    names = pod_names(say)
    # Who answers sooner gets the next item sooner: the shares of the pods differ.
    answers = list(say.map(["x"] * 30, window=3))
    assert len(answers) == 30
    assert set(answers) == set(names)
    assert set(say.starmap([("x",)] * 30, ordered=False)) == set(names)

    async def collect():
        mapped = [value async for value in say.map_async(["x"] * 9, window=3)]
        return mapped + [value async for value in say.starmap_async([("x",)] * 9, window=3)]

    answers = asyncio.run(collect())
    assert len(answers) == 18
    assert set(answers) == set(names)
    assert say("x") == names


def test_the_pod_that_has_least_to_do_gets_the_next_item(deployed, tmp_path):
    remote = deployed("wait_for")
    # The first item keeps its pod busy until the others have ended.
    end = tmp_path / "end"
    pids = remote.map([str(end)] + [None] * 30, window=3, ordered=False)
    other_pids = {next(pids) for _ in range(30)}
    end.touch()
    (busy,) = pids
    assert busy not in other_pids
    assert len(other_pids) == 2


def test_an_item_with_a_key_goes_to_the_same_pod_again(deployed):
    remote = deployed("pid").options(idempotency_key=str(time.time()))
    first = list(remote.map(range(7)))
    assert list(remote.map([0] * 7)) == first
    assert len({pid - item for item, pid in enumerate(first)}) == 3


def test_an_item_goes_to_another_pod_when_one_is_away(deployed):
    remote = deployed("sleep")
    pod = remote.service_config["pods"][0]
    stream = stream_to(remote, pod["name"])
    agent = psutil.Process(pod["pid"])
    agent.kill()
    # Until it has ended, and this end knows, it may take an item still.
    psutil.wait_procs([agent], timeout=60)
    eventually(lambda: not stream.accepts_calls)
    assert len(set(remote.map([0.05] * 20, window=4))) >= 2
    # It was started again; a map that goes on uses it again.
    items = remote.map(itertools.repeat(0.05), window=3)
    deadline = time.monotonic() + 60
    while len({next(items) for _ in range(6)}) < 3:
        assert time.monotonic() < deadline
    items.close()


def test_an_item_that_runs_when_its_agent_is_killed_runs_once(deployed, tmp_path):
    remote = deployed("mark_and_wait")
    pod = remote.service_config["pods"][1]
    marks, end = tmp_path / "marks", tmp_path / "end"
    marks.mkdir()

    def kill():
        psutil.Process(pod["pid"]).kill()
        eventually(lambda: not psutil.pid_exists(pod["pid"]))
        end.touch()

    items = [(str(marks / str(number)), str(end)) for number in range(6)]
    with once_there_are(6, marks, kill):
        results = list(remote.starmap(items, window=6, return_exceptions=True))
    lost = [result for result in results if isinstance(result, KubetorchError)]
    assert [error.pod_name for error in lost] == [pod["name"]] * 2
    assert [path.read_text() for path in marks.iterdir()] == ["x"] * 6


def test_a_map_says_that_the_instance_of_a_pod_was_replaced(jobs):
    counter = kt.cls(jobs.Counter, name="replaced").to(kt.Compute(cpus="0.1", replicas=3))
    try:
        list(counter.add.map([1] * 12, window=3))
        counts = [n for n, _ in counter.add(0)]
        assert sum(counts) == 12
        assert all(counts)
        worker = counter.add(0)[2][1]
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: not psutil.pid_exists(worker))
        with pytest.warns(InstanceReplacedWarning) as warned:
            list(counter.add.map([0] * 12, window=3, return_exceptions=True))
        assert len(warned) == 1
    finally:
        counter.teardown()


def test_every_pod_has_an_instance_of_its_own(deployed):
    counter = deployed("Counter")
    first, second = counter.add(2), counter.add(3)
    assert [n for n, _ in first] == [2, 2, 2]
    assert [n for n, _ in second] == [5, 5, 5]
    assert len({pid for _, pid in second}) == 3


def test_a_generator_is_a_list_of_iterators(deployed):
    count = deployed("count")
    iterators = count(3)
    assert len(iterators) == 3
    values = [list(iterator) for iterator in iterators]
    assert [[n for n, _ in pod] for pod in values] == [[0, 1, 2]] * 3
    assert len({pid for pod in values for _, pid in pod}) == 3
    unknown = kt.fn(name=count.service_name, get_if_exists=True)
    assert [next(iterator)[0] for iterator in unknown(10_000)] == [0, 0, 0]

    async def collect():
        taken = []
        for iterator in await count(2, async_=True):
            taken.append([n async for n, _ in iterator])
        return taken

    assert asyncio.run(collect()) == [[0, 1]] * 3


def test_the_first_error_in_pod_order_carries_the_others(deployed):
    fail_in = deployed("fail_in")
    names = pod_names(fail_in)
    assert fail_in([], names) == [0, 1, 2]

    def attempt():
        with pytest.raises(ValueError, match="bad") as caught:
            fail_in([1, 2], names)
        return caught.value if caught.value.other_errors else None

    error = eventually(attempt)
    assert str(error).startswith("bad 1")
    assert error.pod_name == names[1]
    assert [str(other_error) for other_error in error.other_errors] == ["bad 2"]
    assert error.__notes__ == [
        f"raised in pod 1 ({names[1]}); the call went to 3 pods\n"
        f"also in pod 2 ({names[2]}): ValueError: bad 2"
    ]
    (result,) = fail_in.map([[0]], [names], return_exceptions=True)
    assert str(result) == "bad 0"
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(_await(fail_in, [0, 1, 2], names))


async def _await(remote, *args):
    return await remote(*args, async_=True)


@pytest.mark.parametrize("how", ["blocking", "awaited"])
def test_an_error_in_one_pod_ends_the_calls_on_the_others(deployed, tmp_path, how):
    remote = deployed("fail_or_sleep")
    names = pod_names(remote)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="bad") as caught:
        if how == "awaited":
            asyncio.run(_await(remote, [1], names, str(tmp_path)))
        else:
            remote([1], names, str(tmp_path))
    assert time.monotonic() - begun < 30
    assert caught.value.other_errors == ()
    eventually(lambda: {path.name for path in tmp_path.iterdir()} == {names[0], names[2]})
    assert time.monotonic() - begun < 50


def test_a_timeout_ends_the_call_on_all_pods(deployed):
    remote = deployed("sleep")

    def attempt():
        begun = time.monotonic()
        with pytest.raises(CallTimeoutError) as caught:
            remote.options(timeout=0.3)(60)
        assert time.monotonic() - begun < 30
        return [type(other_error) for other_error in caught.value.other_errors] == [
            CallTimeoutError
        ] * 2

    eventually(attempt)


def test_a_worker_that_is_killed_fails_the_call_and_names_its_pod(deployed):
    remote = deployed("die_in")
    names = pod_names(remote)
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        remote(names[1])
    assert time.monotonic() - begun < 60
    assert caught.value.pod_name == names[1]


def test_an_agent_that_is_killed_fails_the_call_and_is_back_for_the_next_one(deployed, tmp_path):
    remote = deployed("sleep")
    remote(0)
    pod = kt.fn(name=remote.service_name).service_config["pods"][1]
    agent = psutil.Process(pod["pid"])
    begun = time.monotonic()
    with once_there_are(3, tmp_path, agent.kill), pytest.raises(KubetorchError) as caught:
        remote(60, str(tmp_path))
    assert time.monotonic() - begun < 30
    assert "raised in pod 1" in caught.value.__notes__[0]
    # It was started again; what was asked for decides, so the next call waits for it.
    assert len(set(remote(0))) == 3


def test_a_spawned_call_has_one_handle_for_all_pods(deployed):
    say = deployed("say")
    names = pod_names(say)
    handle = say.spawn("spawned")
    assert handle.get(timeout=60) == names
    assert handle.done()
    assert handle.status() == "succeeded"
    unpickled = pickle.loads(pickle.dumps(handle))
    assert unpickled.result(timeout=60) == names
    assert asyncio.run(_get(kt.CallHandle.from_id(handle.id))) == names


async def _get(handle):
    return await handle


def test_a_spawned_call_that_fails_on_one_pod_goes_on_on_the_others(deployed):
    fail_in = deployed("fail_in")
    handle = fail_in.spawn([1], pod_names(fail_in))
    with pytest.raises(ValueError, match="bad 1") as caught:
        handle.get(timeout=60)
    assert caught.value.other_errors == ()
    assert handle.status() == "failed"
    assert [call.status() for call in handle.calls] == ["succeeded", "failed", "succeeded"]


def test_a_spawned_call_is_cancelled_on_all_pods(deployed):
    handle = deployed("sleep").spawn(30)
    with pytest.raises(TimeoutError, match="it goes on"):
        handle.get(timeout=0.1)
    assert handle.status() == "running"
    handle.cancel()
    with pytest.raises(CallCancelledError):
        handle.get(timeout=60)


def test_ctrl_c_ends_the_call_on_all_pods(deployed, tmp_path):
    remote = deployed("fail_or_sleep")
    names = pod_names(remote)
    begun = tmp_path.with_name(f"{tmp_path.name}.begun")

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    with once_there_are(3, begun, interrupt), pytest.raises(KeyboardInterrupt):
        remote([], names, str(tmp_path))
    eventually(lambda: {path.name for path in tmp_path.iterdir()} == set(names))


def post(handle, *args, method=None, headers=(), **kwargs):
    """What curl gets: the status, and the body."""
    request = urllib.request.Request(
        handle.endpoint(method),
        json.dumps({"args": args, "kwargs": kwargs}).encode(),
        {**handle.request_headers, **dict(headers)},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_post_gets_a_list(deployed):
    say = deployed("say")
    assert post(say, "hello") == (200, json.dumps(pod_names(say)).replace(" ", "").encode())
    counter = deployed("Counter")
    status, body = post(counter, 1, method="add")
    assert status == 200
    assert len(json.loads(body)) == 3


def test_a_post_that_fails_on_a_pod_says_how_it_failed_on_the_others(deployed):
    fail_in = deployed("fail_in")
    names = pod_names(fail_in)

    def attempt():
        status, body = post(fail_in, [1, 2], names)
        assert status == 400
        failure = json.loads(body)
        return failure if failure["other_errors"] else None

    failure = eventually(attempt)
    assert (failure["error_type"], failure["message"]) == ("ValueError", "bad 1")
    assert failure["pod_name"] == names[1]
    assert [other_error["message"] for other_error in failure["other_errors"]] == ["bad 2"]


def test_a_post_that_fails_on_a_pod_ends_the_calls_on_the_others(deployed, tmp_path):
    remote = deployed("fail_or_sleep")
    names = pod_names(remote)
    begun = time.monotonic()
    assert post(remote, [1], names, str(tmp_path))[0] == 400
    assert time.monotonic() - begun < 30
    eventually(lambda: {path.name for path in tmp_path.iterdir()} == {names[0], names[2]})
    assert time.monotonic() - begun < 50


def test_a_post_to_a_generator_gets_lines_with_the_number_of_their_pod(deployed):
    status, body = post(deployed("count"), 2)
    lines = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    for pod in range(3):
        pod_lines = [line for line in lines if line["pod"] == pod]
        assert [line["yield"][0] for line in pod_lines if "yield" in line] == [0, 1]
        assert pod_lines[-1] == {"pod": pod, "return": None}


def test_a_post_has_a_timeout_on_all_pods(deployed):
    def attempt():
        status, body = post(deployed("sleep"), 60, headers=[("X-Kubetorch-Timeout", "0.3")])
        failure = json.loads(body)
        assert (status, failure["error_type"]) == (504, "CallTimeoutError")
        return len(failure["other_errors"]) == 2

    eventually(attempt)


def test_a_post_fails_when_an_agent_is_killed(deployed, tmp_path):
    remote = deployed("sleep")
    remote(0)
    pod = kt.fn(name=remote.service_name).service_config["pods"][2]
    agent = psutil.Process(pod["pid"])
    with once_there_are(3, tmp_path, agent.kill):
        status, body = post(remote, 60, str(tmp_path))
    assert (status, json.loads(body)["pod_name"]) == (503, pod["name"])
    # Until it has ended it may take a call still, which nobody can tell from one that it began.
    psutil.wait_procs([agent], timeout=60)

    def attempt():
        status, body = post(remote, 0)
        assert status in (200, 503)  # until the agents of the other pods know
        return body if status == 200 else None

    assert len(set(json.loads(eventually(attempt)))) == 3
