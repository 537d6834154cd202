"""What real operators make of the objects that a deploy applies, with a stand-in for the agent."""

from __future__ import annotations

import asyncio
import copy
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster import byo
from kubetorch import errors
from kubetorch.controller.backends.kubernetes import prepare
from kubetorch.controller.backends.kubernetes.apply import (
    Applier,
    ApplyPlan,
    ApplyRetry,
    TakeoverPermission,
)
from kubetorch.k8s import kubeconfig, pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.informers import Informer
from kubetorch.k8s.kubeconfig import Access
from kubetorch.k8s.resources import PODS, Object, Ref, Resource, Selection
from kubetorch.manifests import agent, agent_container, parameters, rendering, services
from kubetorch.manifests.workload_manifest import WorkloadManifest

pytestmark = pytest.mark.cluster

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
SERVICES = Resource("", "v1", "services", "Service")
ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
#: The image of a pod that has the runtime already gets no copy of it.
RUNTIME = agent.Runtime(image=byo.IMAGE, default_image=byo.IMAGE, controller_url="http://nowhere")
#: Answers every question with yes, as an agent that serves does.
ANSWERING = """
import http.server, os, signal
signal.signal(signal.SIGTERM, lambda *args: os._exit(0))
class Yes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("", 32300), Yes).serve_forever()
"""
#: Variables in which operators say where the first pod is.
ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR", "DMLC_PS_ROOT_URI", "RAY_ADDRESS")
#: Seconds until all pods are ready; a CronJob begins at the next minute.
PATIENCE = 150.0


