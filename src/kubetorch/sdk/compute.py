"""`kt.Compute`: what a workload runs on, as the user declares it."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar, overload

from kubetorch.config import environment
from kubetorch.config.settings import DEFAULT_IMAGE, config
from kubetorch.errors import KubetorchError, SpecError
from kubetorch.manifests import labels as known_labels
from kubetorch.manifests import scheduling
from kubetorch.sdk import backend, compute_parameters, inpod, parameters
from kubetorch.sdk.awaitable import awaitable
from kubetorch.sdk.compute_parameters import ABSENT, PARAMETERS
from kubetorch.sdk.image import Image
from kubetorch.sdk.read_only import shown
from kubetorch.specs import autoscaling, distribution, names
from kubetorch.specs.autoscaling import AutoscalingSpec
from kubetorch.specs.compute import ComputeSpec, Dispatch, Pairs
from kubetorch.specs.distribution import DistributionSpec
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.image import ImageSpec, RunStep, check_reference
from kubetorch.specs.logging import LoggingConfig
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import debugger

if TYPE_CHECKING:
    from typing_extensions import Self

    from kubetorch.manifests.kinds import Manifest
    from kubetorch.sdk.compute_manifest import ComputeManifest
    from kubetorch.sdk.compute_pods import ComputePods
    from kubetorch.sdk.data.declarations import Data
    from kubetorch.sdk.pod_objects import Attributes
    from kubetorch.sdk.scaling import AutoscalingConfig
    from kubetorch.sdk.secret import Secret
    from kubetorch.sdk.transport.session import Session
    from kubetorch.sdk.volume import Volume
    from kubetorch.wire.messages import Equipment, WorkloadView

GivenT = TypeVar("GivenT", contravariant=True)
ShownT = TypeVar("ShownT", covariant=True)
#: Parameters that `kt.config` sets if the user does not.
_CONFIGURED = frozenset({"volumes", "queue", "image"})


class ComputeArguments(TypedDict, total=False):
    """The arguments of `kt.Compute` for type checkers, where they come as keywords."""

    cpus: str | float | None
    memory: str | int | None
    disk_size: str | int | None
    gpus: str | int | None
    gpu_type: str | None
    priority_class_name: str | None
    gpu_memory: str | None
    namespace: str | None
    image: Image | None
    labels: Mapping[str, str] | None
    annotations: Mapping[str, str] | None
    volumes: Sequence[str | Volume] | None
    node_selector: Mapping[str, str] | None
    service_template: Mapping[str, Any] | None
    tolerations: Iterable[Mapping[str, Any]] | None
    env_vars: Mapping[str, str | float] | None
    secrets: Iterable[str | Secret] | None
    freeze: bool
    kubeconfig_path: str | PathLike[str] | None
    service_account_name: str | None
    image_pull_policy: str | None
    inactivity_ttl: str | None
    gpu_anti_affinity: bool | None
    launch_timeout: int | str | None
    working_dir: str | None
    shared_memory_limit: str | None
    allowed_serialization: Iterable[str] | None
    replicas: int | None
    logging_config: LoggingConfig | None
    queue_name: str | None
    selector: Mapping[str, str] | None
    endpoint: Endpoint | None
    queue: str | None
    concurrency: int | None
    max_queue: int | None
    num_proc: int | str | None
    dispatch: Dispatch | None
    data: Mapping[str, str | Data] | None


class _Attribute(Generic[GivenT, ShownT]):
    """A row of `PARAMETERS` as an attribute: checked when it is set, kept in the spec."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._parameter = PARAMETERS[name]

    @overload
    def __get__(self, compute: None, owner: type) -> _Attribute[GivenT, ShownT]: ...
    @overload
    def __get__(self, compute: Compute, owner: type) -> ShownT: ...
    def __get__(self, compute: Compute | None, owner: type) -> _Attribute[GivenT, ShownT] | ShownT:
        if compute is None:
            return self
        value: Any = getattr(compute._spec, str(self._parameter.field))
        show = self._parameter.show
        shown_value: ShownT = shown(self._parameter.name, value if show is None else show(value))
        return shown_value

    def __set__(self, compute: Compute, value: GivenT) -> None:
        compute._set(**{str(self._parameter.field): self._parameter.value(value)})
        if value is not None:
            compute._unsaid -= {self._parameter.name}


_Text = _Attribute[str | None, str | None]
_Amount = _Attribute[str | int | None, str | None]


class _GpuType(_Attribute[str | None, str | None]):
    """The value of the usual label, however it was written; other labels as `key: value`."""

    def __get__(self, compute: Any, owner: type) -> Any:  # noqa: ANN401  # as the base has it
        text: Any = super().__get__(compute, owner)
        label = scheduling.gpu_node_label(text) if isinstance(text, str) else None
        return label[1] if label is not None and label[0] == scheduling.GPU_PRODUCT_LABEL else text


