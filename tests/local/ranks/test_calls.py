"""Calls on the ranks of a distributed service, each pod a process of its own."""

import asyncio
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import numpy
import pytest

import kubetorch as kt
from agent_harness import end_softly, wait_until
from kubetorch.errors import (
    CallCancelledError,
    CallTimeoutError,
    KubetorchError,
    SerializationError,
    SpecError,
    WorkerDiedError,
)
from tests.local.calling import InThread
from tests.local.user_project import UserProject

SOURCE = """
import os, time

RANK = int(os.environ.get("RANK", "-1"))

def work(name, *args):
    return globals()[name](*args)

def where():
    names = ("RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [int(os.environ[name]) for name in names] + [os.getpid()]

def rank(*args):
    return RANK

def say(text):
    print(f"{text} {RANK}")

def meet(folder, ranks):
    open(os.path.join(folder, f"met-{RANK}"), "w").close()
    while not all(os.path.exists(os.path.join(folder, f"met-{rank}")) for rank in ranks):
        time.sleep(0.01)

def fail_on(folder, *ranks):
    try:
        meet(folder, ranks)
        if RANK != ranks[0]:
            sleep(600)
    finally:
        if RANK in ranks:
            raise ValueError(f"bad {RANK}")

def cleanly(folder):
    try:
        meet(folder, range(4))
        if RANK == 2:
            raise KeyError("two")
        sleep(600)
    finally:
        open(os.path.join(folder, str(RANK)), "w").close()

def die(rank, how):
    if RANK == rank:
        if how == "exit":
            os._exit(0)
        os.kill(os.getpid(), 9)
    time.sleep(600)

def unencodable(rank):
    return object() if RANK == rank else RANK

def sleep(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return RANK

def hold(folder, seconds):
    open(os.path.join(folder, str(RANK)), "w").close()
    return sleep(seconds)

def count(n):
    for i in range(n + RANK):
        yield [RANK, i]
    return RANK

def endless():
    i = 0
    while True:
        yield i
        i += 1

def change(values):
    before = float(values.sum())
    values += RANK + 1
    return before, float(values.sum()), values[:3]

def big(size):
    import numpy
    return numpy.full(size, RANK, dtype="uint8")

class Counter:
    def __init__(self, start):
        self.n = start + RANK

    def add(self, k):
        self.n += k
        return self.n
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture(scope="module")
def project(service, tmp_path_factory):
    return UserProject(tmp_path_factory.mktemp("ranks") / "work")


@pytest.fixture(scope="module")
def jobs(project):
    return project.module(SOURCE)


def compute(workers=2, processes=2, env_vars=None, **more):
    undistributed = kt.Compute(
        cpus="0.01",
        allowed_serialization=["json", "pickle"],
        launch_timeout=60,
        env_vars=env_vars,
    )
    return undistributed.distribute("spmd", workers=workers, num_proc=processes, **more)


@pytest.fixture(scope="module")
def work(jobs):
    """Runs the function of a name on four ranks in two pods."""
    remote = kt.fn(jobs.work, name="ranks-work").to(compute())
    yield remote
    remote.teardown()


@pytest.fixture
def alone(jobs):
    """The same, on pods of the test's own."""
    remotes = []

    def deploy(**more):
        remote = kt.fn(jobs.work, name=f"own-ranks-{len(remotes)}").to(compute(**more))
        remotes.append(remote)
        return remote

    yield deploy
    for remote in remotes:
        remote.teardown()


def pods(remote):
    return sorted(remote.service_config["pods"], key=lambda pod: pod["ordinal"])


def test_a_call_answers_in_rank_order_and_each_process_has_its_rank(work):
    answers = work("where")
    assert [answer[:5] for answer in answers] == [
        [0, 0, 0, 4, 2],
        [1, 0, 1, 4, 2],
        [2, 1, 0, 4, 2],
        [3, 1, 1, 4, 2],
    ]
    assert len({answer[5] for answer in answers}) == 4
    assert work("where") == answers


def test_workers_selects_pods_and_changes_no_rank(work):
    second = pods(work)[1]
    assert work("rank", workers=[1]) == [2, 3]
    assert work("rank", workers=["0"]) == [0, 1]
    assert work("rank", workers=[1, 0]) == [0, 1, 2, 3]
    assert work("rank", workers="ready") == [0, 1, 2, 3]
    assert len(work("rank", workers="any")) == 2
    assert work("rank", workers=[second["name"]]) == [2, 3]
    assert work("rank", workers=second["name"]) == [2, 3]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([10], "Worker index 10 out of range. Valid range: 0-1"),
        (["10.9.8.7"], "Worker IP '10.9.8.7' not found"),
        ("nobody", "Worker IP 'nobody' not found"),
    ],
)
def test_workers_that_do_not_exist_are_a_mistake_of_the_caller(work, workers, message):
    with pytest.raises(SpecError, match=message.replace(".", r"\.")) as caught:
        work("rank", workers=workers)
    assert isinstance(caught.value, ValueError)


