"""What programs for 0.5 write: names, attributes and keywords."""

from __future__ import annotations

import pytest

import kubetorch as kt
from kubetorch.sdk.calls.options import CallOptions


def test_an_image_can_be_changed_by_its_attributes() -> None:
    image = kt.Image(name="first").pip_install("numpy")
    image.image_id, image.name, image.python_path = "python:3.12", "second", "/opt/python"

    assert (image.image_id, image.name, image.python_path) == (
        "python:3.12",
        "second",
        "/opt/python",
    )
    assert image.contents.splitlines()[0] == "FROM python:3.12"
    compute = kt.Compute(image=image)
    image.image_id = None
    assert compute.server_image.startswith("ghcr.io/kubetorch/")
    for name, wrong in (("image_id", "not a reference"), ("name", ""), ("python_path", 3)):
        with pytest.raises(kt.SpecError, match=name):
            setattr(image, name, wrong)


def test_a_volume_can_be_mounted_elsewhere() -> None:
    volume = kt.Volume("data", size="1Gi", mount_path="/data")
    volume.mount_path = "/elsewhere"

    assert (volume.mount_path, volume.to_spec().mount_path) == ("/elsewhere", "/elsewhere")
    with pytest.raises(kt.SpecError, match="mount_path"):
        volume.mount_path = "relative"


def test_the_level_of_logs_can_be_set() -> None:
    compute = kt.Compute()
    compute.logging_config.level = "debug"

    assert compute.logging_config.level == "debug"
    (container,) = compute.pod_spec["containers"]
    assert {"name": "KT_LOG_LEVEL", "value": "DEBUG"} in container["env"]
    assert kt.Compute().logging_config.level == "info"
    with pytest.raises(kt.SpecError, match="level is 'loud'"):
        compute.logging_config.level = "loud"
    with pytest.raises(kt.SpecError, match="grace_period is -1"):
        compute.logging_config.grace_period = -1


def test_other_words_for_parameters_are_taken(tmp_path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:3.12\n")
    for image in (
        kt.Image.from_dockerfile(dockerfile_path=tmp_path / "Dockerfile"),
        kt.Image.from_dockerfile(tmp_path / "Dockerfile"),
    ):
        assert image.image_id == "python:3.12"
    with pytest.raises(TypeError, match="path of a Dockerfile"):
        kt.Image.from_dockerfile()
    endpoint = kt.Endpoint(url="web.team.svc")
    assert endpoint.get_proxied_url(proxy_port=3000) == endpoint.get_proxied_url(3000)
    with pytest.raises(TypeError, match="port of the proxy"):
        endpoint.get_proxied_url()


@pytest.mark.parametrize("value", [True, kt.MetricsConfig(interval=5)])
def test_metrics_that_are_asked_for_are_a_line(value: object) -> None:
    with pytest.warns(UserWarning, match="streams no metrics"):
        options, user_keywords = CallOptions().take_from(
            {"stream_metrics": value, "x": 1}, frozenset()
        )
    assert (options, user_keywords) == (CallOptions(), {"x": 1})


def test_metrics_that_nobody_asks_for_are_no_line(recwarn) -> None:
    CallOptions().take_from({"stream_metrics": False, "x": 1}, frozenset())
    assert not recwarn
    user_keywords = {"stream_metrics": True}
    assert CallOptions().take_from(user_keywords, frozenset(user_keywords)) == (
        CallOptions(),
        user_keywords,
    )
    with pytest.raises(kt.SpecError, match="stream_metrics is 3"):
        CallOptions().with_changes({"stream_metrics": 3})
