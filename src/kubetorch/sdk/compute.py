"""`kt.Compute`: what a workload runs on, as the user declares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kubetorch.config import environment
from kubetorch.config.settings import config
from kubetorch.errors import SpecError
from kubetorch.sdk import parameters
from kubetorch.specs import quantity
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.codecs import DEFAULT_ALLOWED

if TYPE_CHECKING:
    from kubetorch.sdk.image import Image

_LAUNCH_TIMEOUT = ComputeSpec().launch_timeout


class Compute:
    """A pool of pods with the resources that a service asks for.

    It is a declaration: nothing starts until a function or class is deployed `.to()` it. Several
    may be deployed to one `Compute`; each is a service with pods of its own.

    Args:
        cpus: CPUs that each pod asks for: cores (`0.5`, `"2"`) or thousandths (`"500m"`).
        memory: Memory that each pod asks for: `"512Mi"`, `"2Gi"`, `"1G"`.
        namespace: Kubernetes namespace; `kt.config.namespace` if not given.
        labels: Labels of the service and its pods.
        env_vars: Environment of the pods; `$NAME` in a value is expanded in the pod.
        inactivity_ttl: Idle time after which the service is torn down, such as `"30m"`.
        launch_timeout: Seconds until a deploy that is not ready fails; `KT_LAUNCH_TIMEOUT` or 900
            if not given.
        working_dir: Absolute path of the working directory in the pods.
        allowed_serialization: How callers may send arguments: `"json"`, `"pickle"`, `"none"`;
            `KT_ALLOWED_SERIALIZATION` or only JSON if not given. Pickle runs code of the caller.
        replicas: Number of pods; 1 if not given.
        logging_config: What of the pods' logs the caller sees.
        image: Image of the pods, with its steps; steps that are added later count too.

    Raises:
        SpecError: A value is impossible; the message names the parameter.
    """

    def __init__(  # noqa: PLR0913  # the documented constructor
        self,
        cpus: str | float | None = None,
        memory: str | int | None = None,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        env_vars: Mapping[str, str | float] | None = None,
        inactivity_ttl: str | None = None,
        launch_timeout: int | str | None = None,
        working_dir: str | None = None,
        allowed_serialization: Iterable[str] | None = None,
        replicas: int | None = None,
        logging_config: LoggingConfig | None = None,
        image: Image | None = None,
    ) -> None:
        self._image = image
        self._service_name: str | None = None
        self._spec = ComputeSpec()
        self._namespace = None if namespace is None else parameters.namespace(namespace)
        if labels is not None:
            self.add_labels(labels)
        if env_vars is not None:
            self.add_env_vars(env_vars)
        self.cpus = cpus
        self.memory = memory
        self.inactivity_ttl = inactivity_ttl
        self.launch_timeout = launch_timeout
        self.working_dir = working_dir
        self.allowed_serialization = allowed_serialization
        self.replicas = replicas
        self.logging_config = logging_config

    @classmethod
    def from_spec(
        cls, spec: ComputeSpec, *, namespace: str | None = None, service_name: str | None = None
    ) -> Compute:
        """The `Compute` of a service that exists."""
        compute = cls(namespace=namespace)
        compute._spec = spec
        if spec.image is not None:
            from kubetorch.sdk.image import Image  # noqa: PLC0415  # few services have one

            compute._image = Image.from_spec(spec.image)
        compute._service_name = service_name
        return compute

    def to_spec(self) -> ComputeSpec:
        """What is sent to the controller: frozen."""
        return (
            self._spec if self._image is None else replace(self._spec, image=self._image.to_spec())
        )

    # ---------------------------------------------------------------------------- identity

    @property
    def namespace(self) -> str:
        """Kubernetes namespace of the service."""
        return self._namespace or config.namespace

    @namespace.setter
    def namespace(self, value: str | None) -> None:
        self._namespace = None if value is None else parameters.namespace(value)

    @property
    def service_name(self) -> str | None:
        """The service that runs on it; set by the first deploy, and only once."""
        return self._service_name

    @service_name.setter
    def service_name(self, value: str) -> None:
        if self._service_name not in (None, value):
            raise SpecError(
                f"this Compute runs the service {self._service_name!r}; it cannot become {value!r}",
                hint="make another kt.Compute(...) for another service",
            )
        self._service_name = value

    @property
    def manifest(self) -> dict[str, Any]:
        """The Kubernetes object that a deploy applies; changing it changes nothing."""
        from kubetorch.manifests import deployment  # noqa: PLC0415  # few programs look at it

        return deployment.render(
            self._spec,
            namespace=self.namespace,
            name=self._service_name,
            username=config.username,
        )

    #: Name under which programs read it.
    _manifest = manifest

    # --------------------------------------------------------------------------- resources

    @property
    def cpus(self) -> str | None:
        """CPUs that each pod asks for, as a Kubernetes quantity."""
        return self._spec.cpus

    @cpus.setter
    def cpus(self, value: str | float | None) -> None:
        self._set(cpus=None if value is None else quantity.cpus(value))

    @property
    def memory(self) -> str | None:
        """Memory that each pod asks for, as a Kubernetes quantity."""
        return self._spec.memory

    @memory.setter
    def memory(self, value: str | int | None) -> None:
        self._set(memory=None if value is None else quantity.memory(value))

    @property
    def replicas(self) -> int:
        """Number of pods."""
        return self._spec.replicas

    @replicas.setter
    def replicas(self, value: int | None) -> None:
        # 0 stands for "not given", as programs expect.
        self._set(replicas=parameters.count("replicas", value) if value else 1)

    # ------------------------------------------------------------------------------- settings

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the service and its pods; `add_labels` changes them."""
        return dict(self._spec.labels)

    def add_labels(self, labels: Mapping[str, str]) -> None:
        """Add labels, or replace those of the same name."""
        self._set(labels=_merged(self._spec.labels, parameters.labels(labels)))

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment of the pods; `add_env_vars` changes it."""
        return dict(self._spec.env_vars)

    def add_env_vars(self, env_vars: Mapping[str, str | float]) -> None:
        """Add environment variables, or replace those of the same name."""
        self._set(env_vars=_merged(self._spec.env_vars, parameters.environment(env_vars)))

    @property
    def working_dir(self) -> str | None:
        """Working directory in the pods."""
        return self._spec.working_dir

    @working_dir.setter
    def working_dir(self, value: str | None) -> None:
        given = value is not None
        self._set(working_dir=parameters.absolute_path("working_dir", value) if given else None)

    @property
    def launch_timeout(self) -> int:
        """Seconds until a deploy that is not ready fails."""
        return self._spec.launch_timeout

    @launch_timeout.setter
    def launch_timeout(self, value: int | str | None) -> None:
        given = environment.launch_timeout() if value is None else value
        seconds = _LAUNCH_TIMEOUT if given is None else parameters.seconds("launch_timeout", given)
        self._set(launch_timeout=seconds)

    @property
    def allowed_serialization(self) -> list[str]:
        """How callers may send arguments."""
        return list(self._spec.allowed_serialization)

    @allowed_serialization.setter
    def allowed_serialization(self, value: Iterable[str] | None) -> None:
        given = environment.allowed_serialization() if value is None else value
        names = DEFAULT_ALLOWED if given is None else parameters.serializations(given)
        self._set(allowed_serialization=names)

    @property
    def inactivity_ttl(self) -> str | None:
        """Idle time after which the service is torn down."""
        return self._spec.inactivity_ttl

    @inactivity_ttl.setter
    def inactivity_ttl(self, value: str | None) -> None:
        self._set(inactivity_ttl=None if value is None else parameters.ttl(value))

    @property
    def image(self) -> Image | None:
        """Image of the pods, with its steps."""
        return self._image

    @image.setter
    def image(self, value: Image | None) -> None:
        self._image = value
        self._set(image=None)

    @property
    def logging_config(self) -> LoggingConfig:
        """What of the pods' logs the caller sees."""
        return self._spec.logging

    @logging_config.setter
    def logging_config(self, value: LoggingConfig | None) -> None:
        self._set(logging=LoggingConfig() if value is None else parameters.logging(value))

    def _set(self, **changes: Any) -> None:  # noqa: ANN401  # fields of the spec
        self._spec = replace(self._spec, **changes)

    # ------------------------------------------------------------------------------- as a value

    def for_service(self, name: str) -> Compute:
        """This object, now of that service; a copy when it is another service's already."""
        if self._service_name in (None, name):
            self._service_name = name
            return self
        other = Compute.from_spec(self._spec, namespace=self._namespace, service_name=name)
        other._image = self._image
        return other

    def describes(self, workload: WorkloadSpec) -> bool:
        """Whether it is what that workload runs on; how that one logs aside."""
        is_its = (self._service_name, self.namespace) == (workload.name, workload.namespace)
        return is_its and self.to_spec() == replace(workload.compute, logging=self._spec.logging)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compute):
            return NotImplemented
        return (self.to_spec(), self._namespace) == (other.to_spec(), other._namespace)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        default = Compute()
        values = {name: getattr(self, name) for name in _PARAMETERS}
        given = {name: value for name, value in values.items() if value != getattr(default, name)}
        if self._namespace is not None:
            given["namespace"] = self._namespace
        return f"Compute({', '.join(f'{name}={value!r}' for name, value in given.items())})"


_PARAMETERS = (
    "cpus",
    "memory",
    "labels",
    "env_vars",
    "inactivity_ttl",
    "launch_timeout",
    "working_dir",
    "allowed_serialization",
    "replicas",
    "logging_config",
    "image",
)


def _merged(
    old: tuple[tuple[str, str], ...], new: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(old), **dict(new)}.items())