def failing_together(tmp_path, ask):
    """A failure that another rank was in time for: it has 0.2 s to say how it ended.

    Args:
        ask: Fails in a folder; returns the failure, and those that came with it.
    """
    for number in range(20):
        folder = tmp_path / f"attempt-{number}"
        folder.mkdir()
        failure, other_failures = ask(str(folder))
        if other_failures:
            return failure
    raise AssertionError("the other ranks were never in time")


def test_the_first_failure_names_its_rank_and_has_the_others(work, tmp_path):
    def ask(folder):
        with pytest.raises(ValueError, match="bad 1") as caught:
            work("fail_on", folder, 1, 3)
        return caught.value, [
            other_error for other_error in caught.value.other_errors if "bad" in str(other_error)
        ]

    error = failing_together(tmp_path, ask)
    assert error.rank == 1
    assert error.pod_name == pods(work)[0]["name"]
    assert [
        str(other_error)
        for other_error in error.other_errors
        if isinstance(other_error, ValueError)
    ] == ["bad 3"]
    assert "bad 3" in error.other_errors[0].remote_traceback
    assert "rank 1" in "".join(error.__notes__)


def test_a_failure_in_another_pod_interrupts_all_ranks(work, tmp_path):
    begun = time.monotonic()
    with pytest.raises(KeyError, match="two") as caught:
        work("cleanly", str(tmp_path))
    assert time.monotonic() - begun < 60
    assert caught.value.rank == 2
    wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))


@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_ends_is_named_and_the_ranks_come_back(work, rank, how):
    work("sleep", 0)  # the ranks are there again
    begun = time.monotonic()
    with pytest.raises(WorkerDiedError) as caught:
        work("die", rank, how)
    seconds = time.monotonic() - begun
    assert caught.value.rank == rank
    assert ("exit code 0" if how == "exit" else "SIGKILL") in str(caught.value)
    assert seconds < 60
    print(f"rank {rank} {how}: {seconds:.2f} s")


def test_a_value_that_cannot_be_encoded_names_its_rank(work):
    with pytest.raises(SerializationError) as caught:
        work("unencodable", 2)
    assert caught.value.rank == 2


def test_lines_have_their_rank_and_come_once(work, capsys):
    work("say", "hello")
    shown = [line for line in capsys.readouterr().out.splitlines() if "hello" in line]
    assert sorted(line[-7:] for line in shown) == [f"hello {rank}" for rank in range(4)]
    assert all(f"rank {line[-1]}" in line for line in shown)


def test_a_generator_gives_a_value_of_each_rank_until_all_have_ended(work):
    streams = work("count", 2)
    assert [list(stream) for stream in streams] == [
        [[rank, i] for i in range(2 + rank)] for rank in range(4)
    ]


def test_a_generator_that_yields_nothing_on_a_rank_is_one_of_the_list(work):
    streams = work("count", 0)
    assert [list(stream) for stream in streams] == [
        [[rank, i] for i in range(rank)] for rank in range(4)
    ]


def test_a_generator_that_nobody_reads_waits(work):
    streams = work("endless")
    first = [next(stream) for stream in streams]
    assert first == [0] * 4
    for _ in range(200):
        for stream in streams:
            next(stream)
    streams[0].close()
    assert list(streams[0]) == []
    with pytest.raises(CallCancelledError, match="rank 0 was closed"):
        list(streams[1])


def test_a_large_array_is_every_ranks_own(work):
    array = numpy.ones(1_000_000)
    sums = work("change", array, serialization="pickle")
    assert [(before, after) for before, after, _ in sums] == [
        (1e6, 1e6 * (rank + 2)) for rank in range(4)
    ]
    assert array.sum() == 1e6


def test_large_values_of_all_ranks_come_back(work):
    arrays = work("big", 9_000_000, serialization="pickle")
    assert [(len(array), int(array[0]), int(array[-1])) for array in arrays] == [
        (9_000_000, rank, rank) for rank in range(4)
    ]


def test_each_rank_keeps_its_instance(jobs):
    remote = kt.cls(jobs.Counter, name="ranks-counter").to(compute(), init_args={"start": 100})
    try:
        assert remote.add(1) == [101, 102, 103, 104]
        assert remote.add(1) == [102, 103, 104, 105]
    finally:
        remote.teardown()


def test_many_calls_at_once_do_not_mix(work):

    async def scenario():
        return await asyncio.gather(*(work("rank", number, async_=True) for number in range(60)))

    assert asyncio.run(scenario()) == [[0, 1, 2, 3]] * 60
    assert list(work.starmap([("rank", number) for number in range(10)])) == [[0, 1, 2, 3]] * 10


