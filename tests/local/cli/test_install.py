"""`kt install` and its like without a cluster: what they print, and what they refuse."""

import json
import os

import pytest
import yaml

from tests.local import commands


@pytest.fixture
def kt(tmp_path):
    """Runs `kt` where there is no kubeconfig."""

    def run(*arguments, **environ):
        inherited = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
        settings = {"HOME": str(tmp_path), "KT_BACKEND": "auto", **environ}
        return commands.kt(*arguments, env=inherited, **settings)

    return run


def test_what_would_be_installed_is_printed_without_a_cluster(kt):
    completed = kt("install", "--dry-run", "--image", "localhost/kubetorch:dev", "-n", "team")
    assert completed.returncode == 0, completed.stderr
    objects = list(yaml.safe_load_all(completed.stdout))
    assert objects[0]["kind"] == "Namespace"
    (deployment,) = (manifest for manifest in objects if manifest["kind"] == "Deployment")
    assert deployment["metadata"]["namespace"] == "team"
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "localhost/kubetorch:dev"
    listed = json.loads(kt("install", "--dry-run", "--json").stdout)
    assert [manifest["kind"] for manifest in listed] == [manifest["kind"] for manifest in objects]


def test_set_goes_before_a_file_and_an_image_before_both(kt, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text("{logLevel: debug, replicas: 3, image: {tag: file}}")
    options = ("-f", str(file), "--set", "replicas=2,image.tag=set", "--image", "a/b:option")
    completed = kt("install", "--dry-run", "--json", *options)
    (deployment,) = (
        manifest for manifest in json.loads(completed.stdout) if manifest["kind"] == "Deployment"
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["KT_LOG_LEVEL"] == "debug"
    assert deployment["spec"]["replicas"] == 2
    assert container["image"] == "a/b:option"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "replica=1"), "did you mean replicas?"),
        (("--set", "replicas"), "is no key=value"),
        (("--image", "a b"), "is no reference of a container image"),
        (("-f", "/does/not/exist"), "/does/not/exist cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(kt, options, message):
    completed = kt("install", *options, "--dry-run")
    assert completed.returncode == 1
    assert message in completed.stderr
    assert completed.stdout == ""


@pytest.mark.parametrize("command", [("install",), ("upgrade",), ("uninstall", "-y")])
def test_without_a_kubeconfig_they_say_which_file_is_missing(kt, command):
    completed = kt(*command)
    assert completed.returncode == 1
    assert ".kube/config does not exist" in completed.stderr
    assert "hint: set KUBECONFIG" in completed.stderr


def test_check_without_a_kubeconfig_says_that_programs_run_here(kt):
    completed = kt("check", "--json")
    assert completed.returncode == 0
    (check,) = json.loads(completed.stdout)["checks"]
    assert (check["check"], check["state"]) == ("backend", "ok")
    assert "there is no kubeconfig" in check["reason"]


def test_check_says_that_services_run_here_where_they_do(kt):
    completed = kt("check", KT_BACKEND="local")
    assert completed.returncode == 0
    assert "programs run here, on this machine" in completed.stdout


def test_check_stops_at_an_api_server_that_does_not_answer(kt, tmp_path):
    file = tmp_path / "config"
    cluster = {"name": "dead", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "dead", "context": {"cluster": "dead", "user": "u"}}
    user = {"name": "u", "user": {"token": "x"}}
    content = {"current-context": "dead", "clusters": [cluster], "contexts": [context]}
    file.write_text(yaml.safe_dump({**content, "users": [user]}))
    completed = kt("check", "--json", KUBECONFIG=str(file))
    states = {check["check"]: check["state"] for check in json.loads(completed.stdout)["checks"]}
    assert (completed.returncode, states) == (1, {"kubeconfig": "ok", "API server": "broken"})
