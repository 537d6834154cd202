"""Checks that a cluster has all that Kubetorch needs for this user, one thing after another.

    kubeconfig ─► API server ─► rights ─► kind ─► controller ─► its answer, version, login
                                                       └─► DNS, storage class, images

With `api_url` the controller answers there, whatever the API server says to this user.

Each broken part comes with the next step. A check that needs further rights is skipped, and the
finding says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kubetorch.errors import KubernetesForbiddenError, KubernetesNotFoundError, KubetorchError
from kubetorch.install import readiness
from kubetorch.install.readiness import CONTROLLER, LABELS, NAME, STORE, Component
from kubetorch.install.tuning import LIMITS, TIMING
from kubetorch.k8s import failures, pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import DEPLOYMENTS, PODS, Object, Ref, Resource, Selection
from kubetorch.manifests.kinds import KINDS

#: `note` is no fault, but worth knowing; `skipped` was not looked at.
State = Literal["ok", "note", "broken", "skipped"]
#: Rights that the user needs in the namespace of their services: verb, group, resource.
NEEDED = (
    ("list", "kubetorch.com", "kubetorchworkloads"),
    ("create", "kubetorch.com", "kubetorchworkloads"),
    ("delete", "kubetorch.com", "kubetorchworkloads"),
    ("create", "kubetorch.com", "kubetorchworkloads/call"),
    ("create", "kubetorch.com", "kubetorchworkloads/exec"),
    ("get", "kubetorch.com", "kubetorchworkloads/logs"),
    ("create", "", "pods/portforward"),
)
#: Rights in the namespace of the installation, to reach the controller.
NEEDED_TO_REACH = (("list", "", "pods"), ("create", "", "pods/portforward"))

_NODES = Resource("", "v1", "nodes", "Node", is_namespaced=False)
_CLASSES = Resource("storage.k8s.io", "v1", "storageclasses", "StorageClass", is_namespaced=False)
_DEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    is_namespaced=False,
)
_ADMINISTRATOR = "kubetorch-admin"
#: Groups of kinds that Kubetorch knows, and suffixes of the groups of Kubernetes' own parts.
_KNOWN_GROUPS = frozenset(kind.group for kind in KINDS.values()) | {"kubetorch.com"}
_KNOWN_GROUP_SUFFIXES = ("k8s.io", "knative.dev")
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_POD_IMAGE = "KT_DEFAULT_IMAGE"
_OLDEST_VERSION = (1, 28)
_PYTHON = "/kubetorch/bin/python"
_RESOLVE_PROGRAM = "import socket, sys; socket.getaddrinfo(sys.argv[1], 8080)"


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    reason: str
    hint: str | None = None


async def cluster(
    client: Client, namespace: str, install_namespace: str, *, api_url: str | None = None
) -> list[Finding]:
    """Run all checks that ask the API server."""
    server = await _guarded("API server", lambda: _check_server(client))
    if server.state == "broken":
        # A user of an ingress may have no access to the API server.
        aside = "not needed with api_url; what only it knows is not looked at"
        return [server if api_url is None else replace(server, state="note", hint=aside)]
    findings = [server]
    needed = (
        NEEDED if api_url is None else [right for right in NEEDED if right not in NEEDED_TO_REACH]
    )
    findings += await asyncio.gather(
        _guarded("rights", lambda: _check_rights(client, namespace, needed)),
        _guarded("way to the controller", lambda: _check_reach(client, install_namespace, api_url)),
        _guarded("kind KubetorchWorkload", lambda: _check_kind(client)),
        _guarded("controller", lambda: _check_controller(client, install_namespace)),
        _guarded("data store", lambda: _check_store(client, install_namespace)),
        _guarded("DNS", lambda: _check_dns(client, install_namespace)),
        _guarded("storage class", lambda: _check_storage(client)),
        _guarded(
            "kinds of your own", lambda: _check_unknown_kinds(client, namespace, install_namespace)
        ),
        _guarded("images", lambda: _check_images(client, install_namespace)),
    )
    return findings


async def _guarded(check: str, run_check: Callable[[], Awaitable[Finding]]) -> Finding:
    """A finding also when the API server refuses."""
    try:
        return await run_check()
    except KubernetesForbiddenError as error:
        return Finding(check, "skipped", f"you may not {error.verb} {error.resource}", error.hint)
    except KubetorchError as error:
        return Finding(check, "broken", error.message, error.hint)


async def _check_server(client: Client) -> Finding:
    version = await client.server_version()
    server = client.access.cluster.server
    parts = version.removeprefix("v").split(".")
    if tuple(int(part) for part in parts[:2] if part.isdigit()) < _OLDEST_VERSION:
        hint = "upgrade the cluster to Kubernetes 1.28 or later"
        return Finding("API server", "broken", f"{server} is of version {version}", hint)
    return Finding("API server", "ok", f"{server} answers, version {version}")


async def _check_rights(
    client: Client,
    namespace: str,
    needed: Sequence[tuple[str, str, str]],
    *,
    check: str = "rights",
    role: str = "--clusterrole kubetorch-edit",
) -> Finding:
    allowed = await asyncio.gather(*(_may(client, namespace, *right) for right in needed))
    missing = [
        f"{verb} {resource}{'.' * bool(group)}{group}"
        for (verb, group, resource), is_allowed in zip(needed, allowed, strict=True)
        if not is_allowed
    ]
    if not missing:
        return Finding(check, "ok", f"you may do all that is needed in namespace {namespace}")
    hint = (
        f"ask an administrator: kubectl create rolebinding kubetorch-user --namespace {namespace} "
        f"{role} --user YOU"
    )
    reason = f"in namespace {namespace} you may not " + ", ".join(missing)
    return Finding(check, "broken", reason, hint)


async def _check_reach(client: Client, namespace: str, api_url: str | None) -> Finding:
    check = "way to the controller"
    if api_url is not None:
        return Finding(check, "skipped", f"api_url is {api_url}")
    role = "--role kubetorch-reach"
    return await _check_rights(client, namespace, NEEDED_TO_REACH, check=check, role=role)


async def _may(client: Client, namespace: str, verb: str, group: str, resource: str) -> bool:
    plural, _, subresource = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": plural}
    if subresource:
        attributes["subresource"] = subresource
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    return bool(((await client.create(review)).get("status") or {}).get("allowed"))


async def _check_kind(client: Client) -> Finding:
    check = "kind KubetorchWorkload"
    try:
        resource = await client.discovery.find("kubetorch.com/v1alpha1", "KubetorchWorkload")
    except KubernetesNotFoundError:
        reason = "the cluster has no kind KubetorchWorkload in kubetorch.com/v1alpha1"
        return Finding(check, "broken", reason, "kt install, or kt upgrade if it is an older one")
    return Finding(check, "ok", f"{resource} of {resource.version} is served")


async def _check_controller(client: Client, namespace: str) -> Finding:
    finding = await _check_component(client, namespace, CONTROLLER)
    if finding is not None:
        return finding
    reason = f"there is no Deployment {NAME} in namespace {namespace}"
    hint = f"kt install --namespace {namespace}; or set install_namespace to where it is"
    return Finding("controller", "broken", reason, hint)


async def _check_store(client: Client, namespace: str) -> Finding:
    finding = await _check_component(client, namespace, STORE)
    return finding or Finding("data store", "ok", "in the controller")


async def _check_component(client: Client, namespace: str, component: Component) -> Finding | None:
    """What is to be said of a component; `None` if it is not installed."""
    try:
        deployment = await client.get(Ref(DEPLOYMENTS, component.name, namespace))
    except KubernetesNotFoundError:
        return None
    pods = (await client.list(Selection(PODS, namespace, component.labels))).items
    states = ", ".join(f"{pod['metadata']['name']}: {readiness.state_of(pod)}" for pod in pods)
    if readiness.is_rolled_out(deployment):
        return Finding(component.noun, "ok", states)
    doom = readiness.refusal_of(deployment)
    for pod in pods:
        doom = readiness.doom_of(pod) or doom
    ready = (deployment.get("status") or {}).get("availableReplicas", 0)
    if doom is None and ready:
        return Finding(component.noun, "note", f"it is being replaced: {states}")
    reason = doom.message if doom else f"none is ready: {states or 'there are no pods'}"
    hint = doom.hint if doom else f"kubectl --namespace {namespace} describe pods"
    return Finding(component.noun, "note" if ready else "broken", reason, hint)


async def _check_dns(client: Client, namespace: str) -> Finding:
    """Check that the controller's pod resolves the name by which pods find the controller."""
    name = f"{NAME}.{namespace}.svc.cluster.local"
    pods = (await client.list(Selection(PODS, namespace, LABELS))).items
    ready_pods = [
        controller_pod for controller_pod in pods if readiness.state_of(controller_pod) == "ready"
    ]
    if not ready_pods:
        return Finding("DNS", "skipped", "no pod of the controller is ready")
    pod = Ref(PODS, ready_pods[0]["metadata"]["name"], namespace)
    command = [_PYTHON, "-c", _RESOLVE_PROGRAM, name]
    done = await pod_streams.run(client, pod, command, timeout=TIMING.pod_program_seconds)
    if done.exit_code == 0:
        return Finding("DNS", "ok", f"pods resolve {name}")
    error_lines = done.stderr.decode(errors="replace").strip().splitlines()
    cause = error_lines[-1] if error_lines else done.exit_code
    reason = f"the controller's pod cannot resolve {name}: {cause}"
    return Finding(
        "DNS", "broken", reason, "check the cluster's DNS: kubectl -n kube-system get pods"
    )