def test_a_spawned_call_has_one_handle(work):
    handle = work.spawn("rank")
    assert handle.get(timeout=60) == [0, 1, 2, 3]


def test_a_call_with_a_key_runs_once(work):
    keyed = work.options(idempotency_key="where-once")
    pids = [keyed("where") for _ in range(3)]
    assert pids == [pids[0]] * 3
    work("rank", restart_procs=True)
    assert keyed("where") == pids[0]


def test_a_call_has_a_timeout_and_its_ranks_are_free_again(work):
    with pytest.raises(CallTimeoutError):
        work.options(timeout=0.4)("sleep", 20)
    assert work("sleep", 0) == [0, 1, 2, 3]


def test_a_call_can_be_cancelled(work):
    handle = work.spawn("sleep", 600)
    threading.Timer(0.3, handle.cancel).start()
    with pytest.raises(CallCancelledError):
        handle.get(timeout=60)
    assert work("sleep", 0) == [0, 1, 2, 3]


def test_restart_procs_of_calls_at_once_starts_the_processes_once(work):
    before = {answer[5] for answer in work("where")}

    async def scenario():
        calls = [work("where", restart_procs=True, async_=True) for _ in range(3)]
        return await asyncio.gather(*calls)

    first, *later_answers = asyncio.run(scenario())
    assert later_answers == [first, first]
    assert not before & {answer[5] for answer in first}


def test_restart_procs_gives_every_rank_a_new_process(work):
    before = {answer[5] for answer in work("where")}
    restarted = work("where", restart_procs=True)
    assert [answer[0] for answer in restarted] == [0, 1, 2, 3]
    assert not before & {answer[5] for answer in restarted}
    assert work("where") == restarted


