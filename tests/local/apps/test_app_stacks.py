"""`kt stacks` of an app: where the threads of its Python processes are."""

import json
import sys

import pytest

import kubetorch as kt
from tests.free_ports import free_port
from tests.local import commands
from tests.local.calling import until

SERVER = """
import multiprocessing, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

def wait_for_ever():
    threading.Event().wait()

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=wait_for_ever, daemon=True).start()
    threading.Thread(target=wait_for_ever, daemon=True).start()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def app(project, monkeypatch):
    """Deploys a command."""
    monkeypatch.chdir(project.folder)
    (project.folder / "server.py").write_text(SERVER)
    (project.folder / "sitecustomize.py").write_text("import sys\nsys.is_customised = True\n")

    def deploy(command, name, **options):
        code = (str(project.folder), "server", "app")
        return kt.App(None, command, code, name=name, **options).to(kt.Compute(cpus="0.1"))

    return deploy


def shown(name):
    ended = commands.kt("stacks", name, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_each_python_of_an_app_shows_its_threads_and_goes_on(app):
    port = free_port()
    app(f"{sys.executable} server.py {port}", "slow", port=port)

    views = []
    until(lambda: views.append(shown("slow")) or len(views[-1]) == 2, 60)
    for _ in range(2):
        main, child = shown("slow")
        assert "in serve_forever" in main["text"]
        assert "in wait_for_ever" in main["text"]
        assert "in wait_for_ever" in child["text"]
        assert "sitecustomize" not in main["text"] + child["text"]
    text = commands.kt("stacks", "slow").stdout
    assert f"process {main['pid']}" in text
    assert "in serve_forever" in text


def test_an_app_without_a_python_that_answers_says_what_to_do(app):
    app("sleep 600", "plain")
    app(f"{sys.executable} -I -c 'import time; time.sleep(600)'", "isolated")

    for name in ("plain", "isolated"):
        (view,) = shown(name)
        assert "no Python of the app answers; py-spy dump --pid" in view["text"]
    assert shown("plain")  # which the question did not end


def test_the_environments_own_sitecustomize_runs_too(app):
    deployed = app(f"{sys.executable} -c 'import sys; print(sys.is_customised, sys.path)'", "own")

    lines = []
    assert deployed.follow(lines.append) == 0
    assert any("True" in line and "children" not in line for line in lines), lines
