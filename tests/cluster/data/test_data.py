"""The data store of a cluster: from a laptop, in pods, between services, through a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cluster import faults
from cluster.conftest import Installed, Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SERVICE = """
import os
from pathlib import Path

import kubetorch as kt

def read(folder):
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*")}

class Pod:
    def put(self, key, text, **options):
        folder = Path("/tmp/put", key)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text").write_text(text)
        kt.put(key, folder, contents=True, **options)
        return os.environ["POD_NAME"]

    def get(self, key):
        kt.get(key, Path("/tmp/got", key), contents=True)
        return read(Path("/tmp/got", key))

    def ls(self, key):
        return sorted((entry["name"], entry["locale"]) for entry in kt.ls(key))

    def rm(self, key):
        kt.rm(key, recursive=True)

    def train(self, step):
        import numpy
        kt.put("weights", src={"w": numpy.full((300, 1000), step, "float32"), "step": step})

    def weights(self):
        value = kt.get("weights")
        return value["step"], float(value["w"].sum())
"""
DEPLOY = """
from concurrent.futures import ThreadPoolExecutor
import kubetorch as kt
from service import Pod

image = kt.Image().pip_install(["numpy"])

def deploy(name):
    kt.cls(Pod, name=name).to(kt.Compute(cpus="10m", image=image), stream_logs=False)

with ThreadPoolExecutor(2) as pool:
    list(pool.map(deploy, ["one", "two"]))
"""
BEGINNING = """
from pathlib import Path
import kubetorch as kt
from service import Pod, read
one, two = (kt.Cls.from_name(name) for name in ("one", "two"))
"""
#: As much as no put sends within a moment.
MIB = 150


@pytest.fixture(scope="module")
def run(
    installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Runs programs of a user that has two services, each with one pod."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "pyproject.toml").touch()
    (folder / "service.py").write_text(SERVICE)
    installed.python(DEPLOY, folder)
    yield lambda program: installed.python(BEGINNING + program, folder)


def test_keys_go_from_a_laptop_to_pods_and_back(run: Callable[[str], str]) -> None:
    printed = run("""
Path("model").mkdir()
Path("model/words").write_text("hello")
kt.put("models/base", "model", contents=True)
print(one.get("models/base"), two.ls("models"))
one.put("models/tuned", "changed")
kt.get("models/tuned", "tuned", contents=True)
print(read("tuned"), [entry["name"] for entry in kt.ls("models")])
two.rm("models/base")
kt.rm("models/tuned", recursive=True)
print(kt.ls("models"), one.ls("models"))
""")
    assert printed.splitlines()[-3:] == [
        "{'words': 'hello'} [['base/', 'store']]",
        "{'text': 'changed'} ['base/', 'tuned/']",
        "[] []",
    ]


def test_a_pod_serves_its_files_to_other_pods_and_to_laptops(run: Callable[[str], str]) -> None:
    printed = run("""
pod = one.put("live", "in place", locale="local")
print([entry["locale"] == pod for entry in kt.ls("/")  if entry["name"] == "live/"])
print(two.get("live"))
kt.get("live", "live", contents=True)
print(read("live"))
""")
    assert printed.splitlines()[-3:] == ["[True]", *["{'text': 'in place'}"] * 2]


def test_tensors_of_a_trainer_reach_another_service_version_by_version(
    run: Callable[[str], str],
) -> None:
    printed = run("""
for step in (1, 2):
    one.train(step)
    print(two.weights())
""")
    assert printed.splitlines()[-2:] == ["[1, 300000.0]", "[2, 600000.0]"]


def test_declared_data_is_there_before_the_first_call_and_refreshed(
    run: Callable[[str], str],
) -> None:
    printed = run("""
for text in ("old", "new"):
    Path("set").mkdir(exist_ok=True)
    Path("set/part").write_text(text)
    kt.put("sets/x", "set", contents=True)
    if text == "old":
        reader = kt.fn(read, name="reader").to(kt.Compute(cpus="10m", data={"/data": "sets/x"}))
    print(reader("/data"))
print(reader.refresh_data(), reader("/data"))
reader.teardown()
""")
    assert printed.splitlines()[-3:] == [
        *["{'part': 'old'}"] * 2,
        "{'/data': '2'} {'part': 'new'}",
    ]


def test_keys_of_a_service_end_with_it(run: Callable[[str], str]) -> None:
    printed = run("""
short = kt.fn(read, name="short").to(kt.Compute(cpus="10m"))
Path("short").write_text("1")
kt.put("short/state", "short")
kt.put("short-lived/state", "short")
short.teardown()
print(kt.ls("short"), [entry["name"] for entry in kt.ls("short-lived")])
""")
    assert printed.splitlines()[-1] == "[] ['state']"


@pytest.mark.faults
@pytest.mark.alone
@pytest.mark.usefixtures("run")
def test_a_put_goes_on_after_a_controller_has_started_anew(
    client: Callable[[str], faults.Client], kubectl: Kubectl, kill_controllers: Callable[[], None]
) -> None:
    program = client(f"""
import hashlib, os, threading, time
with open("large", "wb") as file:
    for _ in range({MIB}):
        file.write(os.urandom(1 << 20))
threading.Timer(0.5, print, ("putting",)).start()
begin = time.monotonic()
kt.put("large", "large")
print("seconds", time.monotonic() - begin)
kt.get("large", "copy")
print("equal", open("large", "rb").read() == open("copy/large", "rb").read())
""")
    program.line("putting")
    kill_controllers()
    assert float(program.line("seconds").split()[1]) > 0.5
    assert program.end().endswith("equal True\n")
