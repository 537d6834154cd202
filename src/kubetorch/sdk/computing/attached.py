"""What parameters of `kt.Compute` may be that give pods an image, volumes and secrets.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kubetorch.errors import SpecError
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import CopyStep, Step
from kubetorch.specs.secret import PROVIDERS, SecretRef
from kubetorch.specs.volume import VolumeSpec, check_claim, default_mount_path

if TYPE_CHECKING:
    from kubetorch.sdk.image import Image
    from kubetorch.sdk.secrets.secret import Secret


def image(value: object) -> Image:
    """An image; its steps are read when it is deployed.

    Raises:
        AttributeError: It is none, in the words that programs expect.
    """
    from kubetorch.sdk.image import Image  # noqa: PLC0415  # few computes have one

    if not isinstance(value, Image):
        raise AttributeError(
            f"{type(value).__name__!r} object has no attribute 'image_id': image is {value!r}; it "
            f"must be a kt.Image, for example kt.Image(image_id={value!r})"
        )
    return value


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
        claim = check_claim(value, parameter="volumes")
        return VolumeSpec(claim, default_mount_path(claim), claim=claim)
    from kubetorch.sdk.volume import Volume  # noqa: PLC0415  # few computes have some

    if not isinstance(value, Volume):
        raise SpecError(
            f"volumes has {value!r}; each must be a kt.Volume, or the name of a claim that exists",
            hint='for example kt.Volume(name="data", size="10Gi", mount_path="/data")',
        )
    return value.to_spec()


def secrets(value: object) -> list[Secret]:
    """Secrets, names of providers, or names of secrets that exist."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(
            f"secrets is {value!r}; it must be a list of kt.Secret, or of names",
            hint='for example kt.Compute(secrets=["huggingface"])',
        )
    return [_secret(one) for one in value]


def _secret(value: object) -> Secret:
    from kubetorch.sdk.secrets.secret import Secret  # noqa: PLC0415  # few computes have one

    if isinstance(value, Secret):
        return value
    if not isinstance(value, str) or not value:
        raise SpecError(
            f"secrets has {value!r}; each must be a kt.Secret, the name of a provider, or that "
            "of a secret that exists"
        )
    return Secret.from_provider(value) if value in PROVIDERS else Secret.reference(value)


def declared(spec: ComputeSpec) -> ComputeSpec:
    """The spec without what a deploy finds out about secrets, claims and files to copy."""
    bare = tuple(SecretRef(one.name, "", "env") for one in spec.secrets)
    volumes = tuple(
        one if one.claim is None else replace(one, mount_path="") for one in spec.volumes
    )
    image = spec.image
    if image is not None:
        image = replace(image, steps=tuple(_as_declared(step) for step in image.steps))
    return replace(spec, secrets=bare, volumes=volumes, image=image)


def _as_declared(step: Step) -> Step:
    return replace(step, digest=None) if isinstance(step, CopyStep) else step
