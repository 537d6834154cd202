"""What programs of user code inherit in a pod of this machine: signals, umask, variables."""

import json
import os
import subprocess
import sys

import pytest

import kubetorch as kt
from kubetorch.local import lifetime

PROBE = """
import json, os, signal, stat, subprocess, sys, tempfile, time
import kubetorch as kt

NAMES = ["TZ", "PATH", "HTTPS_PROXY", "LC_TIME", "PIP_INDEX_URL", "ONLY_MINE"]

def environ():
    return {name: os.environ.get(name) for name in NAMES}

def modes():
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("file", "inner", "file_of_shell")]
        open(paths[0], "w").close()
        os.mkdir(paths[1])
        subprocess.run(["touch", paths[2]], check=True)
        return [oct(stat.S_IMODE(os.stat(path).st_mode)) for path in paths]

CHILD = '''
import signal, sys
try:
    print("ready", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    sys.exit(77)
'''

def interrupted():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    return child.wait(60)

def interrupted_fork():
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b"ready")
            while True:
                time.sleep(0.1)
        except KeyboardInterrupt:
            os._exit(77)
    os.read(reading, 5)
    os.kill(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def goes_on():
    os.kill(os.getpid(), signal.SIGINT)
    return "goes on"

if __name__ == "__main__":
    called = globals()[sys.argv[1]]
    remote = kt.fn(called).to(kt.Compute(cpus="0.1", env_vars=json.loads(sys.argv[2])))
    print(json.dumps([called() if sys.argv[3] == "both" else None, remote()]))
    remote.teardown()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def run(project):
    program = project.write("probe.py", PROBE)

    def run(function, *, where="both", env_vars=None, before="", **environ):
        command = f'{before} exec "$0" "$@"'
        arguments = (function, json.dumps(env_vars or {}), where)
        completed = subprocess.run(
            ["/bin/sh", "-c", command, sys.executable, str(program), *arguments],
            cwd=project.folder,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("function", ["interrupted", "interrupted_fork"])
def test_children_of_user_code_can_be_interrupted(run, function):
    assert run(function, where="pod") == [None, 77]


def test_children_can_be_interrupted_whatever_the_program_and_the_service_ignore(run):
    lifetime.stop()
    # What a shell ignores, the program and the service that it starts ignore, too.
    assert run("interrupted", where="pod", before="trap '' INT QUIT HUP;") == [None, 77]


def test_an_interrupt_does_not_end_a_worker(run):
    assert run("goes_on", where="pod") == [None, "goes on"]


@pytest.mark.parametrize("umask", ["022", "027", "077"])
def test_files_have_the_modes_that_the_programs_umask_gives_them(run, umask):
    local_answer, pod = run("modes", before=f"umask {umask};")
    assert pod == local_answer


def test_apps_shells_and_image_steps_have_the_programs_umask(project, tmp_path):
    of_app = tmp_path / "of_app"
    code = (str(project.folder), "server", "app")
    app = kt.App(None, f"touch {of_app}; sleep 1000", code, name=f"umask{project.suffix}")
    before = os.umask(0o027)
    try:
        app = app.to(kt.Compute(cpus="0.1", image=kt.Image().run_bash("touch of_step")))
    finally:
        os.umask(before)
    wait = f"for _ in $(seq 300); do [ -e {of_app} ] || sleep 0.1; done"
    shown = app.compute.run_bash(f"touch of_shell; {wait}; stat -c %a of_step {of_app} of_shell")
    assert [output.split() for _, output, _ in shown] == [["640"] * 3]
    app.teardown()


def test_variables_of_the_machine_are_those_of_the_program_that_deploys(run):
    lifetime.stop()
    first = {"TZ": "Asia/Tokyo", "HTTPS_PROXY": "http://first:1", "ONLY_MINE": "1"}
    run("environ", **first)
    path = f"/second/bin:{os.environ['PATH']}"
    second = {"TZ": "Europe/Paris", "PATH": path, "LC_TIME": "C", "ONLY_MINE": "2"}

    local_answer, pod = run("environ", **second)

    assert local_answer == pod | {"ONLY_MINE": "2"}
    # A variable of the program alone is declared with env_vars.
    assert pod["ONLY_MINE"] is None
    assert (pod["TZ"], pod["HTTPS_PROXY"]) == ("Europe/Paris", None)


def test_what_a_compute_declares_wins_over_the_program(run):
    env_vars = {"TZ": "UTC", "HTTPS_PROXY": "http://declared:1", "PATH": "/declared:$PATH"}
    path = f"/program:{os.environ['PATH']}"
    _, pod = run("environ", env_vars=env_vars, TZ="Asia/Tokyo", PATH=path)
    assert (pod["TZ"], pod["HTTPS_PROXY"]) == ("UTC", "http://declared:1")
    assert pod["PATH"] == f"/declared:{path}"
