"""Pods that go away on a real cluster: who calls learns why, and no list has them any more."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from cluster.conftest import Installed, Kubectl
from cluster.faults import Client, agents, clients, kill, pods
from shared import WHOLE

PROGRAM = """
import json
limit = {{"resources": {{"limits": {{"memory": "300Mi"}}}}}}
containers = [{{"name": "kubetorch", **limit}}]
pod = {{"terminationGracePeriodSeconds": {grace}, "containers": containers}}
template = {{"spec": {{"template": {{"spec": pod}}}}}}
f = kt.fn(service.slow, name="{name}").to(kt.Compute(cpus="0.01", service_template=template))
f(0)
print("deployed", flush=True)
try:
    f(100)
except kt.PodTerminatedError as error:
    names = f.compute.pod_names()
    said = [error.pod_name, error.reason, error.evicted, error.oom_killed, error.events, names]
    print("ended", json.dumps(said), flush=True)
print("after", f(0), flush=True)
"""
#: How a pod is ended: with which grace, and the reason of its calls.
ENDS = {
    "deleted": (4, "Deleted"),
    "deleted-soon": (1, "Deleted"),
    "deleted-by-force": (0, "Deleted"),
    "evicted": (4, "Evicted"),
    "evicted-at-once": (0, "Evicted"),
    "out-of-memory": (30, "OOMKilled"),
    "killed": (30, "Agent…"),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory, installed: Installed) -> Iterator[Callable[[str], Client]]:
    with clients(tmp_path_factory.mktemp("programs"), installed.environ) as started:
        yield started


@pytest.fixture(scope="module")
def ended(
    start: Callable[[str], Client],
    kubectl: Kubectl,
    installed: Installed,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Future[list[Any]]]:
    """What the programs print whose pods are ended in each of these ways, all at the same time."""
    folder = tmp_path_factory.mktemp("evictions")

    def run(name: str, program: Client) -> list[Any]:
        program.line("deployed")
        program.call_begins(name)
        [pod] = pods(kubectl, installed.namespace, name)
        end(name, pod, ENDS[name][0])
        why = json.loads(program.line("ended").partition(" ")[2])
        return [pod, *why, program.line("after").split()[1]]

    def end(name: str, pod: str, grace: int) -> None:
        namespace = installed.namespace
        if name.startswith("evicted"):
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": pod, "namespace": namespace},
                "deleteOptions": {"gracePeriodSeconds": grace},
            }
            (folder / name).write_text(json.dumps(eviction))
            path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
            kubectl("create", "--raw", path, "-f", str(folder / name))
        elif name.startswith("deleted"):
            more = [f"--grace-period={grace}", *(["--force"] if not grace else [])]
            kubectl("delete", "pod", "-n", namespace, pod, "--wait=false", *more)
        else:
            agent_processes = agents(pod)
            if name == "out-of-memory":
                # What a container runtime goes by, whichever of its processes the kernel takes.
                command = "x = b'1' * 1000 * 2**20"
                kubectl(
                    "exec", "-n", namespace, pod, "--", "sh", "-c", f'python3 -c "{command}"; true'
                )
                time.sleep(2)  # the runtime hears of that by itself
            kill(agent_processes)

    threads = ThreadPoolExecutor(len(ENDS))
    printed_by_program = {}
    for name, (grace, _) in ENDS.items():
        program = start(PROGRAM.format(name=name, grace=grace or 30))
        printed_by_program[name] = threads.submit(run, name, program)
    threads.shutdown(wait=False)
    wait(printed_by_program.values(), timeout=110)
    return printed_by_program


@pytest.mark.parametrize("name", ENDS)
def test_a_call_says_why_its_pod_went_away(ended, name):
    pod, named, reason, evicted, oom_killed, events, names, after = ended[name].result(0)
    assert named == pod
    assert (evicted, oom_killed) == (reason == "Evicted", reason == "OOMKilled")
    if name == "killed":  # of which a kubelet has nothing to say
        assert (reason in ("AgentDied", "AgentRestarted"), events) == (True, [])
        return
    if name == "out-of-memory" and reason == "AgentRestarted":
        return  # its container was back before the kubelet had said why it ended
    if name == "evicted-at-once" and reason == "Deleted":
        return  # it was gone with the condition that says so, which nobody had seen
    assert reason == ENDS[name][1]
    assert pod not in names
    assert [(event["reason"], bool(event["message"])) for event in events] == [(reason, True)]
    assert (after == pod) == (name == "out-of-memory")


@contextlib.contextmanager
def quota(kubectl: Kubectl, namespace: str, *hard: str) -> Iterator[None]:
    kubectl("create", "quota", "full", f"--hard={','.join(hard)}", "-n", namespace)
    try:
        yield
    finally:
        kubectl("delete", "quota", "full", "-n", namespace)


def test_a_quota_is_named_and_so_is_a_pod_that_it_keeps_away(start, kubectl, installed):
    namespace = installed.namespace
    both = start(
        """
        import os, time
        f = kt.fn(service.slow, name="two").to(kt.Compute(cpus="0.01", replicas=2))
        print("deployed", *f(0), flush=True)
        service.until(lambda: os.path.exists("go"))
        whole = IS_WHOLE
        begun = time.monotonic()
        try:
            f.options(timeout=None if whole else 15)(0)
        except kt.CallError as error:
            took = time.monotonic() - begun
            refused = error if whole else error.__cause__
            print("ended", f"{took:.0f}", type(refused).__name__, error.pod_name, refused)
    """.replace("IS_WHOLE", str(WHOLE))
    )
    lost = both.line("deployed").split()[1]
    with quota(kubectl, namespace, "pods=1"):
        kubectl("delete", "pod", "-n", namespace, lost, "--wait=true", "--grace-period=1")
        (both.folder / "go").touch()
        # Others have used it up.
        program = start("""
            print("begins", flush=True)
            kt.fn(service.slow, name="waits").to(kt.Compute(cpus="0.01"))
            print("deployed")
        """)
        program.line("begins")
        begun = time.monotonic()
        assert "the quota 'full' is full: " in program.line("(waits events)")
        assert time.monotonic() - begun < 30
        _, took, kind, named, text = both.line("ended").split(maxsplit=4)
    assert (kind, named) == ("CallRefusedError", lost), text
    assert int(took) < 45
    assert f"pod {lost}: Deleted" in text
    assert "the quota 'full'" in text
    program.line("deployed")
