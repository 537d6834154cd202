"""What a declaration has to be before anything is done with it, whoever brings it.

A deploy is checked before it is stored. What is stored is checked again when a controller takes it
up: another version may have written it, or a user who may write the objects of workloads.
"""

from __future__ import annotations

from kubetorch.controller.backends.base import Backend
from kubetorch.datastore import blobs
from kubetorch.errors import SpecError
from kubetorch.manifests import deployment
from kubetorch.specs import names, quantity
from kubetorch.specs.image import CopyStep
from kubetorch.specs.workload import WorkloadSpec


def check(spec: WorkloadSpec, backend: Backend) -> None:
    """Refuse what is impossible.

    Args:
        spec: The workload.
        backend: What would run it.

    Raises:
        SpecError: It is impossible.
        ResourceNotAvailableError: The backend cannot do it.
    """
    compute = spec.compute
    for label in (spec.namespace, spec.name):
        if names.clean(label) != label or len(label) > names.SERVICE_LIMIT:
            raise SpecError(f"{label!r} is no name: lower-case letters, digits and '-'")
    if not 1 <= compute.replicas <= 10_000:
        raise SpecError(f"replicas is {compute.replicas}; it must be 1 or more")
    if compute.launch_timeout <= 0:
        raise SpecError(f"launch_timeout is {compute.launch_timeout}; it must be above 0")
    if compute.inactivity_ttl is not None:
        quantity.seconds(compute.inactivity_ttl)
    steps = compute.image.steps if compute.image is not None else ()
    copied = (step.digest for step in steps if isinstance(step, CopyStep))
    for digest in (spec.tree, spec.init_args, *copied):
        if digest is not None and not blobs.is_digest(digest):
            raise SpecError(
                f"{digest!r} names no code or arguments: a digest has 64 lower-case hex digits"
            )
    namespace = deployment.of_workload(spec)["metadata"]["namespace"]
    if namespace != spec.namespace:
        # Who may do what is asked for the namespace of the service.
        raise SpecError(
            f"the object of {spec.name} would be in namespace {namespace!r}, and the service is "
            f"in {spec.namespace!r}",
            hint=f"leave metadata.namespace out of service_template, or deploy in {namespace}",
        )
    backend.check(spec)