def test_one_worker_answers_with_a_list(alone):
    assert alone(workers=1, processes=1)("rank") == [0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_that_is_killed_ends_the_call_with_the_reason(alone, tmp_path, victim):
    remote = alone()
    pod = pods(remote)[victim]
    killed = []

    def kill():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
        killed.append(time.monotonic())
        os.kill(pod["pid"], signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(kt.WorkerMembershipChanged) as caught:
        remote("hold", str(tmp_path), 600)
    seconds = time.monotonic() - killed[0]
    assert pod["name"] in caught.value.reasons
    assert isinstance(caught.value.other_errors, tuple)
    assert caught.value.is_critical
    assert seconds < 60
    print(f"pod {victim} killed: {seconds:.2f} s, {caught.value.reasons}")
    assert remote("sleep", 0, restart_procs=True) == [0, 1, 2, 3]


def test_a_pod_that_was_told_to_end_is_in_no_later_world(alone, tmp_path):
    remote = alone(workers=3, processes=1, quorum_workers=2)
    running = remote.spawn("hold", str(tmp_path), 600)  # which the pod does not end before
    wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    end_softly(pods(remote)[2])
    assert remote("sleep", 0, restart_procs=True) == [0, 1]
    with pytest.raises(KubetorchError):
        running.get(timeout=60)


def test_a_lost_pod_is_no_error_for_those_that_take_who_is_there(alone):
    remote = alone(workers=3, processes=1)
    os.kill(pods(remote)[2]["pid"], signal.SIGKILL)
    with pytest.raises(kt.WorkerMembershipChanged):
        remote("sleep", 600)
    assert remote("sleep", 0, workers="ready") == [0, 1]
    with pytest.raises(kt.WorkerMembershipChanged, match="restart_procs=True"):
        remote("sleep", 0)


def test_an_agent_that_is_frozen_is_lost_as_unreachable(alone, tmp_path):
    def is_lost(folder):
        remote = alone(workers=3, processes=1)
        pod = pods(remote)[2]
        folder.mkdir()
        call = InThread(remote, "hold", str(folder), 600)
        wait_until(lambda: len(list(folder.iterdir())) == 3)
        frozen = time.monotonic()
        os.kill(pod["pid"], signal.SIGSTOP)
        try:
            error = call.join().error
        finally:
            os.kill(pod["pid"], signal.SIGCONT)
        print(f"frozen: {time.monotonic() - frozen:.2f} s")
        assert isinstance(error, kt.WorkerMembershipChanged)
        assert set(error.reasons.values()) == {"unreachable"}
        return pod["name"] in error.reasons

    # A busy machine may keep another agent from giving signs of life before.
    assert any(is_lost(tmp_path / str(number)) for number in range(3))


def test_calls_reach_every_pod_through_a_narrow_tree(alone, tmp_path):
    remote = alone(workers=5, processes=1, tree_fanout=1)
    assert remote("rank") == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="bad 4") as caught:
        remote("fail_on", str(tmp_path), 4)
    assert caught.value.rank == 4
    streams = remote("count", 1)
    assert [len(list(stream)) for stream in streams] == [1, 2, 3, 4, 5]
    os.kill(pods(remote)[4]["pid"], signal.SIGKILL)
    with pytest.raises(kt.WorkerMembershipChanged):
        remote("sleep", 600)
    assert remote("sleep", 0, restart_procs=True)[:4] == [0, 1, 2, 3]


def test_a_new_world_that_lacks_its_quorum_says_who_is_missing(alone, capsys):
    remote = alone(processes=1, quorum_timeout=9)
    pod = pods(remote)[1]
    os.kill(pod["pid"], signal.SIGSTOP)
    try:
        with pytest.raises(kt.WorkerMembershipChanged):
            remote("sleep", 600)
        with pytest.raises(KubetorchError) as caught:
            remote("sleep", 0, restart_procs=True)
        assert "QuorumError" in type(caught.value).__name__
        assert pod["name"] in str(caught.value)
        waits = f"1 of 2 pods are there (pod {pod['name']}: unreachable)"
        assert f"waiting for pods to start the ranks again: {waits}" in capsys.readouterr().err
    finally:
        os.kill(pod["pid"], signal.SIGCONT)


def test_more_ranks_than_the_machine_has_memory_for_are_refused_at_once(alone):
    with pytest.raises(kt.ResourceNotAvailableError, match="9000 pods with 2 processes each"):
        alone(workers=9000, processes=2)


def test_a_reload_in_the_middle_of_a_call_lets_it_end(alone):
    remote = alone()
    before = remote("where")
    handle = remote.spawn("sleep", 2)
    redeployed = remote.to(compute(tree_fanout=40))
    assert redeployed("where") != before
    assert handle.get(timeout=60) == [0, 1, 2, 3]


def test_a_deploy_that_replaces_the_pods_ends_a_call_with_the_reason(alone):
    remote = alone()
    handle = remote.spawn("sleep", 600)  # longer than a deploy takes
    redeployed = remote.to(compute(env_vars={"NEWER": "1"}))
    assert redeployed("rank") == [0, 1, 2, 3]
    with pytest.raises(kt.WorkerMembershipChanged) as caught:
        handle.get(timeout=60)
    assert set(caught.value.reasons.values()) == {"Deleted"}
    assert "newer pods took its place" in str(caught.value)
    assert "call again" in str(caught.value)


# ----------------------------------------------------------------------------------------- HTTP


def post(remote, *args, **keys):
    request = urllib.request.Request(
        remote.endpoint(),
        json.dumps({"args": args, **keys}).encode(),
        remote.request_headers,
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_post_gets_a_list_in_rank_order(work):
    assert post(work, "rank") == (200, b"[0,1,2,3]")
    assert post(work, "rank", workers=[1]) == (200, b"[2,3]")
    status, body = post(work, "rank", workers=[7])
    assert (status, "out of range" in json.loads(body)["message"]) == (400, True)
    before = json.loads(post(work, "where")[1])
    after = json.loads(post(work, "where", restart_procs=True)[1])
    assert not {answer[5] for answer in before} & {answer[5] for answer in after}


@pytest.mark.parametrize("count", [0, 1])
def test_a_post_to_a_generator_gets_lines_with_their_rank(work, count):
    status, body = post(work, "count", count)
    lines = [json.loads(line) for line in body.splitlines()]
    assert status == 200
    for rank in range(4):
        rank_lines = [line for line in lines if line["rank"] == rank]
        assert [line["yield"] for line in rank_lines[:-1]] == [
            [rank, i] for i in range(count + rank)
        ]
        assert rank_lines[-1] == {"rank": rank, "return": rank}


def test_a_post_that_fails_names_the_rank(work, tmp_path):
    def ask(folder):
        status, body = post(work, "fail_on", folder, 2, 3)
        failure = json.loads(body)
        assert (status, failure["rank"], failure["message"]) == (400, 2, "bad 2")
        return failure, [
            other_error
            for other_error in failure["other_errors"]
            if "bad" in other_error["message"]
        ]

    failure = failing_together(tmp_path, ask)
    assert "bad 3" in [other_error["message"] for other_error in failure["other_errors"]]


def test_no_call_fails_while_the_service_is_reloaded(alone):
    remote = alone()
    errors, answers, is_over = [], [], threading.Event()

    def call():
        while not is_over.is_set():
            try:
                answers.append(remote("rank"))
            except Exception as error:  # whatever it is
                errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    for fanout in (40, 41, 42):
        remote.to(compute(tree_fanout=fanout))
        enough = len(answers) + 5
        wait_until(lambda enough=enough: errors or len(answers) >= enough)
    is_over.set()
    for caller in callers:
        caller.join()
    assert errors == []
    assert all(answer == [0, 1, 2, 3] for answer in answers)
