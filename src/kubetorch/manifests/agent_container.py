"""The agent's container: image, command, rights, port, probes, variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.errors import SpecError
from kubetorch.manifests import labels
from kubetorch.manifests.container_variables import expand_references
from kubetorch.manifests.kinds import Manifest, Path, assign, dictionary_at, list_at, named
from kubetorch.manifests.tuning import TIMING
from kubetorch.manifests.workload_manifest import ManifestParameter, PodTemplate, WorkloadManifest
from kubetorch.specs.callable import AppSpec
from kubetorch.specs.compute import AGENT_PORT, ComputeSpec, Pairs
from kubetorch.specs.image import Command, ImageSpec
from kubetorch.specs.logging import LEVELS, LoggingConfig

COMMAND = ("/bin/bash", "-c")
START = "exec python -m kubetorch.pod"
#: Service account of a pod when the user names none.
SERVICE_ACCOUNT = "kubetorch-service-account"

_IMAGES = "https://kubernetes.io/docs/concepts/containers/images/"
_ACCOUNTS = "https://kubernetes.io/docs/tasks/configure-pod-container/configure-service-account/"
_CONTAINER = "https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/"


def start_agent(template: PodTemplate, *, default_image: str) -> None:
    """Have the container run the agent of its image, whatever the container ran before.

    `agent.equip` replaces that by an agent that an init container copies into the pod.
    """
    container = template.container
    if not template.kind.is_custom:
        # Operators of training jobs look for their container by its name.
        _rename_container(template, template.kind.container)
        if template.kind.has_template:  # else its runtime has an image
            container.setdefault("image", default_image)
    container["command"] = list(COMMAND)
    container["args"] = [START]


#: Keys whose value names a container, anywhere in a manifest: in a downward API volume, a variable,
#: the failure policy of a Job.
_CONTAINER_KEYS = ("containerName", "mainContainer")
#: Annotations of pods whose value names a container, and prefixes of annotations whose key ends in
#: the name of one.
_CONTAINER_ANNOTATIONS = (
    "kubectl.kubernetes.io/default-container",
    "kubectl.kubernetes.io/default-logs-container",
)
_CONTAINER_ANNOTATION_PREFIXES = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)


def _rename_container(template: PodTemplate, name: str) -> None:
    """Give the agent's container a name, and change the references to its old name."""
    old_name, template.container["name"] = template.container.get("name"), name
    if old_name in (None, name):
        return
    other_bodies = [
        other_template.body
        for other_template in template.workload.templates
        if other_template.body is not template.body
    ]
    _rename_references(template.workload.object, old_name, name, excluded_bodies=other_bodies)
    annotations = template.read_pods("annotations")
    for key in (key for key in _CONTAINER_ANNOTATIONS if annotations.get(key) == old_name):
        annotations[key] = name
    for key_prefix in (
        prefix for prefix in _CONTAINER_ANNOTATION_PREFIXES if prefix + old_name in annotations
    ):
        annotations[key_prefix + name] = annotations.pop(key_prefix + old_name)


def _rename_references(
    node: Any,  # noqa: ANN401  # any node of a manifest
    old_name: str,
    name: str,
    *,
    excluded_bodies: list[Manifest],
) -> None:
    """Change references to a container, but for those in other pod templates."""
    if isinstance(node, list):
        for child in node:
            _rename_references(child, old_name, name, excluded_bodies=excluded_bodies)
    elif isinstance(node, dict) and not any(node is body for body in excluded_bodies):
        for key, value in node.items():
            if key in _CONTAINER_KEYS and value == old_name:
                node[key] = name
            else:
                _rename_references(value, old_name, name, excluded_bodies=excluded_bodies)


def fill_rights(template: PodTemplate) -> None:
    """Add `resources` and the default service account where the manifest has none."""
    dictionary_at(template.container, "resources")
    template.spec.setdefault("serviceAccountName", SERVICE_ACCOUNT)


def _read_freeze(template: PodTemplate) -> bool | None:
    return True if template.read_object("annotations").get(labels.FREEZE) == "true" else None


def _write_freeze(template: PodTemplate, compute: ComputeSpec) -> None:
    if template.is_primary:
        assign(template.annotations_of_object(), labels.FREEZE, "true" if compute.freeze else None)


def _write_image(template: PodTemplate, compute: ComputeSpec) -> None:
    if compute.image is not None and compute.image.image_id is not None:
        template.container["image"] = compute.image.image_id


def _read_image(template: PodTemplate) -> ImageSpec | None:
    image = template.container.get("image")
    return None if image in (None, DEFAULT_IMAGE) else ImageSpec(image_id=image)


def _read_account(template: PodTemplate) -> str | None:
    account: str | None = template.spec.get("serviceAccountName")
    return None if account == SERVICE_ACCOUNT else account


