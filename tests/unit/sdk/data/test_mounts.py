"""`kt.Compute(data=)`: what can be declared, and how it is said what cannot."""

from __future__ import annotations

from typing import Any

import pytest

import kubetorch as kt
from kubetorch.sdk import compute_parameters
from kubetorch.specs.data import DataMount


def test_keys_are_read_only_unless_they_are_declared_writable() -> None:
    compute = kt.Compute(data={"/models/": "/models/base/", "/data": kt.Data("x/y", mode="rw")})
    assert compute.to_spec().data == (
        DataMount("/data", "x/y", "rw"),
        DataMount("/models", "models/base"),
    )
    assert compute.data == {"/data": kt.Data("x/y", mode="rw"), "/models": "models/base"}


def test_the_attribute_replaces_what_was_declared() -> None:
    compute = kt.Compute(data={"/models": "models/base"})
    compute.data = {"/data": "x"}
    assert compute.data == {"/data": "x"}
    compute.data = None
    assert compute.data == {}


@kt.compute(data={"/models": "models/base"})
def work() -> None: ...


def test_the_decorator_takes_data() -> None:
    assert work.compute is not None
    assert work.compute.data == {"/models": "models/base"}


def test_an_expression_makes_the_same_compute_again() -> None:
    compute = kt.Compute(data={"/models": "a", "/data": kt.Data("b", mode="rw")})
    again = eval(repr(compute), {"Compute": kt.Compute, "Data": kt.Data})
    assert again == compute


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["models/base"], "data is .*; it must be a dictionary"),
        ({"models": "a"}, "'models'; it must be an absolute path"),
        ({"/": "a"}, "'/'; it must be an absolute path"),
        ({"/a/../b": "a"}, "must be an absolute path"),
        ({"/proc/x": "a"}, "the system's own"),
        ({1: "a"}, "the path of data is 1"),
        ({"/a": "x", "/a/": "y"}, "has the path '/a' twice"),
        ({"/a": "x", "/a/b": "y"}, "'/a' and '/a/b', which lies in it"),
        ({"/a": 1}, "must be a key of the data store"),
        ({"/a": ""}, "is empty"),
        ({"/a": "ftp://host/x"}, "no address that the data store knows"),
    ],
)
def test_what_is_impossible_is_refused_where_it_is_written(data: Any, message: str) -> None:
    with pytest.raises(kt.SpecError, match=message):
        kt.Compute(data=data)


def test_an_address_stays_as_it_was_written() -> None:
    compute = kt.Compute(data={"/a": "s3://bucket/prefix", "/b": kt.Data("hf://me/small@v1")})
    assert compute.data == {"/a": "s3://bucket/prefix", "/b": "hf://me/small@v1"}


def test_an_unknown_mode_and_a_key_that_is_no_text_are_refused() -> None:
    mode: Any = "wr"
    with pytest.raises(kt.SpecError, match="mode is 'wr'; it can be"):
        kt.Data("x", mode=mode)
    key: Any = 3
    with pytest.raises(kt.SpecError, match="key is 3"):
        kt.Data(key)


@pytest.mark.parametrize("path", ["/mnt", "/mnt/data", "/mnt/data/in"])
def test_data_and_volumes_do_not_share_a_path(path: str) -> None:
    volume = kt.Volume("v", size="1Gi", mount_path="/mnt/data")
    with pytest.raises(kt.SpecError, match="the volume 'v' is at /mnt/data"):
        kt.Compute(volumes=[volume], data={path: "x"})


def test_data_does_not_hide_the_working_directory() -> None:
    with pytest.raises(kt.SpecError, match="working directory /app/code is there"):
        kt.Compute(working_dir="/app/code", data={"/app": "x"})
    assert kt.Compute(working_dir="/app", data={"/app/models": "x"}).data


class Refreshing:
    def refresh_data(self) -> str:
        return "the user's"


def test_a_users_method_of_that_name_goes_first_and_the_service_has_ours() -> None:
    handle = kt.cls(Refreshing)
    assert repr(handle.refresh_data) == f"{handle!r}.refresh_data"
    assert kt.service(handle).refresh_data.__func__ is kt.Module.refresh_data


def test_versions_that_a_deploy_notes_make_no_other_declaration() -> None:
    spec = kt.Compute(data={"/models": "a"}).to_spec()
    (mount,) = compute_parameters.declared(spec).data
    assert mount == DataMount("/models", "a")
