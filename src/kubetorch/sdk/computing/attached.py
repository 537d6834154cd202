"""What parameters of `kt.Compute` may be that give pods an image, volumes and secrets.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from kubetorch.errors import SpecError
from kubetorch.specs.image import ImageSpec
from kubetorch.specs.secret import SecretRef
from kubetorch.specs.volume import VolumeSpec, check_name, default_mount_path


class Image(Protocol):
    """An image as users declare it."""

    @property
    def image_id(self) -> str | None:
        """Reference of the container image."""

    def to_spec(self) -> ImageSpec:
        """Its frozen form."""


class Volume(Protocol):
    """A volume as users declare it."""

    def to_spec(self) -> VolumeSpec:
        """Its frozen form."""


class Secret(Protocol):
    """A secret as users declare it."""

    def to_ref(self) -> SecretRef:
        """What pods see of it."""


def image(value: object) -> Image:
    """An image; its steps are read when it is deployed.

    Raises:
        AttributeError: It is none, in the words that programs expect.
    """
    if not hasattr(value, "image_id"):
        raise AttributeError(
            f"{type(value).__name__!r} object has no attribute 'image_id': image is {value!r}; it "
            f"must be a kt.Image, for example kt.Image(image_id={value!r})"
        )
    return cast("Image", value)


def volumes(value: object) -> tuple[VolumeSpec, ...]:
    """Volumes, or names of claims that exist."""
    if not isinstance(value, (list, tuple)):
        raise SpecError(
            f"volumes is {value!r}; it must be a list of kt.Volume, or of names of claims",
            hint='for example kt.Compute(volumes=["data"])',
        )
    return tuple(_volume(one) for one in value)


def _volume(value: object) -> VolumeSpec:
    if isinstance(value, VolumeSpec):
        return value
    if isinstance(value, str):
        return VolumeSpec(check_name(value), default_mount_path(value), claim=value)
    if not hasattr(value, "to_spec"):
        raise SpecError(
            f"volumes has {value!r}; each must be a kt.Volume, or the name of a claim that exists",
            hint='for example kt.Volume(name="data", size="10Gi", mount_path="/data")',
        )
    return cast("Volume", value).to_spec()


def secrets(value: object) -> list[str | Secret]:
    """Secrets, or names of some that exist."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(
            f"secrets is {value!r}; it must be a list of kt.Secret, or of names",
            hint='for example kt.Compute(secrets=["huggingface"])',
        )
    found = list(value)
    for one in found:
        if not (isinstance(one, str) and one) and not hasattr(one, "to_ref"):
            raise SpecError(
                f"secrets has {one!r}; each must be a kt.Secret, the name of a provider, or that "
                "of a secret that exists"
            )
    return found


def reference(value: str | Secret) -> SecretRef:
    """What pods see of a secret; a name is that of one that exists, all of whose keys are seen."""
    if isinstance(value, str):
        return SecretRef(value, value, "env", all_keys=True)
    return value.to_ref()
