"""Data that a service declares: there before the first call, and new when it is asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

import kubetorch as kt
from kubetorch.sdk.data import mounts
from kubetorch.specs.data import DataMount
from kubetorch.wire import exceptions, messages
from kubetorch.wire.pod_commands import FetchData
from tests.local import commands
from tests.local.user_project import UserProject

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="absolute paths of pods")

SOURCE = """
import os
import stat

# Read while it is imported: it is there before any call.
AT_IMPORT = sorted(os.listdir("/kt-data")) if os.path.exists("/kt-data") else []


def at_import():
    return AT_IMPORT


def read(path):
    with open(path) as file:
        return file.read()


def tree(path):
    return sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    )


def write_bits(path):
    paths = [os.path.realpath(path)]
    paths += [os.path.join(f, n) for f, fs, ns in os.walk(paths[0]) for n in (*fs, *ns)]
    return [p for p in paths if stat.S_IMODE(os.stat(p).st_mode) & 0o222]


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def read_before_and_after(path, flag):
    # The file is open while the data is refreshed.
    import time
    with open(path) as file:
        first = file.read(1)
        open(flag, "w").close()
        while os.path.exists(flag):
            time.sleep(0.01)
        return first + file.read(), read(path), os.getpid()


def process():
    return os.getpid()
