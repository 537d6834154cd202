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

#: Who containers run as whose image says root: a user without a name, as images without one have.
USER = 65532
#: What the level wants of every container.
RIGHTS: Manifest = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_GROUP = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
HOME_VOLUME = "kubetorch-home"
_SHARED_FILE_MODE = 0o644


def complying(found: Manifest | None) -> Manifest:
    """A container's security context, with what the level wants and it does not say."""
    context = {**RIGHTS, **(found or {})}
    context["capabilities"] = {"drop": ["ALL"], **(context.get("capabilities") or {})}
    return context


def is_complying(template: PodTemplate) -> bool:
    """True if the agent's container in a pod template fulfils the level."""
    found = template.container.get("securityContext")
    return found is not None and complying(found) == found


def restrict(
    spec: Manifest, container: Manifest, root_images: Collection[str], *, is_scaled: bool = False
) -> None:
    """Have the containers of a pod comply; this one runs as its image's user, unless that is root.

    What is mounted belongs to a group of the pod, so that any user can use it; Knative, which takes
    no rights of a pod as a whole, has files that everybody in the pod can read.
    """
    for one in (*(spec.get("initContainers") or ()), *spec["containers"]):
        one["securityContext"] = complying(one.get("securityContext"))
    of_pod: Manifest = spec.get("securityContext") or {}
    if container.get("image") in root_images and "runAsUser" not in of_pod:
        container["securityContext"].setdefault("runAsUser", USER)
    if not is_scaled:
        spec["securityContext"] = _GROUP | of_pod
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
    """The images of which pod templates say that they run as root."""
    return {
        str(one.container.get("image"))
        for one in templates
        if (one.container.get("securityContext") or {}).get("runAsUser") == USER
    }
