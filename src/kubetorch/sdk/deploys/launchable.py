"""What can be declared and not be launched: said before anything is sent."""

from __future__ import annotations

from kubetorch.errors import SpecError
from kubetorch.specs.compute import ComputeSpec


def check(name: str, compute: ComputeSpec) -> None:
    """Refuse a service that would not run as it is declared.

    Raises:
        SpecError: It is distributed, or calls of it would go to a URL that they cannot go to.
    """
    endpoint = None if compute.endpoint is None else compute.endpoint.base_url
    if endpoint is not None and not endpoint.startswith("http://"):
        raise SpecError(
            f"{name} cannot be launched: the url of its endpoint is {endpoint!r}, and calls go to "
            "http:// alone",
            hint="give the endpoint the address that the pods have inside the cluster",
        )
    distribution = compute.distribution
    if distribution is None or _is_of_manifest(compute):
        return
    raise SpecError(
        f"{name} cannot be launched: its compute is distributed "
        f"({distribution.distribution_type}), and running distributed services is still to come",
        hint="without .distribute(), kt.Compute(replicas=N) calls N pods; .manifest shows what "
        "the service will be",
    )


def _is_of_manifest(compute: ComputeSpec) -> bool:
    """Whether it follows from the kind of a user's manifest: backends know which of them run."""
    if compute.manifest is None:
        return False
    from kubetorch.manifests import reading  # noqa: PLC0415  # few services have one
    from kubetorch.specs.frozen import thaw  # noqa: PLC0415  # as above

    path = compute.pod_template_path
    found = reading.compute(thaw(compute.manifest), pod_template_path=path)
    return found.distribution == compute.distribution
