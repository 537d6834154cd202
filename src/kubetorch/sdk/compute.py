"""`kt.Compute`: what a workload runs on, as the user declares it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from kubetorch.config.settings import config
from kubetorch.errors import SpecError
from kubetorch.sdk import inpod, parameters
from kubetorch.sdk.computing import attached, consistency, objects
from kubetorch.sdk.computing.doors import Doors
from kubetorch.sdk.computing.syncing import Syncing
from kubetorch.specs import names
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec

if TYPE_CHECKING:
    from typing_extensions import Self

    from kubetorch.sdk.image import Image
    from kubetorch.sdk.secrets.secret import Secret
    from kubetorch.sdk.volume import Volume

#: The parameters.
_PARAMETERS = (
    *("cpus", "memory", "disk_size", "gpus", "gpu_type", "priority_class_name", "gpu_memory"),
    *("namespace", "image", "labels", "annotations", "volumes", "node_selector"),
    *("service_template", "tolerations", "env_vars", "secrets", "freeze", "kubeconfig_path"),
    *("service_account_name", "image_pull_policy", "inactivity_ttl", "gpu_anti_affinity"),
    *("launch_timeout", "working_dir", "shared_memory_limit", "allowed_serialization"),
    *("replicas", "logging_config", "queue_name", "selector", "endpoint", "queue"),
)
#: Parameters that the environment may say, if nobody else does.
_FROM_ENVIRONMENT = ("launch_timeout", "allowed_serialization", "gpu_anti_affinity")
#: Parameters that are added, and have no setter.
_ADDED = ("env_vars", "labels", "annotations", "tolerations")
#: Parameters that `kt.config` may say, if nobody else does.
_CONFIGURED = frozenset({"volumes", "queue", "image"})


class Compute(Syncing, Doors):
    """A pool of pods with the resources that a service asks for.

    It is a declaration: nothing starts until a function or class is deployed `.to()` it. Several
    may be deployed to one `Compute`; each is a service with pods of its own.

    Args:
        cpus: CPUs that each pod asks for: cores (`0.5`, `"2"`) or thousandths (`"500m"`).
        memory: Memory that each pod asks for: `"512Mi"`, `"2Gi"`, `"1G"`.
        disk_size: Ephemeral storage that each pod asks for, in the same units.
        gpus: Whole GPUs that each pod asks for, and gets.
        gpu_type: Type of the GPUs, as the node label `nvidia.com/gpu.product` has it: `"L4"`; or
            `"key: value"` of another label.
        priority_class_name: Priority class of the pods.
        gpu_memory: Memory that is wanted of a GPU, such as `"4Gi"`; a whole GPU is asked for.
        namespace: Kubernetes namespace; `kt.config.namespace` if not given.
        image: Image of the pods, with its steps: a `kt.Image`.
        labels: Labels of the service and its pods.
        annotations: Annotations of the service and its pods.
        volumes: Volumes (`kt.Volume`), or names of claims that exist; those of `kt.config` if not
            given.
        node_selector: Labels of the nodes that pods may run on.
        service_template: Part of a manifest that is laid over the whole one; lists are replaced.
        tolerations: Taints of nodes that pods accept, in the words of Kubernetes. With `gpus`
            those of nodes with GPUs are added.
        env_vars: Environment of the pods; `$NAME` in a value is expanded in the pod.
        secrets: Secrets (`kt.Secret`), names of providers, or names of secrets that exist.
        freeze: Whether pods run what their image has: no code is sent, and no steps are run.
        kubeconfig_path: The kubeconfig that reaches the cluster.
        service_account_name: Service account of the pods.
        image_pull_policy: `"Always"`, `"IfNotPresent"` or `"Never"`.
        inactivity_ttl: Idle time after which the service is torn down, such as `"30m"`.
        gpu_anti_affinity: Whether pods that ask for no GPU stay away from nodes that have some;
            `KT_GPU_ANTI_AFFINITY` if not given.
        launch_timeout: Seconds until a deploy that is not ready fails; `KT_LAUNCH_TIMEOUT` or 900
            if not given.
        working_dir: Absolute path of the working directory in the pods.
        shared_memory_limit: Limit of `/dev/shm`, such as `"2Gi"`.
        allowed_serialization: How callers may send arguments: `"json"`, `"pickle"`, `"none"`;
            `KT_ALLOWED_SERIALIZATION` or only JSON if not given. Pickle runs code of the caller.
            Where `"json"` is allowed, so is `"none"`, whose arguments are JSON, too.
        replicas: Number of pods; 1 if not given.
        logging_config: What of the pods' logs the caller sees.
        queue_name: LocalQueue of Kueue that the pods wait in.
        selector: Labels of pods that are there already, or that belong to the workload.
        endpoint: Where calls go, if not to a Service of Kubetorch: a `kt.Endpoint`.
        _skip_template_init: Makes no difference: a manifest is made whenever it is asked for.
        queue: Queue of the KAI scheduler; `kt.config.queue` if not given.

    Raises:
        SpecError: A value is impossible, or two contradict each other; the message names them.
    """

    def __init__(  # noqa: PLR0913  # the documented constructor
        self,
        cpus: str | float | None = None,
        memory: str | int | None = None,
        disk_size: str | int | None = None,
        gpus: str | int | None = None,
        gpu_type: str | None = None,
        priority_class_name: str | None = None,
        gpu_memory: str | None = None,
        namespace: str | None = None,
        image: Image | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        volumes: Sequence[str | Volume] | None = None,
        node_selector: Mapping[str, str] | None = None,
        service_template: Mapping[str, Any] | None = None,
        tolerations: Iterable[Mapping[str, Any]] | None = None,
        env_vars: Mapping[str, str | float] | None = None,
        secrets: Iterable[str | Secret] | None = None,
        freeze: bool = False,
        kubeconfig_path: str | PathLike[str] | None = None,
        service_account_name: str | None = None,
        image_pull_policy: str | None = None,
        inactivity_ttl: str | None = None,
        gpu_anti_affinity: bool | None = None,
        launch_timeout: int | str | None = None,
        working_dir: str | None = None,
        shared_memory_limit: str | None = None,
        allowed_serialization: Iterable[str] | None = None,
        replicas: int | None = None,
        logging_config: LoggingConfig | None = None,
        queue_name: str | None = None,
        selector: Mapping[str, str] | None = None,
        endpoint: Endpoint | None = None,
        _skip_template_init: bool = False,
        *,
        queue: str | None = None,
    ) -> None:
        given = {
            name: value
            for name, value in locals().items()
            if name in _FROM_ENVIRONMENT or (name in _PARAMETERS and value is not None)
        }
        self._begin(ComputeSpec(), unsaid=_CONFIGURED)
        for name, value in given.items():
            if name in _ADDED:
                getattr(self, f"add_{name}")(value)
            else:
                setattr(self, name, value)
        self._finish()

    def _begin(
        self,
        spec: ComputeSpec,
        *,
        namespace: str | None = None,
        unsaid: frozenset[str] = frozenset(),
    ) -> None:
        self._spec = spec
        self._namespace = namespace
        self._service_name: str | None = None
        # Whether the user chose the name, or a manifest has it: the service is then called so.
        self._is_named = False
        self._image = None
        self._secrets = ()
        self._unsaid = unsaid
        self._url = None
        self._is_found = False
        self._is_whole = False

    def _finish(self) -> None:
        consistency.check(self._spec)
        self._is_whole = True

    def _set(self, **changes: Any) -> None:  # noqa: ANN401  # fields of the spec
        spec = consistency.settled(replace(self._spec, **changes), self._spec)
        if self._is_whole:
            consistency.check(spec)
        self._spec = spec

    # ---------------------------------------------------------------------------- other origins

    @classmethod
    def from_manifest(
        cls,
        manifest: Mapping[str, Any] | str | PathLike[str],
        selector: Mapping[str, str] | None = None,
        endpoint: Endpoint | None = None,
        pod_template_path: str | Sequence[str | int] | None = None,
        image: Image | None = None,
    ) -> Self:
        """The compute of a Kubernetes object of the user's own.

        What the object says stays; what the agent needs is added, and its container runs the
        agent instead of its command. All parameters can be set afterwards.

        Args:
            manifest: The object, or the path of a YAML file with it. If it has a name, the
                service is called so.
            selector: Labels of its pods; those that the object itself selects by if not given.
            endpoint: Where calls go: a URL, or those of its pods that take them.
            pod_template_path: Where its pod template lies, for kinds that are not known: dotted
                text such as `"spec.tasks.0.template"`, or a list of keys.
            image: Image of the pods, with its steps.

        Raises:
            SpecError: The file cannot be read, or the object is not what it has to be.
        """
        from kubetorch.sdk.computing import manifests  # noqa: PLC0415  # not to declare resources

        if inpod.is_worker() and not manifests.is_here(manifest):
            # A module that a pod imports names files of the machine that it was deployed from.
            return cls()
        found = manifests.load(manifest)
        labels = None if selector is None else objects.selector(selector)
        compute = cls.__new__(cls)
        spec = manifests.declared(found, pod_template_path)
        compute._begin(replace(spec, selector=labels), namespace=manifests.namespace(found))
        compute.endpoint = endpoint
        if image is not None:
            compute.image = image
        name = manifests.name(found, selector)
        if name is not None:
            compute.service_name = name
        compute._finish()
        return compute

    @classmethod
    def from_template(cls, service_info: Mapping[str, Any]) -> Self:
        """The compute of an object that is deployed.

        Args:
            service_info: A dictionary with the object as `resource`.

        Raises:
            SpecError: It has none, or the object is not what it has to be.
        """
        given: object = service_info
        if not isinstance(given, Mapping) or "resource" not in given:
            raise SpecError(
                f"service_info is {service_info!r}; it must be a dictionary with the key "
                "'resource'",
                hint='for example {"resource": manifest}',
            )
        return cls.from_manifest(service_info["resource"])

    @classmethod
    def from_spec(
        cls, spec: ComputeSpec, *, namespace: str | None = None, service_name: str | None = None
    ) -> Self:
        """The `Compute` of a service that exists."""
        compute = cls.__new__(cls)
        compute._begin(spec, namespace=namespace)
        compute._service_name = service_name
        compute._is_found = True
        compute._is_whole = True
        return compute

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
        """The service that runs on it: set once, by the user or the first deploy."""
        return self._service_name

    @service_name.setter
    def service_name(self, value: str) -> None:
        name = names.service_name(value)
        if self._service_name not in (None, name):
            raise SpecError(
                f"this Compute runs the service {self._service_name!r}; it cannot become {name!r}",
                hint="make another kt.Compute(...) for another service",
            )
        self._service_name = name
        self._is_named = True

    @property
    def name(self) -> str | None:
        """The same as `service_name`."""
        return self._service_name

    @property
    def chosen_name(self) -> str | None:
        """The name that the service has whatever is deployed; `None` if it may be any."""
        return self._service_name if self._is_named else None

    # ------------------------------------------------------------------------------- as a value

    def for_service(self, name: str) -> Compute:
        """This object, now of that service; a copy when it is another service's already."""
        if self._service_name in (None, name):
            self._service_name = name
            return self
        copied = Compute.__new__(Compute)
        copied.__dict__.update(self.__dict__)
        copied._service_name = name
        copied._is_named = False
        copied._url = None
        return copied

    def deployed_at(self, url: str) -> None:
        """Take note of where the deployed service answers."""
        self._url = url or None

    def describes(self, workload: WorkloadSpec) -> bool:
        """Whether it is what that workload runs on; how that one logs aside."""
        is_its = (self._service_name, self.namespace) == (workload.name, workload.namespace)
        spec = self.to_spec()
        other = replace(workload.compute, logging=spec.logging)
        return is_its and attached.declared(spec) == attached.declared(other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compute):
            return NotImplemented
        return (self.to_spec(), self._namespace) == (other.to_spec(), other._namespace)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        from kubetorch.sdk.computing import representing  # noqa: PLC0415  # to be looked at

        return representing.compute(self, self._namespace)
