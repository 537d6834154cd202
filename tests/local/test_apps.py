"""Apps in real pods: commands that run there, reached below /http/."""

import http.client
import json
import shutil
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

import kubetorch as kt
from kubetorch.lib import ports
from tests.local.user_project import UserProject

TIMEOUT = 20.0
SERVER = Path(__file__).with_name("app_server.py")


@pytest.fixture(scope="module", autouse=True)
def service(shared_service_home):
    return shared_service_home


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = UserProject(tmp_path / "shop")
    shutil.copy(SERVER, project.folder / "server.py")
    monkeypatch.chdir(project.folder)
    yield project
    project.forget()


@pytest.fixture
def port():
    return ports.choose(())


class Deployed:
    """An app that was deployed, and requests to it."""

    def __init__(self, project, port, **options):
        self.project = project
        self.port = port
        self.options = {"name": f"web{project.suffix}", "port": port, **options}
        self.app = self.deploy()

    def deploy(self, **compute):
        settings = {"cpus": "0.1", **compute}
        app = kt.App(
            None,
            f"{sys.executable} server.py {self.port}",
            (str(self.project.folder), "server", "app"),
            **self.options,
        )
        self.app = app.to(kt.Compute(**settings))
        return self.app

    @property
    def agent(self):
        return urlsplit(self.app.base_endpoint)

    @property
    def token(self):
        return self.app.request_headers["Authorization"].partition(" ")[2]

    def connect(self):
        return http.client.HTTPConnection(self.agent.hostname, self.agent.port, timeout=TIMEOUT)

    def ask(self, path="/", method="GET", body=None, *, token=True, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        connection = self.connect()
        try:
            connection.request(method, f"/http{path}", body=body, headers=sent)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def about(self, path="/about", **more):
        status, _, body = self.ask(path, **more)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def web(project, port):
    deployed = Deployed(project, port)
    yield deployed
    deployed.app.teardown()


def wait_until(condition, timeout=TIMEOUT):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


# ------------------------------------------------------------------------------------ requests


def test_requests_reach_the_app_and_its_answers_come_back(web):
    status, headers, body = web.ask("/about?a=1&b=%20", "PUT", b"{}", X_Own="mine")

    assert (status, headers["x-app"]) == (200, "yes")
    about = json.loads(body)
    assert (about["method"], about["query"]) == ("PUT", "a=1&b=%20")
    assert about["headers"]["x-own"] == "mine"
    assert about["headers"]["x-forwarded-prefix"] == "/http"
    assert web.ask("/missing")[0] == 404
    assert web.ask("/nothing")[0] == 204
    assert web.ask("/", "HEAD")[2] == b""


def test_the_app_runs_in_the_project_with_the_variables_of_its_pod(web):
    about = web.about()

    assert Path(about["cwd"]).name == "shop"
    assert about["env"]["KT_APP_PORT"] == str(web.port)
    assert about["env"]["KT_SERVICE_NAME"] == web.app.service_name
    assert not [name for name in about["env"] if name.startswith("KT_POD_")]


def test_a_redirect_to_its_own_path_stays_below_the_prefix(web):
    status, headers, _ = web.ask("/redirect")

    assert (status, headers["location"]) == (302, "/http/about?x=1")


def test_an_edit_restarts_the_app_with_the_new_code(web):
    assert web.ask()[2] == b"one"
    before = web.about()["pid"]

    source = web.project.folder / "server.py"
    source.write_text(source.read_text().replace('VERSION = "one"', 'VERSION = "two"'))
    web.deploy()

    assert web.ask()[2] == b"two"
    wait_until(lambda: not psutil.pid_exists(before))


def test_a_deploy_without_a_change_runs_the_command_again(web):
    before = web.about()["pid"]
    web.deploy()
    assert web.about()["pid"] != before
