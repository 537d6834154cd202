"""`kt notebook`: JupyterLab in a pod, for who has its token."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import websocket

import kubetorch as kt
from kubetorch.cli.notebook import COMMAND
from kubetorch.sdk import backend
from tests.free_ports import free_port
from tests.local import commands

NAME = "notes"
PLAIN = "def f():\n    return 1\n"
pytestmark = [pytest.mark.security, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@contextlib.contextmanager
def notebook(folder, *options, name=NAME):
    """A `kt notebook` that runs; its URL, and what it writes on stderr up to then."""
    port = free_port()
    again = ["kt", "notebook", *([] if name == "kt-notebook" else [name])]
    command = [*again, "-p", str(port), *options]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        written = ""
        try:
            for line in process.stdout:
                written += line
                if line.startswith("JupyterLab of "):
                    yield line.split()[-1], written
                    break
            else:
                raise AssertionError(written)
        finally:
            process.send_signal(signal.SIGINT)
            end = process.stdout.read()
        assert f"{' '.join(again)} opens it again, kt teardown {name} ends it" in end


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notes")
    (folder / "pyproject.toml").touch()
    (folder / "mine.txt").write_text("my own file")
    yield folder
    commands.kt("teardown", NAME, "-y").check_returncode()


def ask(url, token=None, method="GET"):
    headers = {} if token is None else {"Authorization": f"token {token}"}
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def run_code(base, token, code):
    """What a kernel of the notebook answers, over its WebSocket."""
    _, kernel = ask(f"{base}/api/kernels", token, "POST")
    url = f"{base}/api/kernels/{kernel['id']}/channels?token={token}".replace("http", "ws", 1)
    connection = websocket.create_connection(url, timeout=60)
    header = {"msg_id": "1", "msg_type": "execute_request", "session": "s", "username": "u"}
    content = {"code": code, "silent": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
    connection.send(json.dumps({**message, "channel": "shell", "buffers": []}))
    while True:
        answer = json.loads(connection.recv())
        if answer["msg_type"] == "stream":
            connection.close()
            return answer["content"]["text"]


def test_jupyter_runs_in_a_pod_for_who_has_its_token(folder):
    with notebook(folder, "--cpus", "0.1") as (url, written):
        base, token = url.partition("/lab")[0], url.partition("token=")[2]

        assert ask(f"{base}/api/contents")[0] == 403
        assert ask(f"{base}/api/contents", "guess")[0] == 403
        assert token not in written.replace(url, "")
        assert "/lab?" not in written.replace(url, "")
        assert "Control-C" not in written
        status, listing = ask(f"{base}/api/contents", token)
        assert status == 200
        assert "mine.txt" in [entry["name"] for entry in listing["content"]]
        answer = run_code(base, token, "import os; print(os.environ['KT_SERVICE_NAME'])")
        assert answer.strip() == NAME

        view = backend.session().get_workload("default", NAME)
        status, text = ask(f"{view.pods[0].url}/http/api/contents?token={token}")
        assert (status, "needs a token" in text) == (401, True)

    # It runs on; other options are named, and do not restart it.
    with notebook(folder, "--cpus", "0.2") as (again, written):
        assert again.partition("token=")[2] == token
        assert "runs with other cpus; --restart applies" in written
        assert "works on the files of" not in written


def listed(url):
    """The names of the files that Jupyter shows."""
    base, _, token = url.partition("/lab?token=")
    return [entry["name"] for entry in ask(f"{base}/api/contents", token)[1]["content"]]


def test_folders_without_a_project_and_too_large_ones_are_opened_if_asked_for(tmp_path):
    plain, large = tmp_path / "plain", tmp_path / "large"
    for path in (plain, large):
        path.mkdir()
        (path / "mine.txt").touch()
    (large / "pyproject.toml").touch()
    with (large / "rows.bin").open("wb") as file:
        file.truncate(1 << 40)
    try:
        with notebook(plain, name="kt-notebook") as (url, _):
            assert listed(url) == ["mine.txt"]
        with notebook(large, name="kt-notebook") as (url, written):
            assert listed(url) == ["mine.txt"]
            assert f"it works on the files of {plain}; --restart takes those" in written
        with notebook(large, "--restart", name="kt-notebook") as (url, written):
            assert sorted(listed(url)) == ["mine.txt", "pyproject.toml", "rows.bin"]
            assert "rows.bin" in written
            assert "starts without these files" in written
    finally:
        commands.kt("teardown", "kt-notebook", "-y").check_returncode()


def refused(folder, *words, **environ):
    ended = commands.kt("notebook", *words, cwd=folder, **environ)
    assert ended.returncode == 1
    return ended.stderr


def test_a_service_that_is_no_notebook_is_not_taken(folder, project):
    kt.fn(project.module(PLAIN).f, name="plain").to(kt.Compute(cpus="0.1"))

    assert "plain is no notebook" in refused(folder, "plain")


def test_a_port_that_is_taken_is_refused_with_the_option_that_names_another_one(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "kt notebook --port" in refused(folder, NAME, "--port", str(port))


def test_gpus_need_an_image(folder):
    assert "--gpus needs an image" in refused(folder, "--gpus", "1")


def test_a_pod_opens_no_notebook(folder):
    assert "this is a pod" in refused(folder, KT_SERVICE_NAME="f", POD_NAME="f-1")


def test_an_image_without_jupyter_says_what_to_install(tmp_path):
    (tmp_path / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "POD_NAME": "bare"}

    ended = subprocess.run(COMMAND, shell=True, env=environ, capture_output=True, text=True)

    assert ended.returncode == 127
    assert 'kt.Image().pip_install(["jupyterlab"])' in ended.stderr
