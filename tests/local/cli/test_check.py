"""`kt check` and its like with `api_url`: a controller that the API server is no way to."""

import json
import os

import pytest
import yaml

from kubetorch.local import lifetime
from tests.local import commands

#: An API server that nobody is.
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def service(shared_service_home):
    return lifetime.ensure()


@pytest.fixture
def kt(tmp_path):
    """Runs `kt` as a user with a token, if any, of a cluster that does not answer."""

    def run(*arguments, api_url, token=None):
        file = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": NOWHERE}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": token}}
        content = {"current-context": "c", "clusters": [cluster], "contexts": [context]}
        if token is not None:
            file.write_text(yaml.safe_dump({**content, "users": [user]}))
        settings = {"KUBECONFIG": str(file), "KT_BACKEND": "kubernetes", "KT_API_URL": api_url}
        return commands.kt(*arguments, HOME=str(tmp_path), **settings)

    return run


def test_a_controller_that_answers_at_api_url_is_well_whatever_the_api_server_says(kt, service):
    completed = kt("check", "--json", api_url=service.url, token=service.token)
    states = {check["check"]: check["state"] for check in json.loads(completed.stdout)["checks"]}
    assert states == {"kubeconfig": "ok", "API server": "note", "version": "ok", "login": "ok"}
    assert completed.returncode == 0, completed.stderr


def test_a_token_that_the_controller_does_not_take_is_a_fault(kt, service):
    completed = kt("check", "--json", api_url=service.url, token="wrong")
    states = {check["check"]: check["state"] for check in json.loads(completed.stdout)["checks"]}
    assert (completed.returncode, states["version"], states["login"]) == (1, "ok", "broken")


def test_without_a_kubeconfig_it_is_said_that_a_token_is_lacking(kt):
    for command in (("list",), ("check",)):
        completed = kt(*command, api_url="https://127.0.0.1:1")
        assert completed.returncode == 1
        output = completed.stdout + completed.stderr
        assert "there is no kubeconfig" in output
        assert "a kubeconfig who you are, by the token of its user" in output


def test_without_a_cluster_it_ends_well_and_says_that_programs_run_here(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    settings = {"HOME": str(tmp_path), "KT_BACKEND": "auto"}
    for words in (["check"], ["check", "--json"]):
        completed = commands.kt(*words, env=environ, **settings)
        assert completed.returncode == 0, completed.stdout
        assert "programs run here, on this machine (there is no kubeconfig)" in completed.stdout


def test_a_url_that_would_show_the_token_is_a_fault_of_the_check(kt):
    completed = kt("check", "--json", api_url="http://kt.example.com", token="x")
    checks = {check["check"]: check for check in json.loads(completed.stdout)["checks"]}
    assert "your token would travel unencrypted" in checks["login"]["reason"]
    assert "https://" in checks["login"]["hint"]