"""


@pytest.fixture
def jobs(emptied_home: Path, tmp_path: Path) -> Iterator[ModuleType]:
    project = UserProject(tmp_path / "shop")
    yield project.module(SOURCE)
    project.forget()


def put(tmp_path: Path, key: str, files: dict[str, str]) -> None:
    folder = tmp_path / "source" / key
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    kt.put(key, folder, contents=True)


def deployed(function: object, data: dict[str, object], **more: object) -> kt.Fn:
    return kt.fn(function).to(kt.Compute(cpus="0.1", data=data, **more))


def test_what_a_key_holds_is_there_before_the_first_call_and_has_no_write_bits(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1", "deep/er/b.txt": "2"})
    data = {"/kt-data": "models/base"}

    assert deployed(jobs.at_import, data)() == ["a.txt", "deep"]
    assert deployed(jobs.tree, data)("/kt-data") == ["a.txt", "deep/er/b.txt"]
    assert deployed(jobs.write_bits, data)("/kt-data") == []
    assert not Path("/kt-data").exists()


def test_a_writable_copy_changes_in_its_pod_alone(jobs: ModuleType, tmp_path: Path) -> None:
    put(tmp_path, "datasets/x", {"a.txt": "1"})
    data = {"/kt-data": kt.Data("datasets/x", mode="rw")}
    deployed(jobs.write, data)("/kt-data/a.txt", "changed")

    assert deployed(jobs.read, data)("/kt-data/a.txt") == "1"
    kt.get("datasets/x", tmp_path / "got", contents=True)
    assert (tmp_path / "got" / "a.txt").read_text() == "1"


def test_keys_below_a_path_are_merged_and_a_file_may_be_at_a_path_of_its_own(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "sets/left", {"a.txt": "1"})
    put(tmp_path, "sets/right", {"a.txt": "2"})
    (tmp_path / "settings.json").write_text("{}")
    kt.put("settings", tmp_path / "settings.json")
    read = deployed(jobs.read, {"/kt-data/sets": "sets", "/kt-data/settings.json": "settings"})

    assert read("/kt-data/sets/left/a.txt") == "1"
    assert read("/kt-data/sets/right/a.txt") == "2"
    assert read("/kt-data/settings.json") == "{}"


def test_data_hides_a_folder_of_the_machine_in_the_pod_alone(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    machine = tmp_path / "machine" / "models"
    machine.mkdir(parents=True)
    (machine / "own.txt").write_text("own")
    (machine.parent / "beside.txt").write_text("beside")
    tree = deployed(jobs.tree, {str(machine): "models/base"})

    assert tree(str(machine)) == ["a.txt"]
    assert tree(str(machine.parent)) == ["beside.txt"]  # a link is not walked into
    assert [path.name for path in machine.iterdir()] == ["own.txt"]


def test_data_may_lie_in_the_working_directory_beside_the_code(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    data = {"/kt-app/models": "models/base"}
    read = deployed(jobs.read, data, working_dir="/kt-app")
    assert read("models/a.txt") == "1"
    put(tmp_path, "models/base", {"a.txt": "2"})
    read.refresh_data()
    assert read("models/a.txt") == "2"

    project = Path(jobs.__file__).parent.name
    with pytest.raises(kt.SpecError, match=f"lies at /kt-app/{project}"):
        deployed(jobs.read, {f"/kt-app/{project}/models": "models/base"}, working_dir="/kt-app")


def test_a_deploy_brings_a_new_version_to_the_same_pod_and_removes_what_is_gone(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1", "old.txt": "1"})
    read = deployed(jobs.read, {"/kt-data": "models/base"})
    (pod,) = read.compute.pod_names()
    assert read("/kt-data/a.txt") == "1"
    (tmp_path / "source/models/base/old.txt").unlink()
    put(tmp_path, "models/base", {"a.txt": "2"})

    read = deployed(jobs.read, {"/kt-data": "models/base"})
    assert read("/kt-data/a.txt") == "2"
    assert read.compute.pod_names() == [pod]
    with pytest.raises(FileNotFoundError):
        read("/kt-data/old.txt")


def test_a_refresh_brings_a_new_version_while_a_call_reads_the_old_one(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "old"})
    handle = deployed(jobs.read_before_and_after, {"/kt-data": "models/base"})
    flag = tmp_path / "flag"
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(handle, "/kt-data/a.txt", str(flag))
        while not flag.exists() and not call.done():
            pass
        put(tmp_path, "models/base", {"a.txt": "new"})
        assert handle.refresh_data() == {"/kt-data": "2"}
        flag.unlink()
        first, second, process = call.result(60)
    assert (first, second) == ("old", "new")
    described = json.loads(kt_command("describe", handle.service_name, "--json"))
    assert described["data"] == [
        {"path": "/kt-data", "key": "models/base", "mode": "ro", "version": "2"}
    ]
    assert "models/base at /kt-data (version 2, read-only)" in kt_command(
        "describe", handle.service_name
    )
    # The deploy finds in the pods what it would fetch.
    assert handle.refresh_data() == {"/kt-data": "2"}
    assert process


def kt_command(*arguments: str) -> str:
    completed = commands.kt(*arguments)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_a_key_that_is_missing_fails_the_deploy_before_any_pod_is_made(
    jobs: ModuleType, emptied_home: Path
) -> None:
    with pytest.raises(kt.DataStoreError) as raised:
        deployed(jobs.read, {"/kt-data": "models/none"})
    assert "'models/none' in namespace default" in str(raised.value)
    assert "kt put models/none" in str(raised.value)
    assert not list(emptied_home.glob("pods/*/*"))


def test_a_pod_that_cannot_show_the_data_says_so_to_the_deployer(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    (tmp_path / "file").write_text("")
    with pytest.raises(kt.ResourceNotAvailableError, match=r"'models/base' cannot be shown at"):
        deployed(jobs.read, {str(tmp_path / "file"): "models/base"})


def test_data_above_the_files_of_the_pod_itself_is_refused(
    jobs: ModuleType, tmp_path: Path, emptied_home: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    with pytest.raises(kt.ResourceNotAvailableError, match="the pod's own files are below it"):
        deployed(jobs.read, {str(emptied_home.parent): "models/base"})


def test_the_program_of_a_pod_that_cannot_fetch_says_why(jobs: ModuleType, tmp_path: Path) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    (tmp_path / "full").write_text("")
    order = FetchData(
        namespace="default",
        folder=f"{tmp_path}/full/1",
        mounts=(DataMount("/kt-data", "models/base"),),
    )
    command = [sys.executable, "-m", mounts.__name__, messages.encode(order).decode()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    error = exceptions.rebuild(exceptions.parse_json(done.stdout.encode()))
    assert isinstance(error, kt.DataStoreError)
    assert "'models/base' cannot be fetched for /kt-data" in str(error)


def test_all_pods_have_the_data_and_pods_that_start_later_get_what_the_key_holds_then(
    jobs: ModuleType, tmp_path: Path
) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    read = deployed(jobs.read, {"/kt-data": "models/base"}, replicas=2)
    assert read("/kt-data/a.txt") == ["1", "1"]
    put(tmp_path, "models/base", {"a.txt": "2"})
    read.refresh_data()
    assert read("/kt-data/a.txt") == ["2", "2"]

    read = deployed(jobs.read, {"/kt-data": "models/base"}, replicas=3)
    assert read("/kt-data/a.txt") == ["2", "2", "2"]


def test_a_pod_whose_agent_is_killed_gets_the_data_again(jobs: ModuleType, tmp_path: Path) -> None:
    put(tmp_path, "models/base", {"a.txt": "1"})
    read = deployed(jobs.read, {"/kt-data": "models/base"})
    (pod,) = json.loads(kt_command("describe", read.service_name, "--json"))["pods"]
    put(tmp_path, "models/base", {"a.txt": "2"})
    os.kill(pod["pid"], signal.SIGKILL)

    assert read.options(retries=20)("/kt-data/a.txt") == "2"


def test_a_service_without_data_has_nothing_to_refresh(jobs: ModuleType) -> None:
    handle = kt.fn(jobs.process).to(kt.Compute(cpus="0.1"))
    with pytest.raises(kt.SpecError, match="has no data to refresh"):
        handle.refresh_data()
