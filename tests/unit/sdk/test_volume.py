"""`kt.Volume` as a declaration: what it may be, and what it is in a manifest."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

import kubetorch as kt
from kubetorch.sdk import volume
from kubetorch.specs.volume import VolumeSpec
from kubetorch.wire.volumes import CreatedVolume, VolumeView

if TYPE_CHECKING:
    from kubetorch.sdk.controller import Controller


def test_it_is_what_was_said() -> None:
    volume = kt.Volume("data", "10Gi", "/data/", "fast", "RWO", "team", "pv-1")
    assert volume.to_spec() == VolumeSpec(
        "data", "/data", "10Gi", "fast", "ReadWriteOnce", "team", "pv-1"
    )
    assert (volume.name, volume.pvc_name, volume.size) == ("data", "data", "10Gi")
    assert (volume.mount_path, volume.access_mode) == ("/data", "ReadWriteOnce")
    assert (volume.namespace, volume.volume_name) == ("team", "pv-1")
    assert volume.storage_class == "fast"
    assert kt.Volume("a", "1Gi", "/a").to_spec().access_mode is None
    assert kt.Volume("a", "1Gi", "/a", pv="pv-1").storage_class == ""


class _Volumes:
    """A controller whose storage classes give one access mode."""

    def __init__(self, access_mode: str, *, is_new: bool = True) -> None:
        self.volumes = self
        self._access_mode, self._is_new = access_mode, is_new

    def create(self, namespace: str, spec: VolumeSpec) -> CreatedVolume:
        spec = replace(spec, access_mode=spec.access_mode or self._access_mode)
        view = VolumeView(namespace=namespace, claim=spec.name, spec=spec, storage_class="gp3")
        return CreatedVolume(is_new=self._is_new, volume=view)


@pytest.mark.parametrize(
    ("declared", "decided", "is_new", "is_told"),
    [
        (None, "ReadWriteOnce", True, True),
        (None, "ReadWriteOnce", False, False),
        (None, "ReadWriteMany", True, False),
        ("ReadWriteOnce", "ReadWriteOnce", True, False),
    ],
)
def test_who_named_no_access_mode_is_told_that_a_new_volume_is_of_one_node(
    declared: str | None,
    decided: str,
    is_new: bool,
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = kt.Volume("data", "1Gi", access_mode=declared).to_spec()
    controller = cast("Controller", _Volumes(decided, is_new=is_new))
    assert volume.create(controller, "team", spec).spec.access_mode == decided
    line = (
        "kubetorch: the volume data is ReadWriteOnce (pods of one node at a time): its storage "
        'class gp3 is not known to be shared; access_mode="ReadWriteMany" if it is\n'
    )
    assert capsys.readouterr().err == (line if is_told else "")


def test_a_claim_that_exists_needs_no_size() -> None:
    volume = kt.Volume(name="data", mount_path="/data", pvc="shared-data-pvc")
    assert (volume.pvc_name, volume.size) == ("shared-data-pvc", None)
    claim = {"claimName": "shared-data-pvc"}
    assert volume.pod_template_spec() == {"name": "data", "persistentVolumeClaim": claim}
    with pytest.raises(kt.SpecError, match="not deleted"):
        volume.delete()


def test_its_namespace_is_that_of_the_service() -> None:
    volume = kt.Volume("data", "1Gi", "/data")
    assert volume.to_spec().namespace is None
    compute = kt.Compute(namespace="team", volumes=[volume])
    assert compute.to_spec().volumes == (volume.to_spec(),)


def test_it_stands_in_the_manifest() -> None:
    template = kt.Compute(
        volumes=[
            kt.Volume("data", "1Gi", "/data"),
            kt.Volume("ro", "1Gi", "/ro", access_mode="ROX"),
        ]
    ).manifest["spec"]["template"]["spec"]
    named = {volume["name"]: volume for volume in template["volumes"]}
    assert named["data"]["persistentVolumeClaim"] == {"claimName": "data"}
    mounts = {mount["name"]: mount for mount in template["containers"][0]["volumeMounts"]}
    assert mounts["data"] == {"name": "data", "mountPath": "/data"}
    assert mounts["ro"]["readOnly"] is True


def test_it_is_a_value() -> None:
    data_volume, equal_volume = kt.Volume("a", "1Gi", "/a"), kt.Volume("a", "1Gi", "/a")
    assert data_volume == equal_volume
    assert hash(data_volume) == hash(equal_volume)
    assert data_volume != kt.Volume("a", "2Gi", "/a")
    assert eval(repr(data_volume), {"Volume": kt.Volume}) == data_volume
    assert pickle.loads(pickle.dumps(data_volume)) == data_volume


def test_a_volume_is_mounted_below_its_folder_unless_its_path_is_given() -> None:
    assert kt.Volume("my-data", "5Gi").mount_path == "/ktfs/my-data"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"size": None}, "has no size"),
        ({"size": "10 GB"}, "size is '10 GB'"),
        ({"size": "-1Gi"}, "size is '-1Gi'"),
        ({"size": float("nan")}, "size is nan"),
        ({"name": "My Data"}, "the volume's name is 'My Data'"),
        ({"name": "a" * 64}, "at most 63"),
        ({"name": 3}, "the volume's name is 3"),
        ({"mount_path": ""}, "mount_path is ''"),
        ({"mount_path": "data"}, "must be an absolute path"),
        ({"mount_path": "/"}, "must be an absolute path below"),
        ({"mount_path": "/a/../b"}, "mount_path is '/a/../b'"),
        ({"mount_path": "/proc/x"}, "the system's own"),
        ({"access_mode": "RWX2"}, "access_mode is 'RWX2'"),
        ({"namespace": "Team"}, "namespace is 'Team'"),
        ({"storage_class": "a b"}, "storage_class is 'a b'"),
        ({"volume_name": "a", "pv": "b"}, "they are the same"),
        ({"pvc": "x", "pv": "y"}, "bound to a volume already"),
        ({"pvc": "../x"}, "pvc is '../x'"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_declared(
    parameters: dict[str, Any], message: str
) -> None:
    arguments = {"name": "data", "size": "1Gi", "mount_path": "/data", **parameters}
    with pytest.raises(ValueError, match=message):
        kt.Volume(**arguments)


def test_two_volumes_at_one_path_are_refused() -> None:
    with pytest.raises(kt.SpecError, match="/data"):
        kt.Compute(volumes=[kt.Volume("a", "1Gi", "/data"), kt.Volume("b", "1Gi", "/data")])
