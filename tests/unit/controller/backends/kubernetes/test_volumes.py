"""The storage class of volumes for which nobody names one."""

from __future__ import annotations

from typing import Any

import pytest

from kubetorch.controller.backends.kubernetes import volumes
from kubetorch.errors import SpecError

WAITING = "WaitForFirstConsumer"


def made_by(provisioner: str, name: str | None = None, **fields: Any) -> dict[str, Any]:
    noted = {"kubetorch.com/access-modes": fields["modes"]} if "modes" in fields else {}
    if fields.get("default"):
        noted["storageclass.kubernetes.io/is-default-class"] = "true"
    creation_time = fields.get("created", "2026-01-01T00:00:00Z")
    return {
        "metadata": {
            "name": name or provisioner,
            "annotations": noted,
            "creationTimestamp": creation_time,
        },
        "provisioner": provisioner,
        "volumeBindingMode": fields.get("binding", WAITING),
    }


DISK = made_by("ebs.csi.aws.com", "gp3", default=True)
FILES = made_by("efs.csi.aws.com", "efs")


@pytest.mark.parametrize("mode", ["ReadWriteOnce", "ReadWriteOncePod"])
def test_for_one_node_it_is_the_default_one(mode: str) -> None:
    assert volumes.choose([FILES, DISK], mode) == "gp3"


def test_without_a_default_it_is_the_first_by_name() -> None:
    classes = [made_by("b.example"), made_by("a.example")]
    assert volumes.choose(classes, "ReadWriteOnce") == "a.example"


def test_of_two_defaults_it_is_the_newer_one() -> None:
    newer = made_by("new.example", default=True, created="2026-02-01T00:00:00Z")
    assert volumes.choose([DISK, newer], "ReadWriteOnce") == "new.example"


@pytest.mark.parametrize("mode", ["ReadWriteMany", "ReadOnlyMany"])
@pytest.mark.parametrize(
    "provisioner",
    [
        "nfs.csi.k8s.io",
        "cephfs.csi.ceph.com",
        "rook-ceph.cephfs.csi.ceph.com",
        "efs.csi.aws.com",
        "file.csi.azure.com",
        "cluster.local/nfs-subdir-external-provisioner",
    ],
)
def test_for_many_nodes_it_is_one_of_a_shared_file_system(provisioner: str, mode: str) -> None:
    assert volumes.choose([DISK, made_by(provisioner)], mode) == provisioner


def test_of_shared_file_systems_the_default_one_of_the_first_provisioner_is_taken() -> None:
    nfs, default_class = (
        made_by("nfs.csi.k8s.io", "a"),
        made_by("nfs.csi.k8s.io", "b", default=True),
    )
    assert volumes.choose([FILES, nfs, default_class], "ReadWriteMany") == "b"


def test_folders_of_nodes_are_shared_only_if_they_wait_for_no_pod() -> None:
    local = made_by("rancher.io/local-path", "local-path", default=True)
    shared = made_by("rancher.io/local-path", "shared", binding="Immediate")
    assert volumes.choose([local, shared], "ReadWriteMany") == "shared"
    assert volumes.choose([local, shared], "ReadWriteOnce") == "local-path"
    with pytest.raises(SpecError, match="known to give ReadWriteMany"):
        volumes.choose([local], "ReadWriteMany")


def test_what_an_administrator_says_of_a_class_decides() -> None:
    mine = made_by("mine.example", modes="ReadWriteMany, ReadOnlyMany")
    once = made_by("nfs.csi.k8s.io", modes="ReadWriteOnce")
    assert volumes.choose([once, FILES, mine], "ReadWriteMany") == "mine.example"
    assert volumes.choose([DISK, mine, once], "ReadWriteOnce") == "nfs.csi.k8s.io"
    with pytest.raises(SpecError):
        volumes.choose([once], "ReadWriteMany")


@pytest.mark.parametrize(
    ("named", "mode"),
    [
        (None, "ReadWriteMany"),
        ("efs", "ReadWriteMany"),
        ("mine.example", "ReadWriteMany"),
        ("gp3", "ReadWriteOnce"),
        ("nfs.csi.k8s.io", "ReadWriteOnce"),
        ("", "ReadWriteOnce"),
    ],
)
def test_a_volume_is_shared_unless_said_otherwise_where_its_class_is_known_to_share(
    named: str | None, mode: str
) -> None:
    annotated = made_by("mine.example", modes="ReadWriteMany")
    once = made_by("nfs.csi.k8s.io", modes="ReadWriteOnce")
    assert volumes.mode_of([DISK, FILES, annotated, once], named) == mode
    assert volumes.mode_of([DISK, once], None) == "ReadWriteOnce"
    assert volumes.mode_of([], None) == "ReadWriteOnce"


def test_the_error_names_the_classes_and_what_can_be_done() -> None:
    with pytest.raises(SpecError) as error:
        volumes.choose([DISK, made_by("pd.csi.storage.gke.io", "pd")], "ReadWriteMany")
    hint = error.value.hint or ""
    assert "gp3, pd" in hint
    assert 'access_mode="ReadWriteOnce"' in hint
    assert "kubetorch.com/access-modes=ReadWriteMany" in hint


def test_a_cluster_without_classes_makes_no_volumes() -> None:
    with pytest.raises(SpecError, match="has no storage class"):
        volumes.choose([], "ReadWriteOnce")
