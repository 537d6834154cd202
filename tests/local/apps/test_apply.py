"""`kt apply`: manifests whose containers' commands run as apps."""

import json
import subprocess
import sys
import textwrap
import time

import pytest

from tests.local import commands

WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  template:
    spec:
      containers:
        - name: main
          image: python
          command: [python, -c]
          args: ["import os, time; print(os.environ['WHO'], '$(STAGE)', flush=True); time.sleep(9)"]
          env: [{name: STAGE, value: test}, {name: WHO, value: "$(STAGE)er"}]
"""
ONCE = """
apiVersion: batch/v1
kind: Job
metadata: {name: once}
spec:
  template:
    spec:
      containers: [{name: main, image: busybox, command: [sh, -c, "echo ended; exit 3"]}]
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: single}
spec:
  containers: [{name: main, image: busybox}]
"""


#: A test runs `kt` many times.
pytestmark = pytest.mark.timeout(300)
#: Needs root here; elsewhere a user namespace does.
needs_views = pytest.mark.skipif(
    sys.platform != "linux"
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="this machine allows no namespaces of mounts",
)


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def kt(tmp_path):
    def run(*arguments):
        return commands.kt(*arguments, cwd=tmp_path, NO_COLOR="1")

    yield run
    for name in ("web", "once", "single"):
        run("teardown", name, "-y")


@pytest.fixture
def write(tmp_path):
    def write(text, name="app.yaml"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write


def view_once_logged(kt, name, text):
    """The view of a service, once its log has what is wanted."""
    deadline = time.monotonic() + 60
    while text not in kt("logs", name).stdout:
        assert time.monotonic() < deadline, kt("logs", name)
        time.sleep(0.1)
    return json.loads(kt("describe", name, "--json").stdout)


def test_the_command_of_a_deployment_runs_in_all_its_pods(kt, write):
    applied = kt("apply", write(WEB))
    assert applied.returncode == 0, applied.stderr
    assert "Applying app.yaml as 'web'." in applied.stderr
    view = view_once_logged(kt, "web", "tester test")
    assert len(view["pods"]) == 2


def test_a_job_that_has_ended_says_how(kt, write):
    assert kt("apply", write(ONCE)).returncode == 0
    view_once_logged(kt, "once", "ended")
    deadline = time.monotonic() + 60
    while "exit code 3" not in (status := kt("status", "once").stdout):
        assert time.monotonic() < deadline, status


def test_the_command_of_a_dockerfile_is_taken_when_the_manifest_has_none(kt, write):
    dockerfile = write("FROM busybox\nCMD echo from the file && sleep 600\n", "Dockerfile")
    applied = kt("apply", write(POD), "-d", dockerfile, "--json")
    assert applied.returncode == 0, applied.stderr
    assert "Using command from Dockerfile: echo from the file" in applied.stderr
    assert json.loads(applied.stdout)["name"] == "single"
    assert [pod["name"] for pod in view_once_logged(kt, "single", "from the file")["pods"]] == [
        "single"
    ]


@needs_views
def test_the_command_runs_in_the_last_folder_of_the_dockerfile(kt, write, tmp_path):
    (tmp_path / "main.py").write_text("import os; print('runs in', os.getcwd(), flush=True)\n")
    text = 'FROM busybox\nWORKDIR /app\nCOPY main.py .\nCMD ["python", "main.py"]\n'
    applied = kt("apply", write(POD), "-d", write(text, "Dockerfile"))
    assert applied.returncode == 0, applied.stderr
    view_once_logged(kt, "single", "runs in /app")


def test_the_folder_of_a_manifest_is_put_before_that_of_the_dockerfile(kt, write):
    text = "FROM busybox\nWORKDIR sub\nCMD echo runs in $(basename $PWD); sleep 600\n"
    dockerfile = write(text, "Dockerfile")
    assert kt("apply", write(POD), "-d", dockerfile).returncode == 0
    view_once_logged(kt, "single", "runs in sub")
    manifest = POD.replace("image: busybox", "image: busybox, workingDir: /srv")
    assert kt("apply", write(manifest), "-d", dockerfile).returncode == 0
    view_once_logged(kt, "single", "runs in srv")


def test_a_pod_without_a_command_is_idle(kt, write):
    assert kt("apply", write(POD)).returncode == 0
    assert "sleep infinity" in kt("describe", "single").stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (POD.replace("metadata: {name: single}", "metadata: {}"), "has no name"),
        ("kind: [", "no valid YAML"),
        (POD.replace("kind: Pod", "kind: Fleet"), "'Fleet'"),
    ],
)
def test_what_cannot_be_applied_is_exit_status_1(kt, write, text, message):
    failed = kt("apply", write(text))
    assert failed.returncode == 1
    assert message in failed.stderr


def test_a_command_that_fails_before_it_listens_fails_to_apply(kt, write):
    failed = kt("apply", write(ONCE), "--port", "18999")
    assert failed.returncode == 1
    assert "Failed to apply: " in failed.stderr
