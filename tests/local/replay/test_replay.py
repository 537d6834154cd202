"""Calls that have left a record, replayed on this machine and in pods."""

import copy
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kubetorch as kt
from kubetorch.errors import CallRefusedError, ResultExpiredError, SerializationError, SpecError
from kubetorch.sdk import backend
from kubetorch.sdk.replay import replay
from tests.local import commands
from tests.local.calling import until
from tests.local.debugger.sessions import PROMPT, TerminalProgram

COMPUTE = {"cpus": "0.1"}
TRAIN = """
    from dataclasses import dataclass
    import os

    @dataclass
    class Model:
        size: int

    def train(model, lr=0.5, *, epochs=1):
        if lr > {limit}:
            raise ValueError(f"diverged at {{lr}} with {{model.size}}")
        return [model.size, lr, epochs]

    class Counter:
        def __init__(self, start):
            self.value = start

        def add(self, count):
            self.value += count
            if self.value > 5:
                raise RuntimeError(f"{{self.value}} is too many")
            return self.value

    def counts(number):
        yield from range(number)

    def reads_variable():
        raise KeyError(os.environ.get("KT_TEST_SECRET"))

    def speaks(path):
        print("in the function")
        with open(path, "a") as file:
            file.write("x")
        breakpoint()
        raise ValueError("spoken")

    def takes(data):
        raise ValueError(len(data))

    def is_flaky(path):
        with open(path, "a") as file:
            file.write("x")
            if file.tell() % 2:
                raise TimeoutError("odd")
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def jobs(project, monkeypatch):
    monkeypatch.chdir(project.folder)
    return project.module(TRAIN.format(limit=0.2))


def deploy(function, **parameters):
    return kt.fn(function, **parameters).to(kt.Compute(**COMPUTE), stream_logs=False)


def failed_call(remote, *args, **kwargs):
    """The handle of the call that fails so."""
    handle = remote.spawn(*args, **kwargs)
    with pytest.raises((ArithmeticError, LookupError, OSError, ValueError)):
        handle.get(60)
    return handle


def recorded(service_name):
    """The call of a service that can be replayed, once the controller has its record."""
    calls = []

    def find():
        views = backend.session().ask(lambda c: c.list_calls("default", service_name))
        calls[:] = [view for view in views if view.is_replayable]
        return calls

    until(find, 60)
    (call,) = calls
    return call


def run_kt(*words, code=0, **environ):
    ended = commands.kt(*words, **environ)
    assert ended.returncode == code, ended.stderr
    return ended


def test_a_failed_call_runs_again_here_with_other_arguments_and_other_code(jobs, project):
    remote = deploy(jobs.train)
    handle = failed_call(remote, jobs.Model(7))

    with pytest.raises(ValueError, match=r"diverged at 0\.5 with 7"):
        handle.replay()
    assert handle.replay(changes={"lr": 0.1, "epochs": 3}) == [7, 0.1, 3]
    with pytest.raises(SpecError, match=r"train has no parameter 'speed'"):
        handle.replay(changes={"speed": 1})

    # The next generation has other code; a replay runs that of the call, or that of the folder.
    jobs = project.module(TRAIN.format(limit=0.7))
    deploy(jobs.train)
    assert handle.replay(in_pod=True) == [7, 0.5, 1]
    assert json.loads(run_kt("replay", handle.id, "--in-pod", "--json").stdout) == [7, 0.5, 1]
    with pytest.raises(ValueError, match="diverged"):
        handle.replay()
    assert handle.replay(code="here") == [7, 0.5, 1]
    views = backend.session().ask(lambda controller: controller.list_workloads())
    assert not any(view.spec.name.startswith("replay-") for view in views)


def test_replays_of_one_call_run_side_by_side_on_this_machine_whatever_is_configured(
    jobs, monkeypatch
):
    handle = failed_call(deploy(jobs.train, name="twice"), jobs.Model(7))
    session = backend.session()
    monkeypatch.setenv("KT_BACKEND", "kubernetes")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with ThreadPoolExecutor() as pool:
        results = pool.map(
            lambda rate: replay(handle.id, session, changes={"lr": rate}), (0.1, 0.2)
        )
        assert list(results) == [[7, 0.1, 1], [7, 0.2, 1]]


def test_options_that_do_not_fit_the_call_are_refused_before_it_is_described(jobs, tmp_path):
    handle = failed_call(deploy(jobs.train, name="unfit"), jobs.Model(7))

    refused = run_kt("replay", handle.id, "--set", "speed=1", code=1)
    assert "train has no parameter 'speed'" in refused.stderr
    assert "It runs again" not in refused.stderr
    refused = commands.kt("replay", handle.id, "--code", "here", cwd=tmp_path)
    assert "does not have" in refused.stderr
    assert "It runs again" not in refused.stderr


def test_a_plain_call_that_fails_is_listed_and_replayed_from_a_terminal(jobs):
    remote = deploy(jobs.train, name="plain")
    with pytest.raises(ValueError, match="diverged"):
        remote(jobs.Model(2))
    assert remote(jobs.Model(2), lr=0.1) == [2, 0.1, 1]

    view = recorded("plain")
    assert f"kt replay {view.id}" in run_kt("calls", "show", view.id).stdout
    ended = run_kt("replay", view.id, code=1)
    assert "raised ValueError: diverged at 0.5 with 2" in ended.stderr
    assert "A replay does not have:" in ended.stderr
    shown = run_kt("replay", view.id, "--set", "lr=0.125", "--json").stdout
    assert json.loads(shown) == [2, 0.125, 1]


def test_the_first_digits_of_an_id_name_a_call_to_each_command(jobs):
    handle = failed_call(deploy(jobs.train, name="short"), jobs.Model(2))
    digits = recorded("short").id[:8]
    shown = run_kt("replay", digits, "--set", "lr=0.125", "--json").stdout
    assert json.loads(shown) == [2, 0.125, 1]
    assert handle.id in run_kt("calls", "show", digits).stdout
    assert "had ended already: failed" in run_kt("calls", "cancel", digits).stdout
    assert "diverged at 0.5 with 2" in run_kt("calls", "result", digits, code=1).stderr
    refused = run_kt("debug", "--call", digits, code=1)
    assert f"no call '{handle.id}' runs" in refused.stderr
    unknown = "0" * 31
    for words in (("replay",), ("calls", "show"), ("calls", "cancel"), ("debug", "--call")):
        refused = run_kt(*words, unknown, code=1)
        assert f"has an id that begins with {unknown}" in refused.stderr
    assert "too few digits" in run_kt("replay", digits[:5], code=1).stderr


def test_a_list_of_calls_names_one_that_can_be_replayed(jobs):
    remote = deploy(jobs.counts, name="counts")
    handle = remote.spawn(3)
    with pytest.raises(CallRefusedError):  # a generator leaves no record
        handle.get(60)
    assert "kt replay" not in run_kt("calls", "list", "counts").stderr
    failed = failed_call(deploy(jobs.train, name="listed"), jobs.Model(2))
    recorded("listed")
    later = remote.spawn(3)
    later.wait()
    assert f"kt replay {failed.id} runs train again" in run_kt("calls").stderr


def test_a_method_runs_on_a_new_instance_and_the_lost_state_is_named(jobs):
    remote = kt.cls(jobs.Counter).to(
        kt.Compute(**COMPUTE), init_args={"start": 3}, stream_logs=False
    )
    assert remote.add(1) == 4
    with pytest.raises(RuntimeError, match="6 is too many"):
        remote.add(2)

    view = recorded("counter")
    assert kt.calls.get(view.id).replay() == 5
    ended = run_kt("replay", view.id, "--set", "count=4", code=1)
    assert "the state of Counter before the call" in ended.stderr
    assert "7 is too many" in ended.stderr


def test_how_often_a_call_fails_is_counted(jobs, tmp_path):
    remote = deploy(jobs.is_flaky, name="flaky")
    handle = failed_call(remote, str(tmp_path / "runs"))

    shown = run_kt("replay", handle.id, "--times", "4", code=1).stdout

    assert sorted(line.split(None, 1) for line in shown.splitlines()) == [
        ["2", "raised TimeoutError: odd"],
        ["2", "returned"],
    ]


def test_which_calls_leave_a_record_is_said_by_the_function_and_the_environment(jobs, monkeypatch):
    remote = deploy(jobs.train, name="all", record="all")
    handle = remote.spawn(jobs.Model(1), lr=0.1)
    assert handle.get(60) == [1, 0.1, 1]
    assert handle.replay(changes={"lr": 0.15}) == [1, 0.15, 1]

    for name, parameters in (("none", {"record": "none"}), ("silent", {})):
        monkeypatch.setenv("KT_RECORD", "none")
        with pytest.raises(ResultExpiredError, match="has left no record"):
            failed_call(deploy(jobs.train, name=name, **parameters), jobs.Model(1)).replay()
    with pytest.raises(SpecError, match="record is 'some'"):
        kt.fn(jobs.train, record="some")
    monkeypatch.setenv("KT_RECORD", "some")
    with pytest.raises(SpecError, match="KT_RECORD is 'some'"):
        deploy(jobs.train, name="other")


def replay_services():
    views = backend.session().ask(lambda controller: controller.list_workloads())
    return [view.spec for view in views if view.spec.name.startswith("replay-")]


def test_what_the_function_prints_is_shown_and_without_a_debugger_no_breakpoint_stops(
    jobs, tmp_path
):
    compute = kt.Compute(**COMPUTE, env_vars={"KT_DEBUG_WAIT": "0"})
    remote = kt.fn(jobs.speaks, name="speaks").to(compute, stream_logs=False)
    handle = failed_call(remote, str(tmp_path / "first"))
    runs = tmp_path / "runs"
    changed = ("--set", f"path={json.dumps(str(runs))}")

    ended = run_kt("replay", handle.id, *changed, code=1)
    assert "in the function" in ended.stderr
    counted = TerminalProgram(["kt", "replay", handle.id, *changed, "--times", "2"])
    try:
        shown = counted.end()
    finally:
        counted.close()
    assert PROMPT not in shown
    assert "2  raised ValueError: spoken" in shown
    assert len(runs.read_text()) == 3
    stopped = TerminalProgram(["kt", "replay", handle.id, *changed])
    try:
        assert "in the function" in stopped.until(PROMPT)
        assert "spoken" in stopped.command("c")
        stopped.type("q\n")
        stopped.end()
    finally:
        stopped.close()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_replay_that_is_ended_leaves_no_service(jobs, number):
    handle = failed_call(deploy(jobs.train, name="ended"), jobs.Model(7))
    # Tests that nohup runs, and what they start, ignore a hangup.
    earlier_handler = signal.signal(number, signal.SIG_DFL)
    try:
        stopped = TerminalProgram(["kt", "replay", handle.id])
    finally:
        signal.signal(number, earlier_handler)
    try:
        stopped.until(PROMPT)
        names = [spec.name for spec in replay_services() if handle.id[:8] in spec.name]
        # One that is killed cannot delete it.
        (ttl,) = {spec.compute.inactivity_ttl for spec in replay_services() if spec.name in names}
        assert ttl is not None
        os.kill(stopped.pid, number)
        stopped.end()
        assert stopped.status == 128 + number
    finally:
        stopped.close()
    assert not set(names) & {spec.name for spec in replay_services()}


@pytest.mark.security
def test_values_of_variables_are_not_kept(jobs, service):
    compute = kt.Compute(**COMPUTE, env_vars={"KT_TEST_SECRET": "hush-hush-4711"})
    remote = kt.fn(jobs.reads_variable, name="env").to(compute, stream_logs=False)
    handle = failed_call(remote)

    recorded("env")
    record = backend.session().ask(lambda controller: controller.get_record(handle.id))
    assert record.variables == ("KT_TEST_SECRET",)
    assert "hush-hush-4711" not in str(record)
    assert "variables that are not set here: KT_TEST_SECRET" in (
        run_kt("replay", handle.id, code=1).stderr
    )


def test_large_arguments_are_not_kept_and_the_error_says_so(jobs):
    handle = failed_call(deploy(jobs.takes, name="large"), b"x" * (17 << 20))

    with pytest.raises(SerializationError, match=r"were not kept: they had 17825\d* bytes"):
        handle.replay()


def test_arguments_of_a_class_that_is_gone_are_a_clear_error(jobs, project):
    handle = failed_call(deploy(jobs.train, name="gone"), jobs.Model(7))
    file = Path(jobs.__file__)
    file.write_text(file.read_text().replace("Model", "Net"))

    with pytest.raises(SerializationError, match="Model"):
        handle.replay(code="here")


def test_pickled_arguments_are_replayed_and_cannot_be_changed(jobs):
    compute = kt.Compute(**COMPUTE, allowed_serialization=["json", "pickle"])
    remote = kt.fn(jobs.train, name="pickled").to(compute, stream_logs=False)
    handle = failed_call(remote.options(serialization="pickle"), jobs.Model(3))

    with pytest.raises(ValueError, match="with 3"):
        handle.replay()
    with pytest.raises(SerializationError, match="pickled, and cannot be changed"):
        handle.replay(changes={"lr": 0.1})


@pytest.mark.security
def test_in_a_pod_of_a_cluster_a_replay_reads_no_pickle_that_the_pod_answers_with(jobs):
    compute = kt.Compute(**COMPUTE, allowed_serialization=["json", "pickle"])
    remote = kt.fn(jobs.train, name="answers", record="all").to(compute, stream_logs=False)
    handle = remote.options(serialization="pickle").spawn(jobs.Model(3), 0.1)
    assert handle.get(60) == [3, 0.1, 1]
    recorded("answers")
    assert replay(handle.id, backend.session(), changes={}, in_pod=True) == [3, 0.1, 1]
    of_cluster = copy.copy(backend.session())
    of_cluster.is_local = False

    with pytest.raises(SerializationError, match="has not asked for"):
        replay(handle.id, of_cluster, changes={}, in_pod=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "lr"], "no name and value"),
        (["--code", "there"], "none of: recorded, here"),
        (["--code", "here", "--in-pod"], "runs the code of the service"),
    ],
)
def test_wrong_options_are_refused(words, message):
    ended = commands.kt("replay", "0" * 32, *words)

    assert ended.returncode != 0
    assert message in ended.stderr


def test_at_a_terminal_a_replay_stops_where_the_error_was_raised(jobs):
    handle = failed_call(deploy(jobs.train, name="debugged"), jobs.Model(7))
    stopped = TerminalProgram(["kt", "replay", handle.id])
    try:
        stop = stopped.until(PROMPT)
        assert "post-mortem: ValueError: diverged at 0.5 with 7" in stop
        assert "-> raise ValueError(" in stop
        assert "(7, 0.5)" in stopped.command("p model.size, lr")
        stopped.type("q\n")
        assert "diverged at 0.5 with 7" in stopped.end().split("q\n")[-1]
        assert stopped.status == 1
    finally:
        stopped.close()
    lines = ("import kubetorch as kt", "kt.config.post_mortem = True")
    code = "\n".join((*lines, f"kt.calls.get({handle.id!r}).replay()"))
    program = TerminalProgram([sys.executable, "-c", code])
    try:
        assert "post-mortem: ValueError: diverged at 0.5 with 7" in program.until(PROMPT)
        program.type("q\n")
        assert "diverged at 0.5 with 7" in program.end().split("q\n")[-1]
    finally:
        program.close()
    plain = TerminalProgram(["kt", "replay", handle.id, "--no-debugger"])
    try:
        assert PROMPT not in plain.end()
        assert plain.status == 1
    finally:
        plain.close()


def test_a_deploy_says_once_that_failed_calls_keep_their_arguments(jobs, project, tmp_path):
    code = "\n".join(
        (
            f"import sys; sys.path.insert(0, {str(project.folder)!r})",
            f"import kubetorch as kt, {jobs.__name__} as jobs",
            "kt.fn(jobs.train, name='announced').to(kt.Compute(cpus='0.1'))",
        )
    )
    first, second = (
        commands.python("-c", code, KT_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)
    )

    assert first.stderr.count("calls that fail keep their arguments for 7 days") == 1
    assert "KT_RECORD=none" in first.stderr
    assert "keep their arguments" not in second.stderr
