"""The examples of distributed services that need a framework, as a user runs them.

Skipped where the framework is not installed: `pip install -e '.[frameworks]'`.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from example_programs import EXAMPLES, FRAMEWORKS, run

#: Two services of one framework, which meet at the same port unless somebody gives them others.
TWINS = """
import os, sys
import kubetorch as kt

def pytorch():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    mine = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(mine)
    dist.barrier()
    return os.environ["MASTER_PORT"], mine.item()

def jax():
    import jax
    number = int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(num_processes=2, process_id=number)
    ones = jax.numpy.ones(jax.local_device_count()) * (number + 1)
    total = jax.pmap(lambda x: jax.lax.psum(x, "all"), axis_name="all")(ones)
    return os.environ["JAX_COORDINATOR_ADDRESS"], float(total[0])

def tensorflow():
    import tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    def mine():
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.cast(own, tf.float32) + 1.0
    total = strategy.reduce("SUM", strategy.run(tf.function(mine)), axis=None)
    return str(strategy.cluster_resolver.cluster_spec().as_dict()), float(total)

if __name__ == "__main__":
    name = sys.argv[1]
    image = kt.Image().set_env_vars({"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"})
    twins = [
        kt.fn(globals()[name], name=twin).to(
            kt.Compute(cpus="0.1", image=image).distribute(name, workers=2)
        )
        for twin in ("one", "two")
    ]
    first, second = [running.result() for running in [twin.spawn() for twin in twins]]
    print("sums:", [total for _, total in first + second])
    print("apart:", first[0][0] != second[0][0])
    for twin in twins:
        twin.teardown()
"""

#: A service of a framework that nobody has installed.
MISSING = """
import sys
import kubetorch as kt

def nothing():
    pass

if __name__ == "__main__":
    handle = kt.fn(nothing)
    try:
        handle.to(kt.Compute(cpus="0.1").distribute(sys.argv[1], workers=2))
    except kt.ResourceNotAvailableError as error:
        print(error)
    handle.teardown()
"""

#: Actors on two hosts, one of which is killed while they work.
HOSTS = """
import os, signal, threading
import kubetorch as kt

def actors(seconds, host_mesh):
    from monarch.actor import Actor, endpoint

    class Sleeper(Actor):
        @endpoint
        def sleep(self, seconds):
            import os, time
            time.sleep(seconds)
            return os.getppid()

    processes = host_mesh.spawn_procs(per_host={"processes": 1})
    sleepers = processes.spawn("sleepers", Sleeper)
    print("asleep")
    hosts = list(sleepers.sleep.call(seconds).get().values())
    processes.stop().get()
    return hosts

def old(allocator):
    pass

class Held:
    def __init__(self, host_mesh):
        self.hosts = host_mesh

    async def size(self, host_mesh):
        return host_mesh.extent["hosts"], host_mesh is self.hosts

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1").distribute("monarch", workers=2, monitor_members=True)
    service = kt.fn(actors).to(compute)
    first = service(0)
    agents = [int(open(f"/proc/{host}/stat").read().split()[3]) for host in first]
    threading.Timer(1.0, os.kill, (agents[1], signal.SIGKILL)).start()
    for seconds in (300, 0):
        try:
            service(seconds)
        except kt.WorkerMembershipChanged as change:
            print("lost:", list(change.reasons.values()))
    again = service(0, restart_procs=True)
    print("hosts:", len(set(first)), len(set(again)), set(first).isdisjoint(again))
    service.teardown()
    held = kt.cls(Held).to(compute)
    print("held:", held.size())
    held.teardown()
    refused = kt.fn(old)
    try:
        refused.to(compute)
    except kt.SpecError as error:
        print("refused:", "'allocator'" in str(error))
    refused.teardown()
"""

#: Libraries of Ray, whose work runs on both pods.
LIBRARIES = """
import sys
import kubetorch as kt

def data():
    import ray
    ray.init(address="auto", log_to_driver=False)
    rows = ray.data.range(1000, override_num_blocks=4)
    doubled = rows.map_batches(lambda batch: {"id": batch["id"] * 2}, num_cpus=0.1)
    total = doubled.sum("id")
    ray.shutdown()
    return total

def trial(config):
    from ray import tune
    tune.report({"loss": (config["rate"] - 0.3) ** 2})

def tuned(folder):
    import ray
    from ray import tune
    ray.init(address="auto", log_to_driver=False)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),
        param_space={"rate": tune.grid_search([0.1, 0.3, 0.5])},
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    best = tuner.fit().get_best_result("loss", "min")
    ray.shutdown()
    return best.config["rate"]

