"""The processes of a distributed service in one pod: how they start, and what they are given."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request

import pytest

import kubetorch as kt
from agent_harness import end_softly, wait_until
from kubetorch.pod.worker_process.zygotes import ZygoteSpec
from tests.local import commands
from tests.local.user_project import UserProject
from tests.local.worker_harness import DEADLINE, agent, run

MODULE = """
import os

AT_IMPORT = dict(os.environ)

def f(name):
    return AT_IMPORT.get(name), os.getppid()
"""


def test_all_ranks_are_forks_of_one_zygote_each_with_variables_of_its_own(tmp_path):
    (tmp_path / "shop.py").write_text(MODULE)

    async def main() -> None:
        async with agent(tmp_path) as running:
            spec = running.spec("f")
            await running.host.prewarm(ZygoteSpec(spec.python, spec.env, (), ()))
            zygote = running.host.zygote_pid
            workers = await asyncio.gather(
                *(
                    running.start("f", own_env={"RANK": str(rank), "HOME": "/own"}, rank=rank)
                    for rank in range(4)
                )
            )
            await asyncio.gather(*(worker.load(DEADLINE) for worker in workers))
            for rank, worker in enumerate(workers):
                assert await running.call(worker, "RANK") == [str(rank), zygote]
                assert await running.call(worker, "HOME") == ["/own", zygote]
            assert running.host.zygote_pid == zygote

    run(main())


SOURCE = """
import os, threading, time
import kubetorch as kt

AT_IMPORT = {name: value for name, value in os.environ.items()}

def variables(*names):
    return [AT_IMPORT.get(name) for name in names]

def ips(count):
    return kt.distributed.pod_ips(count, 20)

def train(folder):
    stop = threading.Event()
    kt.on_preempt(stop.set)
    kt.on_preempt(lambda: open(os.path.join(folder, AT_IMPORT["RANK"]), "w").close())
    open(os.path.join(folder, f"begun-{AT_IMPORT['RANK']}"), "w").close()
    while not stop.wait(0.01):
        pass
    return int(AT_IMPORT["RANK"])

def save(folder, seconds):
    rank = AT_IMPORT["RANK"]
    def keep():
        while not os.path.exists(os.path.join(folder, "formed")):
            time.sleep(0.02)
        open(os.path.join(folder, f"saved-{rank}"), "w").close()
    kt.on_preempt(keep)
    open(os.path.join(folder, f"begun-{rank}"), "w").close()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    return int(rank)

def hang_on(rank):
    print("says", AT_IMPORT["RANK"])
    if int(AT_IMPORT["RANK"]) == rank:
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def jobs(shared_service_home, tmp_path_factory):
    return UserProject(tmp_path_factory.mktemp("processes") / "work").module(SOURCE)


@pytest.fixture
def deploy(jobs):
    remotes = []

    def deploy(name, compute):
        remote = kt.fn(getattr(jobs, name), name=f"{name}-of-ranks").to(compute)
        remotes.append(remote)
        return remote

    yield deploy
    for remote in remotes:
        remote.teardown()


def of(workers, processes, framework="pytorch"):
    compute = kt.Compute(cpus="0.01", launch_timeout=60)
    return compute.distribute(framework, workers=workers, num_proc=processes)


def pods(remote):
    return sorted(remote.service_config["pods"], key=lambda pod: pod["ordinal"])


