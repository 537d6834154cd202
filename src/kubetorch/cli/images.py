"""What `kt deploy --image` is told: a preset, the reference of a container image, or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.sdk import images
from kubetorch.sdk.image import Image
from kubetorch.specs.spelling import nearest

_PRESETS: dict[str, Callable[..., Image]] = {
    "debian": images.debian,
    "ubuntu": images.ubuntu,
    "python": images.python,
    "ray": images.ray,
    "pytorch": images.pytorch,
}
#: Arguments of `kt.Image`, as keys of the JSON object.
_ARGUMENTS = ("name", "image_id", "python_path", "install_cmd")
#: Steps, as keys of the JSON object; they are added in its order.
_STEPS = ("pip_install", "run_bash", "set_env_vars", "copy", "sync_package")
_EXAMPLE = 'for example --image python:3.12, or \'{"image_id": "a/b:1", "pip_install": ["numpy"]}\''


def parse(text: str) -> Image:
    """The image that the option says.

    Raises:
        SpecError: It is none of the three, or a value in it is impossible.
    """
    if text.lstrip().startswith(("{", "[", '"')):
        return _from_json(text)
    name, _, version = text.partition(":")
    preset = _PRESETS.get(name)
    if preset is None:
        # A preset's mistyped name would be a reference, too.
        near = None if "/" in text or version else nearest(name, _PRESETS)
        if near:
            raise SpecError(f"--image is {text!r}", hint=f"did you mean {near!r}?")
        return Image(image_id=text)
    try:
        return preset(version) if version else preset()
    except TypeError as error:
        raise SpecError(
            f"--image is {text!r}: {name} {'has no versions' if version else 'needs a version'}",
            hint=f"--image {name}" if version else f"for example --image {name}:3.12",
        ) from error


def _from_json(text: str) -> Image:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SpecError(
            f"--image is {text!r}, which is not JSON: {error}", hint=_EXAMPLE
        ) from error
    if not isinstance(found, dict):
        raise SpecError(f"--image must be a JSON object, not {text}", hint=_EXAMPLE)
    for key in found:
        if key not in (*_ARGUMENTS, *_STEPS):
            raise SpecError(
                f"--image has {key!r}; there are {', '.join((*_ARGUMENTS, *_STEPS))}", hint=_EXAMPLE
            )
    image = Image(**{key: value for key, value in found.items() if key in _ARGUMENTS})
    for key, value in found.items():
        if key in _STEPS:
            for arguments in _calls(key, value):
                try:
                    getattr(image, key)(**arguments)
                except TypeError as error:
                    raise SpecError(f"--image: {key}: {error}") from error
    return image


#: Name of the first argument of each step.
_FIRST = {
    "pip_install": "reqs",
    "run_bash": "command",
    "set_env_vars": "env_vars",
    "copy": "source",
    "sync_package": "package",
}


def _calls(step: str, value: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # any JSON
    """The arguments of each call: one for each copy and package, one for the whole otherwise."""
    if step in ("copy", "sync_package"):
        items = value if isinstance(value, list) else [value]
        return [item if isinstance(item, dict) else {_FIRST[step]: item} for item in items]
    return [{_FIRST[step]: value}]