async def _check_unknown_kinds(client: Client, namespace: str, install_namespace: str) -> Finding:
    """Check that the controller may make objects of the cluster's kinds unknown to Kubetorch.

    Users with a certificate act as the account of administrators, which needs the right too.
    """
    check = "kinds of your own"
    definitions = [
        definition["spec"] for definition in (await client.list(Selection(_DEFINITIONS))).items
    ]
    unknown_kinds = [
        definition
        for definition in definitions
        if definition["scope"] == "Namespaced" and not _is_known(definition["group"])
    ]
    accounts = [f"{install_namespace}:{name}" for name in (NAME, _ADMINISTRATOR)]
    lacking: list[str] = []
    for definition in unknown_kinds[: LIMITS.checked_kinds]:
        plural, group = definition["names"]["plural"], definition["group"]
        attributes = {"namespace": namespace, "verb": "create", "group": group, "resource": plural}
        reviews = (_account_may(client, account, attributes) for account in accounts)
        if not all(await asyncio.gather(*reviews)):
            lacking.append(f"{plural}.{group}")
    if not lacking:
        count = len(unknown_kinds)
        return Finding(
            check, "ok", f"the controller may make {count}" if count else "there are none"
        )
    subjects = [f"--serviceaccount={account}" for account in accounts]
    shown = ", ".join(lacking[: LIMITS.named_kinds]) + (
        ", …" if len(lacking) > LIMITS.named_kinds else ""
    )
    reason = (
        f"for Compute.from_manifest the controller lacks the rule resources: [{shown}], "
        f"verbs: [{', '.join(failures.MAKER_VERBS)}] in namespace {namespace}"
    )
    commands = [
        failures.grant_commands(kind, failures.MAKER_VERBS, subjects, namespace)
        for kind in lacking[: LIMITS.named_kinds]
    ]
    return Finding(check, "note", reason, "\n".join(["an administrator grants it with", *commands]))


