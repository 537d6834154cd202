"""The rights of pods in a namespace whose Pod Security level is `restricted`.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ defines the levels. Pods ask
for nothing that the level `baseline` refuses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kubetorch.manifests import storage
from kubetorch.manifests.kinds import Manifest, named
from kubetorch.manifests.workload_manifest import PodTemplate
from kubetorch.wire.podenv import HOME

#: The user of containers whose image says root: the number that images without a root user have.
USER = 65532
#: The rights that the level demands of every container.
RIGHTS: Manifest = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_GROUP = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
HOME_VOLUME = "kubetorch-home"
_SHARED_FILE_MODE = 0o644


def complying(container_context: Manifest | None) -> Manifest:
    """A container's security context, completed by the fields that the level demands."""
    context = {**RIGHTS, **(container_context or {})}
    context["capabilities"] = {"drop": ["ALL"], **(context.get("capabilities") or {})}
    return context


def is_complying(template: PodTemplate) -> bool:
    """True if the agent's container in a pod template fulfils the level."""
    context = template.container.get("securityContext")
    return context is not None and complying(context) == context


def restrict(
    spec: Manifest, container: Manifest, root_images: Collection[str], *, is_scaled: bool = False
) -> None:
    """Have the containers of a pod comply; `container` runs as its image's user, unless root.

    Mounted files belong to a group of the pod, so that any user can use them; Knative, which takes
    no rights of a pod as a whole, has secrets that every user in the pod can read.
    """
    for pod_container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        pod_container["securityContext"] = complying(pod_container.get("securityContext"))
    pod_context: Manifest = spec.get("securityContext") or {}
    if container.get("image") in root_images and "runAsUser" not in pod_context:
        container["securityContext"].setdefault("runAsUser", USER)
    if not is_scaled:
        spec["securityContext"] = _GROUP | pod_context
        return
    for volume in spec.get("volumes") or ():
        if "secret" in volume:
            volume["secret"]["defaultMode"] = _SHARED_FILE_MODE


def give_home(template: PodTemplate) -> None:
    """Give a pod a home that any user can write to, where secrets with `~` in their path lie."""
    mounts: list[Any] = template.container.get("volumeMounts") or []
    if named(mounts, HOME, by="mountPath") is None:
        storage.mount(template, {"name": HOME_VOLUME, "emptyDir": {}}, HOME)


def root_images(templates: Collection[PodTemplate]) -> set[str]:
    """The images that run as root: pod templates give their containers another user."""
    return {
        str(template.container.get("image"))
        for template in templates
        if (template.container.get("securityContext") or {}).get("runAsUser") == USER
    }
