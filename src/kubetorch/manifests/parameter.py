"""What a parameter of `kt.Compute` is to a manifest: how it is read there, and how written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kubetorch.lib.records import record
from kubetorch.manifests.place import Place
from kubetorch.specs.compute import ComputeSpec


@record
class Parameter:
    """One field of `ComputeSpec`.

    Attributes:
        name: Name of the field.
        target: Where it goes, for people: `C` is the agent's container, `P` the pod's spec, `PT`
            the metadata of the pod template, `M` that of the object.
        read: Its value in a manifest; `None` when the manifest does not say.
        write: Makes the manifest say what the compute says. It keeps what else stands there.
        about: What a reader should know besides.
        source: What defines the target.
    """

    name: str
    target: str
    read: Callable[[Place], Any]
    write: Callable[[Place, ComputeSpec], None]
    about: str = ""
    source: str = ""
