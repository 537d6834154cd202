"""What a user reads after a typical mistake, and after Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

import kubetorch as kt
from tests.local import commands

PROGRAM = """
import asyncio, sys, threading, time
import kubetorch as kt

def bad(x):
    raise ValueError("no")

def handle(x):
    return {"rows": [1, threading.Lock()]}

def absent(x):
    import nosuchpackage

def slow(seconds):
    print("running", flush=True)
    time.sleep(seconds)

def build(x):
    pass

class Model:
    def __init__(self, path):
        self.path = path

    def run(self, x):
        return x

    def make(self):
        return {1, 2}, Plain(3)

class Plain:
    def __init__(self, n):
        self.n = n

def main(what, *args):
    compute = kt.Compute(cpus="0.1")
    if what == "cpu":
        kt.Compute(cpu=1)
    elif what == "spawn":
        kt.fn(slow).to(compute).spawn(30).result()
    elif what == "map":
        list(kt.fn(slow).to(compute).map([30, 30]))
    elif what == "async":
        remote = kt.fn(slow).to(compute)
        async def call():
            await remote(30, async_=True)
        asyncio.run(call())
    elif what == "await":
        remote = kt.fn(slow).to(compute)
        async def call():
            await remote(0)
        asyncio.run(call())
    elif what == "await-method":
        model = kt.cls(Model).to(compute, init_args={"path": "x"})
        async def call():
            await model.run(1)
        asyncio.run(call())
    elif what == "class":
        kt.cls(Model).to(compute)
    elif what == "method":
        kt.cls(Model).to(compute, init_args={"path": "x"}).rum(1)
    elif what == "secret":
        kt.fn(bad, name="guarded").to(kt.Compute(cpus="0.1", secrets=["hf-tokn"]))
    elif what == "option":
        kt.fn(slow).to(compute)(0, timeout=1)
    elif what == "option-method":
        kt.cls(Model).to(compute, init_args={"path": "x"}).run(1, retries=1)
    elif what == "typo":
        kt.fn(slow, name="long-job").to(compute)
        kt.fn(name="log-job")
    elif what == "thread":
        remote = kt.fn(bad).to(compute)
        thread = threading.Thread(target=lambda: remote(1))
        thread.start()
        thread.join()
        sys.exit(1)
    elif what == "step":
        image = kt.Image().run_bash("echo running; sleep 30", force=True)
        kt.fn(build).to(kt.Compute(cpus="0.1", image=image))
    else:
        kt.fn(globals()[what]).to(compute)(*map(float, args))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""
#: Where our own code lies: no traceback of a user shows it.
OURS = os.path.dirname(kt.__file__)  # noqa: PTH120  # a piece of text


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    create = commands.kt("secrets", "create", "hf-token", "-v", "HF_TOKEN", HF_TOKEN="x")
    create.check_returncode()
    return shared_service_home


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("mistakes") / "program.py"
    path.write_text(PROGRAM)
    return path


def long_name():
    """A function whose service has no underscore."""


def command(program, *words):
    return [sys.executable, str(program), *words]


def errors_of(program, *words, **variables):
    completed = commands.python(str(program), *words, timeout=60, **variables)
    assert completed.returncode == 1
    return completed.stderr


def test_a_traceback_has_the_users_frames_alone(program):
    text = errors_of(program, "bad", "1")
    assert text.endswith("ValueError: no\n")
    assert "compute)(*map(float, args))" in text
    assert OURS not in text
    full = errors_of(program, "bad", "1", KT_TRACEBACK="full")
    assert OURS in full


def test_so_has_the_traceback_of_a_thread(program):
    text = errors_of(program, "thread")
    assert "lambda: remote(1)" in text
    assert OURS not in text


def test_so_has_that_of_a_cell(program):
    cell = "import kubetorch as kt; kt.Compute(cpu=1)"
    completed = subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", "--colors=nocolor", "-c", cell],
        capture_output=True,
        text=True,
        timeout=60,
    )
    output = completed.stdout + completed.stderr
    assert "did you mean cpus?" in output
    assert OURS not in output


MISTAKES = {
    "cpu": "hint: did you mean cpus?",
    "class": "hint: pass the arguments of Model() in .to(compute, init_args={...})",
    "method": "'Model' has no method 'rum'\nhint: did you mean run?",
    "secret": "hint: did you mean hf-token? kt secrets -n default lists the secrets",
    "typo": "hint: did you mean long-job? kt list -n default shows the services",
    "absent 1": 'hint: kt.Compute(image=kt.Image().pip_install(["nosuchpackage"])) installs it',
    "handle 1": 'result["rows"][1] is a _thread.lock, which cannot travel; nor can it be kept: ',
    "option": "hint: options of a call are given so: f.options(timeout=60)(...)",
    "option-method": "hint: options of a call are given so: f.options(retries=3)(...)",
    "await": "hint: await remote(..., async_=True): without it, a call returns its value",
    "await-method": "hint: await model.run(..., async_=True): without it, ",
}