def _container_parameter(name: str, key: str, source: str) -> ManifestParameter:
    return ManifestParameter(
        name,
        f"C.{key}",
        lambda template: template.container.get(key),
        lambda template, compute: assign(template.container, key, getattr(compute, name)),
        source,
    )


#: Knative takes ports of this name for HTTP/1.
AGENT_PORT_NAME = "http1"


_HEALTH = "/health"
# Kubernetes' defaults of the fields of a probe.
_DEFAULT_PERIOD = 10
_DEFAULT_FAILURES = 3
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

_PORTS = "https://kubernetes.io/docs/concepts/services-networking/service/"
_PROBING = "https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/"


def agent_port(container: Manifest) -> int:
    """Port that the agent listens on: the one named `http1`, else 32300."""
    port = named(container.get("ports") or [], AGENT_PORT_NAME)
    return AGENT_PORT if port is None else int(port["containerPort"])


def check_port(template: PodTemplate) -> None:
    """Refuse pods of which another container port has the agent's number."""
    port = agent_port(template.container)
    agent_container_port = named(template.container.get("ports") or [], AGENT_PORT_NAME)
    sidecars = (
        init_container
        for init_container in template.spec.get("initContainers") or ()
        if init_container.get("restartPolicy")
    )
    for container in (*template.spec["containers"], *sidecars):
        for number, container_port in enumerate(container.get("ports") or ()):
            is_same = (
                container_port.get("containerPort") == port
                and container_port.get("protocol", "TCP") == "TCP"
            )
            if is_same and container_port is not agent_container_port:
                where = f"containers[name={container.get('name')!r}].ports[{number}]"
                raise SpecError(
                    f"{where} of the pods is {port}, on which the agent listens",
                    hint=f"change it, or give the agent's container a port named "
                    f"{AGENT_PORT_NAME!r} of another number: the agent listens on that",
                )


def fill_probes(template: PodTemplate, compute: ComputeSpec) -> None:
    """Add the port, and the probes that the container does not have."""
    if named(template.container.get("ports") or [], AGENT_PORT_NAME) is None:
        _write_port(template, compute)
    for name, probe in _probes(template, compute.launch_timeout).items():
        template.container.setdefault(name, probe)


