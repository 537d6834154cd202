"""Code that deletes what it stands on: its worker may end, its service goes on."""

import contextlib
import os
import resource
import signal
import time
from pathlib import Path

import pytest

import kubetorch as kt
from benchmarks import wheels

JOBS = """
import os
import resource
import shutil

AT_IMPORT = None

def remove(folder, only_contents=False):
    if only_contents:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    elif os.path.islink(folder):
        os.unlink(folder)
    else:
        shutil.rmtree(folder)

def wipe(folder, only_contents=False, dies=False):
    remove(folder, only_contents)
    if dies:
        os._exit(3)

def where():
    return os.getcwd(), os.path.dirname(__file__)

def leave():
    working = os.getcwd()
    with open(os.path.join(os.path.basename(os.path.dirname(__file__)), "parts/data.txt")) as file:
        text = file.read()
    remove(working)
    return working, text

def uses():
    import alpha

    return alpha.VALUE

if AT_IMPORT is not None:
    remove(AT_IMPORT)

class Wiper:
    def __init__(self, folder=None):
        if folder is not None:
            remove(folder)

    def add(self, number):
        return number + 1
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(project):
    project.write("parts/data.txt", "a part\n")
    return project


@pytest.fixture
def jobs(project):
    yield project.module(JOBS)
    kt.Module.from_name("where").teardown()


def deploy(function, **compute_options):
    """All of one service."""
    deployed = kt.fn(function, name="where")
    deployed.to(kt.Compute(cpus="0.1", launch_timeout=60, **compute_options))
    return deployed


def folders(where):
    working, code = where()
    pod = Path(working).parent
    return {
        "working directory": working,
        "project": code,
        "link": f"{working}/{Path(code).name}",
        "part": f"{code}/parts",
        "slots": f"{pod}/code",
        "blobs": f"{pod}/blobs",
        "log": f"{pod}/log",
        "pod": str(pod),
    }


TARGETS = ["working directory", "project", "part", "link", "slots", "blobs", "log", "pod"]


@pytest.mark.parametrize(
    ("target", "dies"),
    [*((target, False) for target in TARGETS), ("project", True), ("pod", True)],
)
def test_what_a_call_deletes_does_not_brick_its_service(project, jobs, target, dies):
    where = deploy(jobs.where)
    folder = folders(where)[target]
    wipe = deploy(jobs.wipe)
    begun = time.monotonic()
    if dies:
        with pytest.raises(kt.WorkerDiedError):
            wipe(folder, dies=True)
    else:
        wipe(folder)
    # The next call, and the next deploys: of what is there, and of an edit.
    wipe(project.write("elsewhere/file", "").parent.as_posix())
    working, code = deploy(jobs.where)()
    assert Path(working).is_dir()
    project.module(JOBS.replace("return os.getcwd()", "return 'edited'"))
    assert deploy(jobs.where)()[0] == "edited"
    assert Path(f"{code}/parts/data.txt").is_file()
    assert time.monotonic() - begun < 60


def test_a_function_that_deletes_its_working_directory_finds_it_again(jobs):
    leave = deploy(jobs.leave)
    working, _ = leave()
    assert leave()[0] == working
    deploy(jobs.leave)  # nothing changed, so the worker stays
    assert leave() == [working, "a part\n"]


@pytest.mark.parametrize("target", ["project", "pod"])
def test_what_an_import_or_a_constructor_deletes_fails_at_most_its_deploy(project, jobs, target):
    where = deploy(jobs.where)
    folder = folders(where)[target]
    begun = time.monotonic()
    project.module(JOBS.replace("AT_IMPORT = None", f"AT_IMPORT = {folder!r}"))
    with contextlib.suppress(OSError):  # of a folder that is not there any more, or there twice
        deploy(jobs.where)()
    project.module(JOBS)
    assert Path(deploy(jobs.where)()[0]).is_dir()
    wiper = kt.cls(jobs.Wiper, name="where")
    with contextlib.suppress(OSError):
        wiper.to(where.compute, init_args={"folder": folder})
        assert wiper.add(1) == 2
    wiper.to(where.compute, init_args={})
    assert wiper.add(1) == 2
    assert time.monotonic() - begun < 60


def test_an_agent_that_dies_after_that_comes_back(jobs):
    where = deploy(jobs.where)
    pod = folders(where)["pod"]
    deploy(jobs.wipe)(pod)
    (pod_view,) = kt.globals.controller_client().get_workload("default", "where").pods
    os.kill(pod_view.pid, signal.SIGKILL)
    assert Path(deploy(jobs.where)()[0]).is_dir()


def test_shells_and_commands_run_after_that(jobs):
    where = deploy(jobs.where)
    working = folders(where)["working directory"]
    deploy(jobs.wipe)(working)
    ((status, output, _),) = where.compute.run_bash("pwd")
    assert (status, output.strip()) == (0, working)


def test_an_environment_that_was_deleted_is_made_again(jobs, tmp_path):
    wheels.build(tmp_path, "alpha", "1.0", "VALUE = 'alpha'")
    image = kt.Image().set_env_vars({"UV_FIND_LINKS": str(tmp_path), "UV_OFFLINE": "1"})
    # A step after a command: in an environment of the pod's own.
    image.run_bash("true").pip_install("alpha")
    where = deploy(jobs.where, image=image)
    own_environment = f"{folders(where)['pod']}/own"
    deploy(jobs.wipe, image=image)(own_environment)
    assert deploy(jobs.uses, image=image)() == "alpha"


@pytest.mark.faults
def test_an_agent_whose_descriptors_were_taken_away_is_started_again(jobs):
    where = deploy(jobs.where)
    (before,) = kt.globals.controller_client().get_workload("default", "where").pods
    resource.prlimit(before.pid, resource.RLIMIT_NOFILE, (4, 4))
    while kt.globals.controller_client().get_workload("default", "where").pods[0].pid == before.pid:
        time.sleep(0.1)
    assert Path(where()[0]).is_dir()
