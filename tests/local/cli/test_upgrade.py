"""`kt install` and `kt upgrade` where something is installed, as an API server remembers it."""

import asyncio
import json

import pytest
import yaml

from kubetorch._version import __version__
from kubetorch.install import releases
from local.fake_apiserver import FakeApiServer
from local.object_server import ObjectServer
from tests.local import commands

SPACE = "kubetorch"
OLD = "0.1.0"
MIRROR = "mirror.example.com/kubetorch"


@pytest.fixture
def kt(tmp_path):
    """Runs `kt` where a release of some version, with some values, is installed."""

    def run(*arguments, version=__version__, **values):
        data = {"version": version, "values": yaml.safe_dump(values), "objects": "[]"}
        server = ObjectServer()
        release = {"kind": "ConfigMap", "metadata": {"name": releases.NAME}, "data": data}
        server.put(f"api/v1/configmaps/{SPACE}", release)
        return asyncio.run(ask(server, arguments))

    async def ask(server, arguments):
        async with FakeApiServer(server) as api:
            completed = await asyncio.to_thread(ask_at, api.url, arguments)
        assert server.writes == []
        return completed

    def ask_at(url, arguments):
        file = tmp_path / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        user = {"name": "u", "user": {"token": "x"}}
        content = {"current-context": "c", "clusters": [cluster], "contexts": [context]}
        file.write_text(yaml.safe_dump({**content, "users": [user]}))
        return commands.kt(*arguments, HOME=str(tmp_path), KUBECONFIG=str(file))

    run.run_at = ask_at
    return run


def deployment(completed):
    assert completed.returncode == 0, completed.stderr
    (deployment_object,) = (
        manifest for manifest in json.loads(completed.stdout) if manifest["kind"] == "Deployment"
    )
    return deployment_object["spec"]


@pytest.mark.parametrize("command", ["install", "upgrade"])
def test_a_dry_run_has_the_values_that_were_given_before(kt, command):
    shown = (command, "--dry-run", "--json", "--set", "logLevel=debug")
    spec = deployment(kt(*shown, replicas=3, image={"repository": MIRROR}))
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 3
    assert container["image"] == f"{MIRROR}:{__version__}"
    assert {"name": "KT_LOG_LEVEL", "value": "debug"} in container["env"]


def test_a_dry_run_says_that_no_cluster_told_it_what_was_given_before(kt):
    completed = kt.run_at("http://127.0.0.1:1", ("install", "--dry-run", "--json"))
    assert deployment(completed)["replicas"] == 1
    assert "lack the values of an earlier installation, if any" in completed.stderr


def test_an_upgrade_does_not_leave_the_image_of_the_version_before(kt):
    image = {"repository": MIRROR, "tag": OLD, "digest": ""}
    for command in (("upgrade",), ("install",), ("upgrade", "--dry-run")):
        completed = kt(*command, version=OLD, image=image)
        assert completed.returncode == 1
        assert f"the image {MIRROR}:{OLD} was given to the installed {OLD}" in completed.stderr
        assert f"kt upgrade -n {SPACE} --image {MIRROR}:{__version__}" in completed.stderr
    shown = ("upgrade", "--dry-run", "--json", "--image", f"{MIRROR}:2")
    (container,) = deployment(kt(*shown, version=OLD, image=image))["template"]["spec"][
        "containers"
    ]
    assert container["image"] == f"{MIRROR}:2"


def test_an_older_package_takes_nothing_back_unasked(kt):
    for command in ("upgrade", "install"):
        completed = kt(command, version="999.0.0")
        assert completed.returncode == 1
        assert "Kubetorch 999.0.0 is installed" in completed.stderr
    deployment(kt("upgrade", "--downgrade", "--dry-run", "--json", version="999.0.0"))


def test_a_kept_value_that_is_known_no_more_can_be_forgotten(kt):
    completed = kt("upgrade", logLevels="debug")
    assert completed.returncode == 1
    assert "values that were given to the installed" in completed.stderr
    assert "--reset-values" in completed.stderr
    for options in (("--reset-values",), ("--set", "logLevels=null")):
        deployment(kt("upgrade", "--dry-run", "--json", *options, logLevels="debug"))
