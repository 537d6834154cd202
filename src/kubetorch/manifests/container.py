"""What the agent's container runs: image, command, working directory, rights."""

from __future__ import annotations

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.manifests import labels
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, assign, entry
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import ImageSpec

COMMAND = ("/bin/bash", "-c")
START = "exec python -m kubetorch.pod"
#: Service account of a pod when the user names none.
SERVICE_ACCOUNT = "kubetorch-service-account"

_IMAGES = "https://kubernetes.io/docs/concepts/containers/images/"
_ACCOUNTS = "https://kubernetes.io/docs/tasks/configure-pod-container/configure-service-account/"
_CONTAINER = "https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/"


def start(place: Place, *, default_image: str) -> None:
    """Have the container run the agent, whatever it ran before.

    It is the agent of the container's image. One that is brought along would be put in here: an
    init container that copies it to an `emptyDir`, a mount of that, and its path in `START`.
    """
    container = place.container
    if not place.kind.is_custom:
        # Operators of training jobs look for their container by its name.
        container["name"] = place.kind.container
        if place.kind.has_template:  # else its runtime has an image
            container.setdefault("image", default_image)
    container["command"] = list(COMMAND)
    container["args"] = [START]


def fill(place: Place, compute: ComputeSpec) -> None:
    """Say what nobody has said of rights."""
    entry(place.container, "resources")
    # Knative takes no capabilities unless its configuration allows them.
    if not compute.freeze and not place.kind.is_autoscaled:
        entry(place.container, "securityContext").setdefault("capabilities", _capabilities())
    place.pod.setdefault("serviceAccountName", SERVICE_ACCOUNT)


def _capabilities() -> dict[str, list[str]]:
    """What debuggers of other processes need."""
    return {"add": ["SYS_PTRACE"]}


def _read_freeze(place: Place) -> bool | None:
    return True if place.own("annotations").get(labels.FREEZE) == "true" else None


def _write_freeze(place: Place, compute: ComputeSpec) -> None:
    if place.is_primary:
        assign(place.mine("annotations"), labels.FREEZE, "true" if compute.freeze else None)
    security = place.container.get("securityContext") or {}
    if compute.freeze and security.get("capabilities") == _capabilities():
        del security["capabilities"]
        assign(place.container, "securityContext", security)


def _write_image(place: Place, compute: ComputeSpec) -> None:
    if compute.image is not None and compute.image.image_id is not None:
        place.container["image"] = compute.image.image_id


def _read_image(place: Place) -> ImageSpec | None:
    found = place.container.get("image")
    return None if found in (None, DEFAULT_IMAGE) else ImageSpec(image_id=found)


def _read_account(place: Place) -> str | None:
    found: str | None = place.pod.get("serviceAccountName")
    return None if found == SERVICE_ACCOUNT else found


PARAMETERS = (
    Parameter(
        "image",
        "C.image",
        _read_image,
        _write_image,
        "the base; steps are run by live pods and are no part of it",
        _IMAGES,
    ),
    Parameter(
        "image_pull_policy",
        "C.imagePullPolicy",
        lambda place: place.container.get("imagePullPolicy"),
        lambda place, compute: assign(
            place.container, "imagePullPolicy", compute.image_pull_policy
        ),
        "",
        _IMAGES,
    ),
    Parameter(
        "working_dir",
        "C.workingDir",
        lambda place: place.container.get("workingDir"),
        lambda place, compute: assign(place.container, "workingDir", compute.working_dir),
        "",
        _CONTAINER,
    ),
    Parameter(
        "service_account_name",
        "P.serviceAccountName",
        _read_account,
        lambda place, compute: assign(
            place.pod, "serviceAccountName", compute.service_account_name or SERVICE_ACCOUNT
        ),
        f"`{SERVICE_ACCOUNT}` if not given",
        _ACCOUNTS,
    ),
    Parameter(
        "freeze",
        f"M.annotations: {labels.FREEZE}; no C.securityContext.capabilities.add: SYS_PTRACE, "
        "which a Knative Service never gets",
        _read_freeze,
        _write_freeze,
        "pods take no live code and run no image steps",
        "Kubetorch",
    ),
)
