"""Where pods run is never a surprise: programs and commands say it, and a cluster that is meant is
not replaced by this machine in silence."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from kubetorch.local import lifetime
from tests.local import commands
from tests.local.fake_cluster import FakeCluster

PROGRAM = """
import subprocess, sys
import kubetorch as kt

def double(x):
    return 2 * x

def outer(x):
    inner = kt.fn(name="double")
    told = subprocess.run(
        [sys.executable, "-m", "kubetorch", "call", "double", "--args", "[1]"],
        capture_output=True, text=True,
    )
    return inner(x), told.stdout, told.stderr

if __name__ == "__main__":
    compute = kt.Compute(cpus="0.1", **dict(item.split("=") for item in sys.argv[1:]))
    double = kt.fn(double).to(compute)
    print(double(2), double(3))
"""
LOCAL = "KT_BACKEND=local"


@pytest.fixture(scope="module")
def folder(shared_service_home, tmp_path_factory):
    folder = tmp_path_factory.mktemp("where")
    (folder / "program.py").write_text(PROGRAM)
    return folder


@pytest.fixture
def default(folder):
    """The default kubeconfig: `default(text)` writes it."""
    file = Path(os.environ["HOME"], ".kube", "config")
    file.parent.mkdir(exist_ok=True)
    yield lambda text: file.write_text(text)
    file.unlink(missing_ok=True)
    Path(os.environ["HOME"], ".kt", "contexts").unlink(missing_ok=True)


@pytest.fixture
def cluster(folder):
    service = lifetime.ensure()
    with FakeCluster(service.url, service.token) as cluster:
        yield cluster


def dead(server="https://127.0.0.1:1"):
    """A kubeconfig whose cluster does not answer."""
    return json.dumps(
        {
            "current-context": "dead",
            "contexts": [{"name": "dead", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": "x"}}],
        }
    )


#: No cluster is chosen.
SETTINGS = {"KT_BACKEND": "auto", "KUBECONFIG": "", "NO_COLOR": "1"}


def run(folder, *command, **environ):
    return commands.python(*command, cwd=folder, **{**SETTINGS, **environ})


def program(folder, *arguments, **environ):
    completed = run(folder, "program.py", *arguments, **environ)
    # What a slow deploy says of itself begins with its name.
    error_lines = [line for line in completed.stderr.splitlines(True) if not line.startswith("(")]
    completed.stderr = "".join(error_lines)
    return completed


def answered(folder):
    """A program whose cluster was in time to answer, which has 1.5 s for it on a busy machine."""
    for _ in range(10):
        completed = program(folder)
        if "the API server does not answer" not in completed.stderr:
            break
    return completed


def kt(folder, *arguments, **environ):
    return commands.kt(*arguments, cwd=folder, **{**SETTINGS, **environ})


# ------------------------------------------------------------------------------------- the line


@pytest.mark.parametrize(
    ("backend", "why"),
    [("local", "the setting backend is local"), ("auto", "there is no kubeconfig")],
)
def test_a_program_says_once_on_stderr_where_its_pods_run(folder, backend, why):
    completed = program(folder, KT_BACKEND=backend)

    assert completed.stdout == "4 6\n"
    assert completed.stderr == f"kubetorch: pods run on this machine ({why})\n"


def test_a_program_that_is_told_to_be_quiet_says_nothing(folder):
    assert program(folder, KT_QUIET="true").stderr == ""
    code = "import kubetorch as kt; kt.config.quiet = True; kt.fn(name='double')"
    assert "pods run" not in run(folder, "-c", code).stderr


def test_pods_and_commands_in_pods_say_nothing(folder):
    assert run(folder, "program.py").returncode == 0  # the service `double`
    compute = ["--compute", '{"cpus": "0.1"}']
    assert kt(folder, "deploy", "program.py:outer", *compute).returncode == 0
    completed = kt(folder, "call", "outer", "--args", "[4]", "--json")

    value, stdout, stderr = json.loads(completed.stdout)
    assert (value, stdout) == (8, "Result: 2\n")
    for text in (completed.stderr, stderr):
        assert "pods run" not in text
    assert "backend" not in stderr


def test_processes_that_a_program_starts_do_not_say_it_again(folder):
    code = """