class Compute:
    """A pool of pods with the resources that a service asks for.

    It is a declaration: nothing starts until a function or class is deployed `.to()` it. Several
    may be deployed to one `Compute`; each is a service with pods of its own.

    Args:
        cpus: CPUs that each pod asks for: cores (`0.5`, `"2"`) or thousandths (`"500m"`).
        memory: Memory that each pod asks for: `"512Mi"`, `"2Gi"`, `"1G"`.
        disk_size: Ephemeral storage that each pod asks for, in the same units.
        gpus: Whole GPUs that each pod asks for, and gets.
        gpu_type: Type of the GPUs, such as `"H200"`, as nodes say it by the labels that are known
            (`NVIDIA-H200`, `nvidia-h200-141gb`, …); or `"key: value"` of a label. One GPU is asked
            for if `gpus` is not given.
        priority_class_name: Priority class of the pods.
        gpu_memory: Memory that is wanted of a GPU, such as `"4Gi"`. With `queue` pods share GPUs
            by it; else nothing is limited, and a whole GPU is asked for.
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
            Without a cluster the project runs in place, with a warning.
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
        concurrency: Calls that each process of the service runs at once; more wait for their turn.
            Any number if not given.
        max_queue: Calls that may wait for a process; 10,000 if not given. Further ones raise
            `QueueFullError`.
        num_proc: Processes of each pod, of which each call gets the least busy one: a number, or
            `"auto"` for as many as the pod has GPUs, or else whole CPUs. 1 if not given.
        dispatch: Which pods of several a call goes to: `"all"`, with a list of their results, or
            `"any"`, the least busy one, with its result. `"all"` if not given.
        data: What each pod has at which path before its first call: keys of the data store by
            absolute path, read-only, or `kt.Data(key, mode="rw")`. Such as
            `{"/models": "models/base"}`.

    Raises:
        SpecError: A value is impossible, or two contradict each other; the message names them.
    """

    #: The first service of a `Compute` that two services were given; this is the second one's copy.
    _beside: str | None = None
    #: The workload that was declared for it or runs on it, and the additions of its cluster.
    _workload: WorkloadSpec | None = None
    _equipment: Equipment | None = None

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
        concurrency: int | None = None,
        max_queue: int | None = None,
        num_proc: int | str | None = None,
        dispatch: Dispatch | None = None,
        data: Mapping[str, str | Data] | None = None,
        **unknown: NoReturn,
    ) -> None:
        arguments = locals()
        for name in unknown:
            raise compute_parameters.unknown(name)
        self._begin(ComputeSpec(), unsaid=_CONFIGURED | {"launch_timeout"})
        for name, parameter in PARAMETERS.items():
            value = arguments.get(name)
            if value is None and parameter.default is None:
                continue
            add = getattr(self, f"add_{name}", None)
            if add is None:
                setattr(self, name, value)
            else:
                add(value)
        self._pass_on_debug_mode()
        self._finish()

    def _pass_on_debug_mode(self) -> None:
        """Let the pods debug as the variable of this program says."""
        debug_mode = os.environ.get(debugger.MODE)
        if debug_mode and debugger.MODE not in self.env_vars:
            self.add_env_vars({debugger.MODE: debug_mode})

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
        #: True if the user chose the name, or a manifest has it, and so the service has it.
        self._is_named = False
        #: The user's own image: steps that are added to it later are deployed, too.
        self._image: Image | None = None
        self._secrets: tuple[Secret, ...] = ()
        #: Parameters that the user has not set, for which `kt.config` or others decide.
        self._unsaid = unsaid
        #: URL of the deployed service.
        self._url: str | None = None
        #: True for the compute of a service that exists, which this program did not declare.
        self._is_found = False
        self._is_whole = False

    def _finish(self) -> None:
        compute_parameters.check_consistency(self._spec)
        self._is_whole = True

    def _set(self, **changes: Any) -> None:  # noqa: ANN401  # fields of the spec
        spec = compute_parameters.settled(replace(self._spec, **changes), self._spec)
        if self._is_whole:
            compute_parameters.check_consistency(spec)
        self._spec = spec

    # -------------------------------------------------------------------------------- other origins

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
        # Declaring resources loads no manifests.
        from kubetorch.sdk import compute_manifest  # noqa: PLC0415

        if inpod.is_worker() and not compute_manifest.is_on_this_machine(manifest):
            # A module that a pod imports names files of the machine that deployed it.
            return cls()
        document = compute_manifest.load(manifest)
        labels = None if selector is None else PARAMETERS["selector"].parse(selector)
        compute = cls.__new__(cls)
        spec, namespace = compute_manifest.read(document, pod_template_path)
        compute._begin(replace(spec, selector=labels), namespace=namespace)
        compute.endpoint = endpoint
        if image is not None:
            compute.image = image
        name = compute_manifest.service_name(document, selector)
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
        info: object = service_info
        if not isinstance(info, Mapping) or "resource" not in info:
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

    # ------------------------------------------------------------------------------------- identity

    @property
    def namespace(self) -> str:
        """Kubernetes namespace of the service."""
        return self._namespace or config.namespace

    @namespace.setter
    def namespace(self, value: str | None) -> None:
        self._namespace = None if value is None else PARAMETERS["namespace"].parse(value)

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
        """The name that a deployed service gets; `None` if it is the callable's."""
        return self._service_name if self._is_named else None

    # ----------------------------------------------------------------------------------- parameters

    cpus = _Attribute[str | float | None, str | None]()
    memory = _Amount()
    disk_size = _Amount()
    gpus = _Amount()
    gpu_type = _GpuType()
    gpu_memory = _Amount()
    shared_memory_limit = _Amount()
    node_selector = _Attribute[Mapping[str, str] | None, dict[str, str]]()
    priority_class_name = _Text()
    gpu_anti_affinity = _Attribute[bool | None, bool]()
    queue_name = _Text()
    image_pull_policy = _Text()
    service_account_name = _Text()
    server_port = _Attribute[int | None, int]()
    working_dir = _Text()
    service_template = _Attribute[Mapping[str, Any] | None, dict[str, Any] | None]()
    freeze = _Attribute[bool | None, bool]()
    launch_timeout = _Attribute[int | str | None, int]()
    inactivity_ttl = _Text()
    allowed_serialization = _Attribute[Iterable[str] | None, list[str]]()
    logging_config = _Attribute[LoggingConfig | None, LoggingConfig]()
    selector = _Attribute[Mapping[str, str] | None, dict[str, str] | None]()
    max_queue = _Attribute[int | None, int]()
    num_proc = _Attribute[int | str | None, int | str]()
    dispatch = _Attribute[Dispatch | None, Dispatch]()
    data = _Attribute["Mapping[str, str | Data] | None", "dict[str, str | Data]"]()

    @property
    def kubeconfig_path(self) -> str:
        """The kubeconfig that reaches the cluster: as given, else that of this machine."""
        path = self._spec.kubeconfig_path
        return str(environment.kubeconfig() if path is None else Path(path).expanduser())

    @kubeconfig_path.setter
    def kubeconfig_path(self, value: str | PathLike[str] | None) -> None:
        self._set(kubeconfig_path=PARAMETERS["kubeconfig_path"].value(value))

    @property
    def shm_size_limit(self) -> str | None:
        """Deprecated: `shared_memory_limit` is this."""
        _warn_of_shm_size_limit()
        return self.shared_memory_limit

    @shm_size_limit.setter
    def shm_size_limit(self, value: str | int | None) -> None:
        _warn_of_shm_size_limit()
        self.shared_memory_limit = value

    # ----------------------------------------------------------------------------- added key by key

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment of the pods; `add_env_vars` changes it."""
        return shown("env_vars", dict(self._spec.env_vars))

    def add_env_vars(self, env_vars: Mapping[str, str | float]) -> None:
        """Add environment variables, or replace those of the same name."""
        self._set(env_vars=_merged(self._spec.env_vars, PARAMETERS["env_vars"].parse(env_vars)))

    @property
    def tolerations(self) -> list[dict[str, Any]]:
        """Taints that pods accept, those of nodes with GPUs among them."""
        return shown("tolerations", self._described().tolerations())

    def add_tolerations(self, tolerations: Iterable[Mapping[str, Any]]) -> None:
        """Add tolerations; those of the same keys are replaced."""
        new = PARAMETERS["tolerations"].parse(tolerations)
        keys = {toleration.key for toleration in new}
        other_tolerations = tuple(
            toleration for toleration in self._spec.tolerations if toleration.key not in keys
        )
        self._set(tolerations=(*other_tolerations, *new))

    def add_labels(self, labels: Mapping[str, str]) -> None:
        """Add labels of the service and its pods, or replace those of the same name."""
        self._set(labels=_merged(self._spec.labels, PARAMETERS["labels"].parse(labels)))

    def add_pod_template_labels(
        self, labels: Mapping[str, str], remove_keys: Iterable[str] | None = None
    ) -> None:
        """Add labels of the pods alone, or replace those of the same name.

        Args:
            labels: The labels.
            remove_keys: Labels to take away from the pods, and from the service if they were
                given for both.
        """
        removed_keys = set(_label_names(remove_keys))
        new = PARAMETERS["labels"].parse(labels)
        remaining_labels = tuple(
            pair for pair in self._spec.pod_labels if pair[0] not in removed_keys
        )
        changes: dict[str, Any] = {"pod_labels": _merged(remaining_labels, new)}
        if removed_keys:
            changes["labels"] = tuple(
                pair for pair in self._spec.labels if pair[0] not in removed_keys
            )
        if removed_keys and self._spec.manifest is not None:
            changes["manifest"] = self._described().without_pod_labels(removed_keys)
        self._set(**changes)

    def add_annotations(self, annotations: Mapping[str, str]) -> None:
        """Add annotations of the service and its pods, or replace those of the same name."""
        self._set(
            annotations=_merged(
                self._spec.annotations, PARAMETERS["annotations"].parse(annotations)
            )
        )

    # ---------------------------------------------------------------------- image, volumes, secrets

    @property
    def image(self) -> Image:
        """The image of the pods and its steps, which can be added to; an empty one by default."""
        if self._image is None:
            self._image = Image.from_spec(self._spec.image or ImageSpec())
        return self._image

    @image.setter
    def image(self, value: Image | None) -> None:
        parsed_image = None if value is None else PARAMETERS["image"].parse(value)
        self._set(image=None)
        self._image = parsed_image

    @property
    def server_image(self) -> str:
        """Reference of the container image that the pods run."""
        return str(self._container().get("image", ""))

    @server_image.setter
    def server_image(self, value: str) -> None:
        spec = self.to_spec().image or ImageSpec()
        self._image = None
        self._set(image=replace(spec, image_id=check_reference(value)))

    @property
    def python_path(self) -> str | None:
        """Interpreter in the container, or its folder, as the image says."""
        spec = self.to_spec().image
        return None if spec is None else spec.python_path

    @property
    def image_install_cmd(self) -> str | None:
        """Command that installs a requirement, as the image says."""
        spec = self.to_spec().image
        return None if spec is None else spec.install_cmd

    @property
    def volumes(self) -> list[str]:
        """Names of its volumes. Setting it adds volumes, or names of claims that exist."""
        return [volume.name for volume in self.to_spec().volumes]

    @volumes.setter
    def volumes(self, value: Sequence[str | Volume] | None) -> None:
        if value is None:
            return
        new = PARAMETERS["volumes"].parse(value)
        names = {volume.name for volume in new}
        other_volumes = tuple(volume for volume in self._spec.volumes if volume.name not in names)
        self._set(volumes=(*other_volumes, *new))
        self._unsaid -= {"volumes"}

    @property
    def secrets(self) -> list[Secret]:
        """The secrets. Setting it adds secrets, names of providers, or of secrets that exist."""
        return list(self._secrets)

    @secrets.setter
    def secrets(self, value: Iterable[str | Secret] | None) -> None:
        if value is None:
            return
        new = PARAMETERS["secrets"].parse(value)
        refs = [secret.to_ref() for secret in new]
        names = {ref.name for ref in refs}
        other_refs = tuple(ref for ref in self._spec.secrets if ref.name not in names)
        self._set(secrets=(*other_refs, *refs))
        self._secrets = (*(secret for secret in self._secrets if secret.name not in names), *new)

    # --------------------------------------------------------------------------- queue and endpoint

    @property
    def queue(self) -> str | None:
        """Queue of the KAI scheduler that the pods wait in; `kt.config.queue` if not given."""
        return self.to_spec().queue

    @queue.setter
    def queue(self, value: str | None) -> None:
        self._set(queue=None if value is None else PARAMETERS["queue"].parse(value))
        self._unsaid = self._unsaid - {"queue"} if value is not None else self._unsaid

    @property
    def endpoint(self) -> str | None:
        """URL that calls go to: the user's own, else that of the deployed service."""
        declared_endpoint = self._spec.endpoint
        return (
            self._url
            if declared_endpoint is None or declared_endpoint.url is None
            else declared_endpoint.url
        )

    @endpoint.setter
    def endpoint(self, value: Endpoint | None) -> None:
        self._set(endpoint=None if value is None else PARAMETERS["endpoint"].parse(value))

    # ------------------------------------------------------------------------------- number of pods

    @property
    def replicas(self) -> int:
        """Number of pods; of an autoscaled service the fewest at any time."""
        scaling = self._spec.autoscaling
        return self._spec.pods if scaling is None else scaling.fewest_pods

    @replicas.setter
    def replicas(self, value: int | None) -> None:
        # 0 stands for "not given", as programs expect.
        pod_count = PARAMETERS["replicas"].parse(value) if value else 1
        scaling, distributed = self._spec.autoscaling, self._spec.distribution
        if scaling is not None:
            fixed = replace(scaling, min_scale=pod_count, min_schedule=(), timezone=None)
            self._set(autoscaling=autoscaling.check(fixed))
            return
        if self._spec.manifest is not None:
            distributed = self._described().distribution(pod_count)
        if distributed is not None:
            distributed = replace(distributed, workers=None)
        self._set(replicas=pod_count, distribution=distributed)

    def autoscale(  # noqa: PLR0913  # the documented parameters
        self,
        *,
        target: float | None = None,
        window: str | None = None,
        metric: str | None = None,
        target_utilization: float | None = None,
        min_scale: int | Mapping[str, int] | None = None,
        max_scale: int | None = None,
        initial_scale: int | None = None,
        concurrency: int | None = None,
        scale_to_zero_pod_retention_period: str | None = None,
        scale_down_delay: str | None = None,
        autoscaler_class: str | None = None,
        progress_deadline: str | None = None,
        activation_scale: int | None = None,
        panic_window_percentage: float | None = None,
        panic_threshold_percentage: float | None = None,
        buffer: int | None = None,
        timezone: str | None = None,
        **extra_annotations: Any,  # noqa: ANN401  # other spellings, and annotations of Knative
    ) -> Self:
        """Let the load decide on the number of pods; each call goes to one of them.

        Where the cluster has Knative, the service becomes one of Knative. Elsewhere, on this
        machine too, Kubetorch scales it by the same rules. `buffer`, `min_scale` by the clock and
        a metric of `kt.metric` are beyond Knative: a deploy to a cluster with Knative refuses them.

        Args:
            target: Load per pod that is aimed at, in units of `metric`; Knative's default is 100.
                For `"cpu"` and `"memory"` a percentage of what the pod requests.
            window: Time over which it is averaged, such as `"60s"`, which is Knative's default.
            metric: `"concurrency"`, the default, or `"rps"`; `"cpu"` or `"memory"`, which choose
                the HPA class. Any other is the name of a `kt.metric` and needs a `target`; with
                the HPA class, Knative's HPA gets it from elsewhere.
            target_utilization: Percentage of the target at which pods are added, 1 to 100.
            min_scale: Fewest pods; 0 allows none. 1 if not given. By the clock:
                `{"0 8 * * 1-5": 4, "0 20 * * *": 0}` has a number for each cron expression; the
                expression that came last counts, and of two at the same time the larger number.
            max_scale: Most pods; 0 or not given is no limit.
            initial_scale: Pods to begin with.
            concurrency: Calls that a pod runs at once, all its processes together; more wait.
            scale_to_zero_pod_retention_period: How long the last pod is kept at least; `"10m"`.
            scale_down_delay: How long the load must be lower before a pod goes; `"1m"`.
            autoscaler_class: `"kpa.autoscaling.knative.dev"` or `"hpa.autoscaling.knative.dev"`.
            progress_deadline: How long a revision may take to become ready; `launch_timeout` is
                no longer than this, or shortened to it where nobody said it.
            activation_scale: Fewest pods while there is load; Knative's default is 1.
            panic_window_percentage: The short window in which bursts are seen, in percent of
                `window`, 1 to 100; Knative's default is 10.
            panic_threshold_percentage: The load that is a burst, in percent of what the ready
                pods can carry, 110 to 1000; Knative's default is 200.
            buffer: Free pods beyond those that work, while there is work.
            timezone: The time zone of the cron expressions, such as `"Europe/Berlin"`; UTC if not
                given.
            extra_annotations: `min_replicas`, `max_replicas` and `target_concurrency` are other
                spellings; `scale_to_zero_grace_period` says in seconds how long the last pod is
                kept and allows none if `min_scale` is not given. Others become annotations
                `autoscaling.knative.dev/…`.

        Returns:
            This object.

        Raises:
            AutoScalingError: A value is impossible, or a keyword is a near miss of a known one.
            SpecError: It is distributed, or has `replicas`.
        """
        arguments = dict(locals())
        del arguments["self"]
        arguments |= arguments.pop("extra_annotations")
        timeout = self._spec.launch_timeout
        settings = autoscaling.parse(arguments, launch_timeout=timeout)
        if "launch_timeout" in self._unsaid and settings.progress_deadline is not None:
            timeout = min(timeout, autoscaling.seconds(settings.progress_deadline))
        self._set(autoscaling=settings, launch_timeout=timeout)
        return self

    @property
    def autoscaling_config(self) -> AutoscalingConfig | None:
        """The settings of autoscaling; `None` if the number of pods is fixed."""
        spec = self._spec.autoscaling
        if spec is None:
            return None
        # Declaring a compute loads no manifests of Knative.
        from kubetorch.sdk.scaling import AutoscalingConfig  # noqa: PLC0415

        return AutoscalingConfig.from_spec(spec)

    @property
    def concurrency(self) -> int | None:
        """Calls that each process of the service runs at once; `None` is any number."""
        return self._spec.concurrency_of(self._spec.processes or 1)

    @concurrency.setter
    def concurrency(self, value: int | None) -> None:
        changes: dict[str, Any] = {"concurrency": PARAMETERS["concurrency"].value(value)}
        if self._spec.autoscaling is not None:
            # The new value is for a process, and replaces the one for a pod.
            changes["autoscaling"] = replace(self._spec.autoscaling, concurrency=None)
        self._set(**changes)

    def distribute(
        self,
        distribution_type: str | None = None,
        workers: int | str | None = None,
        quorum_timeout: int | None = None,
        quorum_workers: int | None = None,
        monitor_members: bool | None = None,
        **kwargs: Any,  # noqa: ANN401  # the framework's own
    ) -> Self:
        """Run each call on all pods, with what a framework for distributed programs needs.

        Args:
            distribution_type: `"spmd"`, the default, `"pytorch"`, `"jax"`, `"tensorflow"`, `"ray"`
                or `"monarch"`; `framework=` is another spelling.
            workers: Number of pods; those of `replicas` if not given.
            quorum_timeout: Seconds to wait for `quorum_workers`; `launch_timeout` if not given.
            quorum_workers: Pods that must be there before a call starts; all if not given.
            monitor_members: Whether the loss of a pod ends a running call; not so for Ray and
                Monarch if not given.
            kwargs: The framework's own, such as `num_proc`, `port` and `monarch_hosts`; JSON must
                be able to carry them. `distribution_args={}` is another spelling.

        Returns:
            This object.

        Raises:
            SpecError: A value is impossible, a keyword is a near miss of a known one, or it is
                autoscaled.
        """
        arguments = dict(locals())
        del arguments["self"]
        arguments |= arguments.pop("kwargs")
        settings, warnings = distribution.parse(arguments)
        self._set(distribution=settings)
        for warning in warnings:
            parameters.warn(warning)
        return self

    @property
    def distributed_config(self) -> dict[str, Any] | None:
        """The settings of calls that run on many pods; `None` when a call runs on one."""
        settings = self._spec.distribution
        if settings is None:
            return None
        spec = self._spec
        config = settings.config(replicas=spec.replicas, launch_timeout=spec.launch_timeout)
        return shown("distributed_config", config)

    @distributed_config.setter
    def distributed_config(self, value: Mapping[str, Any] | None) -> None:
        if value is None:
            self._set(distribution=None)
            return
        if not isinstance(value, Mapping):
            raise SpecError(
                f"distributed_config is {value!r}; it must be a dictionary",
                hint='for example {"distribution_type": "pytorch", "workers": 4}',
            )
        self.distribute(**value)

    @property
    def dispatch_method(self) -> str:
        """The way in which a call reaches pods: `regular`, or the kind of distribution."""
        settings = self._spec.distribution
        return "regular" if settings is None else settings.distribution_type

    # ------------------------------------------------------------------------------------ as a spec

    def to_spec(self) -> ComputeSpec:
        """The frozen form, which is sent to the controller."""
        spec = self._spec
        if self._image is not None:
            image_spec = self._image.to_spec()
            spec = replace(spec, image=None if image_spec == ImageSpec() else image_spec)
        if self._unsaid and not spec.is_selector_only:
            spec = self._with_defaults(spec)
        return spec

    def _with_defaults(self, spec: ComputeSpec) -> ComputeSpec:
        """The spec with the values of `kt.config` for parameters that the user has not set."""
        names, queue, base = config.volumes, config.queue, config.default_image
        if names and "volumes" in self._unsaid:
            spec = replace(spec, volumes=PARAMETERS["volumes"].parse(names))
        if queue and "queue" in self._unsaid and spec.queue_name is None:
            spec = replace(spec, queue=PARAMETERS["queue"].parse(queue))
        if base != DEFAULT_IMAGE and (spec.image is None or spec.image.image_id is None):
            spec = replace(spec, image=replace(spec.image or ImageSpec(), image_id=base))
        return spec

    # -------------------------------------------------------------------------------- as a manifest

    @property
    def manifest(self) -> Manifest | None:
        """The Kubernetes object that a deploy applies; `None` when it only names pods.

        It has the parts of the agent: those of the installation once something was deployed, or
        found, and before that those of one with the chart's own values.
        """
        return shown("manifest", self._described().render())

    def _described(self) -> ComputeManifest:
        # Declaring resources loads no manifests.
        from kubetorch.sdk.compute_manifest import ComputeManifest  # noqa: PLC0415

        return ComputeManifest(
            self.to_spec(), self.namespace, self._service_name, self._workload, self._equipment
        )

    @property
    def _manifest(self) -> Manifest | None:
        """The manifest, under the name that programs of 0.5 read."""
        return self.manifest

    @property
    def selector_only(self) -> bool:
        """True if the compute names pods that are there, and asks for none."""
        return self._spec.is_selector_only

    @property
    def metrics_enabled(self) -> bool:
        """True if calls show the pods' use of resources: not in this release."""
        return False

    @property
    def kind(self) -> str:
        """Kind of the manifest."""
        return str((self.manifest or {}).get("kind", "Deployment"))

    @property
    def api_version(self) -> str:
        """API version of the manifest."""
        return str((self.manifest or {}).get("apiVersion", "apps/v1"))

    @property
    def deployment_mode(self) -> str:
        """The kind for Kubernetes: `deployment`, `knative`, `raycluster`, or another kind."""
        manifest = self.manifest or {}
        if str(manifest.get("apiVersion")).startswith("serving.knative.dev/"):
            return "knative"
        return str(manifest.get("kind", "Deployment")).lower()

    @property
    def raycluster(self) -> Manifest | None:
        """The manifest, if it is a RayCluster."""
        manifest = self._described().render()
        is_ray = manifest is not None and manifest["kind"] == "RayCluster"
        return shown("raycluster", manifest if is_ray else None)

    @property
    def pod_template(self) -> Manifest:
        """Metadata and spec of the pods that calls go to."""
        template = self._described().primary()
        return shown("pod_template", {} if template is None else template.body)

    @property
    def pod_spec(self) -> Manifest:
        """Spec of the pods that calls go to, as `manifest` has it.

        Setting it replaces all that the pods are but their labels and annotations; what the agent
        needs is added. The compute then has a manifest of its own, as after `from_manifest`, and
        parameters change that: what makes another kind of object, `autoscale` or
        `distribute("ray")`, has to be said before.

        Raises:
            SpecError: It is set to what is no spec of pods, or this compute only names pods.
        """
        template = self._described().primary()
        return shown("pod_spec", {} if template is None else template.spec)

    @pod_spec.setter
    def pod_spec(self, value: Mapping[str, Any]) -> None:
        spec = self._described().with_pod_spec(value)
        self._set(**{item.name: getattr(spec, item.name) for item in fields(ComputeSpec)})
        self._image, self._unsaid = None, frozenset()

    def _container(self) -> Manifest:
        template = self._described().primary()
        return {} if template is None else template.container

    @property
    def resources(self) -> Manifest:
        """Requests and limits of the container that calls go to."""
        return shown("resources", self._container().get("resources") or {})

    @property
    def volume_mounts(self) -> list[Manifest]:
        """The mounts of the container that calls go to."""
        return shown("volume_mounts", self._container().get("volumeMounts") or [])

    @property
    def secret_env_vars(self) -> list[Manifest]:
        """Variables whose values come from secrets."""
        variables = self._container().get("env") or []
        secret_variables = [
            variable
            for variable in variables
            if "secretKeyRef" in (variable.get("valueFrom") or {})
        ]
        return shown("secret_env_vars", secret_variables)

    @property
    def secret_volumes(self) -> list[Manifest]:
        """Volumes whose files come from secrets."""
        volumes = [volume for volume in self.pod_spec.get("volumes") or [] if "secret" in volume]
        return shown("secret_volumes", volumes)

    def get_env_vars(self, keys: list[str] | str | None = None) -> dict[str, str]:
        """Variables of the container that have a value of their own.

        Args:
            keys: Only these; all if not given.
        """
        chosen_keys = [keys] if isinstance(keys, str) else keys
        variables = {
            variable["name"]: variable.get("value", "")
            for variable in self._container().get("env") or []
        }
        variables |= self.env_vars
        return {
            key: text
            for key, text in variables.items()
            if chosen_keys is None or key in chosen_keys
        }

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the service; `add_labels` changes them."""
        return shown("labels", self._metadata("labels"))

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the service; `add_annotations` changes them."""
        return shown("annotations", self._metadata("annotations"))

    @property
    def user_labels(self) -> dict[str, str]:
        """Labels of the service that are not Kubetorch's own."""
        return shown("user_labels", self._described().user_labels(self.labels))

    @property
    def user_annotations(self) -> dict[str, str]:
        """Annotations of the service that are not Kubetorch's own."""
        user_annotations = self._described().user_annotations(self.annotations)
        return shown("user_annotations", user_annotations)

    @property
    def gpu_annotations(self) -> dict[str, str]:
        """Annotations that say which part of a GPU is wanted."""
        gpu_memory = self._spec.gpu_memory
        memory_annotations = {} if gpu_memory is None else {known_labels.GPU_MEMORY: gpu_memory}
        return shown("gpu_annotations", memory_annotations)

    def _metadata(self, key: str) -> dict[str, str]:
        if self.selector_only:
            return dict(getattr(self._spec, key))
        metadata = (self.manifest or {}).get("metadata") or {}
        return dict(metadata.get(key) or {})

    # ------------------------------------------------------------------------------------- its pods

    def session(self) -> Session:
        """The session with the controller: in the cluster of its kubeconfig, if it names one."""
        # The kubeconfig of a service that was looked up may be a path of another machine.
        return backend.session(None if self._is_found else self._spec.kubeconfig_path)

    def _pods(self) -> ComputePods:
        if self._service_name is None:
            raise SpecError(
                "this Compute has no pods: nothing was deployed to it",
                hint="kt.fn(train).to(compute) deploys a function",
            )
        # Only programs that deploy or call import this.
        from kubetorch.sdk.compute_pods import ComputePods  # noqa: PLC0415

        return ComputePods(self.session(), self.namespace, self._service_name)

    def pods(self) -> list[Attributes]:
        """The pods as Kubernetes describes them; their keys are attributes, too.

        A key without a value is absent: `pod.metadata.get("deletionTimestamp")` is `None` then.
        There are none before something is deployed, and after its teardown.
        """
        return [] if self._service_name is None else self._pods().list_all()

    def pod_names(self) -> list[str]:
        """Names of the pods that run, but for those that are about to end."""
        return [] if self._service_name is None else self._pods().running_names()

    def is_up(self) -> bool:
        """True if there are pods, and all of them run; false if the controller does not answer."""
        try:
            pods = self.pods()
        except KubetorchError:
            return False
        return bool(pods) and len(self.pod_names()) == len(pods)

    def logs(self, follow: bool = False, tail: int = 100, pod: str | None = None) -> None:
        """Show what the pods have logged, as `kt logs` does.

        Args:
            follow: Go on with new lines until the service is gone.
            tail: How many of the last lines to begin with.
            pod: Only this pod.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
            ServiceNotFoundError: The service is gone.
        """
        self._pods().show_logs(follow=follow, tail=tail, pod=pod)

    def run_bash(
        self,
        commands: str | Iterable[str],
        node: str | int | Iterable[str | int] | None = None,
        container: str | None = None,
    ) -> list[list[int | str]]:
        """Run shell commands in the pods, one after the other.

        Args:
            commands: A command, or several.
            node: The pods to run them in: a name, an index into those that run, several of them,
                or `"all"`; all that run if not given.
            container: Name of the container that the agent runs in; commands run in no other.

        Returns:
            For each command, and for each pod: exit code, output, errors. What a failing command
            wrote is among its errors.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
        """
        agent_container = str(self._container().get("name", "kubetorch"))
        if container not in (None, agent_container):
            raise SpecError(
                f"container is {container!r}; commands run in the container of the agent, "
                f"{agent_container!r}"
            )
        steps = [RunStep(command) for command in parameters.texts("commands", commands)]
        pods = self._pods()
        return [result.as_list() for step in steps for result in pods.run(step, node)]

    def pip_install(
        self,
        reqs: str | Iterable[str],
        node: str | int | Iterable[str | int] | None = None,
        override_remote_version: bool = False,
    ) -> None:
        """Install requirements in the pods, beside what their image has.

        What is importable both here and there is left as it is.

        Args:
            reqs: Requirements, as `kt.Image.pip_install` takes them.
            node: As for `run_bash`.
            override_remote_version: Have the version that is installed here.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
            ImageStepError: A requirement cannot be installed; the message has the output.
        """
        requirements, pods = parameters.texts("reqs", reqs), self._pods()
        for requirement in requirements:
            pods.install(requirement, node, override=override_remote_version)

    def sync_package(
        self, package: str, node: str | int | Iterable[str | int] | None = None
    ) -> None:
        """Copy a Python package of this machine into the pods, importable there.

        Args:
            package: A path, or the name of an installed package whose source is a folder.
            node: As for `run_bash`.

        Raises:
            SpecError: There is no such folder or package, nothing was deployed to this compute, or
                there is no such pod.
        """
        image = Image().sync_package(package)
        self._pods().apply(image, node)

    def rsync(
        self,
        source: str | PathLike[str] | Iterable[str | PathLike[str]],
        dest: str | None = None,
        local_port: int | None = None,
        contents: bool = False,
        filter_options: str | None = None,
        force: bool = False,
    ) -> None:
        """Copy files and folders of this machine into all pods that run; only changes travel.

        The image does not change by it: pods that are started later do not have them.

        Args:
            source: A file, a folder, or several.
            dest: Where they go, as for `kt.Image.copy`: relative to the pods' working directory,
                absolute, or `~/…`; under their own names if not given.
            local_port: Deprecated: nothing needs a port.
            contents: Copy what is in a folder, not the folder itself.
            filter_options: `--include=PATTERN` and `--exclude=PATTERN`, separated by spaces.
            force: Copy also what has not changed.

        Raises:
            SpecError: There is no such file or folder, or nothing was deployed to this compute.
            ImageStepError: A pod cannot store them.
        """
        if local_port is not None:
            parameters.warn("rsync(local_port=) has no meaning any more", DeprecationWarning)
        image = Image()
        for path in compute_parameters.paths(source):
            image.copy(path, dest, contents, filter_options, force)
        self._pods().apply(image, None)

    rsync_async = awaitable(rsync)

    def client_port(self) -> int:
        """A port of this machine that leads to the pods, for as long as this program runs.

        Requests need a token there, as at the pods: `.request_headers` of the deployed module, or
        `kt token`. Paths may begin with `/<namespace>/<service>:<port>`, as an `Endpoint` has them.

        Raises:
            SpecError: Nothing was deployed to it.
            ServiceNotFoundError: The service is gone.
        """
        return self._pods().local_port()

    def ssh(self, pod_name: str | None = None) -> None:
        """A shell in a pod, on this program's terminal, until it is left.

        Args:
            pod_name: Name of the pod; the oldest that runs if not given.

        Raises:
            RuntimeError: There is no pod that runs.
            ServiceNotFoundError: There is no such pod, or the service is gone.
        """
        self._pods().open_shell(pod_name)

    # ----------------------------------------------------------------------------------- as a value

    def for_service(self, name: str) -> Compute:
        """This object, now of that service; a copy when it is another service's already."""
        if self._service_name in (None, name):
            self._service_name = name
            return self
        copied = Compute.__new__(Compute)
        copied.__dict__.update(self.__dict__)
        copied._beside = self._service_name
        copied._service_name = name
        copied._is_named = False
        copied._url, copied._workload = None, None
        return copied

    def declares(self, workload: WorkloadSpec) -> None:
        """Note the workload that would be deployed to it."""
        self._workload = workload

    def deployed_as(self, view: WorkloadView) -> None:
        """Note the deployed workload: its URL, and the additions of its cluster."""
        self._url = view.url or None
        self._workload, self._equipment = view.spec, view.equipment

    def describes(self, workload: WorkloadSpec) -> bool:
        """True if the compute describes that workload, regardless of logging."""
        is_its = (self._service_name, self.namespace) == (workload.name, workload.namespace)
        spec = self.to_spec()
        deployed_spec = replace(workload.compute, logging=spec.logging)
        return is_its and compute_parameters.declared(spec) == compute_parameters.declared(
            deployed_spec
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compute):
            return NotImplemented
        return (self.to_spec(), self._namespace) == (other.to_spec(), other._namespace)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        spec = self._spec
        namespace_argument = {} if self._namespace is None else {"namespace": self._namespace}
        if spec.manifest is not None or spec.pod_labels or spec.server_port is not None:
            shown = parameters.expression("ComputeSpec", _changed(self.to_spec()))
            return parameters.expression("Compute.from_spec", namespace_argument, positional=shown)
        rows = {
            parameter.field: parameter for parameter in PARAMETERS.values() if parameter.is_argument
        }
        values: dict[str, Any] = {}
        for field, value in _changed(spec).items():
            if field in rows and field not in ("image", "secrets"):
                show = rows[field].show
                values[rows[field].name] = value if show is None else show(value)
        if self.image.to_spec() != ImageSpec():
            values["image"] = self.image
        if spec.secrets:
            # A secret that exists is written as its name.
            secrets = [
                secret.name if secret.to_ref().all_keys else secret for secret in self.secrets
            ]
            values["secrets"] = secrets or [ref.object_name for ref in spec.secrets]
        text = parameters.expression("Compute", values | namespace_argument)
        if spec.autoscaling is not None:
            text += parameters.expression(".autoscale", _scaling(spec.autoscaling))
        if spec.distribution is not None:
            text += parameters.expression(".distribute", _distribution(spec.distribution))
        return text


