"""What a removal deletes and what it leaves, against a server that keeps objects."""

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from kubetorch.controller.backends.kubernetes import takeover
from kubetorch.install import releases
from kubetorch.install import remove as removing
from kubetorch.install.remove import Removal
from kubetorch.manifests import labels
from local.cluster.test_installing import DEFINITION, install, scenario
from local.small_apiserver import WORKLOADS
from tests.local import commands

SPACE = "kubetorch"
LABELS_OF_OTHERS = {
    "app.kubernetes.io/managed-by": "kubetorch",
    "app.kubernetes.io/name": "kubetorch",
}


async def remove(server, namespace=SPACE, **options):
    async with server.client() as client:
        release = await releases.load(client, namespace)
        watched = release.watched if release else []
        scope = await removing.scope_of(client, watched, namespace)
        items = release.items if release else ()
        removal = Removal(namespace, scope, 10.0, **options)
        return await removing.remove(client, removal, items, lambda line: None)


@scenario
async def test_nothing_is_left(server):
    before = set(server.objects)
    await install(server)
    server.workload("team", "f")
    removal = await remove(server)
    assert set(server.objects) == before
    assert (removal.definition_users, removal.leftovers) == ([], [])


@scenario
async def test_an_object_that_a_deploy_took_over_is_put_back(server):
    await install(server)
    server.workload("team", "f")
    containers = ({"name": "main"}, {"name": "kubetorch"})
    spec, changed = (
        {"template": {"spec": {"containers": [container]}}} for container in containers
    )
    existing = server.put("apps/v1", "Deployment", "team", "f", spec=spec)
    paths = [*takeover.replaced_fields(existing, {**existing, "spec": changed}, {"main"})]
    text = takeover.record(existing, {**existing, "spec": changed}, paths)
    noted = {labels.APPLIED: "1", labels.BEFORE: text}
    of_service = {labels.SERVICE: "f"}
    server.put(
        "apps/v1", "Deployment", "team", "f", labels=of_service, annotations=noted, spec=changed
    )
    await remove(server)
    remaining = server.take("Deployment", "f", "team")
    assert remaining["spec"] == spec
    assert "annotations" not in remaining["metadata"]


@scenario
async def test_the_kind_stays_for_services_of_others_which_are_named(server):
    await install(server, watchNamespaces=["team"])
    server.workload("team", "f")
    server.workload("research", "g")
    removal = await remove(server)
    assert removal.definition_users == ["research/g"]
    assert server.names("KubetorchWorkload") == {"research/g"}
    definition = server.take("CustomResourceDefinition", DEFINITION)
    assert "kubetorch.com/install-namespace" not in definition["metadata"]["labels"]
    assert server.names("Deployment") == set()
    # Whoever comes next may have it, and a removal deletes it when nobody needs it.
    await install(server, watchNamespaces=["research"])
    assert (await remove(server)).definition_users == []
    assert server.names("CustomResourceDefinition") == set()


@scenario
async def test_the_kind_stays_for_another_installation_without_services(server):
    await install(server, watchNamespaces=["team"])
    server.controller("second", "research")
    removal = await remove(server)
    assert removal.definition_users == ["the Kubetorch in namespace second"]
    assert server.names("CustomResourceDefinition") == {f"/{DEFINITION}"}


@scenario
async def test_a_kind_of_another_version_stays(server):
    await install(server)
    server.kinds["kubetorch.com/v2"] = server.kinds.pop(WORKLOADS)
    removal = await remove(server)
    assert removal.definition_users == [f"{DEFINITION} that are not of version v1alpha1"]
    assert server.names("CustomResourceDefinition") == {f"/{DEFINITION}"}


@scenario
async def test_an_installation_for_all_namespaces_leaves_those_that_another_names(server):
    await install(server)
    server.controller("second", "research")
    server.workload("research", "g")
    server.workload("team", "f")
    removal = await remove(server)
    assert removal.definition_users == ["the Kubetorch in namespace second", "research/g"]
    assert server.names("KubetorchWorkload") == {"research/g"}


