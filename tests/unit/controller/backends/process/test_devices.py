"""Which pod gets which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetorch.controller.backends.process.backend import Devices
from kubetorch.errors import ResourceNotAvailableError


def test_the_driver_says_how_many_there_are(tmp_path: Path) -> None:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    assert Devices.of_machine({}, tmp_path).choose(9, []) == "0,1"


def test_a_container_without_the_drivers_folder_has_its_device_nodes(tmp_path: Path) -> None:
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert Devices.of_machine({}, tmp_path / "none", tmp_path).choose(9, []) == "0"


def test_the_service_hands_out_only_what_it_sees_itself(tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    devices = Devices.of_machine({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, tmp_path)
    assert devices.choose(2, []) == "GPU-a,3"
    assert Devices.of_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).choose(1, []) == ""


def test_pods_get_gpus_of_their_own() -> None:
    devices = Devices(["0", "1", "2", "3"])
    first = devices.choose(2, [])
    second = devices.choose(2, [first])
    assert (first, second) == ("0,1", "2,3")


def test_the_successor_of_a_pod_gets_its_gpus_when_there_are_no_others() -> None:
    assert Devices(["0"]).choose(1, ["0"]) == "0"


def test_too_few_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(ResourceNotAvailableError, match=r"train asks for 1 GPU, and .* has none"):
        Devices([]).check("train", gpus_per_pod=1, pods=1, used_devices=[])
    with pytest.raises(ResourceNotAvailableError, match=r"asks for 4 GPUs, and .* has 3 GPUs"):
        Devices(["0", "1", "2"]).check("train", gpus_per_pod=2, pods=2, used_devices=[])
    with pytest.raises(ResourceNotAvailableError, match=r"of which other services have 2"):
        Devices(["0", "1", "2"]).check("train", gpus_per_pod=2, pods=1, used_devices=["0,1"])


def test_enough_is_no_error() -> None:
    Devices([]).check("train", gpus_per_pod=0, pods=3, used_devices=[])
    Devices(["0", "1"]).check("train", gpus_per_pod=1, pods=2, used_devices=[])
