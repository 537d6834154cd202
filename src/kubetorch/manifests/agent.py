"""Adds to the pods of a cluster the agent and the address of its controller.

`render` says what the user wants; this is laid over it when it is applied. In each pod template:

    initContainer  kubetorch-runtime   copies the agent's runtime to an emptyDir
    container      …                   runs it from there, whatever its image has
    volumes        kubetorch-runtime, kubetorch-state (code, logs, results), kubetorch-token

The default pod image has the runtime already, so its pods need no copy of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.manifests import (
    agent_container,
    labels,
    pod_security,
    raycluster,
    rendering,
    scheduling,
    trainjob,
)
from kubetorch.manifests.kinds import Manifest, assign, entry, items, named
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import podenv, routes
from kubetorch.wire.messages import Runtime

#: Where the runtime lies in every pod, and what of it is run.
FOLDER = "/kubetorch"
AGENT = f"{FOLDER}/bin/kt-agent"
INSTALL = f"{FOLDER}/bin/install"
#: Folder of the pod: code, logs, results.
STATE = "/var/run/kubetorch"
#: Where its workers run.
WORK = f"{STATE}/work"
TOKEN_FOLDER = "/var/run/secrets/kubetorch.com"
#: Who the token is for, and for how many seconds; the kubelet renews it.
AUDIENCE = "kubetorch"
TOKEN_SECONDS = 3600
#: Seconds that Knative gives a request where `timeoutSeconds` does not say.
KNATIVE_TIMEOUT = 300

RUNTIME = "kubetorch-runtime"
_STATE = "kubetorch-state"
_TOKEN = "kubetorch-token"
# Where the copy is made; the runtime's own image has /kubetorch itself.
_COPY = "/runtime"
_GRACE = "terminationGracePeriodSeconds"
_FIELDS = {
    podenv.NAMESPACE: "metadata.namespace",
    podenv.POD: "metadata.name",
    podenv.HOST: "status.podIP",
}
#: All that are added.
_VARIABLES = {
    *_FIELDS,
    podenv.BACKEND,
    podenv.WORKLOAD,
    podenv.PORT,
    podenv.ROOT,
    podenv.WORKING_DIR,
    podenv.ENVIRONMENTS,
    podenv.CONTROLLER_URL,
    podenv.TOKEN_FILE,
    podenv.GRACE,
}
_VOLUMES = {RUNTIME, _STATE, _TOKEN, pod_security.HOME_VOLUME}


def equip(
    manifest: Manifest,
    *,
    workload: str | None,
    runtime: Runtime,
    path: tuple[str, ...] | None = None,
    working_dir: str | None = WORK,
    root_images: Collection[str] | None = None,
) -> str:
    """Put the agent into all pod templates of a rendered object; the digest of what pods are.

    Without the name of the workload, what depends on it is left out; `strip` undoes all of it. With
    `root_images`, the images that run as root as far as is known, pods comply with the Pod Security
    level `restricted`.
    """
    parsed = WorkloadManifest.parse(manifest, path)
    for template in parsed.templates:
        _bring(template, runtime)
        _start(template, _added(template.container, workload, runtime, working_dir))
        _probe(template)
        if root_images is not None:
            pod_security.give_home(template)
            if template.kind.has_template:
                is_scaled = template.kind.is_autoscaled
                pod_security.restrict(
                    template.spec, template.container, root_images, is_scaled=is_scaled
                )
    # Pods of another object are others, though their templates be alike.
    whose = {"kind": parsed.kind.kind, "name": manifest["metadata"]["name"]}
    digest = rendering.fingerprint({"object": whose, "template": parsed.primary.body})
    for template in parsed.templates if workload is not None else ():
        *_, of_pods = template.annotations()
        of_pods[labels.TEMPLATE_DIGEST] = digest
        scheduling.name_group(template, whose["name"], digest)
    parsed.write_templates()
    if not parsed.kind.has_template:
        trainjob.refer_to_own(manifest)
    return digest


def note_secrets(template: PodTemplate, version: str) -> None:
    """Replace pods when the secrets that they see change: variables are set only once."""
    if version:
        *_, of_pods = template.annotations()
        of_pods[labels.SECRETS_VERSION] = version


def strip(manifest: Manifest, path: tuple[str, ...] | None = None) -> None:
    """Take out of an object what was added to it when it was applied; others' objects stay."""
    parsed = WorkloadManifest.parse(manifest, path)
    if not any(map(_is_equipped, parsed.templates)):
        return
    metadata = entry(manifest, "metadata")
    owners = metadata.pop("ownerReferences", None) or ()
    others = [one for one in owners if not str(one.get("apiVersion")).startswith(labels.PREFIX)]
    assign(metadata, "ownerReferences", others)
    for template in parsed.templates:
        pod, container, of_pods = (
            template.spec,
            template.container,
            template.read_pods("annotations"),
        )
        if container.get("command") in ([AGENT], raycluster.beside(AGENT)):
            del container["command"]
        asked = (container.get("readinessProbe") or {}).get("httpGet") or {}
        if str(asked.get("path")).partition("?")[0] == routes.SERVING:
            asked["path"] = routes.HEALTH
        _remove(container, "env", _VARIABLES)
        _remove(pod, "initContainers", {RUNTIME})
        _remove(pod, "volumes", _VOLUMES)
        for one in (*pod["containers"], *(pod.get("initContainers") or ())):
            _remove(one, "volumeMounts", _VOLUMES)
        for key in (labels.TEMPLATE_DIGEST, labels.SECRETS_VERSION, labels.TRIED_AGAIN):
            of_pods.pop(key, None)
        if labels.KUEUE_GROUP_COUNT in of_pods:
            template.read_pods("labels").pop(labels.KUEUE_GROUP, None)
    parsed.write_templates()
    if not parsed.kind.has_template:
        trainjob.refer_to_base(manifest)
    annotations = metadata.get("annotations") or {}
    for key in (labels.APPLIED, labels.BEFORE):
        annotations.pop(key, None)