@scenario
async def test_what_others_labelled_as_ours_is_left(server):
    await install(server)
    server.put("v1", "PersistentVolumeClaim", "team", "data", labels=LABELS_OF_OTHERS)
    server.put("v1", "ConfigMap", "team", "settings", labels=LABELS_OF_OTHERS)
    copied = {**labels.MANAGED, labels.VOLUME: "copy"}
    server.put("v1", "PersistentVolumeClaim", "team", "copy", labels=copied)
    server.put("v1", "ServiceAccount", "team", "kubetorch-user", labels=labels.MANAGED)
    server.put("v1", "PersistentVolumeClaim", "team", "volume", labels={labels.VOLUME: "volume"})
    removal = await remove(server)
    assert server.names("PersistentVolumeClaim") == {"team/copy", "team/data", "team/volume"}
    assert server.names("ConfigMap") == {"team/settings"}
    assert server.names("ServiceAccount") == set()
    assert [volume.name for volume in removal.user_objects.volumes] == ["copy", "volume"]


@scenario
async def test_volumes_go_if_that_is_asked_for(server):
    await install(server)
    server.put("v1", "PersistentVolumeClaim", "team", "volume", labels={labels.VOLUME: "volume"})
    await remove(server, volumes=True)
    assert server.names("PersistentVolumeClaim") == set()


@pytest.mark.parametrize("status", [403, 404, 405, 503])
def test_a_namespace_stays_while_something_in_it_cannot_be_seen(status):
    @scenario
    async def stays(server):
        server.kinds["example.com/v1"] = {"widgets": "Widget"}
        await install(server)
        server.refused["widgets"] = status
        removal = await remove(server)
        assert removal.leftovers == ["cannot see widgets.example.com"]
        assert f"/{SPACE}" in server.names("Namespace")

    stays()


@scenario
async def test_a_namespace_stays_while_the_server_of_a_group_is_away(server):
    server.kinds["example.com/v1"] = {"widgets": "Widget"}
    await install(server)
    server.silent.add("example.com/v1")
    removal = await remove(server)
    assert removal.leftovers == ["cannot see kinds of example.com/v1"]


@scenario
async def test_a_namespace_stays_for_a_kind_that_is_not_in_the_preferred_version(server):
    server.kinds["example.com/v2"] = {"gadgets": "Gadget"}
    server.kinds["example.com/v1"] = {"widgets": "Widget"}
    await install(server)
    server.put("example.com/v1", "Widget", SPACE, "w")
    removal = await remove(server)
    assert removal.leftovers == ["Widget w"]
    assert f"/{SPACE}" in server.names("Namespace")


@scenario
async def test_values_that_this_client_does_not_know_do_not_hinder_a_removal(server):
    await install(server, watchNamespaces=["team"])
    values = {"watchNamespaces": ["team"], "calledOtherwise": 1}
    server.take("ConfigMap", releases.NAME, SPACE)["data"]["values"] = json.dumps(values)
    server.workload("team", "f")
    server.workload("research", "g")
    printed = await kt(server, "uninstall", "-y", "--json")
    assert json.loads(printed)["definition_needed_by"] == ["research/g"]
    assert server.names("KubetorchWorkload") == {"research/g"}


async def kt(server, *arguments):
    """What `kt` prints, run for this cluster; it has to succeed."""
    cluster = {"name": "it", "cluster": {"server": server.url}}
    context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
    user = {"name": "it", "user": {"token": "x"}}
    kubeconfig = {
        "current-context": "it",
        "clusters": [cluster],
        "contexts": [context],
        "users": [user],
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kubeconfig"
        file.write_text(json.dumps(kubeconfig))
        settings = {"HOME": folder, "KUBECONFIG": str(file), "KT_BACKEND": "auto"}
        completed = await asyncio.to_thread(commands.kt, *arguments, **settings)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def as_helm(server):
    """What is there was made by helm."""
    for stored in server.objects.values():
        own_labels = stored["metadata"].get("labels") or {}
        if own_labels.get("app.kubernetes.io/managed-by") == "kubetorch":
            own_labels["app.kubernetes.io/managed-by"] = "Helm"


@pytest.mark.parametrize("other_workload", [None, "g"])
def test_the_hook_of_helm_deletes_the_kind_if_nobody_else_needs_it(other_workload):
    @scenario
    async def deletes(server):
        await install(server, watchNamespaces=["team"])
        as_helm(server)
        server.workload("team", "f")
        if other_workload:
            server.workload("research", other_workload)
        removal = await remove(server, contents_only=True)
        definition = server.take("CustomResourceDefinition", DEFINITION)
        assert removal.definition_users == (["research/g"] if other_workload else [])
        assert (definition is not None) == bool(other_workload)
        if definition:
            assert "app.kubernetes.io/managed-by" not in definition["metadata"]["labels"]
        assert server.names("Role"), "helm deletes those itself"

    deletes()
