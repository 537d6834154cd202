"""What a deploy asks of the controller that its user may not be allowed to do: pure.

The controller makes objects with its own rights, which are more than those of most users. Who may
`create kubetorchworkloads` in a namespace may have pods there as Kubetorch renders them: its own
kinds, its own service account, secrets and volumes that Kubetorch made. What goes beyond that is
done only for users who could have made such an object themselves. A deploy that only selects pods
makes none, but runs code in them and shows their logs, whoever made them and for whatever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kubetorch.manifests import attached, deployment, locating
from kubetorch.manifests.container import SERVICE_ACCOUNT
from kubetorch.manifests.kinds import Kind, Manifest
from kubetorch.specs.workload import WorkloadSpec

#: What somebody needs who has an object made that goes beyond: they could make it themselves.
VERBS = ("create", "patch")
#: What somebody needs on all pods of a namespace who selects some: verb and part.
OF_SELECTED = (("create", ""), ("patch", ""), ("get", "log"))


def beyond(spec: WorkloadSpec) -> str:
    """What goes beyond the pods that Kubetorch renders, but for what they are given; or nothing."""
    compute = spec.compute
    if compute.manifest is not None:
        return "it brings a manifest of its own"
    if compute.service_template is not None:
        return "its service_template changes the object"
    if compute.service_account_name not in (None, SERVICE_ACCOUNT):
        return f"its pods run as the service account {compute.service_account_name!r}"
    if compute.selector is not None and not compute.is_selector_only:
        return "its pods are found by labels of its own"
    return ""


def rendered(spec: WorkloadSpec) -> Manifest | None:
    """The object that a deploy makes; none for one that only selects pods."""
    return None if spec.compute.is_selector_only else deployment.of_workload(spec)


def claims(spec: WorkloadSpec) -> tuple[str, ...]:
    """The names of the volumes' claims that the pods of a rendered object mount."""
    return tuple(dict.fromkeys(volume.claim_name for volume in spec.compute.volumes))


def secrets(spec: WorkloadSpec, manifest: Manifest) -> tuple[str, ...]:
    """The names of the secrets that the pods of an object see."""
    kind = locating.kind_of(manifest, spec.compute.pod_template_path)
    found: Iterable[str] = _secrets(manifest, spec, kind)
    return tuple(dict.fromkeys(found))


def _secrets(manifest: Manifest, spec: WorkloadSpec, kind: Kind) -> Iterator[str]:
    for ref in spec.compute.secrets:
        yield ref.object_name
    for place in locating.places(manifest, kind):
        seen = attached.read(place.pod, place.container)
        yield from (one.secret for one in seen.variables)
        yield from (one.secret for one in seen.files)