def _is_equipped(template: PodTemplate) -> bool:
    # What a user wrote may be anything.
    variables = template.container.get("env")
    names = [one.get("name") for one in variables or () if isinstance(one, dict)]
    return isinstance(variables, list) and podenv.CONTROLLER_URL in names


def _remove(node: Manifest, key: str, gone: Collection[str]) -> None:
    if key in node:
        assign(node, key, [one for one in node[key] or () if one.get("name") not in gone])


def working_dir(spec: WorkloadSpec) -> str | None:
    """The folder in which workers of a workload run; `None`: the folder that their image names.

    So it is in the pods of `kt apply`, which run what the user's own object would.
    """
    is_own = spec.compute.manifest is not None
    return None if is_own and spec.callable.app is not None and spec.tree is None else WORK


def beside(
    manifest: Manifest,
    base: Manifest,
    *,
    runtime: Runtime,
    root_images: Collection[str] | None = None,
) -> Manifest:
    """The runtime that an equipped TrainJob refers to, which has what the job itself cannot say."""
    volumes = trainjob.template(manifest)["spec"].get("volumes") or []
    is_brought = named(volumes, RUNTIME) is not None
    made = trainjob.runtime(manifest, base, [_copying(runtime)] if is_brought else [])
    if root_images is not None:
        pod = trainjob.pod_template(made["spec"])["spec"]
        container = named(pod["containers"], trainjob.NODE) or pod["containers"][0]
        container.update(image=manifest["spec"]["trainer"].get("image") or container.get("image"))
        pod_security.restrict(pod, container, root_images)
    return made


def _bring(template: PodTemplate, runtime: Runtime) -> None:
    container = template.container
    if container.get("image") in (DEFAULT_IMAGE, runtime.default_image):
        container["image"] = runtime.default_image
        _pull(container, runtime)
        return
    _volume(template, {"name": RUNTIME, "emptyDir": {}})
    items(container, "volumeMounts").append(
        {"name": RUNTIME, "mountPath": FOLDER, "readOnly": True}
    )
    # First: other init containers may wait for things that only come later.
    items(template.spec, "initContainers").insert(0, _copying(runtime))


