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
from kubetorch.manifests.kinds import Manifest, Path, assign, entry, items, named
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
    """Have the container run the agent, whatever it ran before.

    It is the agent of the container's image. One that is brought along would be put in here: an
    init container that copies it to an `emptyDir`, a mount of that, and its path in `START`.
    """
    container = template.container
    if not template.kind.is_custom:
        # Operators of training jobs look for their container by its name.
        _rename(template, template.kind.container)
        if template.kind.has_template:  # else its runtime has an image
            container.setdefault("image", default_image)
    container["command"] = list(COMMAND)
    container["args"] = [START]


#: Keys under which a manifest names a container, wherever: a downward API volume, a variable, the
#: failure policy of a Job.
_REFERENCES = ("containerName", "mainContainer")
#: Annotations of pods whose value names a container, and beginnings of those that end in its name.
_NAMING = (
    "kubectl.kubernetes.io/default-container",
    "kubectl.kubernetes.io/default-logs-container",
)
_ENDING = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)


def _rename(template: PodTemplate, name: str) -> None:
    """Give the agent's container its name, and have what refers to it by the old one follow."""
    before, template.container["name"] = template.container.get("name"), name
    if before in (None, name):
        return
    bodies = [one.body for one in template.workload.templates if one.body is not template.body]
    _refer(template.workload.object, before, name, without=bodies)
    annotations = template.read_pods("annotations")
    for key in (key for key in _NAMING if annotations.get(key) == before):
        annotations[key] = name
    for beginning in (one for one in _ENDING if one + before in annotations):
        annotations[beginning + name] = annotations.pop(beginning + before)


def _refer(node: Any, before: str, name: str, *, without: list[Manifest]) -> None:  # noqa: ANN401
    """Change references to a container, but for those of other pods, which have their own."""
    if isinstance(node, list):
        for one in node:
            _refer(one, before, name, without=without)
    elif isinstance(node, dict) and not any(node is one for one in without):
        for key, value in node.items():
            if key in _REFERENCES and value == before:
                node[key] = name
            else:
                _refer(value, before, name, without=without)


def fill_rights(template: PodTemplate) -> None:
    """Say what nobody has said of rights."""
    entry(template.container, "resources")
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
    found = template.container.get("image")
    return None if found in (None, DEFAULT_IMAGE) else ImageSpec(image_id=found)


def _read_account(template: PodTemplate) -> str | None:
    found: str | None = template.spec.get("serviceAccountName")
    return None if found == SERVICE_ACCOUNT else found


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
#: Seconds between two startup probes; `launch_timeout` is counted in them.
STARTUP_PERIOD = 5

#: Seconds for which a pod that starts is not asked again whether it serves.
START_PATIENCE = 600

_HEALTH = "/health"
# What Kubernetes assumes where a probe does not say.
_DEFAULT_PERIOD = 10
_DEFAULT_FAILURES = 3
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

_PORTS = "https://kubernetes.io/docs/concepts/services-networking/service/"
_PROBING = "https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/"


def agent_port(container: Manifest) -> int:
    """Port that the agent listens on: the one named `http1`, else 32300."""
    found = named(container.get("ports") or [], AGENT_PORT_NAME)
    return AGENT_PORT if found is None else int(found["containerPort"])


