"""Makes the fixtures of `test_earlier.py`: `python make.py` in a checkout of the earlier version.

It writes next to itself what that version pickles and stores:

    pickles.json     what `values()` and `errors()` make, in two protocols, and facts about it
    workload.json    a workload as a resource of a cluster
    home/            the home of a local service: its database, blobs, secrets and volumes
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROTOCOLS = (2, 5)

PROGRAM = """\
import kubetorch as kt

def double(x):
    return 2 * x

def numbers(n):
    yield from range(n)

class Counter:
    def __init__(self, start=0):
        self.value = start

    def add(self, n):
        self.value += n
        return self.value
"""


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kt-earlier-")).resolve()
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").touch()
    (project / "train.py").write_text(PROGRAM)
    for name in [name for name in os.environ if name.startswith("KT_")]:
        del os.environ[name]
    os.environ.update(
        {
            "HOME": str(folder),
            "KT_LOCAL_DIR": str(folder / "local"),
            "KT_CONFIG_FILE": str(folder / "config.yaml"),
            "KT_BACKEND": "local",
            "KUBECONFIG": str(folder / "none"),
        }
    )
    os.chdir(project)
    # In place of the folder of this file, which would be one of the pods' path.
    sys.path[0] = str(project)
    try:
        write_stored(folder)
        write_pickles()
        write_resource()
    finally:
        from kubetorch.local import lifetime

        lifetime.stop()
        shutil.rmtree(folder)


# ------------------------------------------------------------------------------------- pickles


def values() -> dict[str, tuple[Any, dict[str, Any]]]:
    """What is pickled, by name: the value, and attributes that it must have when it is read."""
    import train

    import kubetorch as kt

    image = kt.images.python("3.12").pip_install(["numpy"]).run_bash("echo hello")
    image.set_env_vars({"STAGE": "test"}).copy("/bin/sh", "tools/sh")
    Path("Dockerfile").write_text("FROM python:3.12\nWORKDIR /srv\nUSER nobody\nENV A=1\nRUN id\n")
    written = kt.Image.from_dockerfile("Dockerfile")
    volume = kt.Volume("data", size="10Gi", mount_path="/data", access_mode="ReadWriteOnce")
    secret = kt.Secret(name="token", values={"TOKEN": "hidden"})
    exposed = kt.Secret(name="files", path="~/.config/thing", values={"a.txt": "hidden"})
    compute = kt.Compute(
        cpus="0.5",
        memory="2Gi",
        gpus=0,
        replicas=2,
        image=image,
        namespace="team",
        env_vars={"A": "1"},
        labels={"team": "ml"},
        secrets=[secret],
        volumes=[volume],
        inactivity_ttl="30m",
        launch_timeout=60,
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        allowed_serialization=["json", "pickle"],
        logging_config=kt.LoggingConfig(level="warning"),
    )
    scaled = kt.Compute(cpus=1).autoscale(min_scale=0, max_scale=3)
    distributed = kt.Compute(cpus=1, replicas=4).distribute("pytorch", num_proc=2)
    manifest = kt.Compute.from_manifest(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "own"},
            "spec": {"containers": [{"name": "main", "image": "busybox"}]},
        }
    )

    plain = kt.fn(train.double)
    function = kt.fn(train.double, name="halve")
    function.serialization = "pickle"
    function.async_ = True
    function.stream_logs = False
    function.compute = compute
    klass = kt.cls(train.Counter, reload_prefixes=["main", "alice"])
    deployed = kt.fn(train.double, name="served").to(kt.Compute(cpus="0.1"))
    counter = kt.cls(train.Counter, name="counted").to(
        kt.Compute(cpus="0.1"), init_args={"start": 5}
    )
    app = kt.app("python -m http.server 8000", name="web", port=8000, health_check="/", public=True)
    by_name = kt.fn(name="served")
    by_class = kt.Cls.from_name("counted")
    spawned = counter.add.spawn(3)
    assert spawned.get(timeout=30) == 8
    several = kt.CallHandle.from_id(f"{'1' * 32},{'2' * 32}")

    def attributes(value: Any, *names: str) -> tuple[Any, dict[str, Any]]:
        found = {name: getattr(value, name) for name in names}
        return value, json.loads(json.dumps(found, default=str))

    of_handle = (
        *("name", "service_name", "namespace", "reload_prefixes", "serialization", "async_"),
        *("callable_name", "remote_import_path", "remote_root_path"),
    )
    of_compute = (
        *("namespace", "cpus", "memory", "gpus", "replicas", "env_vars", "labels"),
        *("inactivity_ttl", "launch_timeout", "allowed_serialization", "service_name"),
    )
    of_volume = ("name", "size", "mount_path", "access_mode", "namespace", "pvc_name")
    of_secret = ("name", "path", "env_vars", "mount_type", "filenames", "values")
    made = {
        "fn": attributes(plain, *of_handle),
        "fn with all settings": attributes(function, *of_handle),
        "fn that is deployed": attributes(deployed, *of_handle),
        "fn by name": attributes(by_name, *of_handle),
        "cls": attributes(klass, *of_handle),
        "cls that is deployed": attributes(counter, *of_handle),
        "cls by name": attributes(by_class, *of_handle),
        "method of a class": (counter.add, {}),
        "options of a function": (deployed.options(timeout=10, retries=2), {}),
        "options of a method": (counter.add.options(timeout=10), {}),
        "app": attributes(app, "name", "service_name", "namespace", "callable_name"),
        "compute": attributes(compute, *of_compute),
        "compute that is autoscaled": attributes(scaled, *of_compute),
        "compute that is distributed": attributes(distributed, *of_compute),
        "compute of a manifest": attributes(manifest, *of_compute),
        "compute of a service": attributes(deployed.compute, *of_compute),
        "image": attributes(image, "image_id"),
        "image of a dockerfile": attributes(written, "image_id"),
        "volume": attributes(volume, *of_volume),
        "secret": attributes(secret, *of_secret),
        "secret in files": attributes(exposed, *of_secret),
        "secret by name": (kt.Secret.reference("other", namespace="team"), {"name": "other"}),
        "call handle": attributes(spawned, "id"),
        "call handle of a broadcast": attributes(several, "id"),
        "endpoint": (kt.Endpoint(selector={"app": "x"}), {}),
        "logging config": attributes(kt.LoggingConfig(level="debug"), "level"),
        "handles in a dictionary": ({"fn": plain, "method": counter.add}, {}),
    }
    for name in ("secret", "secret in files"):  # a pickle has no values
        made[name][1]["values"] = {}
    return made


def errors() -> dict[str, BaseException]:
    """One error of each class, with arguments that are typical of it."""
    import kubetorch as kt
    from kubetorch import errors as tree

    arguments: dict[str, Callable[[], BaseException]] = {
        "PodTerminatedError": lambda: kt.PodTerminatedError(
            "pod-0", "OOMKilled", 503, [{"timestamp": "t", "reason": "Killing", "message": "m"}]
        ),
        "AgentDiedError": lambda: kt.AgentDiedError("pod-0", "it has no agent"),
        "WorkerDiedError": lambda: kt.WorkerDiedError("it ended", exit_code=-9, hint="look"),
        "OutOfMemoryError": lambda: kt.OutOfMemoryError("too much", exit_code=-9),
        "WorkerMembershipChanged": lambda: kt.WorkerMembershipChanged(
            removed_ips=["10.0.0.1"], current_ips=["10.0.0.2"]
        ),
        "RemoteError": lambda: kt.RemoteError("it failed", error_type="ValueError"),
        "RsyncError": lambda: kt.RsyncError("rsync a b", 12, "out", "protocol data stream"),
        "SecretConflictError": lambda: kt.SecretConflictError("token", "team"),
        "ControllerRequestError": lambda: kt.ControllerRequestError(
            "GET", "http://localhost/x", 500, "it broke", hint="look"
        ),
        "SecretNotFound": lambda: kt.SecretNotFound("token", "team"),
        "VolumeInUseError": lambda: kt.VolumeInUseError("in use", services=["a", "b"], hint="wait"),
    }
    made: dict[str, BaseException] = {}
    for name, error in tree.EXCEPTION_REGISTRY.items():
        make = arguments.get(name)
        made[name] = error("what is wrong", hint="the next step") if make is None else make()
    made["RemoteTraceback"] = kt.RemoteTraceback("Traceback ...", "pod-0", 3)
    chained = kt.CallError("outer", hint="next")
    chained.remote_traceback, chained.pod_name, chained.rank = "Traceback ...", "pod-0", 3
    made["an error of a rank"] = chained
    return made


def write_pickles() -> None:
    found: dict[str, Any] = {"values": {}, "errors": {}}
    for name, (value, facts) in values().items():
        # What another process has of it: `.options(...)` gives an object of another class there.
        read = pickle.loads(pickle.dumps(value))
        found["values"][name] = {
            "type": type(read).__qualname__,
            "repr": None if " object at 0x" in repr(read) else repr(read),
            "facts": facts,
            "pickles": {str(one): pickled(value, one) for one in PROTOCOLS},
        }
    for name, error in errors().items():
        found["errors"][name] = {
            "type": type(error).__qualname__,
            "text": str(error),
            "state": json.loads(json.dumps(vars(error), default=sorted)),
            "pickles": {str(one): pickled(error, one) for one in PROTOCOLS},
        }
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
    (HERE / "pickles.json").write_text(text + "\n", encoding="utf-8")


def pickled(value: object, protocol: int) -> str:
    return base64.b64encode(pickle.dumps(value, protocol=protocol)).decode()


# --------------------------------------------------------------------------------------- stored


def write_stored(folder: Path) -> None:
    """The home of a service that had work to do, after it was stopped."""
    import train

    import kubetorch as kt
    from kubetorch.local import lifetime
    from kubetorch.sdk import services

    volume = kt.Volume("kept", size="1Gi", mount_path="/kept")
    secret = kt.Secret(name="kept", values={"TOKEN": "a value"})
    own = kt.Compute(cpus="0.1", env_vars={"A": "1"}, secrets=[secret], volumes=[volume])
    function = kt.fn(train.double).to(own)
    counter = kt.cls(train.Counter).to(
        kt.Compute(cpus="0.1", allowed_serialization=["json", "pickle"]), init_args={"start": 5}
    )
    spawned = [function.spawn(21), counter.add.options(serialization="pickle").spawn(3)]
    assert [one.get(timeout=30) for one in spawned] == [42, 8]
    controller = services.controller_client()
    while any(controller.get_call(one.id).ended is None for one in spawned):
        time.sleep(0.1)
    (folder / "local" / "volumes" / "default" / "kept" / "data.txt").write_text("data\n")
    lifetime.stop()
    services.close_all()
    home = HERE / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    database = sqlite3.connect(folder / "local" / "state.sqlite")
    source = str(Path(kt.__file__).parents[1])
    for given, written in ((sys.prefix, "/opt/python"), (source, "/opt/kubetorch")):
        database.execute("update generations set spec = replace(spec, ?, ?)", (given, written))
    database.commit()
    database.executescript("pragma wal_checkpoint(truncate); pragma journal_mode=delete; vacuum;")
    database.close()
    shutil.copy(folder / "local" / "state.sqlite", home)
    for name in ("blobs", "secrets", "volumes"):
        if (folder / "local" / name).exists():
            shutil.copytree(folder / "local" / name, home / name)
    lifetime.ensure()


def write_resource() -> None:
    """The workloads of that home, as a cluster keeps them."""
    from kubetorch.controller import database
    from kubetorch.controller.cluster import resource
    from kubetorch.controller.state import SqliteState

    copy = Path(tempfile.mkdtemp()) / "state.sqlite"
    shutil.copy(HERE / "home" / "state.sqlite", copy)
    state = SqliteState(copy, database.open_database(copy))
    contents = state.contents()
    found = []
    for record in contents.workloads:
        generations = contents.generations[record.namespace, record.name]
        content = resource.Content(record, generations)
        found.append({**resource.manifest(content), "status": resource.status(content, None, {})})
    state.close()
    shutil.rmtree(copy.parent)
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False)
    (HERE / "workload.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
