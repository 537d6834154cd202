"""The client of the Kubernetes API against a real API server, kubelet and pod."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import port_forward
from kubetorch import errors
from kubetorch.k8s import kubeconfig, pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.kubeconfig import Access, Impersonation, User
from kubetorch.k8s.resources import PODS, Ref, Resource, Selection
from kubetorch.lib import deadlines

pytestmark = pytest.mark.cluster

SOURCES = Path(__file__).parents[3] / "src/kubetorch"
IMAGE = "localhost/python:3.11"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
#: Gives back what it gets, and says so.
ECHO = """
import socketserver, sys, threading
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        print("connected", flush=True)
        while data := self.request.recv(65536):
            self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
print("listening", flush=True)
Server(("", 8080), Echo).serve_forever()
"""


@pytest.fixture(scope="module")
def access() -> Iterator[Access]:
    """A namespace of its own, gone afterwards."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    name = f"kt-client-{uuid.uuid4().hex[:8]}"
    namespace_access = dataclasses.replace(kubeconfig.find(), namespace=name)

    async def make() -> None:
        async with Client(namespace_access) as client:
            await client.create(manifest(NAMESPACES, name))
            default = Selection(ACCOUNTS, name, fields="metadata.name=default")
            async with Informer(client, default) as accounts:
                await accounts.until(bool, timeout=60)

    async def remove() -> None:
        async with Client(namespace_access) as client:
            await client.delete(Ref(NAMESPACES, name))

    asyncio.run(make())
    yield namespace_access
    asyncio.run(remove())


@pytest.fixture(scope="module")
def web(access: Access) -> Ref:
    """A running pod whose port 8080 echoes."""

    async def make() -> None:
        async with Client(access) as client:
            await client.apply(pod("web", "python", "-u", "-c", ECHO))
            await until_phase(client, "web", "Running")
            await listening(client, Ref(PODS, "web"))

    asyncio.run(make())
    return Ref(PODS, "web")


def manifest(resource: Resource, name: str, **fields: Any) -> dict[str, Any]:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, "metadata": {"name": name}, **fields}


def pod(name: str, *command: str, **container: Any) -> dict[str, Any]:
    main = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "resources": {"requests": {"cpu": "10m"}},
        **container,
    }
    spec = {"containers": [main], "restartPolicy": "Never", "terminationGracePeriodSeconds": 0}
    return manifest(PODS, name, spec=spec)


async def until_phase(client: Client, name: str, *phases: str) -> None:
    selection = Selection(PODS, client.access.namespace, fields=f"metadata.name={name}")
    async with Informer(client, selection) as pods:
        await pods.until(
            lambda objects: any(o["status"].get("phase") in phases for o in objects.values()),
            timeout=60,
        )


@contextlib.asynccontextmanager
async def service_account(admin: Client, name: str) -> AsyncIterator[tuple[Client, str]]:
    """A client with a token of a service account that may do nothing, and the token."""
    await admin.apply(manifest(ACCOUNTS, name))
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    answer = await admin.post(Ref(ACCOUNTS, name, subresource="token"), request)
    token = answer["status"]["token"]
    access = dataclasses.replace(admin.access, user=User(token=token))
    async with Client(access) as client:
        yield client, token


# ----------------------------------------------------------------------------------- objects


