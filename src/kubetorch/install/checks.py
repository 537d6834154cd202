"""Checks that a cluster has all that Kubetorch needs for this user, one thing after another.

    kubeconfig ─► API server ─► rights ─► kind ─► controller ─► its answer, version, login
                                                       └─► DNS, storage class, images

With `api_url` the controller answers there, whatever the API server says to this user.

Each thing that is broken comes with the next step. What cannot be looked at without further rights
is left out and said so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kubetorch.errors import KubernetesForbiddenError, KubernetesNotFoundError, KubetorchError
from kubetorch.install import readiness
from kubetorch.install.readiness import LABELS, NAME
from kubetorch.k8s import failures, pod_streams
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import DEPLOYMENTS, PODS, Object, Ref, Resource, Selection
from kubetorch.manifests.kinds import KINDS

#: `note` is no fault, but worth knowing; `skipped` was not looked at.
State = Literal["ok", "note", "broken", "skipped"]
#: What the user needs in the namespace of their services: verb, group, resource, for what.
NEEDED = (
    ("list", "kubetorch.com", "kubetorchworkloads"),
    ("create", "kubetorch.com", "kubetorchworkloads"),
    ("delete", "kubetorch.com", "kubetorchworkloads"),
    ("create", "kubetorch.com", "kubetorchworkloads/call"),
    ("create", "kubetorch.com", "kubetorchworkloads/exec"),
    ("get", "kubetorch.com", "kubetorchworkloads/logs"),
    ("create", "", "pods/portforward"),
)
#: And in that of the installation, to reach the controller.
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
#: Groups of kinds that Kubetorch knows, and what those of Kubernetes' own parts end with.
_KNOWN_GROUPS = frozenset(kind.group for kind in KINDS.values()) | {"kubetorch.com"}
_OF_OTHERS = ("k8s.io", "knative.dev")
#: Kinds that are looked at, and those that are named.
_LOOKED_AT, _SHOWN = 50, 5
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_POD_IMAGE = "KT_DEFAULT_IMAGE"
_OLDEST = (1, 28)
_PYTHON = "/kubetorch/bin/python"
_RESOLVE = "import socket, sys; socket.getaddrinfo(sys.argv[1], 8080)"
#: Seconds for a program in the controller's pod.
_EXEC_TIMEOUT = 15.0


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    reason: str
    hint: str | None = None


async def cluster(
    client: Client, namespace: str, install_namespace: str, *, api_url: str | None = None
) -> list[Finding]:
    """Look at all that the API server knows."""
    server = await _guarded("API server", lambda: _server(client))
    if server.state == "broken":
        # Who comes through an ingress may well have no other way in.
        aside = "not needed with api_url; what only it knows is not looked at"
        return [server if api_url is None else replace(server, state="note", hint=aside)]
    found = [server]
    needed = NEEDED if api_url is None else [one for one in NEEDED if one not in NEEDED_TO_REACH]
    found += await asyncio.gather(
        _guarded("rights", lambda: _rights(client, namespace, needed)),
        _guarded("way to the controller", lambda: _way(client, install_namespace, api_url)),
        _guarded("kind KubetorchWorkload", lambda: _kind(client)),
        _guarded("controller", lambda: _controller(client, install_namespace)),
        _guarded("DNS", lambda: _dns(client, install_namespace)),
        _guarded("storage class", lambda: _storage(client)),
        _guarded("kinds of your own", lambda: _own_kinds(client, namespace, install_namespace)),
        _guarded("images", lambda: _images(client, install_namespace)),
    )
    return found


async def _guarded(check: str, look: Callable[[], Awaitable[Finding]]) -> Finding:
    """A finding also when the API server refuses."""
    try:
        return await look()
    except KubernetesForbiddenError as error:
        return Finding(check, "skipped", f"you may not {error.verb} {error.resource}", error.hint)
    except KubetorchError as error:
        return Finding(check, "broken", error.message, error.hint)


async def _server(client: Client) -> Finding:
    version = await client.server_version()
    server = client.access.cluster.server
    parts = version.removeprefix("v").split(".")
    if tuple(int(part) for part in parts[:2] if part.isdigit()) < _OLDEST:
        hint = "upgrade the cluster to Kubernetes 1.28 or later"
        return Finding("API server", "broken", f"{server} is of version {version}", hint)
    return Finding("API server", "ok", f"{server} answers, version {version}")


async def _rights(
    client: Client,
    namespace: str,
    needed: Sequence[tuple[str, str, str]],
    *,
    check: str = "rights",
    role: str = "--clusterrole kubetorch-edit",
) -> Finding:
    allowed = await asyncio.gather(*(_may(client, namespace, *one) for one in needed))
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


async def _way(client: Client, namespace: str, api_url: str | None) -> Finding:
    check = "way to the controller"
    if api_url is not None:
        return Finding(check, "skipped", f"api_url is {api_url}")
    role = "--role kubetorch-reach"
    return await _rights(client, namespace, NEEDED_TO_REACH, check=check, role=role)


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


async def _kind(client: Client) -> Finding:
    check = "kind KubetorchWorkload"
    try:
        resource = await client.discovery.find("kubetorch.com/v1alpha1", "KubetorchWorkload")
    except KubernetesNotFoundError:
        reason = "the cluster has no kind KubetorchWorkload in kubetorch.com/v1alpha1"
        return Finding(check, "broken", reason, "kt install, or kt upgrade if it is an older one")
    return Finding(check, "ok", f"{resource} of {resource.version} is served")


async def _controller(client: Client, namespace: str) -> Finding:
    try:
        deployment = await client.get(Ref(DEPLOYMENTS, NAME, namespace))
    except KubernetesNotFoundError:
        reason = f"there is no Deployment {NAME} in namespace {namespace}"
        hint = f"kt install --namespace {namespace}; or set install_namespace to where it is"
        return Finding("controller", "broken", reason, hint)
    pods = (await client.list(Selection(PODS, namespace, LABELS))).items
    states = ", ".join(f"{one['metadata']['name']}: {readiness.state_of(one)}" for one in pods)
    if readiness.is_rolled_out(deployment):
        return Finding("controller", "ok", states)
    doom = readiness.refusal_of(deployment)
    for pod in pods:
        doom = readiness.doom_of(pod) or doom
    ready = (deployment.get("status") or {}).get("availableReplicas", 0)
    if doom is None and ready:
        return Finding("controller", "note", f"it is being replaced: {states}")
    reason = doom.message if doom else f"none is ready: {states or 'there are no pods'}"
    hint = doom.hint if doom else f"kubectl --namespace {namespace} describe pods"
    return Finding("controller", "note" if ready else "broken", reason, hint)


async def _dns(client: Client, namespace: str) -> Finding:
    """Check that the controller's pod resolves the name by which pods find the controller."""
    name = f"{NAME}.{namespace}.svc.cluster.local"
    pods = (await client.list(Selection(PODS, namespace, LABELS))).items
    running = [one for one in pods if readiness.state_of(one) == "ready"]
    if not running:
        return Finding("DNS", "skipped", "no pod of the controller is ready")
    pod = Ref(PODS, running[0]["metadata"]["name"], namespace)
    command = [_PYTHON, "-c", _RESOLVE, name]
    done = await pod_streams.run(client, pod, command, timeout=_EXEC_TIMEOUT)
    if done.exit_code == 0:
        return Finding("DNS", "ok", f"pods resolve {name}")
    said = done.stderr.decode(errors="replace").strip().splitlines()
    reason = f"the controller's pod cannot resolve {name}: {said[-1] if said else done.exit_code}"
    return Finding(
        "DNS", "broken", reason, "check the cluster's DNS: kubectl -n kube-system get pods"
    )


