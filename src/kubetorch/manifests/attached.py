"""What a pod template attaches to its container, for a backend that is no Kubernetes.

Secrets as variables and files, and claims of volumes. Other kinds of volumes are only named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.lib.records import record
from kubetorch.manifests.secrets import HOME

_NAME = re.compile("[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")


@record
class SecretVariables:
    """Variables that get their values from a secret.

    Attributes:
        secret: Name of the object.
        variable: Name of the variable; `None` for one variable for each key.
        key: Key of its value.
        prefix: What stands before the keys, when there is one variable for each.
        optional: Whether a secret or key that is missing is no error.
    """

    secret: str
    variable: str | None = None
    key: str = ""
    prefix: str = ""
    optional: bool = False


@record
class SecretFiles:
    """A secret whose values are files of a folder.

    Attributes:
        secret: Name of the object.
        path: Absolute path of the folder in the pod.
        items: Pairs of key and file name; all keys if there are none.
        optional: Whether a secret that is missing is no error.
    """

    secret: str
    path: str
    items: tuple[tuple[str, str], ...] = ()
    optional: bool = False


@record
class ClaimMount:
    """A volume at a path.

    Attributes:
        claim: Name of the claim.
        path: Absolute path in the pod.
        read_only: Whether the pod can only read it.
        sub_path: Folder of the volume that is mounted, instead of all of it.
    """

    claim: str
    path: str
    read_only: bool = False
    sub_path: str = ""


@record
class Attached:
    """Everything that is attached.

    Attributes:
        variables: Secrets as variables, in the order in which they are set.
        files: Secrets as files.
        claims: Volumes.
        others: Pairs of path and kind of volume for whatever else is mounted.
    """

    variables: tuple[SecretVariables, ...] = ()
    files: tuple[SecretFiles, ...] = ()
    claims: tuple[ClaimMount, ...] = ()
    others: tuple[tuple[str, str], ...] = ()

    @property
    def all_secrets(self) -> tuple[str, ...]:
        """All secrets that are named."""
        named = [one.secret for one in self.variables] + [one.secret for one in self.files]
        return tuple(dict.fromkeys(named))

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets without which the pod cannot start."""
        needed = [one.secret for one in self.variables if not one.optional]
        needed += [one.secret for one in self.files if not one.optional]
        return tuple(dict.fromkeys(needed))

    @property
    def paths(self) -> tuple[str, ...]:
        """Where something is shown that needs a path of the pod's own."""
        return (*(one.path for one in self.files), *(one.path for one in self.claims))


def read(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Attached:
    """What is attached.

    Args:
        pod: Spec of the pod.
        container: The container in it.

    Raises:
        SpecError: A path in a volume leads out of it, or a name is none.
    """
    volumes = {one["name"]: one for one in pod.get("volumes") or ()}
    files, claims, others = [], [], []
    for mount in container.get("volumeMounts") or ():
        volume = volumes.get(mount["name"]) or {}
        if "secret" in volume and not mount.get("subPath"):
            files.append(_files(volume["secret"], mount))
        elif "persistentVolumeClaim" in volume:
            claims.append(_claim(volume["persistentVolumeClaim"], mount))
        else:
            kind = next((key for key in volume if key != "name"), "unknown")
            others.append((mount["mountPath"], kind))
    return Attached(tuple(_variables(container)), tuple(files), tuple(claims), tuple(others))


def _variables(container: Mapping[str, Any]) -> Iterator[SecretVariables]:
    for source in container.get("envFrom") or ():
        ref = source.get("secretRef")
        if ref is not None:
            prefix, optional = source.get("prefix", ""), bool(ref.get("optional"))
            yield SecretVariables(_named(ref["name"]), prefix=prefix, optional=optional)
    for variable in container.get("env") or ():
        ref = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if ref is not None:
            optional = bool(ref.get("optional"))
            secret = _named(ref["name"])
            yield SecretVariables(secret, variable["name"], ref["key"], optional=optional)


def _files(secret: Mapping[str, Any], mount: Mapping[str, Any]) -> SecretFiles:
    items = ((one["key"], _inside(one["path"], "path")) for one in secret.get("items") or ())
    optional = bool(secret.get("optional"))
    return SecretFiles(_named(secret["secretName"]), mount["mountPath"], tuple(items), optional)


def _claim(claim: Mapping[str, Any], mount: Mapping[str, Any]) -> ClaimMount:
    read_only = bool(mount.get("readOnly") or claim.get("readOnly"))
    folder = _inside(mount.get("subPath") or "", "subPath")
    return ClaimMount(_named(claim["claimName"]), mount["mountPath"], read_only, folder)


def _named(name: str) -> str:
    """The name of an object.

    Raises:
        SpecError: No object can have it.
    """
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is no name of a secret or a claim",
            hint="lowercase letters, digits, '-' and '.', as Kubernetes has it",
        )
    return name


def _inside(path: str, field: str) -> str:
    """A path in a volume.

    Raises:
        SpecError: It leads out of it.
    """
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise SpecError(
            f"{field} {path!r} of a volume leads out of it",
            hint="it must be relative, without '..', as Kubernetes has it",
        )
    return path


def path_of_machine(path: str, home: str) -> str:
    """A path of a manifest as a path of this machine, whose user has another home than root."""
    is_home = path == HOME or path.startswith(f"{HOME}/")
    return home + path.removeprefix(HOME) if is_home else path
