"""What a pod asks for of CPUs, memory and disk."""

from __future__ import annotations

from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, assign, entry
from kubetorch.specs.compute import ComputeSpec

_RESOURCES = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"


def requested(place: Place, resource: str, *, section: str = "requests") -> str | None:
    """How much of a resource the container asks for."""
    found = ((place.container.get("resources") or {}).get(section) or {}).get(resource)
    return None if found is None else str(found)


def request(
    place: Place, resource: str, amount: str | None, *, sections: tuple[str, ...] = ("requests",)
) -> None:
    """Ask for an amount of a resource; `None` asks for nothing."""
    found = entry(place.container, "resources")
    for section in sections:
        amounts = entry(found, section)
        assign(amounts, resource, amount)
        assign(found, section, amounts)


def _parameter(name: str, resource: str, about: str) -> Parameter:
    def write(place: Place, compute: ComputeSpec) -> None:
        request(place, resource, getattr(compute, name))

    def read(place: Place) -> str | None:
        return requested(place, resource)

    return Parameter(name, f"C.resources.requests.{resource}", read, write, about, _RESOURCES)


PARAMETERS = (
    _parameter("cpus", "cpu", "a request; there is no limit"),
    _parameter(
        "memory", "memory", "a request; a limit comes from `service_template` or a manifest"
    ),
    _parameter("disk_size", "ephemeral-storage", "a request"),
)