def _documented(docstring: str) -> dict[str, str]:
    """The section `Args` of a docstring, by name, its line breaks as spaces."""
    section = inspect.cleandoc(docstring).partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(*[iter(entries)] * 2, strict=True)}


for _name, _text in _documented(Compute.__doc__ or "").items():
    if isinstance(vars(Compute).get(_name), _Attribute):
        vars(Compute)[_name].__doc__ = _text


def _merged(old: Pairs, new: Pairs) -> Pairs:
    return tuple({**dict(old), **dict(new)}.items())


def _label_names(value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SpecError(f"remove_keys is {value!r}; it must be a list of names of labels")
    return [str(key) for key in value]


def _warn_of_shm_size_limit() -> None:
    message = "Compute.shm_size_limit is deprecated; use shared_memory_limit"
    parameters.warn(message, DeprecationWarning)


# ---------------------------------------------------------------------------- as an expression


def _changed(spec: ComputeSpec) -> dict[str, Any]:
    """The fields that do not have their defaults."""
    absent = {**ABSENT, "logging": LoggingConfig()}
    field_values = {item.name: getattr(spec, item.name) for item in fields(ComputeSpec)}
    return {name: value for name, value in field_values.items() if value != absent[name]}


def _scaling(spec: AutoscalingSpec) -> dict[str, Any]:
    field_values = {item.name: getattr(spec, item.name) for item in fields(spec)}
    extra = field_values.pop("extra_annotations")
    schedule = dict(field_values.pop("min_schedule"))
    field_values["min_scale"] = schedule or spec.min_scale
    set_values = {name: value for name, value in field_values.items() if value is not None}
    return set_values | {name.replace("-", "_"): text for name, text in extra}


def _distribution(spec: DistributionSpec) -> dict[str, Any]:
    field_values = {item.name: getattr(spec, item.name) for item in fields(spec)}
    set_values = {name: value for name, value in field_values.items() if value is not None}
    return {**set_values, "options": None, **json.loads(spec.options)}