async def _own_kinds(client: Client, namespace: str, install_namespace: str) -> Finding:
    """Check that the controller may make what the cluster has of kinds unknown to Kubetorch.

    Who comes with a certificate acts as the account of administrators, which needs the right too.
    """
    check = "kinds of your own"
    found = [one["spec"] for one in (await client.list(Selection(_DEFINITIONS))).items]
    own = [one for one in found if one["scope"] == "Namespaced" and not _is_known(one["group"])]
    accounts = [f"{install_namespace}:{name}" for name in (NAME, _ADMINISTRATOR)]
    lacking: list[str] = []
    for one in own[:_LOOKED_AT]:
        plural, group = one["names"]["plural"], one["group"]
        attributes = {"namespace": namespace, "verb": "create", "group": group, "resource": plural}
        reviews = (_account_may(client, account, attributes) for account in accounts)
        if not all(await asyncio.gather(*reviews)):
            lacking.append(f"{plural}.{group}")
    if not lacking:
        count = len(own)
        return Finding(
            check, "ok", f"the controller may make {count}" if count else "there are none"
        )
    subjects = [f"--serviceaccount={account}" for account in accounts]
    shown = ", ".join(lacking[:_SHOWN]) + (", …" if len(lacking) > _SHOWN else "")
    reason = (
        f"for Compute.from_manifest the controller lacks the rule resources: [{shown}], "
        f"verbs: [{', '.join(failures.MAKER_VERBS)}] in namespace {namespace}"
    )
    commands = failures.grant_commands(lacking[0], failures.MAKER_VERBS, subjects, namespace)
    return Finding(check, "note", reason, f"an administrator grants it with\n{commands}")


def _is_known(group: str) -> bool:
    return group in _KNOWN_GROUPS or group.endswith(_OF_OTHERS)


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


async def _storage(client: Client) -> Finding:
    classes = (await client.list(Selection(_CLASSES))).items
    default = [
        one["metadata"]["name"]
        for one in classes
        if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    ]
    if default:
        return Finding("storage class", "ok", f"{default[0]} is the default")
    names = ", ".join(one["metadata"]["name"] for one in classes)
    reason = f"none is the default; there are {names}" if names else "there is none"
    hint = "give kt.Volume a storage_class" if names else "volumes need one: install a provisioner"
    return Finding("storage class", "note", reason, hint)


async def _images(client: Client, namespace: str) -> Finding:
    """Check that nodes have the images already; a node lists only some of its images."""
    deployment = await client.get(Ref(DEPLOYMENTS, NAME, namespace))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value") for one in container.get("env") or []}
    wanted = [container["image"], variables.get(_POD_IMAGE)]
    nodes = (await client.list(Selection(_NODES))).items
    lines = []
    for image in filter(None, wanted):
        having = sum(_has(node, image) for node in nodes)
        lines.append(f"{image} on {having} of {len(nodes)} nodes")
    return Finding("images", "ok", "; ".join(lines) + " (others pull it for their first pod)")


def _has(node: dict[str, Any], image: str) -> bool:
    images = (node.get("status") or {}).get("images") or []
    names = [name for one in images for name in one.get("names") or []]
    return any(name == image or name.endswith(f"/{image}") for name in names)
