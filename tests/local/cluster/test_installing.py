"""What an installation refuses, leaves alone and gives up, against a server that keeps objects."""

import asyncio
import contextlib

import pytest

from kubetorch.errors import InstallError
from kubetorch.install import apply
from kubetorch.install.chart import Chart
from local.small_apiserver import SmallApiServer

DEFINITION = "kubetorchworkloads.kubetorch.com"
#: Values of an installation beside one that brings definition and roles.
SECOND = {"crd": {"create": False}, "rbac": {"userRoles": False}}
GOING = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


async def install(server, namespace="kubetorch", **values):
    report_lines = []
    async with server.client() as client:
        installed = await apply.apply(
            client, Chart(), values, namespace=namespace, report=report_lines.append
        )
    return installed, report_lines


def scenario(body):
    """Runs a test with a server in which there are two namespaces for services."""

    def run():
        async def serve():
            async with SmallApiServer() as server:
                for name in ("research", "team"):
                    server.put("v1", "Namespace", "", name)
                await body(server)

        asyncio.run(serve())

    run.__name__ = body.__name__
    return run


@contextlib.contextmanager
def refused(server, *words):
    """What is done inside is refused with these words, and nothing is changed."""
    before = dict(server.objects)
    with pytest.raises(InstallError) as raised:
        yield
    assert all(word in str(raised.value) for word in words), raised.value
    assert server.objects == before


@scenario
async def test_the_definition_is_given_up_and_not_deleted_with_all_services(server):
    await install(server)
    server.workload("team", "f")
    installed, report_lines = await install(server, crd={"create": False})
    definition = server.take("CustomResourceDefinition", DEFINITION)
    assert "kubetorch.com/install-namespace" not in definition["metadata"]["labels"]
    assert "app.kubernetes.io/managed-by" not in definition["metadata"]["labels"]
    assert f"kept CustomResourceDefinition {DEFINITION}" in report_lines
    assert "kept" in installed.changes.values()
    assert server.names("KubetorchWorkload") == {"team/f"}
    # Another installation may have it then.
    await install(server, watchNamespaces=["team"], crd={"create": False})
    await install(server, "other", watchNamespaces=["research"], rbac={"userRoles": False})
    definition = server.take("CustomResourceDefinition", DEFINITION)
    assert definition["metadata"]["labels"]["kubetorch.com/install-namespace"] == "other"


@scenario
async def test_what_the_chart_has_no_more_is_deleted(server):
    await install(server)
    installed, _ = await install(server, networkPolicy={"enabled": False})
    assert server.names("NetworkPolicy") == set()
    assert list(installed.changes.values()).count("deleted") == 1


@scenario
async def test_no_namespace_gets_a_second_controller(server):
    server.controller("first")
    with refused(server, "the Kubetorch in namespace first works in all namespaces"):
        await install(server, **SECOND, watchNamespaces=["team"])
    server.controller("first", "research", "team")
    for values in ({}, {"watchNamespaces": ["team"]}):
        with refused(server, "namespace first works in namespaces research, team"):
            await install(server, **SECOND, **values)
    server.controller("first", "research")
    await install(server, **SECOND, watchNamespaces=["team"])
    with refused(server, "namespace first works in namespaces research"):
        await install(server, **SECOND, watchNamespaces=["research", "team"])


@scenario
async def test_one_of_two_that_overlap_may_withdraw(server):
    server.put("v1", "Namespace", "", "first")
    server.controller("kubetorch", "research", "team")
    server.controller("first")
    server.workload("research", "f")
    await install(server, **SECOND, watchNamespaces=["team"])
    assert server.names("KubetorchWorkload") == {"research/f"}, "the other one looks after it"


@scenario
async def test_a_controller_that_is_going_is_in_nobodys_way(server):
    server.controller("first", **GOING)
    await install(server)


@scenario
async def test_services_are_not_left_without_a_controller(server):
    await install(server)
    server.workload("research", "f")
    server.workload("team", "g")
    with refused(server, "watchNamespaces leaves out services", "research/f", "kt teardown"):
        await install(server, watchNamespaces=["team"])
    await install(server, watchNamespaces=["research", "team"])
    with refused(server, "team/g"):
        await install(server, watchNamespaces=["research"])


@scenario
async def test_what_is_being_deleted_is_not_changed(server):
    await install(server)
    server.controller("kubetorch", **GOING)
    with refused(
        server, "Deployment kubetorch-controller in namespace kubetorch is being deleted", "gone"
    ):
        await install(server, logLevel="debug")
