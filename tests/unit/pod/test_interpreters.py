import asyncio
import os

import pytest

from kubetorch.lib import runtime
from kubetorch.pod import environment
from kubetorch.pod.environment import Interpreters, candidates
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.podenv import PodEnv

POD = PodEnv(
    namespace="ns",
    workload="train",
    pod="train-0",
    host="127.0.0.1",
    port=1,
    root="/root",
    working_dir="/work",
    environments="/environments",
    backend="kubernetes",
)


def image_with(python_path):
    compute = ComputeSpec(image=ImageSpec(python_path=python_path))
    return WorkloadSpec("ns", "train", CallableRef("fn", "f", "m", "f"), compute=compute)


@pytest.fixture
def make(tmp_path):
    """Makes programs, or links to them; their path."""

    def program(path, target=None, mode=0o755):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if target is None:
            file.write_text("")
            file.chmod(mode)
        else:
            file.symlink_to(tmp_path / target)
        return str(file)

    return program


@pytest.fixture
def find_interpreters(tmp_path):
    """The candidates among the programs that a test made."""

    def look(image_python="", agent_python=None, **environ):
        paths = candidates(image_python, {"PATH": "", **environ}, agent_python)
        return [path for path in paths if path.startswith(str(tmp_path))]

    return look


def test_an_interpreter_is_looked_at_once_whatever_it_is_called(make, find_interpreters, tmp_path):
    make("usr/python3.11")
    first = make("usr/python3", "usr/python3.11")
    make("usr/python", "usr/python3")
    assert find_interpreters(PATH=str(tmp_path / "usr")) == [first]


def test_a_virtual_environment_is_another_one_than_what_it_was_made_from(
    make, find_interpreters, tmp_path
):
    base = make("usr/python3")
    inside = make("venv/bin/python", "usr/python3")
    make("venv/bin/python3", "usr/python3")
    make("venv/pyvenv.cfg")
    path = os.pathsep.join([str(tmp_path / "usr"), str(tmp_path / "venv" / "bin")])
    assert find_interpreters(PATH=path, VIRTUAL_ENV=str(tmp_path / "venv")) == [inside, base]


def test_the_agents_own_goes_first_where_it_is_the_users(make, find_interpreters, tmp_path):
    agent_python, image_python = make("own/python"), make("usr/python3")
    assert find_interpreters(agent_python=agent_python, PATH=str(tmp_path / "usr")) == [
        agent_python,
        image_python,
    ]


def test_what_an_image_names_is_the_only_one(make, find_interpreters, tmp_path):
    make("usr/python3")
    python, python_312 = make("there/python3"), make("there/python3.12")
    path = str(tmp_path / "usr")
    assert find_interpreters(python_312, PATH=path) == [python_312]
    assert find_interpreters(str(tmp_path / "there"), PATH=path) == [python, python_312]
    assert find_interpreters(str(tmp_path / "nowhere"), PATH=path) == []


def test_what_cannot_be_run_is_no_interpreter(make, find_interpreters, tmp_path):
    make("usr/python3", mode=0o644)
    (tmp_path / "usr" / "python").mkdir()
    assert find_interpreters(PATH=str(tmp_path / "usr")) == []


def test_a_path_that_no_file_can_have_is_no_interpreter(find_interpreters):
    assert find_interpreters("/" + "x" * 5000) == []


def test_deploys_at_one_time_each_say_that_there_is_no_interpreter(tmp_path):
    async def choose_twice():
        interpreters = Interpreters(POD, {})
        choices = [interpreters.choose(image_with(str(tmp_path))) for _ in range(2)]
        return await asyncio.gather(*choices, return_exceptions=True)

    errors = asyncio.run(choose_twice())
    assert [str(error).partition(" at ")[0] for error in errors] == [
        "the image of pod train-0 has no Python 3.10 or newer"
    ] * 2


def test_the_container_gets_back_what_was_put_aside():
    environ = environment.container_environ({"KT_POD_KEPT_LD_PRELOAD": "/lib/x.so", "A": "1"})
    assert environ == {"LD_PRELOAD": "/lib/x.so", "A": "1"}


def test_the_tag_names_version_and_c_library():
    version, _, libc = runtime.tag().partition("-")
    assert version.startswith("cp3")
    assert libc in ("gnu", "musl")
    assert not runtime.is_used()
