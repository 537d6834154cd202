"""A workload with the object whose controller makes its pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kubetorch.controller.backends.kubernetes import scaling
from kubetorch.k8s.resources import Object
from kubetorch.manifests import agent, deployment, services
from kubetorch.manifests.agent import Runtime
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.workload import WorkloadSpec

#: Group, kind and name of an object: with another one of these it is another object.
Identity = tuple[str, str, str]


class Applied(msgspec.Struct):
    """What was applied.

    Attributes:
        spec: The workload.
        main: The object whose controller makes the pods; `None` where pods are somebody else's.
        called: Labels of the pods that calls go to; none when each call goes to all of them.
        template: Digest of the template that its pods should have; empty while it is not known.
        objects: All that there can be of it; empty while that is not known.
    """

    spec: WorkloadSpec
    main: Manifest | None
    called: dict[str, str]
    template: str = ""
    objects: frozenset[Identity] = frozenset()
    # That of the object which it was applied as (`metadata.generation`).
    _generation: int = 0

    @classmethod
    def of(cls, spec: WorkloadSpec) -> Applied:
        """A workload that is to be applied."""
        main = None if spec.compute.is_selector_only else deployment.of_workload(spec)
        is_all = spec.compute.broadcast is not None
        called = {} if is_all else services.called(spec.compute, main, name=spec.name)
        return cls(spec, main, called)

    def equip(self, runtime: Runtime) -> None:
        """Put the agent into its pods: the last that is written into its object."""
        if self.main is not None:
            self.template = agent.equip(
                self.main,
                workload=self.spec.name,
                runtime=runtime,
                path=self.spec.compute.pod_template_path,
                working_dir=None if self._is_plain_container else agent.WORK,
            )

    @property
    def _is_plain_container(self) -> bool:
        """Whether its pods run what the user's own object would, as `kt apply` has it."""
        spec = self.spec
        is_own = spec.compute.manifest is not None
        return is_own and spec.callable.app is not None and spec.tree is None

    def found(self, there: Object | None) -> None:
        """An earlier controller applied it, maybe with another agent; it is left as it is."""
        if there is not None:
            path = self.spec.compute.pod_template_path
            template = deployment.primary_template(there, pod_template_path=path)
            self.template = agent.digest_of(template)
            self.applied(there)

    def applied(self, there: Object) -> None:
        """The API server took its object."""
        self._generation = _generation(there)

    def expected(self, owners: Sequence[Object]) -> int | None:
        """How many pods there should be, as `Backend.expected` says it.

        Args:
            owners: Its object as it was seen last, and what that owns above the pods.
        """
        if self.main is None:
            return 1
        if scaling.rests(owners, self.template):
            return 0
        # What was seen last may be older than what was applied.
        newer = (one for one in owners[:1] if _generation(one) >= self._generation)
        return scaling.expected(next(newer, self.main), self.spec.compute.pod_template_path)


def identity(manifest: Manifest) -> Identity:
    """Which object of its namespace a manifest is of."""
    group = str(manifest["apiVersion"]).rpartition("/")[0]
    return group, manifest["kind"], manifest["metadata"]["name"]


def identities(manifests: Iterable[Manifest]) -> frozenset[Identity]:
    """Which objects manifests are of."""
    return frozenset(map(identity, manifests))


def _generation(there: Object) -> int:
    return int(there["metadata"].get("generation") or 0)
