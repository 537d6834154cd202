"""What a user reads after a typical mistake, and after Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

import kubetorch as kt

PROGRAM = """
import sys, time
import kubetorch as kt

def bad(x):
    raise ValueError("no")

def handle(x):
    import threading
    return threading.Lock()

def slow(seconds):
    print("running", flush=True)
    time.sleep(seconds)

class Model:
    def __init__(self, path):
        self.path = path

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1")
    what, *args = sys.argv[1:]
    if what == "spawn":
        call = kt.fn(slow).to(compute).spawn(30)
        print("running", flush=True)
        call.result()
    elif what == "class":
        kt.cls(Model).to(compute)
    elif what == "secret":
        kt.fn(bad, name="guarded").to(kt.Compute(cpus="0.1", secrets=["nosuch"]))
    elif what == "typo":
        kt.fn(slow, name="long-job").to(compute)
        kt.fn(name="log-job")
    else:
        kt.fn(globals()[what]).to(compute)(*map(float, args))
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
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
    done = subprocess.run(
        command(program, *words),
        env=dict(os.environ, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr


def test_trust_23_a_traceback_has_the_users_frames_alone(program):
    text = errors_of(program, "bad", "1")
    assert text.endswith("ValueError: no\n")
    assert "compute)(*map(float, args))" in text
    assert os.path.dirname(kt.__file__) not in text  # noqa: PTH120  # a piece of text
    full = errors_of(program, "bad", "1", KT_TRACEBACK="full")
    assert os.path.dirname(kt.__file__) in full  # noqa: PTH120


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("class", "hint: .to(compute, init_args={...}) has the arguments of Model(): "),
        ("secret", "hint: kt secrets -n default shows those that are there"),
        ("typo", "hint: did you mean 'long-job'? kt list -n default shows the services"),
    ],
)
def test_trust_23_a_mistake_is_named_with_what_would_be_right(program, what, expected):
    assert expected in errors_of(program, what)


@pytest.mark.parametrize(
    ("words", "goes_on"),
    [
        (("slow", "30"), "Interrupted. The call is cancelled in its pods."),
        (("spawn",), "Interrupted. The spawned call goes on: kt calls shows it."),
    ],
)
def test_trust_23_ctrl_c_is_one_line_that_says_what_goes_on(program, words, goes_on):
    running = subprocess.Popen(
        command(program, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert any("running" in line for line in running.stdout)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT
    assert [line for line in errors.splitlines() if "Interrupted" in line] == [goes_on]
    assert "Traceback" not in errors


def kt_status(name):
    return subprocess.run(["kt", "status", name], capture_output=True, text=True, timeout=60)


def test_trust_23_the_cli_finds_a_service_as_its_function_is_called(program):
    errors_of(program, "typo")
    done = kt_status("long_jo")
    assert (done.returncode, "did you mean 'long-job'?" in done.stderr) == (1, True)
    assert kt_status("long-job").returncode == 0
    compute = kt.Compute(cpus="0.1")
    remote = kt.fn(long_name).to(compute)
    assert remote.service_name == "longname"
    assert kt_status("long_name").returncode == 0
    remote.teardown()