def check_port(template: PodTemplate) -> None:
    """Refuse pods another port of which is the agent's: two cannot listen on one."""
    port = agent_port(template.container)
    agents = named(template.container.get("ports") or [], AGENT_PORT_NAME)
    beside = (one for one in template.spec.get("initContainers") or () if one.get("restartPolicy"))
    for container in (*template.spec["containers"], *beside):
        for number, one in enumerate(container.get("ports") or ()):
            is_same = one.get("containerPort") == port and one.get("protocol", "TCP") == "TCP"
            if is_same and one is not agents:
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
    patience = 5 if template.kind.is_autoscaled else START_PATIENCE

    def probe(period: int, timeout: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": _HEALTH, "port": port},
            "periodSeconds": period,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    startup = probe(STARTUP_PERIOD, 2, max(1, launch_timeout // STARTUP_PERIOD))
    return {
        "startupProbe": startup | {"initialDelaySeconds": 0},
        "readinessProbe": probe(3, patience, 5) | {"successThreshold": 1},
        "livenessProbe": probe(30, 5, 3),
    }


def _read_port(template: PodTemplate) -> int | None:
    found = agent_port(template.container)
    return None if found == AGENT_PORT else found


def _write_port(template: PodTemplate, compute: ComputeSpec) -> None:
    before, wanted = agent_port(template.container), compute.server_port or AGENT_PORT
    found = items(template.container, "ports")
    if template.kind.is_autoscaled:
        # Knative allows one port, and sends calls to it.
        found.clear()
    there = named(found, AGENT_PORT_NAME)
    if there is None:
        found.append({"name": AGENT_PORT_NAME, "containerPort": wanted})
    else:
        there["containerPort"] = wanted
    for name in _PROBES:
        asked = (template.container.get(name) or {}).get("httpGet")
        if asked == {"path": _HEALTH, "port": before}:
            asked["port"] = wanted


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


def _variables(template: PodTemplate) -> Iterable[dict[str, Any]]:
    """Those with a value of their own, not one from elsewhere."""
    found = template.container.get("env") or ()
    return (one for one in found if "valueFrom" not in one)


def _read_variables(template: PodTemplate) -> Pairs | None:
    found = ((one["name"], str(one.get("value") or "")) for one in _variables(template))
    return tuple(one for one in found if one[0] != LOG_LEVEL) or None


def _set(template: PodTemplate, *variables: tuple[str, str]) -> None:
    """Set variables; one that is there keeps its template in the order."""
    found = items(template.container, "env")
    known = {one.get("name"): one for one in reversed(found)}
    for name, value in variables:
        there = known.get(name)
        if there is None:
            known[name] = {"name": name, "value": value}
            found.append(known[name])
        elif (there.get("value") or "") != value:
            there.pop("valueFrom", None)
            there["value"] = value


def _write_variables(template: PodTemplate, compute: ComputeSpec) -> None:
    # By name: the order in which a program says them is no reason to replace pods.
    _set(template, *(one for one in sorted(compute.env_vars) if not mentions_itself(*one)))


def mentions_itself(name: str, value: str) -> bool:
    """True if a value refers to its own variable, as `$PATH:/opt/bin` does.

    Only who starts a worker can expand that: set for the container, it would hide what the image
    says, and the agent's own start would break on such a `PATH`.
    """
    return any(name in (found[1], found[2]) for found in _MENTIONED.finditer(value))


def _read_level(template: PodTemplate) -> LoggingConfig | None:
    there = named(list(_variables(template)), LOG_LEVEL)
    level = str(there.get("value") or "").lower() if there is not None else None
    return next((LoggingConfig(level=known) for known in LEVELS if known == level), None)


def _write_level(template: PodTemplate, compute: ComputeSpec) -> None:
    if LOG_LEVEL not in dict(compute.env_vars):
        _set(template, (LOG_LEVEL, compute.logging.level.upper()))


def write_app(template: PodTemplate, app: AppSpec) -> None:
    if app.port is not None:
        _set(template, (APP_PORT, str(app.port)))
    if app.health_check is not None:
        _set(template, (APP_HEALTH_CHECK, app.health_check))


def fill_log_level(template: PodTemplate, compute: ComputeSpec) -> None:
    """Say the level of logs where nobody has."""
    if named(template.container.get("env") or [], LOG_LEVEL) is None:
        _write_level(template, compute)


#: What a pod runs when nobody says what.
IDLE = "sleep infinity"


def command_of(manifest: Mapping[str, Any], pod_template_path: Path | None = None) -> str | None:
    """`command` and `args` of the container, if it has any.

    References to the container's variables, `$(NAME)`, are replaced as Kubernetes does; `$$(NAME)`
    stands for the text itself, and what is not known stays.
    """
    container = WorkloadManifest.parse(dict(manifest), pod_template_path).primary.container
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not words:
        return None
    known = variables(container)
    return shlex.join(expand_references(str(word), known) for word in words)


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container that have a value in its manifest, their references replaced."""
    found: dict[str, str] = {}
    for one in container.get("env") or ():
        if "valueFrom" not in one:
            found[str(one["name"])] = expand_references(str(one.get("value") or ""), found)
    return found


def command_line(command: Command) -> str | None:
    """The command of a Dockerfile as text, see `ImageSpec.command`; `None` without a command."""
    return command if command is None or isinstance(command, str) else shlex.join(command)


#: In the order in which they are written.
PARAMETERS = (
    ManifestParameter(
        "image",
        "C.image",
        _read_image,
        _write_image,
        _IMAGES,
    ),
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
        "freeze",
        f"M.annotations: {labels.FREEZE}",
        _read_freeze,
        _write_freeze,
        "Kubetorch",
    ),
    ManifestParameter(
        "server_port",
        "C.ports: http1",
        _read_port,
        _write_port,
        _PORTS,
    ),
    ManifestParameter(
        "launch_timeout",
        "C.startupProbe.failureThreshold",
        _read_timeout,
        _write_timeout,
        _PROBING,
    ),
)
#: Written after those of `scheduling`: keys of a container keep their order.
ENVIRONMENT_PARAMETERS = (
    ManifestParameter(
        "env_vars",
        "C.env",
        _read_variables,
        _write_variables,
        _ENV,
    ),
    ManifestParameter(
        "logging",
        "C.env: KT_LOG_LEVEL",
        _read_level,
        _write_level,
        _ENV,
    ),
)