def _copying(runtime: Runtime) -> Manifest:
    copying: Manifest = {
        "name": RUNTIME,
        "image": runtime.image,
        "command": [INSTALL, _COPY],
        "volumeMounts": [{"name": RUNTIME, "mountPath": _COPY}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    _pull(copying, runtime)
    return copying


def _pull(container: Manifest, runtime: Runtime) -> None:
    if runtime.pull_policy is not None:
        container.setdefault("imagePullPolicy", runtime.pull_policy)


def _start(template: PodTemplate, own: dict[str, str]) -> None:
    """Run the agent in the container; its environment says which pod it is."""
    container = template.container
    is_ray = template.kind == raycluster.KIND
    container["command"] = raycluster.beside(AGENT) if is_ray else [AGENT]
    container.pop("args", None)
    _volume(template, {"name": _STATE, "emptyDir": {}})
    _volume(
        template, {"name": _TOKEN, "projected": {"sources": [{"serviceAccountToken": _token()}]}}
    )
    items(container, "volumeMounts").extend(
        [
            {"name": _STATE, "mountPath": STATE},
            {"name": _TOKEN, "mountPath": TOKEN_FOLDER, "readOnly": True},
        ]
    )
    variables = items(container, "env")
    for name, value in own.items():
        _replace(variables, name, {"value": value})
    # Knative gives pods as long as it gives requests.
    time = ("timeoutSeconds", KNATIVE_TIMEOUT) if template.kind.is_autoscaled else (_GRACE, None)
    if isinstance(grace := template.spec.get(*time), int):
        _replace(variables, podenv.GRACE, {"value": str(grace)})
    if template.kind.is_autoscaled:
        # Knative takes no fields of pods; an agent finds out the rest.
        namespace = template.workload.object["metadata"]["namespace"]
        _replace(variables, podenv.NAMESPACE, {"value": namespace})
        return
    for name, field in _FIELDS.items():
        _replace(variables, name, {"valueFrom": {"fieldRef": {"fieldPath": field}}})


def _token() -> Manifest:
    return {"audience": AUDIENCE, "expirationSeconds": TOKEN_SECONDS, "path": "token"}


def _added(
    container: Manifest, workload: str | None, runtime: Runtime, working_dir: str | None
) -> dict[str, str]:
    said = container.get("workingDir") or working_dir
    return {
        podenv.BACKEND: "kubernetes",
        **({} if workload is None else {podenv.WORKLOAD: workload}),
        podenv.PORT: str(agent_container.agent_port(container)),
        podenv.ROOT: STATE,
        **({} if said is None else {podenv.WORKING_DIR: said}),
        podenv.ENVIRONMENTS: f"{STATE}/environments",
        podenv.CONTROLLER_URL: runtime.controller_url,
        podenv.TOKEN_FILE: f"{TOKEN_FOLDER}/token",
    }


def _replace(variables: list[Any], name: str, value: Manifest) -> None:
    there = named(variables, name)
    if there is None:
        variables.append({"name": name, **value})
    else:
        there.clear()
        there.update({"name": name, **value})


def _probe(template: PodTemplate) -> None:
    """Ready is a pod that serves: until then, the pods of the template before it stay.

    Workers of a training job or a RayCluster start once the first pod is ready, which serves once
    they are there: there ready is a pod whose agent answers.

    A kubelet makes a warning of each answer that is no, so while a pod starts, its agent answers as
    late as the probe allows. Knative has probes of its own, which have to be answered at once.
    """
    if template.kind.is_job or template.kind == raycluster.KIND:
        return
    probe = template.container.get("readinessProbe") or {}
    asked = probe.get("httpGet")
    if asked is not None and asked.get("path") == routes.HEALTH:
        seconds = 0 if template.kind.is_autoscaled else int(probe.get("timeoutSeconds") or 1) - 1
        asked["path"] = routes.serving(wait=seconds)


def _volume(template: PodTemplate, volume: Manifest) -> None:
    volumes = items(template.spec, "volumes")
    if named(volumes, volume["name"]) is None:
        volumes.append(volume)


def digest_of(pod_object: Manifest) -> str:
    """Digest of the template that a pod was made from; empty if it does not say."""
    metadata = entry(pod_object, "metadata")
    return str((metadata.get("annotations") or {}).get(labels.TEMPLATE_DIGEST) or "")