def _is_known(group: str) -> bool:
    return group in _KNOWN_GROUPS or group.endswith(_KNOWN_GROUP_SUFFIXES)


async def _account_may(client: Client, account: str, attributes: dict[str, str]) -> bool:
    namespace = account.partition(":")[0]
    review: Object = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": f"system:serviceaccount:{account}",
            "groups": [
                "system:serviceaccounts",
                f"system:serviceaccounts:{namespace}",
                "system:authenticated",
            ],
            "resourceAttributes": attributes,
        },
    }
    return bool(((await client.create(review)).get("status") or {}).get("allowed"))


async def _check_storage(client: Client) -> Finding:
    classes = (await client.list(Selection(_CLASSES))).items
    default = [
        storage_class["metadata"]["name"]
        for storage_class in classes
        if (storage_class["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    ]
    if default:
        return Finding("storage class", "ok", f"{default[0]} is the default")
    names = ", ".join(storage_class["metadata"]["name"] for storage_class in classes)
    reason = f"none is the default; there are {names}" if names else "there is none"
    hint = "give kt.Volume a storage_class" if names else "volumes need one: install a provisioner"
    return Finding("storage class", "note", reason, hint)


async def _check_images(client: Client, namespace: str) -> Finding:
    """Check that nodes have the images already; a node lists only some of its images."""
    deployment = await client.get(Ref(DEPLOYMENTS, NAME, namespace))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in container.get("env") or []}
    images = [container["image"], variables.get(_POD_IMAGE)]
    nodes = (await client.list(Selection(_NODES))).items
    lines = []
    for image in filter(None, images):
        having = sum(_has(node, image) for node in nodes)
        lines.append(f"{image} on {having} of {len(nodes)} nodes")
    return Finding("images", "ok", "; ".join(lines) + " (others pull it for their first pod)")


def _has(node: dict[str, Any], image: str) -> bool:
    images = (node.get("status") or {}).get("images") or []
    names = [name for node_image in images for name in node_image.get("names") or []]
    return any(name == image or name.endswith(f"/{image}") for name in names)
