"""What `kt deploy --image` understands."""

import json

import pytest

from kubetorch.cli import deploy
from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.errors import SpecError
from kubetorch.sdk.image import Image


@pytest.mark.parametrize(
    ("text", "image_id"),
    [
        ("python:3.12", "python:3.12-slim"),
        ("pytorch", "nvcr.io/nvidia/pytorch:23.12-py3"),
        ("ray:2.9.0", "rayproject/ray:2.9.0"),
        ("debian", DEFAULT_IMAGE),
        ("reg/img:tag", "reg/img:tag"),
        ("busybox", "busybox"),
        ('{"image_id": "a/b:1"}', "a/b:1"),
        ('{"name": "a/b:1"}', "a/b:1"),
    ],
)
def test_an_image_is_a_preset_a_reference_or_json(text, image_id):
    assert deploy.parse_image(text).image_id == image_id


def test_steps_are_added_in_the_order_of_the_object(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).touch()
    first_source, second_source = str(tmp_path / "one"), str(tmp_path / "two")
    image = {
        "set_env_vars": {"A": "1"},
        "run_bash": ["date", "ls"],
        "pip_install": "numpy",
        "copy": [first_source, {"source": second_source, "dest": "/two"}],
    }

    expected = Image().set_env_vars({"A": "1"}).run_bash(["date", "ls"]).pip_install("numpy")
    assert deploy.parse_image(json.dumps(image)) == expected.copy(first_source).copy(
        second_source, dest="/two"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"pip": []}', "'pip'"),
        ('{"copy": {"from": "x"}}', "from"),
        ('{"pip_install": 5}', "reqs is 5"),
        ("pytroch", "did you mean pytorch"),
        ("python", "needs a version"),
        ("ubuntu:22", "has no versions"),
        ("No Image", "No Image"),
        ("", "''"),
    ],
)
def test_what_is_no_image_is_refused(text, message):
    with pytest.raises(SpecError, match=message):
        deploy.parse_image(text)