UNGUARDED = """
import os, sys
import kubetorch as kt

{needs}

def train(x):
    return x

kt.fn(train, name="unguarded").to(kt.Compute(cpus="0.1"), replace=True)
"""
NEEDS = ["name = sys.argv[1]", "key = os.environ['ONLY_HERE']", "len(sys.argv) > 1 or sys.exit(2)"]


@pytest.mark.parametrize("needs", NEEDS)
def test_a_pod_that_runs_what_only_the_program_should_run_says_so(tmp_path, needs):
    path = tmp_path / "unguarded.py"
    path.write_text(UNGUARDED.format(needs=needs))
    text = errors_of(path, "x", ONLY_HERE="x")
    assert "hint: pods import unguarded.py without the arguments and the environment of " in text
    assert 'if __name__ == "__main__":' in text
    # What is wrong with the code itself gets no such hint.
    path.write_text(UNGUARDED.format(needs="def half(:"))
    assert "pods import" not in errors_of(path, "x")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_would_be_right(program, mistake):
    text = errors_of(program, *mistake.split())
    assert MISTAKES[mistake] in text
    assert OURS not in text


def test_the_one_setting_that_is_named_is_enough(program):
    compute = kt.Compute(cpus="0.1", allowed_serialization=["pickle"])
    sys.path.insert(0, str(program.parent))
    import program as users

    model = kt.cls(users.Model, name="pickled").to(compute, init_args={"path": "x"})
    values, plain = model.make()
    assert (values, plain.n) == ({1, 2}, 3)
    with pytest.raises(AttributeError, match="did you mean run"):
        model.rum  # noqa: B018
    completed = commands.kt("call", "pickled:run", "-a", "[1]")
    assert completed.stdout == "Result: 1\n"
    kt.cls(users.Model, name="pickled").teardown()


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        (("slow", "30"), "Interrupted. The call is cancelled in its pods."),
        (("async",), "Interrupted. The call is cancelled in its pods."),
        (("map",), "Interrupted. The calls that run are cancelled in their pods."),
        (("spawn",), "Interrupted. The call goes on: kt calls show "),
        (
            ("step",),
            "Interrupted. The deploy of build goes on: kt status build, kt teardown build.",
        ),
    ],
)
def test_ctrl_c_is_one_line_that_says_what_goes_on(program, words, goes_on):
    lines = interrupted(command(program, *words), is_shown_in_errors=words == ("step",))
    # What a slow deploy or a step says of itself begins with its name.
    lines = [line for line in lines if not line.startswith("(")]
    assert len(lines) == 1
    assert lines[0].startswith(goes_on)


def test_ctrl_c_in_a_command_says_the_same(program):
    errors_of(program, "slow", "x")
    lines = interrupted(["kt", "call", "slow", "-a", "[30]"], status=130, stderr=subprocess.STDOUT)
    assert lines[-1:] == ["Interrupted. The call is cancelled in its pods."]


def interrupted(words, *, status=-signal.SIGINT, stderr=subprocess.PIPE, is_shown_in_errors=False):
    """What a program writes on stderr after Ctrl-C, which ends it once it says that it runs."""
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, text=True)
    stream = running.stderr if is_shown_in_errors else running.stdout
    assert any("running" in line for line in stream)
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == status
    text = errors or output
    assert "Traceback" not in text
    lines = text.splitlines()
    return [line for line in lines if line and not line.startswith("kubetorch: pods run ")]


def kt_status(name):
    return commands.kt("status", name)


def test_the_cli_finds_a_service_as_its_function_is_called(program):
    errors_of(program, "typo")
    completed = kt_status("long_jo")
    assert (completed.returncode, "did you mean long-job?" in completed.stderr) == (1, True)
    completed = commands.kt("teardown", "long_jo")
    assert (completed.returncode, "did you mean long-job?" in completed.stderr) == (1, True)
    assert kt_status("long-job").returncode == 0
    # The name without the user name, or the branch, in front of it.
    assert "did you mean long-job?" in kt_status("job").stderr
    compute = kt.Compute(cpus="0.1")
    remote = kt.fn(long_name).to(compute)
    assert remote.service_name == "longname"
    assert kt_status("long_name").returncode == 0
    remote.teardown()
