"""Adds to the pods of a cluster the agent and the address of its controller.

`rendering.render` makes the object of the user's spec; the agent is added to it when it is applied.
In each pod template:

    initContainer  kubetorch-runtime   copies the agent's runtime to an emptyDir
    container      …                   runs it from there, not from its own image
    volumes        kubetorch-runtime, kubetorch-state (code, logs, results), kubetorch-token,
                   kubetorch-node-data (trees that pods of a node share, where the chart allows it)

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
from kubetorch.manifests.kinds import Manifest, assign, dictionary_at, list_at, named
from kubetorch.manifests.tuning import TIMING
from kubetorch.manifests.workload_manifest import PodTemplate, WorkloadManifest
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import podenv, routes
from kubetorch.wire.messages import Runtime

#: Folder of the runtime in every pod, and its programs.
FOLDER = "/kubetorch"
AGENT = f"{FOLDER}/bin/kt-agent"
INSTALL = f"{FOLDER}/bin/install"
#: Folder of the pod: code, logs, results.
STATE = "/var/run/kubetorch"
#: Working directory of the pod's workers.
WORK = f"{STATE}/work"
TOKEN_FOLDER = "/var/run/secrets/kubetorch.com"
#: Audience of the token, and the seconds that it is valid; the kubelet renews it.
AUDIENCE = "kubetorch"
#: Seconds that Knative gives a request where `timeoutSeconds` is not set.
KNATIVE_TIMEOUT = 300

RUNTIME = "kubetorch-runtime"
_STATE_VOLUME = "kubetorch-state"
_TOKEN_VOLUME = "kubetorch-token"
NODE_DATA_VOLUME = "kubetorch-node-data"
NODE_DATA_FOLDER = "/var/run/kubetorch-node"
# Folder that the init container copies the runtime to; the runtime's own image has /kubetorch.
_COPY_FOLDER = "/runtime"
_GRACE_FIELD = "terminationGracePeriodSeconds"
_FIELD_PATHS = {
    podenv.NAMESPACE: "metadata.namespace",
    podenv.POD: "metadata.name",
    podenv.HOST: "status.podIP",
}
#: Names of all variables and volumes that `equip` adds and `strip` removes.
_VARIABLE_NAMES = {
    *_FIELD_PATHS,
    podenv.BACKEND,
    podenv.WORKLOAD,
    podenv.PORT,
    podenv.ROOT,
    podenv.WORKING_DIR,
    podenv.ENVIRONMENTS,
    podenv.CONTROLLER_URL,
    podenv.TOKEN_FILE,
    podenv.GRACE,
    podenv.NODE_DATA,
}
_VOLUME_NAMES = {RUNTIME, _STATE_VOLUME, _TOKEN_VOLUME, NODE_DATA_VOLUME, pod_security.HOME_VOLUME}


def equip(
    manifest: Manifest,
    *,
    workload: str | None,
    runtime: Runtime,
    path: tuple[str, ...] | None = None,
    working_dir: str | None = WORK,
    root_images: Collection[str] | None = None,
) -> str:
    """Put the agent into all pod templates of a rendered object; return the template's digest.

    Without the name of the workload, the fields that depend on it are left out; `strip` undoes all
    of it. With `root_images`, the images that run as root as far as is known, pods comply with the
    Pod Security level `restricted`.
    """
    parsed = WorkloadManifest.parse(manifest, path)
    for template in parsed.templates:
        _add_runtime(template, runtime)
        _run_agent(template, _agent_variables(template.container, workload, runtime, working_dir))
        if runtime.node_data:
            _share_node_data(template, runtime.node_data)
        _probe_serving(template)
        if root_images is not None:
            pod_security.give_home(template)
            if template.kind.has_template:
                is_scaled = template.kind.is_autoscaled
                pod_security.restrict(
                    template.spec, template.container, root_images, is_scaled=is_scaled
                )
    # Pods of another object are other pods, though their templates be alike.
    owner = {"kind": parsed.kind.kind, "name": manifest["metadata"]["name"]}
    digest = rendering.fingerprint({"object": owner, "template": parsed.primary.body})
    for template in parsed.templates if workload is not None else ():
        *_, pod_annotations = template.annotations()
        pod_annotations[labels.TEMPLATE_DIGEST] = digest
        scheduling.name_group(template, owner["name"], digest)
    parsed.write_templates()
    if not parsed.kind.has_template:
        trainjob.refer_to_own(manifest)
    return digest


def note_secrets(template: PodTemplate, version: str) -> None:
    """Note the version of a template's secrets, so that pods are replaced when it changes.

    A pod's variables are set only once, when it starts.
    """
    if version:
        *_, pod_annotations = template.annotations()
        pod_annotations[labels.SECRETS_VERSION] = version


def strip(manifest: Manifest, path: tuple[str, ...] | None = None) -> None:
    """Remove from an object all that `equip` added; an object that it did not equip stays."""
    parsed = WorkloadManifest.parse(manifest, path)
    if not any(map(_is_equipped, parsed.templates)):
        return
    metadata = dictionary_at(manifest, "metadata")
    owners = metadata.pop("ownerReferences", None) or ()
    foreign_owners = [
        owner for owner in owners if not str(owner.get("apiVersion")).startswith(labels.PREFIX)
    ]
    assign(metadata, "ownerReferences", foreign_owners)
    for template in parsed.templates:
        pod, container, pod_annotations = (
            template.spec,
            template.container,
            template.read_pods("annotations"),
        )
        if container.get("command") in ([AGENT], raycluster.command_with_agent(AGENT)):
            del container["command"]
        http_get = (container.get("readinessProbe") or {}).get("httpGet") or {}
        if str(http_get.get("path")).partition("?")[0] == routes.SERVING:
            http_get["path"] = routes.HEALTH
        _remove(container, "env", _VARIABLE_NAMES)
        _remove(pod, "initContainers", {RUNTIME})
        _remove(pod, "volumes", _VOLUME_NAMES)
        for pod_container in (*pod["containers"], *(pod.get("initContainers") or ())):
            _remove(pod_container, "volumeMounts", _VOLUME_NAMES)
        for key in (labels.TEMPLATE_DIGEST, labels.SECRETS_VERSION, labels.TRIED_AGAIN):
            pod_annotations.pop(key, None)
        if labels.KUEUE_GROUP_COUNT in pod_annotations:
            template.read_pods("labels").pop(labels.KUEUE_GROUP, None)
    parsed.write_templates()
    if not parsed.kind.has_template:
        trainjob.refer_to_base(manifest)
    annotations = metadata.get("annotations") or {}
    for key in (labels.APPLIED, labels.BEFORE):
        annotations.pop(key, None)


def _is_equipped(template: PodTemplate) -> bool:
    # A user's manifest may have anything there.
    variables = template.container.get("env")
    names = [variable.get("name") for variable in variables or () if isinstance(variable, dict)]
    return isinstance(variables, list) and podenv.CONTROLLER_URL in names


def _remove(node: Manifest, key: str, removed_names: Collection[str]) -> None:
    if key in node:
        assign(
            node,
            key,
            [
                named_dictionary
                for named_dictionary in node[key] or ()
                if named_dictionary.get("name") not in removed_names
            ],
        )


def working_dir(spec: WorkloadSpec) -> str | None:
    """The folder in which workers of a workload run; `None`: the folder that their image names.

    The pods of `kt apply` run in the folder of their image, as the user's own object would.
    """
    is_own = spec.compute.manifest is not None
    return None if is_own and spec.callable.app is not None and spec.tree is None else WORK


def runtime_of_trainjob(
    manifest: Manifest,
    base: Manifest,
    *,
    runtime: Runtime,
    root_images: Collection[str] | None = None,
) -> Manifest:
    """The TrainingRuntime that an equipped TrainJob refers to, for the fields that a job lacks."""
    volumes = trainjob.template(manifest)["spec"].get("volumes") or []
    is_brought = named(volumes, RUNTIME) is not None
    job_runtime = trainjob.runtime(
        manifest, base, [_copying_container(runtime)] if is_brought else []
    )
    if root_images is not None:
        pod = trainjob.pod_template(job_runtime["spec"])["spec"]
        container = named(pod["containers"], trainjob.NODE) or pod["containers"][0]
        container.update(image=manifest["spec"]["trainer"].get("image") or container.get("image"))
        pod_security.restrict(pod, container, root_images)
    return job_runtime


def _add_runtime(template: PodTemplate, runtime: Runtime) -> None:
    container = template.container
    if container.get("image") in (DEFAULT_IMAGE, runtime.default_image):
        container["image"] = runtime.default_image
        _set_pull_policy(container, runtime)
        return
    _add_volume(template, {"name": RUNTIME, "emptyDir": {}})
    list_at(container, "volumeMounts").append(
        {"name": RUNTIME, "mountPath": FOLDER, "readOnly": True}
    )
    # First: the user's init containers may wait for things that only come later.
    list_at(template.spec, "initContainers").insert(0, _copying_container(runtime))


def _copying_container(runtime: Runtime) -> Manifest:
    copying: Manifest = {
        "name": RUNTIME,
        "image": runtime.image,
        "command": [INSTALL, _COPY_FOLDER],
        "volumeMounts": [{"name": RUNTIME, "mountPath": _COPY_FOLDER}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    _set_pull_policy(copying, runtime)
    return copying


def _set_pull_policy(container: Manifest, runtime: Runtime) -> None:
    if runtime.pull_policy is not None:
        container.setdefault("imagePullPolicy", runtime.pull_policy)


def _run_agent(template: PodTemplate, agent_variables: dict[str, str]) -> None:
    """Run the agent in the container; its environment says which pod it is."""
    container = template.container
    is_ray = template.kind == raycluster.KIND
    container["command"] = raycluster.command_with_agent(AGENT) if is_ray else [AGENT]
    container.pop("args", None)
    _add_volume(template, {"name": _STATE_VOLUME, "emptyDir": {}})
    _add_volume(
        template,
        {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": _token()}]}},
    )
    list_at(container, "volumeMounts").extend(
        [
            {"name": _STATE_VOLUME, "mountPath": STATE},
            {"name": _TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True},
        ]
    )
    variables = list_at(container, "env")
    for name, value in agent_variables.items():
        _set_variable(variables, name, {"value": value})
    # Knative gives pods as long to end as it gives requests.
    time = (
        ("timeoutSeconds", KNATIVE_TIMEOUT) if template.kind.is_autoscaled else (_GRACE_FIELD, None)
    )
    if isinstance(grace := template.spec.get(*time), int):
        _set_variable(variables, podenv.GRACE, {"value": str(grace)})
    if template.kind.is_autoscaled:
        # Knative takes no fields of pods; the agent finds out its pod's name and address.
        namespace = template.workload.object["metadata"]["namespace"]
        _set_variable(variables, podenv.NAMESPACE, {"value": namespace})
        return
    for name, field in _FIELD_PATHS.items():
        _set_variable(variables, name, {"valueFrom": {"fieldRef": {"fieldPath": field}}})


def _share_node_data(template: PodTemplate, folder: str) -> None:
    """Mount the folder of the node in which the pods of this namespace share declared data.

    Knative takes no volumes of nodes.
    """
    if template.kind.is_autoscaled:
        return
    namespace = template.workload.object["metadata"]["namespace"]
    _add_volume(template, node_data_volume(folder, namespace))
    volume_mount = {"name": NODE_DATA_VOLUME, "mountPath": NODE_DATA_FOLDER}
    list_at(template.container, "volumeMounts").append(volume_mount)
    variables = list_at(template.container, "env")
    _set_variable(variables, podenv.NODE_DATA, {"value": NODE_DATA_FOLDER})


def node_data_volume(folder: str, namespace: str) -> Manifest:
    """The folder of one namespace alone: its pods do not see the folder above."""
    path = {"path": f"{folder}/{namespace}", "type": "DirectoryOrCreate"}
    return {"name": NODE_DATA_VOLUME, "hostPath": path}


def _token() -> Manifest:
    return {"audience": AUDIENCE, "expirationSeconds": TIMING.pod_token_seconds, "path": "token"}


def _agent_variables(
    container: Manifest, workload: str | None, runtime: Runtime, working_dir: str | None
) -> dict[str, str]:
    folder = container.get("workingDir") or working_dir
    return {
        podenv.BACKEND: "kubernetes",
        **({} if workload is None else {podenv.WORKLOAD: workload}),
        podenv.PORT: str(agent_container.agent_port(container)),
        podenv.ROOT: STATE,
        **({} if folder is None else {podenv.WORKING_DIR: folder}),
        podenv.ENVIRONMENTS: f"{STATE}/environments",
        podenv.CONTROLLER_URL: runtime.controller_url,
        podenv.TOKEN_FILE: f"{TOKEN_FOLDER}/token",
    }


def _set_variable(variables: list[Any], name: str, value: Manifest) -> None:
    variable = named(variables, name)
    if variable is None:
        variables.append({"name": name, **value})
    else:
        variable.clear()
        variable.update({"name": name, **value})


def _probe_serving(template: PodTemplate) -> None:
    """Have a pod be ready once it serves; until then, the pods of the former template stay.

    Workers of a training job or a RayCluster start once the first pod is ready, and the first pod
    serves once they run: there, a pod is ready once its agent answers.

    A kubelet makes a warning of each negative answer, so while a pod starts, its agent answers as
    late as the probe allows. Knative has probes of its own, which have to be answered at once.
    """
    if template.kind.is_job or template.kind == raycluster.KIND:
        return
    probe = template.container.get("readinessProbe") or {}
    http_get = probe.get("httpGet")
    if http_get is not None and http_get.get("path") == routes.HEALTH:
        seconds = 0 if template.kind.is_autoscaled else int(probe.get("timeoutSeconds") or 1) - 1
        http_get["path"] = routes.serving(wait=seconds)


def _add_volume(template: PodTemplate, volume: Manifest) -> None:
    volumes = list_at(template.spec, "volumes")
    if named(volumes, volume["name"]) is None:
        volumes.append(volume)


def digest_of(pod_object: Manifest) -> str:
    """Digest of the template that a pod was made from; empty if it does not say."""
    metadata = dictionary_at(pod_object, "metadata")
    return str((metadata.get("annotations") or {}).get(labels.TEMPLATE_DIGEST) or "")