def test_objects_are_applied_listed_changed_and_deleted(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            assert (await client.server_version()).startswith("v1.")
            labels = {"test": "objects"}
            for name in "abc":
                config_map = manifest(CONFIGMAPS, name, data={"key": "1"})
                config_map["metadata"]["labels"] = labels
                await client.apply(config_map)
            before = await client.get(Ref(CONFIGMAPS, "a"))
            changed_map = manifest(CONFIGMAPS, "a", data={"key": "1"})
            changed_map["metadata"]["labels"] = labels
            after = await client.apply(changed_map)
            assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
            selection = Selection(CONFIGMAPS, access.namespace, labels="test=objects")
            listing = await client.list(selection, page=2)
            assert [item["metadata"]["name"] for item in listing.items] == ["a", "b", "c"]
            await client.patch(Ref(CONFIGMAPS, "a"), {"data": {"key": None, "other": "2"}})
            operation = {"op": "add", "path": "/data/third", "value": "3"}
            changed = await client.patch(Ref(CONFIGMAPS, "a"), [operation])
            assert changed["data"] == {"other": "2", "third": "3"}
            changed["data"] = {"all": "new"}
            await client.replace(changed)
            with pytest.raises(errors.KubernetesConflictError, match="modified"):
                await client.replace(changed | {"metadata": after["metadata"]})
            with pytest.raises(errors.KubernetesConflictError):
                await client.delete(Ref(CONFIGMAPS, "a"), preconditions={"uid": "another"})
            await client.delete(Ref(CONFIGMAPS, "a"))
            with pytest.raises(errors.KubernetesNotFoundError, match='"a" not found'):
                await client.get(Ref(CONFIGMAPS, "a"))
            for name in "bc":
                await client.delete(Ref(CONFIGMAPS, name))
            assert (await client.list(selection)).items == []

    asyncio.run(scenario())


def test_field_managers_conflict_by_name_and_force_takes_the_field(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            mine = manifest(CONFIGMAPS, "shared", data={"key": "mine"})
            theirs = manifest(CONFIGMAPS, "shared", data={"key": "theirs"})
            await client.apply(mine, field_manager="mine")
            with pytest.raises(errors.KubernetesConflictError) as caught:
                await client.apply(theirs, field_manager="theirs")
            (cause,) = caught.value.causes
            assert cause["field"] == ".data.key"
            assert '"mine"' in cause["message"]
            taken = await client.apply(theirs, field_manager="theirs", force=True)
            assert taken["data"] == {"key": "theirs"}

    asyncio.run(scenario())


def test_a_dry_run_checks_and_leaves_nothing(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            await client.create(manifest(CONFIGMAPS, "dry"), dry_run=True)
            await client.apply(manifest(CONFIGMAPS, "dry"), dry_run=True)
            with pytest.raises(errors.KubernetesNotFoundError):
                await client.get(Ref(CONFIGMAPS, "dry"))
            wrong = pod("dry", "true", image=3)
            with pytest.raises(errors.KubernetesRequestError, match="image"):
                await client.apply(wrong, dry_run=True)

    asyncio.run(scenario())


def test_the_status_is_a_part_of_its_own(access: Access, web: Ref) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            part = dataclasses.replace(web, subresource="status")
            condition = {"type": "example.com/Tested", "status": "True"}
            await client.patch(part, {"status": {"conditions": [condition]}})
            status = (await client.get(part))["status"]
            assert condition["type"] in {
                status_condition["type"] for status_condition in status["conditions"]
            }

    asyncio.run(scenario())


def test_kinds_are_found_with_their_scope_and_unknown_ones_are_named(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            deployment = await client.discovery.find("apps/v1", "Deployment")
            assert (str(deployment), deployment.is_namespaced) == ("deployments.apps", True)
            assert not (await client.discovery.find("v1", "Node")).is_namespaced
            with pytest.raises(errors.KubernetesNotFoundError, match="has no kind Nope"):
                await client.discovery.find("no.pe/v1", "Nope")

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------- refusals


def test_a_missing_permission_is_named_and_granted(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as admin, service_account(admin, "nobody") as (client, _):
            with pytest.raises(errors.KubernetesForbiddenError) as caught:
                await client.list(Selection(PODS, access.namespace))
            assert "resources: ['pods'], verbs: ['list']" in caught.value.hint
            assert access.namespace in str(caught.value)
            group = "rbac.authorization.k8s.io"
            role = Resource(group, "v1", "roles", "Role")
            rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
            await admin.apply(manifest(role, "lister", rules=[rule]))
            binding = Resource(group, "v1", "rolebindings", "RoleBinding")
            subject = {
                "kind": "ServiceAccount",
                "name": "nobody",
                "namespace": access.namespace,
            }
            to = {"apiGroup": group, "kind": "Role", "name": "lister"}
            await admin.apply(manifest(binding, "lister", roleRef=to, subjects=[subject]))
            for _ in range(300):
                with contextlib.suppress(errors.KubernetesForbiddenError):
                    await client.list(Selection(PODS, access.namespace))
                    return
                await asyncio.sleep(0.1)
            pytest.fail("the role never took effect")

    asyncio.run(scenario())


def test_streams_need_the_verbs_that_the_hint_names(access: Access, web: Ref) -> None:
    async def scenario() -> None:
        async with Client(access) as admin, service_account(admin, "nobody") as (client, _):
            with pytest.raises(errors.KubernetesForbiddenError) as caught:
                await pod_streams.run(client, web, ["true"], timeout=60)
            assert "resources: ['pods/exec'], verbs: ['create', 'get']" in caught.value.hint
            with pytest.raises(errors.KubernetesForbiddenError, match="portforward"):
                await port_forward.connect(client, web, 8080)

    asyncio.run(scenario())


def test_a_rotated_token_file_is_read_when_the_old_one_is_refused(
    access: Access, tmp_path: Path
) -> None:
    file = tmp_path / "token"

    async def scenario() -> None:
        async with Client(access) as admin, service_account(admin, "nobody") as (_, token):
            file.write_text("worn.out.token")
            user = User(token_file=file)
            review = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "SelfSubjectReview",
            }
            async with Client(dataclasses.replace(access, user=user)) as client:
                with pytest.raises(errors.KubernetesForbiddenError, match="401"):
                    await client.create(review)
                file.write_text(token)
                answer = await client.create(review)
            assert answer["status"]["userInfo"]["username"].endswith(":nobody")

    asyncio.run(scenario())


def test_impersonation_asks_as_somebody_else(access: Access) -> None:
    acting = Impersonation("jane", groups=("dev", "system:authenticated"))
    user = dataclasses.replace(access.user, impersonation=acting)

    async def scenario() -> None:
        async with Client(dataclasses.replace(access, user=user)) as client:
            with pytest.raises(errors.KubernetesForbiddenError, match='User "jane" cannot list'):
                await client.list(Selection(PODS, access.namespace))

    asyncio.run(scenario())


def test_a_full_quota_is_told_from_a_missing_permission(access: Access) -> None:
    quotas = Resource("", "v1", "resourcequotas", "ResourceQuota")
    limits = {"hard": {"count/secrets": "0"}}

    async def scenario() -> None:
        async with Client(access) as client:
            await client.apply(manifest(quotas, "full", spec=limits))
            selection = Selection(quotas, access.namespace)
            async with Informer(client, selection) as informer:
                await informer.until(
                    lambda live_quotas: any(
                        "hard" in q.get("status", {}) for q in live_quotas.values()
                    ),
                    timeout=60,
                )
            secret = Resource("", "v1", "secrets", "Secret")
            # The quota controller's word is in the object before the API server's admission has it.
            with pytest.raises(errors.KubernetesForbiddenError, match="exceeded quota") as caught:
                for number in range(100):
                    await client.create(manifest(secret, f"one-too-many-{number}"))
                    await asyncio.sleep(0.1)
            assert "quota" in caught.value.hint

    asyncio.run(scenario())


#: What a pod runs to find its cluster and ask who it is.
WHO_AM_I = """
import asyncio, os
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
async def main():
    async with Client(kubeconfig.find()) as client:
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
        answer = await client.create(review)
        print(client.access.namespace, answer["status"]["userInfo"]["username"])
asyncio.run(main())
"""


def test_in_a_pod_the_client_is_its_service_account(access: Access, web: Ref) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(SOURCES, "kubetorch", filter=_without_cache)

    async def scenario() -> None:
        async with Client(access) as client:
            install = ["pip", "install", "-q", "httptools", "msgspec", "pyyaml"]
            completed = await pod_streams.run(client, web, install, timeout=100)
            assert completed.exit_code == 0, completed
            unpack = ["tar", "-xzf", "-", "-C", "/tmp"]
            async with await pod_streams.start(client, web, unpack, stdin=True) as process:
                await process.write(packed.getvalue())
                process.end_input()
                assert await process.wait() == 0
            ask = ["env", "PYTHONPATH=/tmp", "python", "-c", WHO_AM_I]
            completed = await pod_streams.run(client, web, ask, timeout=60)
            name = access.namespace
            assert completed.stdout.decode().split() == [
                name,
                f"system:serviceaccount:{name}:default",
            ]

    asyncio.run(scenario())


def _without_cache(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in info.name else info


# ------------------------------------------------------------------------------------ watches


def test_an_informer_follows_what_happens(access: Access) -> None:
    changes: list[tuple[str, str]] = []

    async def scenario() -> None:
        selection = Selection(CONFIGMAPS, access.namespace, labels="test=watch")
        async with (
            Client(access) as client,
            Informer(
                client,
                selection,
                lambda change: changes.append((change.kind, change.object["metadata"]["name"])),
                watch_seconds=(1.0, 1.0),
            ) as informer,
        ):
            await informer.listed(timeout=60)
            for name in "xy":
                config_map = manifest(CONFIGMAPS, name)
                config_map["metadata"]["labels"] = {"test": "watch"}
                await client.apply(config_map)
                await asyncio.sleep(1.2)  # so that a watch ends in between
            await client.patch(Ref(CONFIGMAPS, "x"), {"data": {"a": "b"}})
            await client.delete(Ref(CONFIGMAPS, "y"))
            await informer.until(lambda _: len(changes) == 4, timeout=60)
            assert informer.error is None
        assert changes == [("added", "x"), ("added", "y"), ("modified", "x"), ("deleted", "y")]

    asyncio.run(scenario())


def test_a_version_that_is_too_old_is_410(access: Access) -> None:
    """The server knows the history of a kind since it has the kind."""
    group = f"{access.namespace}.example.com"
    definitions = Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False
    )
    schema = {"openAPIV3Schema": {"type": "object"}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    names = {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"}
    spec = {"group": group, "names": names, "scope": "Namespaced", "versions": [version]}
    name = f"things.{group}"

    async def scenario() -> None:
        async with Client(access) as client:
            await client.create(manifest(definitions, name, spec=spec))
            try:
                resource = await served(client, f"{group}/v1", "Thing")
                listing = await client.list(Selection(resource))
                assert await first_event(client, resource, listing.resource_version) is None
                assert await first_event(client, resource, "1") == 410
            finally:
                await client.delete(Ref(definitions, name))

    asyncio.run(scenario())


async def served(client: Client, api_version: str, kind: str) -> Resource:
    """A kind that was just defined, when its path answers."""
    for _ in range(100):
        with contextlib.suppress(errors.KubernetesNotFoundError):
            resource = await client.discovery.find(api_version, kind)
            await client.list(Selection(resource))
            return resource
        await asyncio.sleep(0.1)
    raise AssertionError(f"{kind} is not served")


async def first_event(client: Client, resource: Resource, version: str) -> int | None:
    """The status of the error that a watch begins with, or that it is refused with.

    Watches of a kind that was just defined are refused with 429 until the server is ready for them.
    """
    for _ in range(100):
        status = await _first_event(client, resource, version)
        if status != 429:
            return status
        await asyncio.sleep(0.1)
    raise AssertionError(f"{resource.kind} cannot be watched")


async def _first_event(client: Client, resource: Resource, version: str) -> int | None:
    events = client.watch(Selection(resource), version, seconds=1.0)
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                if event["type"] == "ERROR":
                    return int(event["object"]["code"])
        except errors.KubernetesRequestError as error:
            return error.status_code
    return None


# ------------------------------------------------------------------------------------ streams


def test_programs_run_in_the_pod(access: Access, web: Ref) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
            completed = await pod_streams.run(client, web, ["python", "-c", script], timeout=60)
            assert completed == pod_streams.Completed(7, b"out\n", b"err\n")
            completed = await pod_streams.run(client, web, ["true"], container="main", timeout=60)
            assert completed.exit_code == 0
            with pytest.raises(errors.KubernetesRequestError, match="no-such-program"):
                await pod_streams.run(client, web, ["no-such-program"], timeout=60)
            with pytest.raises(errors.KubernetesRequestError, match="nope"):
                await pod_streams.run(client, web, ["true"], container="nope", timeout=60)
            with pytest.raises(errors.KubernetesNotFoundError, match="gone"):
                await pod_streams.run(client, Ref(PODS, "gone"), ["true"], timeout=60)

    asyncio.run(scenario())


def test_much_data_goes_through_a_program_and_its_input_ends(access: Access, web: Ref) -> None:
    data = os.urandom(8 * 1024 * 1024)

    async def scenario() -> None:
        async with (
            Client(access) as client,
            await pod_streams.start(client, web, ["cat"], stdin=True) as process,
        ):

            async def feed() -> None:
                await process.write(data)
                process.end_input()

            feeding = asyncio.create_task(feed())
            received = b"".join([piece async for _, piece in process.output()])
            await feeding
            assert received == data
            assert await process.wait() == 0

    asyncio.run(scenario())


def test_a_terminal_has_the_size_that_it_is_given(access: Access, web: Ref) -> None:
    async def scenario() -> None:
        async with (
            Client(access) as client,
            await pod_streams.start(client, web, ["sh"], stdin=True, tty=True) as process,
        ):
            process.resize(101, 37)
            is_so = b'stty size | grep -q "^37 " && break'
            wait = b"for i in $(seq 100); do %s; sleep 0.2; done" % is_so
            await process.write(wait + b"; stty size; exit\n")
            shown = b"".join([piece async for _, piece in process.output()])
            assert b"37 101" in shown

    asyncio.run(scenario())


def test_logs_are_read(access: Access) -> None:
    async def scenario() -> None:
        async with Client(access) as client:
            script = "import time\nfor n in range(5): print('line', n, flush=True); time.sleep(.3)"
            await client.apply(pod("talker", "python", "-c", script))
            await until_phase(client, "talker", "Succeeded")
            ref = Ref(PODS, "talker")
            lines = (await pod_streams.read_log(client, ref)).splitlines()
            assert lines == [f"line {n}".encode() for n in range(5)]
            tail = await pod_streams.read_log(client, ref, pod_streams.LogOptions(tail=1))
            assert tail == b"line 4\n"
            with pytest.raises(errors.KubernetesRequestError, match="container nope"):
                await pod_streams.read_log(client, ref, pod_streams.LogOptions(container="nope"))

    asyncio.run(scenario())


def test_ports_are_forwarded_side_by_side(access: Access, web: Ref) -> None:
    async def target() -> Ref:
        return web

    async def exchange(port: int, size: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = os.urandom(size)
        writer.write(data)
        assert await asyncio.wait_for(reader.readexactly(size), 60) == data
        writer.close()

    async def scenario() -> None:
        async with (
            Client(access) as client,
            port_forward.PortForward(client, target, 8080) as forward,
        ):
            await asyncio.gather(*(exchange(forward.local_port, 2_000_000) for _ in range(8)))
            assert forward.error is None

    asyncio.run(scenario())


def test_a_port_that_nobody_listens_on_is_an_error(access: Access, web: Ref) -> None:
    async def scenario() -> None:
        async with Client(access) as client, await port_forward.connect(client, web, 9) as stream:
            with pytest.raises(errors.KubernetesError, match=r"port 9.*refused"):
                await asyncio.wait_for(stream.read(), 60)

    asyncio.run(scenario())


def test_a_deleted_pod_ends_its_connections_and_the_next_one_finds_its_successor(
    access: Access,
) -> None:
    names = iter(["first", "second"])

    async def target() -> Ref:
        return Ref(PODS, next(names))

    async def scenario() -> None:
        async with Client(access) as client:
            for name in ("first", "second"):
                await client.apply(pod(name, "python", "-u", "-c", ECHO))
            for name in ("first", "second"):
                await until_phase(client, name, "Running")
                await listening(client, Ref(PODS, name))
            async with port_forward.PortForward(client, target, 8080) as forward:
                reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
                writer.write(b"one")
                assert await reader.readexactly(3) == b"one"
                await client.delete(Ref(PODS, "first"), grace_seconds=0)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 60) == b""
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", forward.local_port)
                writer.write(b"two")
                assert await reader.readexactly(3) == b"two"
                writer.close()

    asyncio.run(scenario())


async def listening(client: Client, ref: Ref) -> None:
    async with deadlines.timeout(60):
        while b"listening" not in await pod_streams.read_log(client, ref):
            await asyncio.sleep(0.2)
