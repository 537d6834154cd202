"""Ready images: `kt.images.python("3.12")` and its like. Each call returns a new one."""

from __future__ import annotations

import re

from kubetorch.config.settings import DEFAULT_IMAGE
from kubetorch.sdk.image import Image

_UBUNTU = "ghcr.io/run-house/ubuntu:v1"


def debian() -> Image:
    """Kubetorch's own default image, a Debian with Python."""
    return Image(name="debian", image_id=DEFAULT_IMAGE)


def ubuntu() -> Image:
    """Ubuntu."""
    return Image(name="ubuntu", image_id=_UBUNTU)


def python(version: str) -> Image:
    """The slim official image of a Python version, such as `3.12`."""
    return Image(name=f"python{_digits(version)}", image_id=f"python:{version}-slim")


def ray(version: str = "latest") -> Image:
    """Ray's image of a version."""
    suffix = "" if version == "latest" else _digits(version)
    return Image(name=f"ray{suffix}", image_id=f"rayproject/ray:{version}")


def pytorch(version: str = "23.12-py3") -> Image:
    """NVIDIA's PyTorch image of a version."""
    return Image(name=f"pytorch{_digits(version)}", image_id=f"nvcr.io/nvidia/pytorch:{version}")


def _digits(version: str) -> str:
    return re.sub(r"[^0-9a-z]", "", version.lower())


# The names that programs use.
Debian, Ubuntu = debian, ubuntu


def Ray() -> Image:  # the name that programs use
    """As `ray`."""
    return ray()


def Python310() -> Image:  # the name that programs use
    """Python 3.10."""
    return python("3.10")


def Python311() -> Image:  # the name that programs use
    """Python 3.11."""
    return python("3.11")


def Python312() -> Image:  # the name that programs use
    """Python 3.12."""
    return python("3.12")


def Pytorch2312() -> Image:  # the name that programs use
    """NVIDIA's PyTorch 23.12."""
    return pytorch("23.12-py3")
