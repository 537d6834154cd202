"""Secrets, volumes and namespaces of the Kubernetes backend, on a real cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from kubetorch import errors
from kubetorch.controller.backends.base import Stores
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.controller.backends.kubernetes.prepare import PodPrerequisites, check_attached
from kubetorch.controller.backends.kubernetes.secrets import SECRETS, SecretObjects
from kubetorch.controller.backends.kubernetes.volumes import CLAIMS, VolumeClaims
from kubetorch.controller.cluster.access import Clocks, PodTokens
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.kubeconfig import Access
from kubetorch.k8s.resources import PODS, Ref, Resource, Selection
from kubetorch.manifests import rendering
from kubetorch.manifests.agent_container import SERVICE_ACCOUNT
from kubetorch.manifests.desired_pods import Attached, ClaimMount, SecretVariables
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.secret import SIZE_BYTES, SecretRef
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.secrets import Collision, PutSecret, SecretDraft

pytestmark = pytest.mark.cluster

IMAGE = "localhost/python:3.11"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
TOKENS = SecretDraft(name="tokens", mount_type="env", username="ada")
OBJECT = "kt.secret.ada.tokens"
Scenario = Callable[[Client, str], Awaitable[None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a coroutine with a client and a namespace of its own, which is gone afterwards."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    name = f"kt-stores-{uuid.uuid4().hex[:8]}"
    access = dataclasses.replace(kubeconfig.find(), namespace=name)

    def run(scenario: Scenario) -> None:
        asyncio.run(_within(access, scenario))

    yield run


async def _within(access: Access, scenario: Scenario) -> None:
    assert access.namespace is not None
    async with Client(access) as client:
        await client.create(_object(NAMESPACES, access.namespace))
        try:
            await scenario(client, access.namespace)
        finally:
            await client.delete(Ref(NAMESPACES, access.namespace))


def _object(resource: Resource, name: str, **fields: Any) -> dict[str, Any]:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, "metadata": {"name": name}, **fields}


def _put(collision: Collision = "same", draft: SecretDraft = TOKENS, **values: str) -> PutSecret:
    encoded = {key: value.encode() for key, value in values.items()}
    return PutSecret(draft=draft, values=encoded, collision=collision)


def _pod(name: str, claim: str, namespace: str) -> dict[str, Any]:
    main = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "python",
            "-c",
            "open('/data/x', 'w').write('1'); import time; time.sleep(600)",
        ],
        "resources": {"requests": {"cpu": "10m"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = _object(PODS, name)
    pod["metadata"]["labels"] = {"kubetorch.com/service": "trainer"}
    pod["spec"] = {
        "containers": [main],
        "terminationGracePeriodSeconds": 0,
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
    }
    return pod


async def _until_running(client: Client, name: str) -> None:
    selection = Selection(PODS, client.access.namespace, fields=f"metadata.name={name}")
    async with Informer(client, selection) as pods:
        await pods.until(
            lambda objects: any(o["status"].get("phase") == "Running" for o in objects.values()),
            timeout=60,
        )


# ---------------------------------------------------------------------------------------- secrets


def test_a_secret_is_made_kept_refused_replaced_added_to_and_deleted(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = SecretObjects(client)
        assert await store.get(where, OBJECT) is None
        created = await store.put(where, OBJECT, _put(A="1", B="2"))
        assert created.outcome == "created"
        repeated = await store.put(where, OBJECT, _put(A="1", B="2"))
        assert (repeated.outcome, repeated.secret.version) == ("unchanged", created.secret.version)
        with pytest.raises(errors.SecretConflictError, match="tokens"):
            await store.put(where, OBJECT, _put(A="other"))
        colliding = await store.put(where, OBJECT, _put("keep", A="other"))
        assert colliding.outcome == "unchanged"
        added = await store.put(where, OBJECT, _put("merge", C="3"))
        assert added.outcome == "merged"
        assert await store.values(where, OBJECT) == {"A": b"1", "B": b"2", "C": b"3"}
        replaced = await store.put(where, OBJECT, _put("replace", A="1"))
        assert replaced.outcome == "replaced"
        assert await store.values(where, OBJECT) == {"A": b"1"}
        versions = [outcome.secret.version for outcome in (created, added, replaced)]
        assert len(set(versions)) == 3
        assert await store.delete(where, OBJECT)
        assert not await store.delete(where, OBJECT)
        with pytest.raises(errors.SecretNotFound):
            await store.values(where, OBJECT)
        with pytest.raises(errors.SecretNotFound):
            await store.put(where, OBJECT, _put("merge", A="1"))

    run(scenario)


def test_the_object_says_what_the_contract_wants_and_is_read_back(run: Run) -> None:
    files = SecretDraft(
        name="keys", mount_type="volume", path="~/.ssh", username="ada", provider="ssh"
    )
    renamed = SecretDraft(
        name="openai", mount_type="env", renamed=(("api_key", "OPENAI_API_KEY"),), override=True
    )

    async def scenario(client: Client, where: str) -> None:
        store = SecretObjects(client)
        put = PutSecret(draft=files, values={"id_rsa": b"\0\xff", "known": b"x"})
        view = (await store.put(where, "kt.secret.ada.keys", put)).secret
        await store.put(where, "kt.secret.global.openai", _put(draft=renamed, api_key="k"))
        secret_object = await client.get(Ref(SECRETS, "kt.secret.ada.keys", where))
        assert secret_object["type"] == "Opaque"
        assert secret_object["metadata"]["labels"] == {
            "kubetorch.com/mount-type": "volume",
            "kubetorch.com/secret-name": "keys",
            "kubetorch.com/username": "ada",
            "kubetorch.com/provider": "ssh",
        }
        assert secret_object["metadata"]["annotations"] == {
            "kubetorch.com/override": "False",
            "kubetorch.com/secret-path": "~/.ssh",
            "kubetorch.com/secret-filenames": '["id_rsa", "known"]',
        }
        assert secret_object["metadata"]["managedFields"][0]["manager"] == "kubetorch"
        assert (view.path, view.provider, view.keys) == ("~/.ssh", "ssh", ("id_rsa", "known"))
        assert view.created > 0 and view.updated >= view.created
        assert await store.values(where, "kt.secret.ada.keys") == {
            "id_rsa": b"\0\xff",
            "known": b"x",
        }
        listed = {secret.name: secret for secret in await store.list(where)}
        assert set(listed) == {"keys", "openai"}
        assert listed["openai"].renamed == (("api_key", "OPENAI_API_KEY"),)
        assert listed["openai"].override
        assert {"keys", "openai"} <= {secret.name for secret in await store.list(None)}
        # Described anew, it loses what it was.
        await store.put(where, "kt.secret.ada.keys", _put("replace", A="1"))
        secret_object = await client.get(Ref(SECRETS, "kt.secret.ada.keys", where))
        assert "kubetorch.com/provider" not in secret_object["metadata"]["labels"]
        assert "kubetorch.com/secret-path" not in secret_object["metadata"]["annotations"]

    run(scenario)


def test_values_of_a_secret_of_somebody_else_are_not_told_or_changed(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = SecretObjects(client)
        await client.create(_object(SECRETS, "theirs", stringData={"password": "quince"}))
        view = await store.get(where, "theirs")
        assert view is not None
        assert (view.name, view.keys, view.mount_type) == ("theirs", ("password",), "env")
        assert await store.list(where) == []
        for forbidden in (
            store.values(where, "theirs"),
            store.delete(where, "theirs"),
            store.put(where, "theirs", _put("replace", password="mine")),
            store.put(where, "theirs", _put("same", password="quince")),
        ):
            with pytest.raises(errors.SpecError, match="not made by Kubetorch") as error:
                await forbidden
            assert "quince" not in str(error.value)
        assert (await client.get(Ref(SECRETS, "theirs", where)))["data"] == {"password": "cXVpbmNl"}

    run(scenario)


def test_a_secret_may_have_one_mebibyte_and_no_more(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = SecretObjects(client)
        large = PutSecret(draft=TOKENS, values={"A": b"x" * SIZE_BYTES})
        assert (await store.put(where, OBJECT, large)).outcome == "created"
        larger = PutSecret(draft=TOKENS, values={"B": b"x"}, collision="merge")
        with pytest.raises(errors.SpecError, match="1048576 bytes, not 1048577"):
            await store.put(where, OBJECT, larger)
        with pytest.raises(errors.SpecError, match="at most"):
            await store.put(where, "other", PutSecret(draft=TOKENS, values={"A": b"x" * 2**21}))

    run(scenario)


def test_uploads_at_the_same_time_lose_nothing(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = SecretObjects(client)
        first = [store.put(where, OBJECT, _put("same", A="1")) for _ in range(4)]
        outcomes = [stored.outcome for stored in await asyncio.gather(*first)]
        assert sorted(outcomes) == ["created", "unchanged", "unchanged", "unchanged"]
        added = [store.put(where, OBJECT, _put("merge", **{f"K{n}": "v"})) for n in range(4)]
        await asyncio.gather(*added)
        assert set(await store.values(where, OBJECT)) == {"A", "K0", "K1", "K2", "K3"}

    run(scenario)


def test_a_namespace_that_is_not_there_and_a_full_quota_are_said(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        secrets, volumes = SecretObjects(client), VolumeClaims(client)
        with pytest.raises(errors.KubernetesNotFoundError) as missing:
            await secrets.put("kt-stores-nowhere", OBJECT, _put(A="1"))
        assert "kubectl create namespace kt-stores-nowhere" in (missing.value.hint or "")
        with pytest.raises(errors.KubernetesNotFoundError, match="does not exist"):
            await volumes.create("kt-stores-nowhere", _volume())
        hard = {"hard": {"count/secrets": "0", "requests.storage": "1Gi"}}
        await client.create(_object(QUOTAS, "little", spec=hard))
        selection = Selection(QUOTAS, where)
        async with Informer(client, selection) as quotas:
            await quotas.until(lambda o: all("hard" in q["status"] for q in o.values()), timeout=60)
        # The quota controller's word is in the object before the API server's admission has it.
        with pytest.raises(errors.StorageFullError, match="quota") as full:
            for number in range(100):
                await secrets.put(where, f"{OBJECT}-{number}", _put(A="quince"))
                await asyncio.sleep(0.1)
        assert "quince" not in str(full.value)
        with pytest.raises(errors.StorageFullError, match=r"exceeded quota: little"):
            await volumes.create(where, _volume(size="2Gi"))

    run(scenario)


# ---------------------------------------------------------------------------------------- volumes


def _volume(name: str = "data", size: str | None = "1Gi", **fields: Any) -> VolumeSpec:
    return VolumeSpec(name, f"/{name}", size=size, **fields)


def test_a_volume_is_made_once_bound_listed_and_deleted(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = VolumeClaims(client)
        assert await store.get(where, "data") is None
        created = await store.create(where, _volume())
        assert created.is_new
        assert created.volume.storage_class == "shared"
        assert not (await store.create(where, _volume(size="5Gi"))).is_new
        claim = await client.get(Ref(CLAIMS, "data", where))
        assert claim["metadata"]["labels"] == {
            "app": "kubetorch",
            "kubetorch.com/volume": "data",
        }
        assert claim["metadata"]["annotations"]["kubetorch.com/mount-path"] == "/data"
        selection = Selection(CLAIMS, where, fields="metadata.name=data")
        async with Informer(client, selection) as claims:
            await claims.until(
                lambda objects: any(o["status"]["phase"] == "Bound" for o in objects.values()),
                timeout=60,
            )
        view = await store.get(where, "data")
        assert view is not None
        assert (view.phase, view.is_ours) == ("Bound", True)
        assert view.spec == _volume(
            storage_class="shared", access_mode="ReadWriteMany", namespace=where
        )
        await client.create(
            _object(
                CLAIMS,
                "theirs",
                spec={
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            )
        )
        assert [selection.claim for selection in await store.list(where)] == ["data"]
        theirs = await store.get(where, "theirs")
        assert theirs is not None and not theirs.is_ours
        assert theirs.spec.claim == "theirs"
        with pytest.raises(errors.SpecError, match="not made by Kubetorch"):
            await store.delete(where, "theirs", wait=0)
        assert await store.delete(where, "data", wait=60)
        assert await store.get(where, "data") is None

    run(scenario)


def test_a_volume_for_one_node_has_the_default_class_and_waits_for_its_pod(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = VolumeClaims(client)
        created = await store.create(where, _volume(access_mode="ReadWriteOnce"))
        assert (created.volume.storage_class, created.volume.phase) == ("local-path", "Pending")
        for access_mode, name in (("ReadWriteOnce", "local-path"), ("ReadWriteMany", "shared")):
            chosen = await store.storage_class(_volume(access_mode=access_mode))
            assert (chosen.storage_class, chosen.access_mode) == (name, access_mode)
        with pytest.raises(errors.SpecError, match="'fast'") as error:
            await store.create(where, _volume("other", storage_class="fast"))
        assert "local-path, shared" in (error.value.hint or "")
        named = await store.create(where, _volume("bound", volume_name="some-volume"))
        assert (named.volume.storage_class, named.volume.spec.volume_name) == ("", "some-volume")

    run(scenario)


def test_a_volume_that_pods_hold_is_deleted_by_force_only(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        store = VolumeClaims(client)
        await store.create(where, _volume())
        await client.create(_pod("holder", "data", where))
        await _until_running(client, "holder")
        with pytest.raises(errors.VolumeInUseError, match="by the pods holder") as error:
            await store.delete(where, "data", wait=0)
        assert error.value.services == ("trainer",)
        assert "kubectl delete pod holder" in (error.value.hint or "")
        assert "--force" in (error.value.hint or "")
        # By force: it waits for the pod, and is nobody's to use.
        assert not await store.delete(where, "data", wait=30, is_forced=True)
        with pytest.raises(errors.VolumeInUseError, match="is being deleted"):
            await store.create(where, _volume())
        # A pod that goes is waited for.
        await client.delete(Ref(PODS, "holder", where))
        assert await store.delete(where, "data", wait=60)
        assert await store.get(where, "data") is None

    run(scenario)


# -------------------------------------------------------------------------------------- attaching


def test_what_pods_could_not_be_given_is_refused_and_other_values_are_another_version(
    run: Run,
) -> None:
    def reading(secret: str, key: str, claim: str = "data") -> Attached:
        variable = SecretVariables(secret, variable="A", key=key)
        maybe = SecretVariables("maybe", optional=True)
        return Attached((variable, maybe), claims=(ClaimMount(claim, "/data"),))

    async def scenario(client: Client, where: str) -> None:
        stores = Stores(SecretObjects(client), VolumeClaims(client))
        secrets, volumes = stores
        await secrets.put(where, OBJECT, _put(A="1"))
        await volumes.create(where, _volume())
        first = await check_attached(stores, where, reading(OBJECT, "A"))
        assert first == await check_attached(stores, where, reading(OBJECT, "A"))
        with pytest.raises(errors.SecretNotFound, match="'other'"):
            await check_attached(stores, where, reading("other", "A"))
        with pytest.raises(errors.SpecError, match="has no 'B'; it has A"):
            await check_attached(stores, where, reading(OBJECT, "B"))
        with pytest.raises(errors.VolumeNotFoundError, match="'elsewhere'"):
            await check_attached(stores, where, reading(OBJECT, "A", "elsewhere"))
        await secrets.put(where, OBJECT, _put("replace", A="2"))
        assert first != await check_attached(stores, where, reading(OBJECT, "A"))
        assert await check_attached(stores, where, Attached()) == ""

    run(scenario)


# ------------------------------------------------------------------------------------- namespaces


def test_the_first_deploy_makes_the_account_and_its_rights(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        namespaces = Namespaces(client, {"eks.amazonaws.com/role-arn": "arn:x"})
        await namespaces.prepare(where)
        await namespaces.prepare(where)
        account = await client.get(Ref(ACCOUNTS, SERVICE_ACCOUNT, where))
        binding = await client.get(Ref(BINDINGS, SERVICE_ACCOUNT, where))
        for manifest in (account, binding):
            assert manifest["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kubetorch"
        assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:x"}
        assert binding["roleRef"]["name"] == "kubetorch-edit"
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": SERVICE_ACCOUNT, "namespace": where}
        ]
        # Somebody deletes them, or the namespace.
        await client.delete(Ref(BINDINGS, SERVICE_ACCOUNT, where))
        await client.delete(Ref(ACCOUNTS, SERVICE_ACCOUNT, where))
        await namespaces.prepare(where)
        await client.get(Ref(BINDINGS, SERVICE_ACCOUNT, where))

    run(scenario)


def test_the_account_follows_the_annotations_of_the_chart_but_for_what_somebody_annotated(
    run: Run,
) -> None:
    async def scenario(client: Client, where: str) -> None:
        ref = Ref(ACCOUNTS, SERVICE_ACCOUNT, where)
        await Namespaces(client).prepare(where)
        await Namespaces(client, {"example.com/role": "a", "team": "ml"}).prepare(where)
        by_hand = {"metadata": {"annotations": {"example.com/role": "mine"}}}
        await client.patch(ref, by_hand, field_manager="kubectl-annotate")
        await Namespaces(client, {"example.com/role": "b", "team": "nlp"}).prepare(where)
        account = await client.get(ref)
        assert account["metadata"]["annotations"] == {"example.com/role": "mine", "team": "nlp"}
        await Namespaces(client).prepare(where)
        account = await client.get(ref)
        assert account["metadata"]["annotations"] == {"example.com/role": "mine"}

    run(scenario)


def test_an_account_of_the_administrator_stays_as_it_is(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        await client.create(_object(ACCOUNTS, SERVICE_ACCOUNT))
        await Namespaces(client).prepare(where)
        account = await client.get(Ref(ACCOUNTS, SERVICE_ACCOUNT, where))
        assert not account["metadata"].get("labels")
        await client.get(Ref(BINDINGS, SERVICE_ACCOUNT, where))

    run(scenario)


def test_accounts_and_namespaces_that_are_missing_are_named(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        namespaces = Namespaces(client)
        with pytest.raises(errors.KubernetesNotFoundError, match="'trainer'") as error:
            await namespaces.prepare(where, "trainer")
        assert f"kubectl create serviceaccount trainer -n {where}" in (error.value.hint or "")
        for account in (SERVICE_ACCOUNT, "trainer"):
            with pytest.raises(errors.KubernetesNotFoundError, match="does not exist") as error:
                await namespaces.prepare("kt-stores-nowhere", account)
            assert "kubectl create namespace kt-stores-nowhere" in (error.value.hint or "")
        await client.create(_object(ACCOUNTS, "trainer"))
        await namespaces.prepare(where, "trainer")
        with pytest.raises(errors.KubernetesNotFoundError):
            await client.get(Ref(BINDINGS, SERVICE_ACCOUNT, where))

    run(scenario)


def test_an_object_is_prepared_with_its_namespace(run: Run) -> None:
    async def scenario(client: Client, where: str) -> None:
        secrets = SecretObjects(client, watched=(where,))
        tokens = PodTokens(client, secret=b"s" * 32, clocks=Clocks(time.time, time.monotonic))
        stores = Stores(secrets, VolumeClaims(client))
        prerequisites = PodPrerequisites(Namespaces(client), stores, tokens.ensure)
        secret = SecretRef("tokens", OBJECT, "env", keys=("A",))
        compute = ComputeSpec(secrets=(secret,), service_account_name="default")
        with pytest.raises(errors.SecretNotFound):
            await prerequisites.prepare(rendering.render(compute, namespace=where, name="web"))
        stored = await secrets.put(where, OBJECT, _put(A="1"))
        assert [secret_object.object_name for secret_object in await secrets.list(None)] == [OBJECT]
        first, second = (rendering.render(compute, namespace=where, name="web") for _ in range(2))
        await prerequisites.prepare(first)
        await secrets.put(where, OBJECT, _put("replace", A="2"))
        await prerequisites.prepare(second)
        versions = [
            manifest["spec"]["template"]["metadata"]["annotations"]["kubetorch.com/secrets-version"]
            for manifest in (first, second)
        ]
        assert len(set(versions)) == 2 and stored.secret.version not in versions
        with pytest.raises(errors.KubernetesNotFoundError):
            await client.get(Ref(ACCOUNTS, SERVICE_ACCOUNT, where))
        await prerequisites.prepare(rendering.render(ComputeSpec(), namespace=where, name="web"))
        await client.get(Ref(ACCOUNTS, SERVICE_ACCOUNT, where))

    run(scenario)
