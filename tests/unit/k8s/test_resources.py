"""Paths of objects, and what discovery says."""

from __future__ import annotations

import asyncio

from kubetorch.k8s import client
from kubetorch.k8s.resources import PODS, Resource, Selection

NODES = Resource("", "v1", "nodes", "Node", is_namespaced=False)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")


def test_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path(namespace="n") == "/api/v1/namespaces/n/pods"
    assert PODS.path(namespace="n", name="a/b") == "/api/v1/namespaces/n/pods/a%2Fb"
    assert NODES.path(namespace="n", name="x") == "/api/v1/nodes/x"
    path = DEPLOYMENTS.path(namespace="n", name="x", subresource="status")
    assert path == "/apis/apps/v1/namespaces/n/deployments/x/status"


def test_names() -> None:
    assert (str(PODS), str(DEPLOYMENTS)) == ("pods", "deployments.apps")
    assert (PODS.api_version, DEPLOYMENTS.api_version) == ("v1", "apps/v1")


def test_a_selection_says_only_what_it_selects_by() -> None:
    assert Selection(PODS, "n").query == {}
    assert Selection(PODS, labels="a=b", fields="c=d").query == {
        "labelSelector": "a=b",
        "fieldSelector": "c=d",
    }


def test_discovery_takes_kinds_and_leaves_their_parts_out() -> None:
    document = {
        "resources": [
            {"name": "deployments/scale", "kind": "Scale", "namespaced": True},
            {"name": "deployments", "kind": "Deployment", "namespaced": True},
        ]
    }
    assert client.parse("apps/v1", document) == {"Deployment": DEPLOYMENTS}


def test_discovery_asks_once_until_it_is_told_to_forget() -> None:
    fetched_paths = []

    async def fetch(path: str) -> dict[str, object]:
        fetched_paths.append(path)
        return {"resources": [{"name": "nodes", "kind": "Node", "namespaced": False}]}

    async def scenario() -> None:
        discovery = client.Discovery(fetch)
        for _ in range(2):
            assert await discovery.find("v1", "Node") == NODES
        assert fetched_paths == ["/api/v1"]
        discovery.forget("v1")
        await discovery.find("v1", "Node")
        assert len(fetched_paths) == 2

    asyncio.run(scenario())
