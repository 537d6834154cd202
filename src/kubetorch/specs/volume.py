"""Storage that outlives pods: the frozen form of `kt.Volume`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kubetorch.errors import SpecError

ACCESS_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
_SHORT = {"RWO": "ReadWriteOnce", "ROX": "ReadOnlyMany", "RWX": "ReadWriteMany"}
DEFAULT_ACCESS_MODE = "ReadWriteMany"
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")


@dataclass(frozen=True)
class VolumeSpec:
    """One volume of a service.

    Attributes:
        name: Name of the volume, and of its claim unless `claim` names another.
        mount_path: Absolute path in the pods.
        size: Requested size, a Kubernetes quantity; `None` for a claim that exists.
        storage_class: `None` leaves the choice to the access mode and the cluster's default.
        access_mode: One of `ACCESS_MODES`.
        namespace: `None` is the compute's.
        volume_name: PersistentVolume to bind to.
        claim: An existing claim; it is neither created nor deleted.
    """

    name: str
    mount_path: str
    size: str | None = None
    storage_class: str | None = None
    access_mode: str = DEFAULT_ACCESS_MODE
    namespace: str | None = None
    volume_name: str | None = None
    claim: str | None = None

    @property
    def claim_name(self) -> str:
        """Name of the PersistentVolumeClaim."""
        return self.claim or self.name


def default_mount_path(name: str) -> str:
    """Where a volume is mounted that nobody gave a path."""
    return f"/ktfs/{name}"


def access_mode(given: str | None) -> str:
    """The access mode in Kubernetes' words; `RWX` and its like are understood.

    Raises:
        SpecError: There is no such mode.
    """
    mode = _SHORT.get(given or "", given or DEFAULT_ACCESS_MODE)
    if mode not in ACCESS_MODES:
        raise SpecError(f"access_mode is {given!r}; it must be one of {', '.join(ACCESS_MODES)}")
    return mode


def check_name(name: object, *, parameter: str = "name") -> str:
    """`name`, if Kubernetes takes it for a claim.

    Raises:
        SpecError: It does not.
    """
    if not isinstance(name, str) or len(name) > 253 or not _NAME.match(name):
        raise SpecError(
            f"the volume's {parameter} is {name!r}; it must be lower-case letters, digits and '-', "
            "and begin and end with a letter or digit"
        )
    return name


def check_mount_path(path: object) -> str:
    """`path`, if a volume can be mounted there.

    Raises:
        SpecError: It is empty, not absolute, the root, or has `..` or `:` in it.
    """
    if not isinstance(path, str) or not path:
        raise SpecError(
            f"mount_path is {path!r}; a volume needs an absolute path", hint='mount_path="/data"'
        )
    parts = path.split("/")
    if not path.startswith("/") or not path.strip("/") or ".." in parts or ":" in path:
        raise SpecError(f"mount_path is {path!r}; it must be an absolute path below '/'")
    return path.rstrip("/")
