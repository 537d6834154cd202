"""Faults that are injected for real: what is killed is killed, what is cut is cut.

Those that stop a part of the cluster itself need the kit that started it (`KT_CLUSTER_DIR`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cluster.faults import Client, agents, controllers, pods, processes, stopped, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

MIB = 1024 * 1024
#: Seconds until a controller that was killed leads again, on a machine that has other work.
PATIENCE = 100.0


def largest(folder: Path, pattern: str) -> int:
    """The size of the largest file."""
    sizes = [0]
    for file in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(file.stat().st_size)
    return max(sizes)


# ------------------------------------------------------------------------------------- the client


def test_a_pod_that_is_deleted_ends_its_call_with_its_name_and_calls_go_on(
    client, kubectl, installed
):
    program = client("""
        f = kt.fn(service.slow).to(kt.Compute(cpus="0.01"))
        print("deployed", flush=True)
        try:
            f(60)
        except kt.PodTerminatedError as error:
            print("terminated", error.pod_name, type(error).__name__)
        print("after", f(0))
    """)
    program.line("deployed")
    program.call_begins("slow")
    [pod] = pods(kubectl, installed.namespace, "slow")
    kubectl("delete", "pod", "-n", installed.namespace, pod, "--grace-period=1", "--wait=false")

    assert pod in program.line("terminated")
    assert pod not in program.line("after")


def test_a_spawned_call_whose_pod_is_killed_without_a_word_has_failed(client, kubectl, installed):
    program = client("""
        f = kt.fn(service.slow, name="spawned").to(kt.Compute(cpus="0.01"))
        handle = f.spawn(600)
        print("call", handle.id, flush=True)
    """)
    call = program.line("call").split()[1]
    program.end()

    def state() -> str:
        return json.loads(installed.run("kt", "calls", "show", call, "--json"))["state"]

    def has_ended() -> bool:
        with contextlib.suppress(AssertionError):  # the controller may not answer
            return state() != "running"
        return False

    until(lambda: state() == "running")
    [pod] = pods(kubectl, installed.namespace, "spawned")
    agent = agents(pod)
    assert agent
    with contextlib.suppress(psutil.NoSuchProcess), stopped(agent):
        kubectl("delete", "pod", "-n", installed.namespace, pod, "--force", "--grace-period=0")
        until(has_ended)

    assert state() == "failed"


def test_a_pod_that_is_evicted_ends_its_call_with_its_name_and_calls_go_on(
    client, kubectl, installed, tmp_path
):
    program = client("""
        pod = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 10}}}}
        f = kt.fn(service.slow, name="evicted").to(kt.Compute(cpus="0.01", service_template=pod))
        print("deployed", flush=True)
        try:
            f(60)
        except kt.PodTerminatedError as error:
            print("terminated", error.pod_name, error.reason, error.evicted, flush=True)
        print("after", f(0))
    """)
    program.line("deployed")
    program.call_begins("evicted")
    [pod] = pods(kubectl, installed.namespace, "evicted")
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": installed.namespace},
    }
    path = f"/api/v1/namespaces/{installed.namespace}/pods/{pod}/eviction"
    (tmp_path / "eviction.json").write_text(json.dumps(eviction))
    kubectl("create", "--raw", path, "-f", str(tmp_path / "eviction.json"))

    assert program.line("terminated").split()[1:] == [pod, "Evicted", "True"]
    assert pod not in program.line("after")


def test_a_pod_that_its_kubelet_evicts_is_replaced_and_the_next_edit_is_live(
    client, kubectl, installed
):
    program = client("""
        limit = {"resources": {"limits": {"ephemeral-storage": "30Mi"}}}
        pod = {"spec": {"template": {"spec": {"containers": [{"name": "kubetorch", **limit}]}}}}

        compute = kt.Compute(cpus="0.01", service_template=pod)
        f = kt.fn(service.fill_disk, name="greedy").to(compute)
        print("evicting", f(0), flush=True)
        try:
            f(60)
            print("ended", flush=True)
        except kt.PodTerminatedError as error:
            print("ended", error.pod_name, error.reason, error.evicted, flush=True)
        print("after", f(0), flush=True)
        print("edited", kt.fn(service.echo, name="greedy").to(compute)(7), flush=True)
    """)
    pod = program.line("evicting").split()[1]
    assert program.line("ended").split()[1:] == [pod, "Evicted", "True"]
    assert pod not in program.line("after")
    # What is left of the first pod is still there.
    assert pod in pods(kubectl, installed.namespace, "greedy")
    assert program.line("edited") == "edited 7"


def test_a_call_that_uses_too_much_memory_fails_alone(client, installed):
    program = client("""
        limit = {"resources": {"limits": {"memory": "300Mi"}}}
        pod = {"spec": {"template": {"spec": {"containers": [{"name": "kubetorch", **limit}]}}}}
        compute = kt.Compute(cpus="0.01", service_template=pod)
        f = kt.fn(service.fill, name="memory").to(compute)
        pod = f(1)
        try:
            f(600)
        except kt.OutOfMemoryError as error:
            print("killed", pod in str(error), "300Mi" in str(error), error, flush=True)
        print("after", f(1) == pod)
    """)

    assert program.line("killed").startswith("killed True True")
    assert program.line("after") == "after True"


def test_a_client_that_is_killed_while_it_uploads_leaves_nothing_behind(client, installed):
    # A controller before this one may still end.
    until(lambda: len(processes("kubetorch.controller")) == 1)
    [controller] = controllers()
    store = Path(f"/proc/{controller.pid}/root/var/lib/kubetorch")
    uploading = client("""
        import os, time
        from pathlib import Path
        from kubetorch.datastore import transfer

        compressed = transfer.compressed

        def held(*arguments):
            sent = 0
            for piece in compressed(*arguments):
                yield piece
                sent += len(piece)
                if sent > 20 * 1024 * 1024:
                    time.sleep(600)

        transfer.compressed = held
        Path("big.bin").write_bytes(os.urandom(200 * 1024 * 1024))
        print("begins", flush=True)
        f = kt.fn(service.echo, name="upload").to(kt.Compute(cpus="0.01"))
    """)
    uploading.line("begins")
    until(lambda: largest(store, "**/tmp/*") > 10 * MIB)
    uploading.kill()
    until(lambda: not list(store.glob("**/tmp/*")))
    assert largest(store, "**/*") < 100 * MIB

    second_program = client("""
        print("result", kt.fn(service.echo, name="upload").to(kt.Compute(cpus="0.01"))(1))
    """)
    assert second_program.line("result") == "result 1"


def test_two_clients_that_deploy_one_name_end_in_one_generation(client, kubectl, installed):
    program = """
        import sys
        f = kt.fn(service.echo, name="both")
        try:
            f.to(kt.Compute(cpus="0.01", env_vars={{"WHO": "{who}"}}))
            print("ready")
        except kt.StartupError as error:
            print("superseded", "superseded" in str(error))
        print("result", f(5))
    """
    first, second = (client(program.format(who=who)) for who in ("first", "second"))

    assert first.line("result") == second.line("result") == "result 5"
    view = json.loads(installed.run("kt", "describe", "both", "--json"))
    assert view["status"] == "Ready"
    assert view["generation"] in [pod["generation"] for pod in view["pods"]]


EDITED = """
compute = kt.Compute(cpus="0.01", launch_timeout=60)
f = kt.fn(service.echo, name="edited").to(compute)
print("deployed", f(1), flush=True)
service.until(lambda: __import__("os").path.exists("scaled"), seconds=100)
f.to(compute)
print("again", f(2), flush=True)
"""


def test_a_deploy_puts_right_what_somebody_did_to_its_object(client, kubectl, installed):
    program = client(EDITED)
    assert program.line("deployed") == "deployed 1"
    where = ("-n", installed.namespace)
    kubectl("scale", "deployment/edited", "--replicas=0", *where)
    pods_of_service = ("-l", "kubetorch.com/service=edited")
    kubectl("wait", "pods", *where, *pods_of_service, "--for=delete", "--timeout=80s")
    (program.folder / "scaled").touch()
    assert program.line("again") == "again 2"


# --------------------------------------------------------------------------------- the controller


@pytest.mark.alone
def test_calls_go_on_while_the_controller_is_away(client):
    program = client("""
        import time
        from pathlib import Path
        f = kt.fn(service.echo, name="alone").to(kt.Compute(cpus="0.01"))
        count = 0
        while not Path("is-over").exists():
            assert f(count) == count
            count += 1
            print("called", time.time(), flush=True)
            time.sleep(0.05)
        print("over", flush=True)
    """)
    program.line("called")
    with stopped(controllers()):
        begun = time.time()
        while float(program.line("called").split()[1]) < begun + 5:
            pass
    (program.folder / "is-over").touch()

    assert program.line("over") == "over"


@pytest.mark.alone
def test_a_controller_that_is_killed_in_a_deploy_goes_on_with_it(client, kill_controllers):
    program = client("""
        print("begins", flush=True)
        f = kt.fn(service.echo, name="killed").to(kt.Compute(cpus="0.01"))
        print("result", f(7))
    """)
    program.line("begins")
    time.sleep(0.8)  # the pods are being made
    kill_controllers()

    assert program.line("result") == "result 7"


@pytest.mark.alone
def test_a_controller_that_comes_back_knows_everything_again(installed, client, kill_controllers):
    client("""
        print("result", kt.fn(service.echo, name="known").to(kt.Compute(cpus="0.01"))(1))
    """).line("result")
    before = json.loads(installed.run("kt", "describe", "known", "--json"))
    kill_controllers()
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(AssertionError):
            after = json.loads(installed.run("kt", "describe", "known", "--json"))
            if after["status"] == "Ready":
                break
        assert time.monotonic() < deadline, f"not ready again within {PATIENCE:.0f} s"

    assert after["generation"] == before["generation"]
    assert int(after["created"]) == int(before["created"])
    assert after["pods"][0]["name"] == before["pods"][0]["name"]


# ------------------------------------------------------------------------------------ the cluster


@pytest.mark.alone
def test_an_api_server_that_is_away_for_30_s_ends_neither_calls_nor_deploys(
    client, kit, kubectl, installed
):
    calling = client("""
        import time
        f = kt.fn(service.echo, name="through").to(kt.Compute(cpus="0.01"))
        print("deployed", flush=True)
        ended = time.monotonic() + 45
        count = 0
        while time.monotonic() < ended:
            assert f(count) == count
            count += 1
            time.sleep(0.1)
        print("calls", count)
    """)
    calling.line("deployed")
    deploying = client("""
        import time
        print("begins", flush=True)
        f = kt.fn(service.echo, name="during").to(kt.Compute(cpus="0.01"))
        print("result", f(3))
    """)
    deploying.line("begins")
    until(lambda: pods(kubectl, installed.namespace, "during"))
    with stopped(processes("kube-apiserver", "--etcd-servers")):
        time.sleep(30)

    assert deploying.line("result") == "result 3"
    assert int(calling.line("calls").split()[1]) > 20


@pytest.mark.alone
def test_a_watch_whose_history_is_compacted_goes_on(client, kubectl, installed, kit):
    client("""
        print("result", kt.fn(service.echo, name="before").to(kt.Compute(cpus="0.01"))(1))
    """).line("result")
    with stopped(controllers()):
        # The watches of the controller have nothing to go on from when it wakes up.
        for number in range(20):
            name = f"noise-{number}"
            kubectl("create", "configmap", name, "-n", installed.namespace)
        etcd = ["curl", "--silent", "--fail", "http://127.0.0.1:2379/v3/kv/range"]
        read_key = subprocess.run(
            [*etcd, "-d", '{"key": "AA=="}'], capture_output=True, text=True, check=True
        )
        revision = json.loads(read_key.stdout)["header"]["revision"]
        compact = ["curl", "--silent", "--fail", "http://127.0.0.1:2379/v3/kv/compaction"]
        body = json.dumps({"revision": revision, "physical": True})
        subprocess.run([*compact, "-d", body], check=True, capture_output=True)
        time.sleep(1)  # watches hear of it

    after = client("""
        print("result", kt.fn(service.echo, name="after").to(kt.Compute(cpus="0.01"))(2))
    """)
    assert after.line("result") == "result 2"


def calling(client: Callable[[str], Client], name: str, node: str) -> Client:
    """A program in the middle of a call of a service whose pod is on a node."""
    program = client(f"""
        compute = kt.Compute(cpus="0.01", node_selector={{"kubernetes.io/hostname": "{node}"}})
        f = kt.fn(service.slow, name="{name}").to(compute)
        print("deployed", flush=True)
        try:
            f(120)
        except (kt.PodTerminatedError, kt.CallLostError) as error:
            print("lost", type(error).__name__, error, flush=True)
        print("after", f(0), flush=True)
    """)
    program.line("deployed")
    program.call_begins(name)
    return program


def start_node(kit: Path, environ: dict[str, str]) -> None:
    """Start the second node.

    A kubelet that is there before its containerd answers ends at once; the kit does not see that.
    """
    pid = Path(environ["KT_CLUSTER_DIR"]) / "state" / "node2-kubelet.pid"
    for _ in range(4):
        with contextlib.suppress(subprocess.TimeoutExpired, subprocess.CalledProcessError):
            subprocess.run([kit / "node", "2"], check=True, timeout=30, env=environ)
        time.sleep(3)  # it ends within one
        if lives(int(pid.read_text())):
            return
        pid.unlink()
    raise AssertionError("the node did not start")


def lives(pid: int) -> bool:
    """Whether a process runs; it may be there all the same, where nobody asks how it ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.alone
def test_a_node_that_stops_ends_its_calls_with_a_typed_error_and_serves_when_it_is_back(
    client, second, kit
):
    program = calling(client, "stopped", second)
    # What it starts outlives this test, and so must not have its folders.
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "KT_CLUSTER_DIR": str(Path(os.environ["KUBECONFIG"]).parent),
    }
    subprocess.run([kit / "node", "2", "stop"], check=True, timeout=60, env=environ)
    try:
        assert "stopped" in program.line("lost")
    finally:
        start_node(kit, environ)
    assert program.line("after").startswith("after stopped-")


@pytest.mark.alone
def test_a_node_that_is_cut_off_ends_its_calls_with_a_typed_error(client, second, kit):
    program = calling(client, "far", second)
    link = "kt-n2"
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        assert "far" in program.line("lost")
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