import concurrent.futures, multiprocessing
import kubetorch as kt

def call(x):
    return kt.fn(name="double")(x)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
            print(list(pool.map(call, [1, 2])), call(3))
"""
    assert run(folder, "program.py").returncode == 0  # the service `double`
    (folder / "children.py").write_text(code)
    completed = run(folder, "children.py")

    assert completed.stdout == "[2, 4] 6\n[2, 4] 6\n"
    assert completed.stderr.count("pods run on this machine") == 1


# --------------------------------------------------------------------- clusters that are not there


def test_a_default_kubeconfig_that_leads_nowhere_means_this_machine_and_the_line_says_so(
    folder, default
):
    default(dead())
    completed = program(folder)

    assert completed.stdout == "4 6\n"
    (line,) = completed.stderr.splitlines()
    assert line.startswith("kubetorch: pods run on this machine (the API server does not answer:")
    assert "context 'dead'" in line


def test_a_default_cluster_without_kubetorch_means_this_machine(folder, default, cluster, tmp_path):
    file = cluster.kubeconfig(tmp_path, token="x")
    cluster.is_installed = False
    default(absolute(file))
    completed = answered(folder)

    assert completed.stdout == "4 6\n"
    assert "Kubetorch is not installed in namespace kubetorch: context 'here'" in completed.stderr
    listed = kt(folder, "list")
    assert listed.returncode == 0 and listed.stderr == ""
    torn = kt(folder, "teardown", "double", "-y")
    assert torn.returncode == 0
    assert "backend local: this machine, namespace default" in torn.stderr


def pointing(folder, tmp_path, default, server):
    """Ways to point to a cluster: arguments of the program, and variables."""
    file = tmp_path / "kubeconfig"
    file.write_text(dead(server))
    default(dead(server))
    return {
        "KUBECONFIG": ([], {"KUBECONFIG": str(file)}),
        "kubeconfig_path": ([f"kubeconfig_path={file}"], {}),
        "api_url": ([], {"KT_API_URL": server}),
        "backend": ([], {"KT_BACKEND": "kubernetes"}),
        "missing file": ([], {"KUBECONFIG": str(tmp_path / "none")}),
    }


@pytest.mark.parametrize(
    "pointer", ["KUBECONFIG", "kubeconfig_path", "api_url", "backend", "missing file"]
)
def test_a_cluster_that_the_user_points_to_and_that_is_away_is_an_error(
    folder, tmp_path, default, pointer
):
    arguments, environ = pointing(folder, tmp_path, default, "https://127.0.0.1:1")[pointer]
    begun = time.monotonic()
    completed = program(folder, *arguments, **environ)

    assert (completed.returncode, completed.stdout) == (1, "")
    assert LOCAL in completed.stderr.splitlines()[-1]
    # Nothing is waited for that would take 15 s or more to be given up.
    assert time.monotonic() - begun < 14
    if not arguments:
        listed = kt(folder, "list", **environ)
        assert listed.returncode == 1 and LOCAL in listed.stderr


def test_an_api_server_that_says_nothing_is_given_up_after_its_one_chance(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file = tmp_path / "kubeconfig"
        file.write_text(dead(f"https://127.0.0.1:{silent.getsockname()[1]}"))
        begun = time.monotonic()
        completed = program(folder, KUBECONFIG=str(file))

    assert completed.returncode == 1 and LOCAL in completed.stderr.splitlines()[-1]
    assert time.monotonic() - begun < 19


def absolute(file):
    """A kubeconfig with its files named absolutely, to lie elsewhere."""
    kubeconfig = json.loads(file.read_text())
    authority = kubeconfig["clusters"][0]["cluster"]
    authority["certificate-authority"] = str(file.parent / "ca.crt")
    return json.dumps(kubeconfig)


def test_a_context_that_was_deployed_to_is_meant_from_then_on(folder, default, cluster, tmp_path):
    service = lifetime.ensure()
    default(absolute(cluster.kubeconfig(tmp_path, token=service.token)))
    completed = answered(folder)
    assert completed.stdout == "4 6\n", completed.stderr
    (line,) = completed.stderr.splitlines()
    assert line.startswith("kubetorch: pods run in Kubernetes: context 'here' of ")
    assert line.endswith("(Kubetorch is installed there)")

    cluster.is_installed = False
    completed = program(folder)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert "pods run in Kubernetes: context 'here'" in completed.stderr
    assert "deployed to before" in completed.stderr
    assert "not installed in namespace kubetorch" in completed.stderr
    assert LOCAL in completed.stderr.splitlines()[-1]

    cluster.stop()
    try:
        completed = program(folder)
        assert (completed.returncode, completed.stdout) == (1, "")
        assert LOCAL in completed.stderr.splitlines()[-1]
        assert program(folder, KT_BACKEND="local").stdout == "4 6\n"
    finally:
        cluster.start()


# --------------------------------------------------------------------------------------- commands

CHANGING = (
    ("deploy", "program.py:double", "--compute", '{"cpus": "0.1"}'),
    ("run", "python", "app.py"),
    ("apply", "manifest.yaml"),
    ("call", "double", "--args", "[1]"),
    ("teardown", "double", "-y"),
    ("teardown", "-a", "-y"),
    ("secrets", "create", "key", "-v", "HOME"),
    ("secrets", "update", "key", "-v", "HOME"),
    ("secrets", "delete", "key", "-y"),
    ("volumes", "create", "data"),
    ("volumes", "delete", "data", "-y"),
    ("volumes", "ssh", "data"),
    ("ssh", "double", "--", "true"),
    ("calls", "cancel", "0123456789abcdef"),
)


@pytest.fixture
def files(folder):
    (folder / "app.py").write_text("import kubetorch as kt\nkt.app(cpus='0.1')\n")
    container = {"name": "c", "image": "i", "command": ["true"]}
    template = {"metadata": {"labels": {"app": "m"}}, "spec": {"containers": [container]}}
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "m"},
        "spec": {"selector": {"matchLabels": {"app": "m"}}, "template": template},
    }
    (folder / "manifest.yaml").write_text(json.dumps(manifest))


def all_changing(folder, **environ):
    """What each of these commands comes to."""
    return {words: kt(folder, *words, **environ) for words in CHANGING}


@pytest.mark.usefixtures("files")
def test_a_command_that_changes_something_refuses_to_guess_where(folder, default):
    default(dead())
    for command, completed in all_changing(folder).items():
        assert completed.returncode == 1, (command, completed)
        assert "the API server does not answer: context 'dead'" in completed.stderr, command
        assert LOCAL in completed.stderr, command


@pytest.mark.usefixtures("files")
def test_a_command_that_changes_something_says_where(folder):
    for command, completed in all_changing(folder, KT_BACKEND="local", KT_NAMESPACE="team").items():
        first, *further_lines = completed.stderr.splitlines()
        assert first == "backend local: this machine, namespace team", command
        assert not any("pods run" in line for line in further_lines), command


def test_a_command_names_the_cluster_that_it_changes(folder, cluster, tmp_path):
    file = cluster.kubeconfig(tmp_path, token=lifetime.ensure().token)
    completed = kt(folder, "teardown", "nothing", "-y", "-n", "team", KUBECONFIG=str(file))

    where = f"backend kubernetes: context 'here' of {file}, namespace team"
    assert completed.stderr.splitlines()[0] == where


def test_a_command_that_only_looks_says_when_a_cluster_did_not_answer(folder, default):
    default(dead())
    completed = kt(folder, "list")

    assert completed.returncode == 0
    assert "looking on this machine: the API server does not answer" in completed.stderr