def test_variables_of_a_rank_are_there_when_user_code_is_imported(deploy):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE")
    addresses = ("MASTER_ADDR", "POD_IP", "POD_IPS")
    variables_of_ranks = deploy("variables", of(2, 2))(*names, *addresses)
    assert [values[:5] for values in variables_of_ranks] == [
        [str(r), "4", str(r % 2), str(r // 2), "2"] for r in range(4)
    ]
    pod_ips = variables_of_ranks[0][6], variables_of_ranks[2][6]
    assert [values[5:] for values in variables_of_ranks] == [
        [pod_ips[0], pod_ips[r // 2], ",".join(pod_ips)] for r in range(4)
    ]
    assert len({*pod_ips}) == (1 if sys.platform == "darwin" else 2)


def test_replicas_know_their_number_and_each_other_without_waiting(deploy):
    remote = deploy("variables", kt.Compute(cpus="0.01", replicas=2, launch_timeout=60))
    variables_of_ranks = sorted(
        remote("RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    assert variables_of_ranks == [["0", "0", "2", "0", "1"], ["1", "1", "2", "0", "1"]]
    by_pod = deploy("ips", kt.Compute(cpus="0.01", replicas=2))(2)
    assert by_pod == [by_pod[0]] * 2
    assert all(address.startswith("127.0.") for address in by_pod[0])
    assert len({*by_pod[0]}) == (1 if sys.platform == "darwin" else 2)


def test_all_ranks_of_a_pod_that_is_told_to_end_save_their_state(deploy, tmp_path):
    remote = deploy("train", of(1, 2))
    handle = remote.spawn(str(tmp_path))
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    os.kill(pods(remote)[0]["pid"], signal.SIGTERM)
    assert handle.get(timeout=30) == [0, 1]
    assert {path.name for path in tmp_path.glob("[01]")} == {"0", "1"}


def test_a_pod_that_is_told_to_end_saves_its_state_although_a_new_world_is_formed(deploy, tmp_path):
    compute = kt.Compute(cpus="0.01", launch_timeout=60)
    remote = deploy("save", compute.distribute("spmd", workers=2, quorum_workers=1))
    running = remote.spawn(str(tmp_path), 60)
    wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    end_softly(pods(remote)[1])
    assert remote(str(tmp_path), 0, restart_procs=True) == [0]
    (tmp_path / "formed").touch()  # the new world, without this pod
    with pytest.raises(kt.KubetorchError):
        running.get(timeout=20)
    wait_until((tmp_path / "saved-1").exists)


def test_the_rank_that_hangs_is_found_among_the_others(deploy):
    remote = deploy("hang_on", of(1, 3))
    handle = remote.spawn(1)
    request = urllib.request.Request(
        f"{pods(remote)[0]['url']}/v1/stacks", headers=remote.request_headers
    )

    def stacks():
        with urllib.request.urlopen(request, timeout=30) as answer:
            return {stack["rank"]: stack["text"] for stack in json.load(answer)}

    # The others may still say something.
    wait_until(lambda: [rank for rank, text in stacks().items() if "in hang_on" in text] == [1])
    assert sorted(stacks()) == [0, 1, 2]
    handle.cancel()


def cli(*arguments):
    completed = commands.kt(*arguments)
    return completed.returncode, completed.stdout, completed.stderr


def test_logs_of_a_rank_of_a_service_without_ranks_are_an_error(deploy):
    name = deploy("hang_on", kt.Compute(cpus="0.1")).service_name
    status, _, error = cli("logs", name, "--rank", "3")
    assert status == 1
    assert f"{name} has no ranks, because it is not distributed" in error


@pytest.mark.timeout(400)  # it runs many commands
def test_ranks_are_shown_one_by_one_on_the_command_line(deploy):
    remote = deploy("hang_on", of(2, 2))
    name, handle = remote.service_name, remote.spawn(3)
    wait_until(lambda: "in hang_on" in cli("stacks", name, "--rank", "3")[1])
    # The others may still say something.
    wait_until(lambda: cli("stacks", name)[1].count("in hang_on") == 1)
    status, text, _ = cli("stacks", name)
    heads = [line for line in text.splitlines() if not line.startswith(" ") and line]
    assert status == 0
    assert [f" rank {rank}: process " in head for rank, head in enumerate(heads)] == [True] * 4
    assert text.index("in hang_on") > text.index(" rank 3: ")
    rank_stacks = json.loads(cli("stacks", name, "--json")[1])
    assert [stack["rank"] for stack in rank_stacks] == [0, 1, 2, 3]
    status, _, error = cli("stacks", name, "--rank", "4")
    assert status != 0
    assert "has no rank 4" in error
    wait_until(lambda: cli("logs", name)[1].count("says ") == 4)
    assert cli("logs", name, "--rank", "2")[1].splitlines() == [
        f"({pods(remote)[1]['name']} rank 2) says 2"
    ]
    assert f"({pods(remote)[0]['name']} rank 1) says 1" in cli("logs", name)[1]
    handle.cancel()
    first, second = (pod["name"] for pod in pods(remote))
    assert f"{first}  ranks 0-1" in cli("list", "--pods")[1]
    assert f"{second}  ranks 2-3" in cli("list", "--pods")[1]
    for command in ("describe", "status"):
        shown = cli(command, name)[1]
        assert "pytorch, 4 ranks in 2 pods, epoch 1" in shown
        lines = shown.splitlines()
        assert any(first in line and " 0-1" in line for line in lines)
        assert any(second in line and " 2-3" in line for line in lines)
    assert json.loads(cli("status", name, "--json")[1])["pods"][1]["ranks"] == [2, 3]