def nodes(ends):
    import os, ray
    if ends:
        os._exit(1)
    ray.init(address="auto", log_to_driver=False)
    found = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    ray.shutdown()
    return found

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1").distribute("ray", workers=2)
    service = kt.fn(nodes).to(compute)
    before = service(False)
    try:
        service(True)
    except kt.WorkerDiedError:
        print("the same cluster:", len(before), service(False) == before)
    service.teardown()
    for function, arguments in ((data, ()), (tuned, (sys.argv[1],))):
        service = kt.fn(function).to(compute)
        print(function.__name__, service(*arguments))
        service.teardown()
"""


#: Clusters of Ray side by side, beside what is no Ray and has its port.
CLUSTERS = """
import socket
import kubetorch as kt

def nodes():
    import ray
    ray.init(address="auto", log_to_driver=False)
    found = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    ray.shutdown()
    return found

if __name__ == "__main__":
    try:
        taken = socket.create_server(("127.0.0.1", 6379))
    except OSError:
        pass  # somebody has it already
    services = {}
    for name, workers in (("one", 2), ("two", 1)):
        compute = kt.Compute(cpus="0.1").distribute("ray", workers=workers)
        services[name] = kt.fn(nodes, name=name).to(compute)
    first, second = [service() for service in services.values()]
    print("nodes:", len(first), len(second), set(first).isdisjoint(second))
    for service in services.values():
        service.teardown()
"""


def forget(*patterns: str) -> None:
    """Remove what frameworks leave where temporary files are."""
    for pattern in patterns:
        for cache in Path(tempfile.gettempdir()).glob(pattern):
            shutil.rmtree(cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def _caches() -> Iterator[None]:
    """PyTorch and TensorFlow leave empty caches."""
    yield
    forget("torchinductor_*", "__pycache__")


@pytest.fixture
def _sockets() -> Iterator[None]:
    """Processes of Monarch that are killed leave their sockets, and agents the folder of these."""
    yield
    forget(".tmp*", "kt-node-*")


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_ranks_of_a_framework_work_together(shared_service_home, tmp_path, name):
    needed, expected = FRAMEWORKS[name]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    folder = shutil.copytree(EXAMPLES, tmp_path / "examples")

    shown = run(sys.executable, f"examples/{name}", cwd=folder.parent, timeout=250)

    assert shown.splitlines()[-len(expected) :] == expected


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("name", "needed"), [("pytorch", "torch"), ("jax", "jax"), ("tensorflow", "tensorflow")]
)
def test_ranks_of_two_services_on_one_machine_do_not_meet(
    shared_service_home, tmp_path, name, needed
):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    (tmp_path / "twins.py").write_text(TWINS)

    shown = run(sys.executable, "twins.py", name, cwd=tmp_path, timeout=250)

    assert shown.splitlines()[-2:] == ["sums: [3.0, 3.0, 3.0, 3.0]", "apart: True"]


@pytest.mark.parametrize(("name", "module"), [("monarch", "monarch"), ("ray", "ray")])
def test_ranks_of_a_framework_that_is_not_installed_are_refused(
    shared_service_home, tmp_path, name, module
):
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    (tmp_path / "missing.py").write_text(MISSING)

    shown = run(sys.executable, "missing.py", name, cwd=tmp_path)

    assert re.search(f"{name.title()}, which a service .* needs", shown)
    assert "hint: kt.Image().pip_install" in shown


@pytest.mark.timeout(280)
def test_ranks_of_monarch_lose_a_host_and_start_again(shared_service_home, tmp_path, _sockets):
    if find_spec("monarch") is None:
        pytest.skip("monarch is not installed")
    (tmp_path / "hosts.py").write_text(HOSTS)

    shown = run(sys.executable, "hosts.py", cwd=tmp_path, timeout=250)

    assert [line for line in shown.splitlines() if not line.startswith("(")] == [
        "lost: ['AgentDied']",
        "lost: ['AgentDied']",
        "hosts: 2 2 True",
        "held: [2, True]",
        "refused: True",
    ]


@pytest.mark.timeout(280)
def test_ranks_of_ray_run_its_libraries(shared_service_home, tmp_path):
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        pytest.skip("ray[data,tune] is not installed")
    (tmp_path / "libraries.py").write_text(LIBRARIES)

    shown = run(sys.executable, "libraries.py", str(tmp_path / "trials"), cwd=tmp_path, timeout=250)

    assert [line for line in shown.splitlines() if not line.startswith("(")] == [
        "the same cluster: 2 True",
        "data 999000",
        "tuned 0.3",
    ]


@pytest.mark.timeout(480)
def test_clusters_of_ray_share_a_machine(shared_service_home, tmp_path):
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    (tmp_path / "clusters.py").write_text(CLUSTERS)

    shown = run(sys.executable, "clusters.py", cwd=tmp_path, timeout=450)

    assert shown.splitlines()[-1] == "nodes: 2 1 True"
