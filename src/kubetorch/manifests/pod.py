"""The pods of a workload as a whole."""

from __future__ import annotations

import hashlib
import json

from kubetorch.manifests import container, environment, gpus, metadata, raycluster, serving, storage
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import Place
from kubetorch.specs.compute import ComputeSpec


def fill(place: Place, compute: ComputeSpec) -> None:
    """Say what the agent needs and the pods do not say yet; what they say stays."""
    metadata.fill(place, compute)
    container.fill(place, compute)
    raycluster.fill(place)
    serving.fill(place, compute)
    environment.fill(place, compute)
    storage.fill(place, compute)
    gpus.tolerate(place)


def fingerprint(template: Manifest) -> str:
    """What changes when pods have to be replaced."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
