"""Storage that outlives pods: the frozen form of `kt.Volume`."""

from __future__ import annotations

import posixpath
import re

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.specs import quantity

ACCESS_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
_SHORT_ACCESS_MODES = {
    "RWO": "ReadWriteOnce",
    "ROX": "ReadOnlyMany",
    "RWX": "ReadWriteMany",
    "RWOP": "ReadWriteOncePod",
}
#: Access modes of a volume without one: if its storage class is known to share volumes, and else.
SHARED, UNSHARED = "ReadWriteMany", "ReadWriteOnce"

#: The folder of pods in which volumes without a path are mounted.
FOLDER = "/ktfs"
NAME_CHARACTERS = 63
CLAIM_CHARACTERS = 253

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(rf"{_NAME.pattern}(\.{_NAME.pattern})*")
# Folders that Kubernetes or the machine itself mounts.
_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")


class VolumeSpec(FrozenValue):
    """One volume of a service.

    Attributes:
        name: Name of the volume, and of its claim unless `claim` names another.
        mount_path: Absolute path in the pods.
        size: Requested size, a Kubernetes quantity; `None` for a claim that exists.
        storage_class: `None` leaves the choice to the access mode and the cluster's default.
        access_mode: One of `ACCESS_MODES`; `None` leaves the choice to the storage class. An
            existing volume has one.
        namespace: `None` is the compute's.
        volume_name: PersistentVolume to bind to.
        claim: An existing claim; it is neither created nor deleted.
    """

    name: str
    mount_path: str
    size: str | None = None
    storage_class: str | None = None
    access_mode: str | None = None
    namespace: str | None = None
    volume_name: str | None = None
    claim: str | None = None

    @property
    def claim_name(self) -> str:
        return self.claim or self.name

    @property
    def is_read_only(self) -> bool:
        return self.access_mode == "ReadOnlyMany"


#: The hint of an error about a volume that services have mounted.
FORCE = "kt volumes delete --force deletes it and its data all the same"


def check(spec: VolumeSpec) -> None:
    """Refuse a volume that cannot be made."""
    check_name(spec.name)
    check_mount_path(spec.mount_path)
    if spec.claim is not None or spec.size is None:
        raise SpecError(f"the volume {spec.name!r} has no size, so it cannot be made")
    quantity.memory(spec.size, parameter="size")
    access_mode(spec.access_mode)
    if spec.storage_class:
        check_claim(spec.storage_class, parameter="storage_class")
    if spec.volume_name is not None:
        check_claim(spec.volume_name, parameter="volume_name")


def default_mount_path(name: str) -> str:
    return f"{FOLDER}/{name}"


def access_mode(word: object) -> str | None:
    """The access mode in Kubernetes' words, also for a short form such as `RWX`."""
    if word is None:
        return None
    mode = _SHORT_ACCESS_MODES.get(word, word) if isinstance(word, str) else word
    for access_mode_name in ACCESS_MODES:
        if mode == access_mode_name:
            return access_mode_name
    raise SpecError(
        f"access_mode is {word!r}; it must be one of {', '.join(ACCESS_MODES)}",
        hint=f"{', '.join(_SHORT_ACCESS_MODES)} are understood too",
    )


def check_name(name: object) -> str:
    """The name of a volume, which must be right for a volume of pods, too."""
    if not isinstance(name, str) or len(name) > NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise SpecError(
            f"the volume's name is {name!r}; it must be at most {NAME_CHARACTERS} lower-case "
            "letters, digits and '-', and begin and end with a letter or digit"
        )
    return name


def check_claim(name: object, *, parameter: str = "pvc") -> str:
    """The name of a claim, or of a PersistentVolume."""
    if not isinstance(name, str) or len(name) > CLAIM_CHARACTERS or not _CLAIM.fullmatch(name):
        raise SpecError(
            f"{parameter} is {name!r}; it must be at most {CLAIM_CHARACTERS} lower-case letters, "
            "digits, '-' and '.', and begin and end, as each part between dots, with a letter or "
            "digit"
        )
    return name


def check_mount_path(path: object, parameter: str = "mount_path") -> str:
    if not isinstance(path, str) or not path:
        raise SpecError(
            f"{parameter} is {path!r}; a volume needs an absolute path", hint='mount_path="/data"'
        )
    cleaned = "/" + posixpath.normpath(path).lstrip("/")
    is_unsafe = ".." in path.split("/") or ":" in path or not path.isprintable()
    if not path.startswith("/") or cleaned == "/" or is_unsafe:
        raise SpecError(
            f"{parameter} is {path!r}; it must be an absolute path below '/', such as '/data'"
        )
    if (
        cleaned.startswith(tuple(f"{taken}/" for taken in _SYSTEM_FOLDERS))
        or cleaned in _SYSTEM_FOLDERS
    ):
        raise SpecError(
            f"{parameter} is {path!r}; {', '.join(_SYSTEM_FOLDERS)} are the system's own"
        )
    return cleaned
