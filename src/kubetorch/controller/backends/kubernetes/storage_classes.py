"""Which storage class a volume gets for which nobody names one. Pure.

No API says which access modes a class can give. An administrator can, by an annotation; else a
class counts as shared by several nodes when its provisioner is known to make such volumes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kubetorch.errors import SpecError
from kubetorch.k8s.resources import Object
from kubetorch.manifests import labels

_DEFAULT = "storageclass.kubernetes.io/is-default-class"
_DEFAULT_BETA = "storageclass.beta.kubernetes.io/is-default-class"
_SHARED_MODES = ("ReadWriteMany", "ReadOnlyMany")
#: Provisioners whose volumes several nodes can mount at a time; the first ones go first.
_SHARED = (
    r"nfs\.csi\.k8s\.io",
    r"(.+\.)?cephfs\.csi\.ceph\.com",  # with the namespace of Rook's operator in front
    r"filestore\.csi\.storage\.gke\.io",
    r"efs\.csi\.aws\.com",
    r"fsx\.csi\.aws\.com",
    r"file\.csi\.azure\.com",
    r"azurelustre\.csi\.azure\.com",
    r"lustre\.csi\.storage\.gke\.io",
    r"fss\.csi\.oraclecloud\.com",
    r"csi\.juicefs\.com",
    r"csi\.weka\.io",
    r"csi\.vastdata\.com",
    r"beegfs\.csi\.netapp\.com",
    r"driver\.longhorn\.io",
    r"smb\.csi\.k8s\.io",
    r"k8s-sigs\.io/nfs-subdir-external-provisioner",
    r"cluster\.local/.*nfs.*",  # what the charts of NFS provisioners call themselves
)
#: It makes folders of a node, for which it waits until a pod has one; a class of it that waits for
#: none makes folders of a file system that all nodes have.
_LOCAL_PATH = "rancher.io/local-path"


def choose(classes: Sequence[Object], access_mode: str) -> str:
    """The name of the class.

    Args:
        classes: The StorageClasses of the cluster.
        access_mode: In Kubernetes' words.

    Raises:
        SpecError: There is none for this access mode.
    """
    ordered = sorted(classes, key=_order)
    annotated = [one for one in ordered if access_mode in _annotated(one)]
    if annotated:
        return _name(annotated[0])
    if access_mode not in _SHARED_MODES:
        unsaid = [one for one in ordered if not _annotated(one)]
        if unsaid:
            return _name(unsaid[0])
        raise _none(ordered, access_mode)
    shared = [one for one in ordered if not _annotated(one) and _rank(one) is not None]
    if not shared:
        raise _none(ordered, access_mode)
    # Sorting is stable: the default one goes first among those of a provisioner.
    return _name(min(shared, key=lambda one: _rank(one) or 0))


def is_default(found: Object) -> bool:
    """Whether Kubernetes gives this class to claims that name none."""
    noted = found["metadata"].get("annotations") or {}
    return noted.get(_DEFAULT) == "true" or noted.get(_DEFAULT_BETA) == "true"


def missing(classes: Sequence[Object], name: str) -> SpecError:
    """The error for a class that does not exist."""
    return SpecError(
        f"storage_class is {name!r}, which this cluster does not have",
        hint=f"it has {_listed(classes)}",
    )


def _order(found: Object) -> tuple[int, int, str]:
    """Defaults first, of several the newest one, as Kubernetes does; the rest by name."""
    made = found["metadata"].get("creationTimestamp") or ""
    newest = -int("".join(re.findall(r"\d", made)) or 0)
    return (0, newest, _name(found)) if is_default(found) else (1, 0, _name(found))


def _rank(found: Object) -> int | None:
    """How early a class comes among those that several nodes can mount; `None` if they cannot."""
    provisioner = str(found.get("provisioner") or "")
    for number, pattern in enumerate(_SHARED):
        if re.fullmatch(pattern, provisioner):
            return number
    if provisioner == _LOCAL_PATH and found.get("volumeBindingMode") != "WaitForFirstConsumer":
        return len(_SHARED)
    return None


def _annotated(found: Object) -> tuple[str, ...]:
    noted = found["metadata"].get("annotations") or {}
    return tuple(re.findall(r"\w+", noted.get(labels.ACCESS_MODES) or ""))


def _name(found: Object) -> str:
    return str(found["metadata"]["name"])


def _none(classes: Sequence[Object], access_mode: str) -> SpecError:
    if not classes:
        return SpecError(
            "this cluster has no storage class, so it can make no volumes",
            hint="install a provisioner, or name a PersistentVolume that exists: pv=",
        )
    hint = f"name one yourself: storage_class= ({_listed(classes)})"
    if access_mode in _SHARED_MODES:
        hint += (
            '; access_mode="ReadWriteOnce" if the pods of one node are enough; or let an '
            f"administrator say which can: kubectl annotate storageclass NAME "
            f"{labels.ACCESS_MODES}={access_mode}"
        )
    return SpecError(f"no storage class of this cluster is known to give {access_mode}", hint=hint)


def _listed(classes: Sequence[Object]) -> str:
    return ", ".join(sorted(_name(one) for one in classes)) or "none"