@pytest.fixture
def access() -> Iterator[Access]:
    """A namespace of its own, gone afterwards."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("no KUBECONFIG: these tests need a real Kubernetes")
    namespace_access = replace(kubeconfig.find(), namespace=f"kt-kinds-{uuid.uuid4().hex[:8]}")
    name = namespace_access.namespace

    async def make() -> None:
        async with Client(namespace_access) as client:
            await client.create(_object(NAMESPACES, name))
            await client.create(_object(ACCOUNTS, agent_container.SERVICE_ACCOUNT))

    async def remove() -> None:
        async with Client(namespace_access) as client:
            await client.delete(Ref(NAMESPACES, name))

    asyncio.run(make())
    yield namespace_access
    asyncio.run(remove())


def _object(resource: Resource, name: str) -> Object:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, "metadata": {"name": name}}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", list(byo.KINDS))
def test_its_pods_run_the_agent_and_are_found(kind: str, access: Access) -> None:
    manifest, pods = byo.KINDS[kind]
    asyncio.run(_run(access, copy.deepcopy(manifest), pods))


async def _run(access: Access, manifest: Object, pods: int) -> None:
    async with Client(access) as client:
        await _needs(client, manifest)
        main, rendered_services = await _apply(client, manifest)
        name = main["metadata"]["name"]
        compute = parameters.read_manifest(manifest)
        behind = services.KubernetesServices(
            compute, main, namespace=str(access.namespace), name=name
        )
        pool, called = behind.pool, behind.called
        selection = Selection(PODS, access.namespace, labels=_selector(pool))
        async with Informer(client, selection) as informer:
            try:
                await informer.until(
                    lambda objects: (
                        len(objects) >= max(pods, 1) and all(_is_ready(o) for o in objects.values())
                    ),
                    timeout=PATIENCE,
                )
            except TimeoutError:
                statuses = {o["metadata"]["name"]: o["status"] for o in informer.objects.values()}
                raise AssertionError(f"not ready: {statuses}") from None
            running_pods = list(informer.objects.values())
        assert len(running_pods) == pods or not pods
        for pod in running_pods:
            _check_agent(pod, kind=manifest["kind"])
        listing = await client.list(Selection(PODS, access.namespace, labels=_selector(called)))
        assert listing.items
        for service in rendered_services:
            await _check_endpoints(client, service)
        await _check_services(client, running_pods)
        for pod in running_pods:
            await _check_names(client, pod, running_pods)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["StatefulSet", "ReplicaSet", "Pod", "Job", "PyTorchJob", "JobSet", "TrainJob"]
)
def test_another_template_is_that_of_all_pods(kind: str, access: Access) -> None:
    manifest, pods = byo.KINDS[kind]

    async def scenario() -> None:
        async with Client(access) as client:
            await _needs(client, manifest)
            main, _ = await _apply(client, copy.deepcopy(manifest), STAGE="one")
            name = main["metadata"]["name"]
            pool = services.KubernetesServices(
                parameters.read_manifest(manifest), main, namespace=str(access.namespace), name=name
            ).pool
            selection = Selection(PODS, access.namespace, labels=_selector(pool))
            async with Informer(client, selection) as informer:
                await informer.until(lambda o: _all_say(o, pods, "one"), timeout=PATIENCE)
                await _apply(client, copy.deepcopy(manifest), STAGE="one")
                before = {pod["metadata"]["uid"] for pod in informer.objects.values()}
                await _apply(client, copy.deepcopy(manifest), STAGE="two")
                await informer.until(lambda o: _all_say(o, pods, "two"), timeout=PATIENCE)
                after = {pod["metadata"]["uid"] for pod in informer.objects.values()}
            assert not before & after

    asyncio.run(scenario())


def _all_say(pods: Mapping[Any, Object], count: int, stage: str) -> bool:
    """Whether there are so many pods, ready and with that value of a variable."""
    stages = [
        variable["value"]
        for pod in pods.values()
        for container in pod["spec"]["containers"]
        for variable in container.get("env") or ()
        if variable["name"] == "STAGE" and _is_ready(pod)
    ]
    return len(pods) == count and stages == [stage] * count


async def _needs(client: Client, manifest: Object) -> None:
    """Skip without the operator; have what the kind refers to."""
    try:
        await client.discovery.resource_of(manifest)
    except errors.KubernetesNotFoundError:
        pytest.skip(f"the cluster has no {manifest['kind']}")
    if manifest["kind"] == "TrainJob":
        # It is of the whole cluster, and tests beside this one use it: nobody deletes it.
        await client.apply(byo.TRAIN_RUNTIME)


async def _apply(client: Client, manifest: Object, **variables: str) -> tuple[Object, list[Object]]:
    """The objects of a workload, as the backend applies them; its own one, and its Services."""
    namespace = str(client.access.namespace)
    compute = replace(parameters.read_manifest(manifest), env_vars=tuple(variables.items()))
    name = manifest["metadata"]["name"]
    main = rendering.render(compute, namespace=namespace, name=name, default_image=byo.IMAGE)
    agent.equip(main, workload=name, runtime=RUNTIME)
    beside = await prepare.companion_objects(client, main, RUNTIME)
    for companion in beside:
        job = companion["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
        job["spec"]["template"]["spec"]["initContainers"][0]["command"] = ["true"]
        main["spec"]["trainer"]["command"] = ["python3", "-c", ANSWERING]
    for template in WorkloadManifest.parse(main).templates:
        template.container["command"] = ["python3", "-c", ANSWERING]
    rendered_services = services.KubernetesServices(
        compute, main, namespace=namespace, name=name
    ).render()
    objects = ApplyPlan(
        (*rendered_services, *beside, main),
        user_manifest=None,
        permission=TakeoverPermission(),
        owner=None,
        live_objects={},
        timeout=60,
    )
    applier = ApplyRetry(Applier(client), now=time.monotonic, on_wait=lambda _: None)
    await applier.apply((namespace, name), objects)
    return main, rendered_services


def _selector(labels: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def _check_agent(pod: Object, kind: str) -> None:
    """The operator left our container as it was."""
    expected = {"TrainJob": "node"}.get(kind)
    agents: list[Any] = [
        container
        for container in pod["spec"]["containers"]
        if any(variable["name"] == "KT_POD_WORKLOAD" for variable in container.get("env") or ())
    ]
    assert len(agents) == 1, "the agent's variables are not in one container"
    assert agents[0]["command"] == ["python3", "-c", ANSWERING]
    assert not agents[0].get("args")
    assert expected in (None, agents[0]["name"])
    assert pod["spec"]["serviceAccountName"] == agent_container.SERVICE_ACCOUNT
    assert "kubetorch.com/template-digest" in pod["metadata"]["annotations"]
    assert pod["metadata"]["labels"]["kubetorch.com/service"] == f"my-{kind.lower()}"


async def _check_endpoints(client: Client, service: Object) -> None:
    """The Service has pods behind it, whoever made it."""
    resource = await client.discovery.find("discovery.k8s.io/v1", "EndpointSlice")
    name = service["metadata"]["name"]
    mine = Selection(resource, client.access.namespace, labels=f"kubernetes.io/service-name={name}")
    async with Informer(client, mine) as slices:
        await slices.until(
            lambda objects: any(o.get("endpoints") for o in objects.values()), timeout=60
        )


async def _check_services(client: Client, pods: list[Object]) -> None:
    """The Services by which pods find each other have them before they are ready, too."""
    for name in {pod["spec"]["subdomain"] for pod in pods if pod["spec"].get("subdomain")}:
        service = await client.get(Ref(SERVICES, name, client.access.namespace))
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]


async def _check_names(client: Client, pod: Object, pods: list[Object]) -> None:
    """Names that the operator gave the pods lead to them, and so do those in their variables."""
    host_specs = [named_pod["spec"] for named_pod in pods if named_pod["spec"].get("subdomain")]
    names = [
        f"{spec['hostname']}.{spec['subdomain']}" for spec in host_specs if spec.get("hostname")
    ]
    variables = ", ".join(repr(name) for name in ADDRESSES)
    program = f"""
import os, socket, time
said = [os.environ[name] for name in ({variables},) if name in os.environ]
names = {names!r} + [address.partition(":")[0] for address in said]
left = time.monotonic() + 40
for name in names:
    while True:
        try:
            socket.getaddrinfo(name, 80)
            break
        except OSError:
            if time.monotonic() > left:
                raise SystemExit(name + " leads nowhere")
            time.sleep(0.5)
print(*names)
"""
    ref = Ref(PODS, pod["metadata"]["name"], client.access.namespace)
    main = next(
        container
        for container in pod["spec"]["containers"]
        if container["command"][-1] == ANSWERING
    )
    completed = await pod_streams.run(
        client, ref, ["python3", "-c", program], container=main["name"], timeout=60
    )
    assert completed.exit_code == 0, completed.stderr.decode()
