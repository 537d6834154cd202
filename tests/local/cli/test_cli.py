"""`kt` against a real local service: what a user sees in a second terminal."""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.local import commands
from tests.local.calling import until

SOURCE = """
import logging
import time


def train(steps, lr=0.1):
    print("step", steps)
    return {"loss": lr / steps}


def fail(message):
    raise ValueError(message)


def count(n):
    for i in range(n):
        yield i


def slow(seconds):
    print("begun", flush=True)
    time.sleep(seconds)
    return "done"


class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n


LIMIT = 3
"""
COMPUTE = ["--compute", '{"cpus": "0.1"}']


def kt(*arguments, cwd=None, stdin="", **environ):
    """Run `kt` as a user would; whatever it says comes back."""
    return commands.kt(*arguments, cwd=cwd, stdin=stdin, **{"NO_COLOR": "1", **environ})


def ok(*arguments, **options):
    completed = kt(*arguments, **options)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed


def shown(*arguments, **options):
    """The JSON that a command prints."""
    return json.loads(ok(*arguments, "--json", **options).stdout)


@pytest.fixture(scope="module")
def project(shared_service_home, tmp_path_factory):
    """A folder with `jobs.py`, all of it deployed."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "jobs.py").write_text(SOURCE)
    functions = [f"jobs.py:{name}" for name in ("train", "fail", "count", "slow")]
    ok("deploy", *functions, *COMPUTE, cwd=folder)
    ok("deploy", "jobs.py:Counter", *COMPUTE, "--init-args", '{"start": 5}', cwd=folder)
    return folder


# --------------------------------------------------------------------------------------- deploy


def test_deploy_says_what_it_does_for_each_target(project):
    completed = ok("deploy", "jobs.py:train", "jobs.py:fail", *COMPUTE, cwd=project)
    lines = completed.stdout.splitlines()
    assert lines[:2] == ["• train", "• fail"]
    assert {"Deploying train...", "Deploying fail...", "Successfully deployed train."} < set(lines)


def test_deploy_prints_json_alone_when_asked(project):
    (service,) = shown("deploy", "jobs.py:train", *COMPUTE, cwd=project)
    assert (service["name"], service["status"], service["ready_pods"]) == ("train", "Ready", 1)


def test_a_module_is_deployed_by_its_dotted_name(shared_service_home, tmp_path):
    (tmp_path / "requirements.txt").write_text("")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "values.py").write_text("ANSWER = 42\n")
    (package / "inner.py").write_text("from .values import ANSWER\ndef answer(): return ANSWER\n")
    for target in ("package.inner:answer", "package/inner.py:answer"):
        ok("deploy", target, *COMPUTE, cwd=tmp_path)
        assert shown("call", "answer") == 42
    ok("teardown", "answer", "-y")


def test_a_program_that_deploys_itself_at_module_level_is_deployed_once(project):
    program = "import kubetorch as kt\n\ndef triple(n):\n    return 3 * n\n\n"
    program += "f = kt.fn(triple).to(kt.Compute(cpus='0.1'))\nprint('never', f(1))\n"
    (project / "program.py").write_text(program)
    completed = ok("deploy", "program.py:triple", *COMPUTE, cwd=project)
    assert "never" not in completed.stdout + completed.stderr
    assert shown("call", "triple", "-a", "[4]") == 12
    program += "def quadruple(n):\n    return 4 * n\n"
    (project / "program.py").write_text(program)
    ok("deploy", "program.py:triple", "program.py:quadruple", *COMPUTE, cwd=project)
    assert shown("call", "quadruple", "-a", "[4]") == 16
    ok("teardown", "program.py", "-y", cwd=project)
    assert kt("status", "triple").returncode == 1


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("jobs.py:train", [], "train in jobs.py is not decorated with @kt.compute"),
        ("jobs.py:missing", COMPUTE, "missing not found in jobs.py"),
        ("jobs.py:LIMIT", COMPUTE, "LIMIT in jobs.py is not a callable function or class"),
        ("jobs.py", COMPUTE, "nothing in jobs.py is decorated with @kt.compute"),
        ("absent.py:train", COMPUTE, "absent.py not found"),
        ("absent.module:train", COMPUTE, "module 'absent.module' not found"),
        ("jobs.py:train", ["--compute", "[1]"], "--compute must be a JSON object"),
        ("jobs.py:train", [*COMPUTE, "-d", '{"workers": "x"}'], "workers is 'x'"),
        ("jobs.py:train", [*COMPUTE, "--autoscale", '{"min_scales": 1}'], "did you mean min_scale"),
        ("jobs.py:train", ["--compute", '{"cpu": 1}'], "cpu"),
        ("jobs.py:train", [*COMPUTE, "--init-args", "{}"], "--init-args is for classes"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_is_sent(
    project, target, options, message
):
    completed = kt("deploy", target, *options, cwd=project)
    assert completed.returncode == 1
    assert message in completed.stderr
    assert "Deploying" not in completed.stdout


def test_a_name_that_was_forgotten_is_suggested(project):
    assert "jobs.py:train --compute" in kt("deploy", "jobs.py", cwd=project).stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("values = 1 / 0", "ZeroDivisionError: division by zero"),
        ("open('/nowhere/at/all')", "'/nowhere/at/all'"),
        ("def g(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_cannot_be_imported_here_shows_where(project, line, message):
    (project / "wrong.py").write_text(f"def f(): return 1\n{line}\n")
    completed = kt("deploy", "wrong.py:f", *COMPUTE, cwd=project)
    assert completed.returncode == 1
    assert 'wrong.py", line 2' in completed.stderr
    assert completed.stderr.endswith(f"{message}\n")
    assert "kubetorch/" not in completed.stderr


# ----------------------------------------------------------------------------------------- call


def test_call_prints_the_result_and_logs_beside_it(project):
    completed = ok("call", "train", "-a", "[10]", "-k", '{"lr": 0.5}')
    assert completed.stdout == "Result: {'loss': 0.05}\n"
    assert "Calling train" in completed.stderr
    assert "step 10" in completed.stderr


def test_call_prints_the_result_alone_as_json(project):
    assert shown("call", "train", "-a", "[10]") == {"loss": 0.01}
    completed = kt("call", "train", "10", "a b")
    assert completed.returncode == 2
    assert completed.stderr.endswith("""are JSON: kt call train --args '[10, "a b"]'\n""")


def test_call_reaches_methods_whose_object_keeps_its_state(project):
    before = shown("call", "counter:add", "-a", "[0]")
    assert shown("call", "counter:add", "-k", '{"k": 3}') == before + 3


def test_call_prints_the_values_of_a_generator_one_by_one(project):
    assert ok("call", "count", "-a", "[3]").stdout == "Result: 0\nResult: 1\nResult: 2\n"
    assert ok("call", "count", "-a", "[3]", "--json").stdout == "0\n1\n2\n"


def test_a_service_that_allows_nothing_but_pickle_is_called_by_pickle(project):
    (project / "pickled.py").write_text("def pair(a): return (a, {1})\n")
    compute = '{"allowed_serialization": ["pickle"]}'
    ok("deploy", "pickled.py:pair", "--compute", compute, cwd=project)
    assert ok("call", "pair", "-a", "[7]").stdout == "Result: (7, {1})\n"
    assert shown("call", "pair", "-a", "[7]") == [7, "{1}"]


def test_a_service_that_allows_nothing_but_none_is_called_by_it(project):
    source = """
    class Page:
        body = b"<p>hi</p>"
        media_type = "text/html"

    def show(what):
        return Page() if what == "page" else b"A" if what == "bytes" else [what]
    """
    (project / "pages.py").write_text(textwrap.dedent(source))
    ok("deploy", "pages.py:show", "--compute", '{"allowed_serialization": ["none"]}', cwd=project)
    assert ok("call", "show", "-a", '["page"]').stdout == "Result: <p>hi</p>\n"
    assert ok("call", "show", "-a", '["bytes"]').stdout == "Result: b'A'\n"
    assert shown("call", "show", "-a", '["page"]') == "<p>hi</p>"
    assert shown("call", "show", "-a", '["value"]') == ["value"]


def test_names_are_lower_cased(project):
    assert shown("call", "Train", "-a", "[1]") == {"loss": 0.1}


def test_an_exception_of_the_callable_is_shown_with_its_remote_traceback(project):
    completed = kt("call", "fail", "-a", '["bad batch"]')
    assert completed.returncode == 1
    assert completed.stdout == ""
    assert completed.stderr.rstrip().endswith("ValueError: bad batch")
    assert "jobs.py" in completed.stderr and "raise ValueError(message)" in completed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-a", '{"a": 1}'], "--args must be a JSON array"),
        (["train", "-k", "[1]"], "--kwargs must be a JSON object"),
        (["counter"], "counter is a class; a method of it must be named"),
        (["counter:subtract"], "subtract"),
        (["absent"], "Failed to load service absent in namespace default"),
        (["train"], "steps"),
    ],
)
def test_a_call_that_cannot_be_made_fails_with_a_message(project, arguments, message):
    completed = kt("call", *arguments)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert message in completed.stderr


def test_the_method_of_a_function_is_an_error_that_names_it(project):
    completed = kt("call", "train:fast", "-a", "[1]")
    assert (completed.returncode, completed.stdout) == (1, "")
    assert "train is a function; it has no method 'fast'" in completed.stderr
    assert "hint: kt call train calls it" in completed.stderr


@pytest.mark.parametrize("service", ["slow", "patient"])
def test_ctrl_c_ends_the_call_in_the_pod(project, service):
    (project / "patient.py").write_text(
        "import asyncio\nasync def patient(n): print('begun'); await asyncio.sleep(n)\n"
    )
    if service == "patient":
        ok("deploy", "patient.py:patient", *COMPUTE, cwd=project)
    process = subprocess.Popen(
        [sys.executable, "-m", "kubetorch", "call", service, "-a", "[600]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "begun" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert shown("call", service, "-a", "[0]") in ("done", None)
    until(lambda: shown("status", service)["pods"][0]["calls"] == 0, 60)


# ------------------------------------------------------------------------- list, status, describe


def test_list_shows_each_service_in_a_row(project):
    header, *rows = ok("list").stdout.splitlines()
    assert header.split()[:3] == ["RESOURCE", "TYPE", "STATUS"]
    assert {"train", "counter", "fail"} <= {row.split()[0] for row in rows}
    row = next(row for row in rows if row.startswith("train"))
    assert row.split()[:4] == ["train", "deployment", "Ready", "1"]
    assert "0.1" in row


def test_list_filters_sorts_and_names_pods(project):
    names = [service["name"] for service in shown("list", "-t", "ount")]
    assert names == ["count", "counter"]
    latest_first = [service["updated"] for service in shown("list", "--sort")]
    assert latest_first == sorted(latest_first, reverse=True)
    assert "POD NAMES" in ok("list", "-p").stdout


def test_an_empty_namespace_is_no_error(project):
    completed = ok("list", "-n", "nowhere")
    assert completed.stdout == "No services found in nowhere namespace\n"
    assert shown("list", "-n", "nowhere") == []


def test_status_shows_pods(project):
    completed = ok("status", "train")
    assert "train: Ready" in completed.stdout
    assert "RESTARTS" in completed.stdout
    (pod,) = shown("status", "train")["pods"]
    assert pod["ready"] and pod["restarts"] == 0 and pod["url"].startswith("http://127.0.0.1:")


def test_the_curl_line_of_describe_works_as_it_stands(project, tmp_path):
    line = shown("describe", "train")["curl"]
    assert line in ok("describe", "train").stdout
    kt_command = tmp_path / "kt"
    kt_command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kubetorch "$@"\n')
    kt_command.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    completed = subprocess.run(
        line + " --silent", shell=True, env={**os.environ, "PATH": path}, capture_output=True
    )
    assert json.loads(completed.stdout) == {"loss": 0.1}


@pytest.mark.parametrize(("service", "expected"), [("train", "{'loss': 0.1}"), ("counter", None)])
def test_the_python_lines_of_describe_work_as_they_stand(project, tmp_path, service, expected):
    program = shown("describe", service)["python"]
    assert program in ok("describe", service).stdout
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    result = completed.stdout.splitlines()[-1]
    assert result == expected if expected else int(result) > 5


def test_describe_shows_signatures(project):
    assert shown("describe", "counter")["signatures"] == ["def add(self, k)"]
    assert "def train(steps, lr=0.1)" in ok("describe", "train").stdout


# ---------------------------------------------------------------------------------------- token


def test_a_token_calls_one_service_and_no_other(project):
    import urllib.error
    import urllib.request

    token = ok("token", "train").stdout.strip()
    services = {service["name"]: service["pods"][0]["url"] for service in shown("list")}

    def post(url):
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, b'{"args": [1]}', headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    assert post(f"{services['train']}/train") == {"loss": 0.1}
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        post(f"{services['count']}/count")
    refused.value.close()


def test_a_token_says_when_it_expires(project):
    import time

    view = shown("token", "train", "--ttl", "30m")
    assert 1700 < view["expires"] - time.time() < 1801
    assert kt("token", "train", "--ttl", "soon").returncode == 1


# ---------------------------------------------------------------------------------------- check


def test_check_passes_for_a_service_that_works(project):
    lines = ok("check", "train").stdout.splitlines()
    assert lines == [
        "Checking deployment service...",
        "Checking deployment pod...",
        "Checking service call...",
        "Checking log streaming...",
        "✓ All service checks passed",
    ]
    assert shown("check", "train")["ok"] is True


def test_check_of_what_is_not_there_fails(project):
    completed = kt("check", "absent")
    assert completed.returncode == 1
    reason = "Failed to load service absent in namespace default"
    assert reason in completed.stderr

    checked = kt("check", "absent", "--json")
    assert checked.returncode == 1
    missing = {"check": "service", "ok": False, "reason": reason}
    assert json.loads(checked.stdout) == {"ok": False, "checks": [missing]}


# ---------------------------------------------------------------------------------------- calls


def spawn(folder, code):
    program = f"import kubetorch as kt\n{code}"
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.split()[-1]


def test_a_spawned_call_is_found_awaited_and_listed_from_elsewhere(project):
    call_id = spawn(project, "print(kt.fn(name='slow').spawn(0.2).id)")
    assert ok("calls", "result", call_id).stdout == "Result: done\n"
    assert shown("calls", "result", call_id) == "done"
    call = shown("calls", "show", call_id)
    assert (call["service"], call["state"]) == ("slow", "succeeded")
    assert call_id in [listed["id"] for listed in shown("calls", "list", "slow")]
    assert call_id in ok("calls", "list").stdout
    assert call_id in ok("calls").stdout
    assert call_id in [listed["id"] for listed in shown("calls")]


def test_a_spawned_call_that_failed_fails_again_when_awaited(project):
    call_id = spawn(project, "print(kt.fn(name='fail').spawn('bad batch').id)")
    completed = kt("calls", "result", call_id)
    assert completed.returncode == 1
    assert "ValueError: bad batch" in completed.stderr


def test_a_spawned_call_can_be_cancelled(project):
    call_id = spawn(project, "print(kt.fn(name='slow').spawn(60).id)")
    assert "✓ Cancelled slow" in ok("calls", "cancel", call_id).stdout
    completed = kt("calls", "result", call_id)
    assert completed.returncode == 1 and "cancel" in completed.stderr
    assert "had ended already: cancelled" in ok("calls", "cancel", call_id).stdout


def test_calls_are_listed_by_the_name_of_a_service_that_is_gone(project):
    (project / "brief.py").write_text("def brief(): return 7\n")
    ok("deploy", "brief.py:brief", *COMPUTE, cwd=project)
    call_id = spawn(project, "h = kt.fn(name='brief').spawn(); h.get(); print(h.id)")
    ok("teardown", "brief", "-y")
    assert [listed["id"] for listed in shown("calls", "list", "Brief")] == [call_id]
    assert "Failed to load service never" in kt("calls", "list", "never").stderr


@pytest.mark.parametrize(("answer", "status"), [(b"\x03", 130), (b"n\n", 1)])
def test_ctrl_c_at_a_question_is_no_answer(project, answer, status):
    child, screen = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "kubetorch", "teardown", "-a"])
    shown_text = b""
    while b"[y/N]" not in shown_text:
        shown_text += os.read(screen, 65536)
    os.write(screen, answer)
    with contextlib.suppress(OSError):  # the other end was closed
        while True:
            if not select.select([screen], [], [], 10)[0]:
                # A signal just before Python begins to read is noticed only with the next one.
                os.write(screen, answer)
            elif not os.read(screen, 65536):
                break
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


def test_waiting_for_a_call_can_be_given_up(project):
    call_id = spawn(project, "print(kt.fn(name='slow').spawn(60).id)")
    completed = kt("calls", "result", call_id, "--timeout", "0.2")
    assert completed.returncode == 1 and "0.2 s" in completed.stderr
    ok("calls", "cancel", call_id)


def test_a_call_that_nobody_knows_is_an_error(project):
    for verb in ("show", "cancel", "result"):
        completed = kt("calls", verb, "feedfacefeedfacefeedfacefeedface")
        assert completed.returncode == 1 and "feedface" in completed.stderr


# ------------------------------------------------------------------------------------- teardown


def deploy_copies(folder, *names):
    code = "".join(f"def {name}(): return 1\n" for name in names)
    (folder / "copies.py").write_text(code)
    ok("deploy", *(f"copies.py:{name}" for name in names), *COMPUTE, cwd=folder)


def test_teardown_asks_first(project):
    deploy_copies(project, "victim")
    refused = kt("teardown", "victim", stdin="n\n")
    assert refused.returncode == 1
    assert "Looking for resources for service victim in default namespace..." in refused.stdout
    assert shown("status", "victim")["status"] == "Ready"
    completed = ok("teardown", "victim", stdin="y\n")
    assert "✓ Deleted deployment victim" in completed.stdout
    assert completed.stdout.endswith("Teardown completed successfully\n")
    assert kt("status", "victim").returncode == 1


def test_teardown_by_prefix_takes_all_that_begin_so(project):
    deploy_copies(project, "batchone", "batchtwo")
    completed = ok("teardown", "--prefix", "batch", "-y")
    assert completed.stdout.startswith(
        "Deleting all services with prefix batch in default namespace..."
    )
    assert {"✓ Deleted deployment batchone", "✓ Deleted deployment batchtwo"} < set(
        completed.stdout.splitlines()
    )


def test_teardown_of_a_file_takes_what_was_deployed_from_it(project):
    deploy_copies(project, "first", "second")
    completed = ok("teardown", "copies.py:first", "-y", cwd=project)
    assert "first" in completed.stdout and "second" not in completed.stdout
    assert shown("teardown", "copies.py", "-y", cwd=project) == {"deleted": ["second"]}
    assert "train" in [service["name"] for service in shown("list")]


def test_teardown_of_a_file_leaves_services_of_others_alone(project):
    deploy_copies(project, "ours")
    ok("deploy", "copies.py:ours", *COMPUTE, cwd=project, KT_USERNAME="alice")
    completed = ok("teardown", "copies.py", "-y", "--json", cwd=project, KT_USERNAME="alice")
    assert json.loads(completed.stdout) == {"deleted": ["alice-ours"]}
    assert shown("teardown", "copies.py", "-y", cwd=project) == {"deleted": ["ours"]}


def test_a_forced_teardown_does_not_wait_for_calls(project):
    deploy_copies(project, "forced")
    assert "✓ Force deleted deployment forced" in ok("teardown", "forced", "-y", "-f").stdout


def test_teardown_of_nothing_fails_unless_it_was_told_not_to_ask(project):
    completed = kt("teardown", "absent")
    assert completed.returncode == 1 and "Service absent not found" in completed.stderr
    completed = ok("teardown", "absent", "-y")
    assert "Service absent not found" in completed.stdout
    assert completed.stderr.endswith("kt list -n default shows the services\n")
    assert "No services found" in ok("teardown", "--prefix", "absent", "-y").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No target"),
        (["train", "--all"], "not several"),
        (["--prefix", "kt"], "reserved"),
        (["--prefix", "kubetorch", "-y"], "reserved"),
        (["--prefix", "knative-", "-y"], "reserved"),
    ],
)
def test_a_teardown_that_could_mean_too_much_is_refused(project, arguments, message):
    completed = kt("teardown", *arguments)
    assert completed.returncode == 1
    assert message in completed.stderr


def test_names_are_tried_with_the_configured_user_in_front(project):
    (project / "mine.py").write_text("def mine(): return 'mine'\n")
    ok("deploy", "mine.py:mine", *COMPUTE, cwd=project, KT_USERNAME="alice")
    assert shown("status", "mine", KT_USERNAME="alice")["name"] == "alice-mine"
    assert kt("status", "mine").returncode == 1
    exact = kt("teardown", "mine", "-e", KT_USERNAME="alice")
    assert exact.returncode == 1
    # What changes something is one's own first, and one of somebody else by its exact name alone.
    ok("deploy", "mine.py:mine", *COMPUTE, cwd=project)
    assert shown("status", "mine", KT_USERNAME="alice")["name"] == "mine"
    assert ok("exec", "mine", "--", "printenv KT_SERVICE", KT_USERNAME="alice").stdout == (
        "alice-mine\n"
    )
    assert shown("teardown", "mine", "-y", KT_USERNAME="alice") == {"deleted": ["alice-mine"]}
    for command in (["teardown", "mine", "-y"], ["exec", "mine", "--", "true"]):
        completed = kt(*command, KT_USERNAME="alice")
        assert (
            completed.returncode == 1
            and "the service mine in namespace default is not yours" in (completed.stderr)
        )
        assert "mine --exact-match" in completed.stderr
    completed = ok("teardown", "--prefix", "min", "-y", KT_USERNAME="alice")
    assert "Not yours in default namespace: mine" in completed.stderr
    assert shown("teardown", "mine", "-y", "-e", KT_USERNAME="alice") == {"deleted": ["mine"]}


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["list", "--nonsense"],
        ["call"],
        ["logs", "train", "-t", "many"],
        ["calls", "x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments):
    completed = kt(*arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert "Error" in completed.stderr


def test_without_arguments_it_prints_its_help():
    completed = ok()
    assert completed.stdout.startswith("Usage: kt")
    assert "teardown" in completed.stdout


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_the_version_is_printed_alone(option):
    from kubetorch import __version__

    assert ok(option).stdout == f"{__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_installed(shell):
    # Else typer looks for the shell among the processes that this test was started by.
    environ = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = ok("--show-completion", shell, **environ).stdout
    assert f"complete_{shell}" in script and "_KT_COMPLETE" in script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kt logs t", ["train"]),
        ("kt call cou", ["count", "counter"]),
        ("kt status -n elsewhere ", []),
        ("kt describe none", []),
    ],
)
def test_the_shell_offers_the_names_of_services(project, words, offered):
    position = len(words.split(" ")) - 1
    environ = {"COMP_WORDS": words, "COMP_CWORD": str(position), "_KT_COMPLETE": "complete_bash"}
    assert kt(**environ).stdout.split() == offered


def test_the_shell_offers_nothing_where_no_service_runs(tmp_path):
    environ = {"COMP_WORDS": "kt logs ", "COMP_CWORD": "2", "_KT_COMPLETE": "complete_bash"}
    home = tmp_path / "home"
    assert kt(**environ, KT_LOCAL_DIR=str(home)).stdout.split() == []
    assert not home.exists()


def test_a_cluster_that_no_kubeconfig_leads_to_is_refused(project):
    completed = kt("list", KT_BACKEND="kubernetes", KUBECONFIG="")
    assert completed.returncode == 1
    assert "there is no kubeconfig" in completed.stderr
    assert "KT_BACKEND=local" in completed.stderr


# --------------------------------------------------------------- services that do not work


@pytest.fixture(scope="module")
def broken(project):
    """A service whose only deploy failed."""
    (project / "broken.py").write_text(
        "import os\nprint('loading data')\ndef f(): return 1\n"
        "if 'POD_NAME' in os.environ: raise KeyError('no such dataset')\n"
    )
    completed = kt("deploy", "broken.py:f", *COMPUTE, cwd=project)
    assert completed.returncode == 1
    return completed


def test_a_deploy_that_fails_shows_the_users_own_error(broken):
    assert broken.stderr.endswith("KeyError: 'no such dataset'\n")
    assert broken.stderr.count("KeyError: 'no such dataset'") == 1
    assert "Successfully" not in broken.stdout


def test_status_says_why_the_last_deploy_failed(broken):
    completed = ok("status", "f")
    assert "Failed" in completed.stdout
    assert "── Last failure" in completed.stdout and "no such dataset" in completed.stdout
    failure = shown("status", "f")["failure"]
    assert failure["error_type"] == "KeyError"


def test_check_explains_what_fails_with_the_state_of_pods_and_their_lines(broken):
    completed = kt("check", "f")
    assert completed.returncode == 1
    assert "no such dataset" in completed.stderr
    assert "── POD STATUS" in completed.stderr and "\nf-" in completed.stderr
    assert "── LOGS" in completed.stderr and "loading data" in completed.stderr
    verdict = json.loads(kt("check", "f", "--json").stdout)
    assert verdict["ok"] is False
    assert "no such dataset" in verdict["checks"][-1]["reason"]


def test_describe_of_a_service_without_a_ready_pod_still_shows_how_it_would_be_called(broken):
    described = ok("describe", "f").stdout
    assert "── With Curl" in described and "── Last failure" in described
