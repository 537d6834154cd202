"""Secrets and volumes of the Kubernetes backend against an API server that does what it likes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kubetorch import errors
from kubetorch.controller.backends.kubernetes.secrets import SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import VolumeClaims
from kubetorch.k8s.client import Client
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.secrets import Collision, PutSecret, SecretDraft
from local.fake_apiserver import Exchange, FakeApiServer, listing

SECRET = "/api/v1/namespaces/team/secrets/tokens"
KINDS = {
    "/api/v1": [
        ("secrets", "Secret"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
        ("persistentvolumes", "/PersistentVolume"),
    ],
    "/apis/storage.k8s.io/v1": [("storageclasses", "/StorageClass")],
}


class Objects:
    """An API server that keeps objects, and at times is changed by somebody else.

    Attributes:
        by_path: The objects by path.
        before_write: Called with each request that would write, before it does.
    """

    def __init__(self) -> None:
        self.by_path: dict[str, Any] = {}
        self.before_write: Any = lambda exchange: False
        self._versions = iter(range(1, 1000))

    def keep(self, path: str, stored: dict[str, Any]) -> dict[str, Any]:
        version = str(next(self._versions))
        stored["metadata"] = {
            "uid": "u1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **stored["metadata"],
            "resourceVersion": version,
        }
        self.by_path[path] = stored
        return stored

    async def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path in KINDS:
            served = [
                {"name": plural, "kind": kind.lstrip("/"), "namespaced": kind[0] != "/"}
                for plural, kind in KINDS[request.path]
            ]
            exchange.answer(200, {"kind": "APIResourceList", "resources": served})
        elif request.method == "GET":
            stored = self.by_path.get(request.path)
            if stored is None:
                exchange.refuse(404, "NotFound", "not found")
            else:
                exchange.answer(200, stored)
        elif not self.before_write(exchange):
            self._write(exchange)

    def _write(self, exchange: Exchange) -> None:
        request, body = exchange.request, exchange.request.json
        path = request.path
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.by_path:
                return exchange.refuse(409, "AlreadyExists", "already exists")
            return exchange.answer(201, self.keep(path, body))
        stored = self.by_path.get(path)
        if stored is None:
            return exchange.refuse(404, "NotFound", "not found")
        version = body["metadata"]["resourceVersion"]
        if version != stored["metadata"]["resourceVersion"]:
            return exchange.refuse(409, "Conflict", "the object has been modified")
        data = {**stored["data"], **body["data"]}
        stored = {
            **stored,
            "data": {key: value for key, value in data.items() if value is not None},
        }
        return exchange.answer(200, self.keep(path, stored))


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[tuple[Objects, Client, FakeApiServer]]:
    objects = Objects()
    async with (
        FakeApiServer(objects) as fake,
        Client(fake.access(), timeout=30.0, patience=0.0, variables={}) as client,
    ):
        yield objects, client, fake


def _put(collision: Collision = "same", **values: str) -> PutSecret:
    draft = SecretDraft(name="tokens", mount_type="env")
    encoded = {key: value.encode() for key, value in values.items()}
    return PutSecret(draft=draft, values=encoded, collision=collision)


def test_an_upload_that_another_one_overtakes_is_decided_again() -> None:
    async def scenario() -> None:
        async with server() as (objects, client, _):
            store = SecretObjects(client)

            def create_first(exchange: Exchange) -> bool:
                objects.before_write = lambda exchange: False
                objects.keep(SECRET, exchange.request.json)
                return False

            objects.before_write = create_first
            assert (await store.put("team", "tokens", _put(A="1"))).outcome == "unchanged"

            def change_first(exchange: Exchange) -> bool:
                objects.before_write = lambda exchange: False
                secret = objects.by_path[SECRET]
                objects.keep(SECRET, {**secret, "data": {**secret["data"], "B": "Mg=="}})
                return False

            objects.before_write = change_first
            assert (await store.put("team", "tokens", _put("merge", C="3"))).outcome == "merged"
            assert await store.values("team", "tokens") == {"A": b"1", "B": b"2", "C": b"3"}

            def delete_first(exchange: Exchange) -> bool:
                objects.before_write = lambda exchange: False
                del objects.by_path[SECRET]
                return False

            objects.before_write = delete_first
            assert (await store.put("team", "tokens", _put("replace", D="4"))).outcome == "created"

    asyncio.run(scenario())


def test_the_version_of_a_secret_changes_with_its_values_and_with_nothing_else() -> None:
    async def scenario() -> None:
        async with server() as (objects, client, _):
            store = SecretObjects(client)

            async def version() -> str:
                view = await store.get("team", "tokens")
                assert view is not None
                return view.version

            await store.put("team", "tokens", _put(A="1", B="2"))
            first = await version()
            secret = objects.by_path[SECRET]
            objects.keep(SECRET, {**secret, "data": dict(reversed(secret["data"].items()))})
            assert await version() == first
            await store.put("team", "tokens", _put("replace", A="1", B="3"))
            second = await version()
            await store.put("team", "tokens", _put("replace", A="1", C="3"))
            assert len({first, second, await version()}) == 3

    asyncio.run(scenario())


def test_an_upload_that_is_overtaken_for_ever_ends_with_an_error() -> None:
    async def scenario() -> None:
        async with server() as (objects, client, fake):
            store = SecretObjects(client)
            await store.put("team", "tokens", _put(A="1"))

            def refuse(exchange: Exchange) -> bool:
                exchange.refuse(409, "Conflict", "the object has been modified")
                return True

            objects.before_write = refuse
            with pytest.raises(errors.KubernetesConflictError, match="changed by others 8 times"):
                await store.put("team", "tokens", _put("replace", A="2"))
            assert sum(request.method == "PATCH" for request in fake.requests) == 8

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("status", "reason", "message", "error", "words"),
    [
        (403, "Forbidden", "exceeded quota: little", errors.StorageFullError, "quota"),
        (500, "", "etcdserver: mvcc: database space exceeded", errors.StorageFullError, "no space"),
        (403, "Forbidden", "User x cannot create", errors.KubernetesForbiddenError, "cannot"),
        (422, "Invalid", "spec is wrong", errors.KubernetesRequestError, "spec is wrong"),
    ],
)
def test_what_the_server_refuses_is_an_error_without_the_values(
    status: int, reason: str, message: str, error: type[Exception], words: str
) -> None:
    async def scenario() -> None:
        async with server() as (objects, client, _):

            def refuse(exchange: Exchange) -> bool:
                exchange.refuse(status, reason, message)
                return True

            objects.before_write = refuse
            with pytest.raises(error, match=words) as raised:
                await SecretObjects(client).put("team", "tokens", _put(A="quince"))
            whole = json.dumps([str(raised.value), repr(raised.value.__dict__)])
            assert "quince" not in whole and "cXVpbmNl" not in whole

    asyncio.run(scenario())


def test_a_volume_without_an_access_mode_has_that_of_its_class_or_persistent_volume() -> None:
    disk = {
        "metadata": {
            "name": "gp3",
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "ebs.csi.aws.com",
    }
    files = {"metadata": {"name": "efs"}, "provisioner": "efs.csi.aws.com"}

    async def scenario() -> None:
        async with server() as (objects, client, _):
            claims = VolumeClaims(client)

            async def created(name: str, **fields: Any) -> tuple[str, str | None, list[str]]:
                spec = VolumeSpec(name, "/data", size="1Gi", **fields)
                view = (await claims.create("team", spec)).volume
                path = f"/api/v1/namespaces/team/persistentvolumeclaims/{name}"
                modes = objects.by_path[path]["spec"]["accessModes"]
                return view.storage_class, view.spec.access_mode, modes

            one_node, many_nodes = "ReadWriteOnce", "ReadWriteMany"
            path = "/apis/storage.k8s.io/v1/storageclasses"
            objects.by_path[path] = listing(1, disk)
            assert await created("first") == ("gp3", one_node, [one_node])
            objects.by_path[path] = listing(2, disk, files)
            assert await created("first") == ("gp3", one_node, [one_node]), "it keeps its own"
            assert await created("second") == ("efs", many_nodes, [many_nodes])
            assert await created("third", storage_class="gp3") == ("gp3", one_node, [one_node])
            fields = {"storage_class": "gp3", "access_mode": many_nodes}
            assert await created("fourth", **fields) == ("gp3", many_nodes, [many_nodes])
            for number, modes in enumerate(
                ([one_node, many_nodes], ["ReadOnlyMany", one_node], ["ReadOnlyMany"])
            ):
                volume = f"/api/v1/persistentvolumes/pv{number}"
                objects.by_path[volume] = {
                    "metadata": {"name": "pv"},
                    "spec": {"accessModes": modes},
                }
            for number, mode in enumerate((many_nodes, one_node, "ReadOnlyMany", one_node)):
                bound = await created(f"bound{number}", volume_name=f"pv{number}")
                assert bound == ("", mode, [mode])

    asyncio.run(scenario())


def test_a_namespace_that_is_being_deleted_and_a_limit_are_said() -> None:
    async def scenario() -> None:
        async with server() as (objects, client, _):
            spec = VolumeSpec("data", "/data", size="1Gi", volume_name="pv")

            def refuse(exchange: Exchange) -> bool:
                cause = {"reason": "NamespaceTerminating", "message": "m", "field": "f"}
                body = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no"}
                exchange.answer(403, {**body, "details": {"causes": [cause]}})
                return True

            objects.before_write = refuse
            with pytest.raises(errors.KubernetesNotFoundError, match="is being deleted"):
                await VolumeClaims(client).create("team", spec)

            def limit(exchange: Exchange) -> bool:
                message = (
                    "maximum storage usage per PersistentVolumeClaim is 512Mi, but request is 1Gi"
                )
                exchange.refuse(403, "Forbidden", message)
                return True

            objects.before_write = limit
            with pytest.raises(errors.SpecError, match="512Mi"):
                await VolumeClaims(client).create("team", spec)

    asyncio.run(scenario())


def test_stores_of_some_namespaces_ask_for_nothing_elsewhere() -> None:
    async def scenario() -> None:
        async with server() as (objects, client, fake):
            for namespace in ("team", "side"):
                for plural in ("secrets", "persistentvolumeclaims"):
                    objects.by_path[f"/api/v1/namespaces/{namespace}/{plural}"] = listing(1)
            secrets = SecretObjects(client, ("team", "side"))
            volumes = VolumeClaims(client, ("team", "side"))
            assert await secrets.list(None) == []
            assert await volumes.list(None) == []
            count = len(fake.requests)
            data = VolumeSpec("data", "/data", size="1Gi", volume_name="pv")
            for refused in (
                secrets.list("else"),
                secrets.put("else", "tokens", _put(A="1")),
                volumes.list("else"),
                volumes.create("else", data),
            ):
                with pytest.raises(errors.SpecError, match="watchNamespaces has team, side"):
                    await refused
            assert len(fake.requests) == count

    asyncio.run(scenario())
