"""What pods of a cluster need beyond what a compute says: the agent, and where its controller is.

`render` says what the user wants; this is laid over it when it is applied. In each pod template:

    initContainer  kubetorch-runtime   copies the agent's runtime to an emptyDir
    container      …                   runs it from there, whatever its image has
    volumes        kubetorch-runtime, kubetorch-state (code, logs, results), kubetorch-token

The default pod image has the runtime already, so its pods need no copy of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
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
from kubetorch.manifests.kinds import Manifest, entry, items, named
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.wire import podenv, routes

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


@dataclass(frozen=True)
class Runtime:
    """Where pods get their agent from, and whom it belongs to."""

    image: str
    default_image: str
    controller_url: str
    pull_policy: str | None = None


def equip(
    manifest: Manifest,
    *,
    workload: str,
    runtime: Runtime,
    path: tuple[str, ...] | None = None,
    working_dir: str | None = WORK,
    root_images: Collection[str] | None = None,
) -> str:
    """Put the agent into all pod templates of a rendered object; the digest of what pods are.

    With `root_images`, the images that run as root as far as is known, pods comply with the Pod
    Security level `restricted`.
    """
    parsed = WorkloadManifest.parse(manifest, path)
    for template in parsed.templates:
        _bring(template, runtime)
        _start(template, _variables(template.container, workload, runtime, working_dir))
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
    for template in parsed.templates:
        *_, of_pods = template.annotations()
        of_pods[labels.TEMPLATE_DIGEST] = digest
        scheduling.name_group(template, whose["name"], digest)
    parsed.write_templates()
    return digest


def beside(
    manifest: Manifest,
    base: Manifest,
    *,
    runtime: Runtime,
    root_images: Collection[str] | None = None,
) -> Manifest:
    """The runtime that an equipped TrainJob runs on, which has what the job itself cannot say.

    The job is changed to refer to it.
    """
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
    """Have the runtime at `FOLDER`."""
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
    """Have the container run the agent, which learns from its environment who it is."""
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


def _variables(
    container: Manifest, workload: str, runtime: Runtime, working_dir: str | None
) -> dict[str, str]:
    said = container.get("workingDir") or working_dir
    return {
        podenv.BACKEND: "kubernetes",
        podenv.WORKLOAD: workload,
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
    """
    if template.kind.is_job or template.kind == raycluster.KIND:
        return
    asked = (template.container.get("readinessProbe") or {}).get("httpGet")
    if asked is not None and asked.get("path") == routes.HEALTH:
        asked["path"] = routes.SERVING


def _volume(template: PodTemplate, volume: Manifest) -> None:
    volumes = items(template.spec, "volumes")
    if named(volumes, volume["name"]) is None:
        volumes.append(volume)


def digest_of(pod_object: Manifest) -> str:
    """Digest of the template that a pod was made from; empty if it does not say."""
    metadata = entry(pod_object, "metadata")
    return str((metadata.get("annotations") or {}).get(labels.TEMPLATE_DIGEST) or "")
