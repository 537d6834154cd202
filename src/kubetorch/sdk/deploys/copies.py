"""What the steps of an image copy, as it travels with a deploy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kubetorch.datastore import ignoring
from kubetorch.datastore import scan as scanning
from kubetorch.datastore.scan import Options, Scan
from kubetorch.errors import SpecError
from kubetorch.specs.image import CopyStep, ImageSpec, Step


def scan(image: ImageSpec, *, cache: Path) -> tuple[ImageSpec, list[Scan]]:
    """The image with the digests of what it copies, and where their bytes are.

    Args:
        image: As it was declared.
        cache: Folder for what is kept between scans.

    Raises:
        SpecError: A source is gone, or cannot be read.
        ProjectTooLargeError: A source has more than may travel.
    """
    steps: list[Step] = []
    scans: list[Scan] = []
    for step in image.steps:
        if isinstance(step, CopyStep):
            found = _scan(step, cache)
            scans.append(found)
            steps.append(replace(step, digest=found.digest))
        else:
            steps.append(step)
    return replace(image, steps=tuple(steps)), scans


def _scan(step: CopyStep, cache: Path) -> Scan:
    if not os.path.exists(step.source):  # noqa: PTH110  # pathlib costs more than the rest
        raise SpecError(f"the image copies {step.source!r}, which is not there any more")
    if not step.is_folder:
        folder, name = os.path.split(step.source)
        return scanning.scan(Path(folder), Options(only=name, cache=cache))
    # A package leaves at home what a project would; a copy takes all but what it is told.
    filters = None if step.is_package else ignoring.parse_filters(step.filter_options or "")
    return scanning.scan(Path(step.source), Options(cache=cache, filters=filters))