def _probes(template: PodTemplate, launch_timeout: int) -> dict[str, Manifest]:
    port = agent_port(template.container)
    patience = 5 if template.kind.is_autoscaled else TIMING.pod_start_seconds

    def probe(period: int, timeout: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": _HEALTH, "port": port},
            "periodSeconds": period,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    startup = probe(
        TIMING.startup_probe_seconds, 2, max(1, launch_timeout // TIMING.startup_probe_seconds)
    )
    return {
        "startupProbe": startup | {"initialDelaySeconds": 0},
        "readinessProbe": probe(3, patience, 5) | {"successThreshold": 1},
        "livenessProbe": probe(30, 5, 3),
    }


def _read_port(template: PodTemplate) -> int | None:
    port = agent_port(template.container)
    return None if port == AGENT_PORT else port


def _write_port(template: PodTemplate, compute: ComputeSpec) -> None:
    old_number, port_number = agent_port(template.container), compute.server_port or AGENT_PORT
    ports = list_at(template.container, "ports")
    if template.kind.is_autoscaled:
        # Knative allows one port, and sends calls to it.
        ports.clear()
    agent_container_port = named(ports, AGENT_PORT_NAME)
    if agent_container_port is None:
        ports.append({"name": AGENT_PORT_NAME, "containerPort": port_number})
    else:
        agent_container_port["containerPort"] = port_number
    for name in _PROBES:
        http_get = (template.container.get(name) or {}).get("httpGet")
        if http_get == {"path": _HEALTH, "port": old_number}:
            http_get["port"] = port_number


def _read_timeout(template: PodTemplate) -> int | None:
    probe = template.container.get("startupProbe")
    if probe is None:
        return None
    period = int(probe.get("periodSeconds", _DEFAULT_PERIOD))
    return period * int(probe.get("failureThreshold", _DEFAULT_FAILURES))


def _write_timeout(template: PodTemplate, compute: ComputeSpec) -> None:
    probe = template.container.get("startupProbe")
    if probe is not None:  # else `fill` makes it
        period = int(probe.get("periodSeconds", _DEFAULT_PERIOD))
        probe["failureThreshold"] = max(1, compute.launch_timeout // period)


LOG_LEVEL = "KT_LOG_LEVEL"
APP_PORT = "KT_APP_PORT"
APP_HEALTH_CHECK = "KT_APP_HEALTHCHECK"

_ENV = "https://kubernetes.io/docs/tasks/inject-data-application/define-environment-variable-container/"


_MENTIONED = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")


def _plain_variables(template: PodTemplate) -> Iterable[dict[str, Any]]:
    """The variables with a `value`, not a `valueFrom`."""
    container_variables = template.container.get("env") or ()
    return (variable for variable in container_variables if "valueFrom" not in variable)


def _read_variables(template: PodTemplate) -> Pairs | None:
    pairs = (
        (variable["name"], str(variable.get("value") or ""))
        for variable in _plain_variables(template)
    )
    return tuple(pair for pair in pairs if pair[0] != LOG_LEVEL) or None


def _set_variables(template: PodTemplate, *variables: tuple[str, str]) -> None:
    """Set variables; a variable that the container has keeps its position in the list."""
    container_variables = list_at(template.container, "env")
    variables_by_name = {
        variable.get("name"): variable for variable in reversed(container_variables)
    }
    for name, value in variables:
        variable = variables_by_name.get(name)
        if variable is None:
            variables_by_name[name] = {"name": name, "value": value}
            container_variables.append(variables_by_name[name])
        elif (variable.get("value") or "") != value:
            variable.pop("valueFrom", None)
            variable["value"] = value


def _write_variables(template: PodTemplate, compute: ComputeSpec) -> None:
    # By name: the order in which a program sets them is no reason to replace pods.
    _set_variables(
        template, *(pair for pair in sorted(compute.env_vars) if not mentions_itself(*pair))
    )


def mentions_itself(name: str, value: str) -> bool:
    """True if a value refers to its own variable, as `$PATH:/opt/bin` does.

    Only the agent, which starts a worker, can expand that. Set for the container, it would hide the
    variable of the image, and the agent's own start would break on such a `PATH`.
    """
    return any(name in (mention[1], mention[2]) for mention in _MENTIONED.finditer(value))


def _read_level(template: PodTemplate) -> LoggingConfig | None:
    variable = named(list(_plain_variables(template)), LOG_LEVEL)
    level = str(variable.get("value") or "").lower() if variable is not None else None
    return next(
        (LoggingConfig(level=known_level) for known_level in LEVELS if known_level == level), None
    )


def _write_level(template: PodTemplate, compute: ComputeSpec) -> None:
    if LOG_LEVEL not in dict(compute.env_vars):
        _set_variables(template, (LOG_LEVEL, compute.logging.level.upper()))


def write_app(template: PodTemplate, app: AppSpec) -> None:
    if app.port is not None:
        _set_variables(template, (APP_PORT, str(app.port)))
    if app.health_check is not None:
        _set_variables(template, (APP_HEALTH_CHECK, app.health_check))


def fill_log_level(template: PodTemplate, compute: ComputeSpec) -> None:
    """Set the level of logs where the container has none."""
    if named(template.container.get("env") or [], LOG_LEVEL) is None:
        _write_level(template, compute)


#: Command of a pod for which the user gives none.
IDLE = "sleep infinity"


def command_of(manifest: Mapping[str, Any], pod_template_path: Path | None = None) -> str | None:
    """`command` and `args` of the container, if it has any.

    References to the container's variables, `$(NAME)`, are replaced as Kubernetes does; `$$(NAME)`
    stands for the text itself, and references to unknown variables stay.
    """
    container = WorkloadManifest.parse(dict(manifest), pod_template_path).primary.container
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not words:
        return None
    values = variables(container)
    return shlex.join(expand_references(str(word), values) for word in words)


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container that have a value in its manifest, their references replaced."""
    values: dict[str, str] = {}
    for variable in container.get("env") or ():
        if "valueFrom" not in variable:
            values[str(variable["name"])] = expand_references(
                str(variable.get("value") or ""), values
            )
    return values


def command_line(command: Command) -> str | None:
    """The command of a Dockerfile as text, see `ImageSpec.command`; `None` without a command."""
    return command if command is None or isinstance(command, str) else shlex.join(command)


#: In the order in which they are written.
PARAMETERS = (
    ManifestParameter("image", "C.image", _read_image, _write_image, _IMAGES),
    _container_parameter("image_pull_policy", "imagePullPolicy", _IMAGES),
    _container_parameter("working_dir", "workingDir", _CONTAINER),
    ManifestParameter(
        "service_account_name",
        "P.serviceAccountName",
        _read_account,
        lambda template, compute: assign(
            template.spec, "serviceAccountName", compute.service_account_name or SERVICE_ACCOUNT
        ),
        _ACCOUNTS,
    ),
    ManifestParameter(
        "freeze", f"M.annotations: {labels.FREEZE}", _read_freeze, _write_freeze, "Kubetorch"
    ),
    ManifestParameter("server_port", "C.ports: http1", _read_port, _write_port, _PORTS),
    ManifestParameter(
        "launch_timeout", "C.startupProbe.failureThreshold", _read_timeout, _write_timeout, _PROBING
    ),
)
#: Written after those of `scheduling`: keys of a container keep their order.
ENVIRONMENT_PARAMETERS = (
    ManifestParameter("env_vars", "C.env", _read_variables, _write_variables, _ENV),
    ManifestParameter("logging", "C.env: KT_LOG_LEVEL", _read_level, _write_level, _ENV),
)
