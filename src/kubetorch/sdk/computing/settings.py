"""The parameters of `kt.Compute`: one attribute each.

What manifests make of them stands in `kubetorch.manifests.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, TypeVar

from kubetorch.config import environment
from kubetorch.sdk import advice, parameters
from kubetorch.sdk.computing import nodes, objects
from kubetorch.sdk.computing.field import Field
from kubetorch.specs import quantity
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.logging import LoggingConfig
from kubetorch.wire.codecs import DEFAULT_ALLOWED

#: Amounts of memory below this are probably meant in another unit.
_LITTLE_BYTES = 2**16


def _memory(parameter: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = quantity.memory(value, parameter=parameter)
        if text.isdecimal() and int(text) < _LITTLE_BYTES:
            advice.warn(f'{parameter} is {value!r}, which is {text} bytes; "{text}Gi" has a unit')
        return text

    return parse


def _working_dir(value: object) -> str:
    return parameters.absolute_path("working_dir", value)


def _launch_timeout(value: object) -> int:
    return parameters.seconds("launch_timeout", value)


def _kubeconfig(path: str | None) -> str:
    return str(environment.kubeconfig() if path is None else parameters.expanded(path))


def _warn_of_shm_size_limit() -> None:
    message = "Compute.shm_size_limit is deprecated; use shared_memory_limit"
    advice.warn(message, DeprecationWarning)


Text = Field[str | None, str | None]
Amount = Field[str | int | None, str | None]


class Settings:
    """What can be set on a compute, also on one that was made of a manifest."""

    _spec: ComputeSpec

    cpus = Field[str | float | None, str | None](
        quantity.cpus, "CPUs that each pod asks for, as a Kubernetes quantity."
    )
    memory = Amount(_memory("memory"), "Memory that each pod asks for, as a Kubernetes quantity.")
    disk_size = Amount(_memory("disk_size"), "Ephemeral storage that each pod asks for.")
    gpus = Amount(nodes.gpus, "GPUs that each pod asks for, and gets.")
    gpu_type = Text(nodes.gpu_type, "Type of the GPUs: a label of the nodes that pods run on.")
    gpu_memory = Amount(nodes.gpu_memory, "Memory that is wanted of a GPU.")
    shared_memory_limit = Amount(_memory("shared_memory_limit"), "Limit of `/dev/shm`.")

    node_selector = Field[Mapping[str, str] | None, dict[str, str]](
        nodes.node_selector, "Labels of the nodes that pods may run on.", show=dict
    )
    priority_class_name = Text(objects.priority_class_name, "Priority class of the pods.")
    gpu_anti_affinity = Field[bool | None, bool](
        objects.gpu_anti_affinity,
        "Whether pods that ask for no GPU stay away from nodes that have some.",
        default=environment.gpu_anti_affinity,
    )
    queue_name = Text(objects.queue_name, "LocalQueue of Kueue that the pods wait in.")

    image_pull_policy = Text(objects.image_pull_policy, "When a node pulls the image.")
    service_account_name = Text(objects.service_account_name, "Service account of the pods.")
    server_port = Field[int | None, int](
        objects.server_port, "Port of the agent.", show=objects.shown_port
    )
    working_dir = Text(_working_dir, "Working directory in the pods.")
    service_template = Field[Mapping[str, Any] | None, dict[str, Any] | None](
        objects.service_template,
        "Part of a manifest that is laid over the whole one.",
        show=objects.shown_template,
    )
    freeze = Field[bool | None, bool](
        objects.freeze, "Whether pods run what their image has, without live code."
    )
    kubeconfig_path = Field[str | PathLike[str] | None, str](
        objects.kubeconfig_path,
        "The kubeconfig that reaches the cluster: as given, else that of this machine.",
        show=_kubeconfig,
    )
    launch_timeout = Field[int | str | None, int](
        _launch_timeout,
        "Seconds until a deploy that is not ready fails.",
        default=environment.launch_timeout,
        variable="KT_LAUNCH_TIMEOUT",
    )
    inactivity_ttl = Text(
        parameters.ttl, "Idle time after which the service is torn down, such as `30m`."
    )
    allowed_serialization = Field[Iterable[str] | None, list[str]](
        parameters.serializations,
        "How callers may send arguments.",
        show=list,
        default=lambda: environment.allowed_serialization() or DEFAULT_ALLOWED,
        variable="KT_ALLOWED_SERIALIZATION",
    )
    logging_config = Field[LoggingConfig | None, LoggingConfig](
        parameters.logging,
        "What of the pods' logs the caller sees.",
        default=LoggingConfig,
        field="logging",
    )
    selector = Field[Mapping[str, str] | None, dict[str, str] | None](
        objects.selector,
        "Labels of the pods that belong to it, where the user names them.",
        show=objects.shown_pairs,
    )

    def _set(self, **changes: Any) -> None:  # noqa: ANN401  # fields of the spec
        """Change the spec, if it is then one that is possible."""
        raise NotImplementedError

    @property
    def shm_size_limit(self) -> str | None:
        """Deprecated: `shared_memory_limit` is this."""
        _warn_of_shm_size_limit()
        return self.shared_memory_limit

    @shm_size_limit.setter
    def shm_size_limit(self, value: str | int | None) -> None:
        _warn_of_shm_size_limit()
        self.shared_memory_limit = value

    # ----------------------------------------------------------- what is added to, key by key

    @property
    def env_vars(self) -> dict[str, str]:
        """Environment of the pods; `add_env_vars` changes it."""
        return dict(self._spec.env_vars)

    def add_env_vars(self, env_vars: Mapping[str, str | float]) -> None:
        """Add environment variables, or replace those of the same name."""
        self._set(env_vars=_merged(self._spec.env_vars, parameters.environment(env_vars)))

    @property
    def tolerations(self) -> list[dict[str, Any]]:
        """Taints that pods accept, those of nodes with GPUs among them."""
        from kubetorch.manifests import scheduling, tolerations  # noqa: PLC0415  # few look at it

        return [tolerations.render(one) for one in scheduling.all_tolerations(self._spec)]

    def add_tolerations(self, tolerations: Iterable[Mapping[str, Any]]) -> None:
        """Add tolerations; those of the same keys are replaced."""
        new = nodes.tolerations(tolerations)
        keys = {one.key for one in new}
        kept = tuple(one for one in self._spec.tolerations if one.key not in keys)
        self._set(tolerations=(*kept, *new))

    def add_labels(self, labels: Mapping[str, str]) -> None:
        """Add labels of the service and its pods, or replace those of the same name."""
        self._set(labels=_merged(self._spec.labels, objects.own_labels(labels)))

    def add_pod_template_labels(
        self, labels: Mapping[str, str], remove_keys: Iterable[str] | None = None
    ) -> None:
        """Add labels of the pods alone, or replace those of the same name.

        Args:
            labels: The labels.
            remove_keys: Labels to take away from the pods, and from the service if they were
                given for both.
        """
        gone = set(objects.label_names(remove_keys))
        new = objects.own_labels(labels)
        kept = tuple(one for one in self._spec.pod_labels if one[0] not in gone)
        changes: dict[str, Any] = {"pod_labels": _merged(kept, new)}
        if gone:
            changes["labels"] = tuple(one for one in self._spec.labels if one[0] not in gone)
        if gone and self._spec.manifest is not None:
            changes["manifest"] = objects.without_labels(self._spec, gone)
        self._set(**changes)

    def add_annotations(self, annotations: Mapping[str, str]) -> None:
        """Add annotations of the service and its pods, or replace those of the same name."""
        self._set(
            annotations=_merged(self._spec.annotations, objects.annotation_pairs(annotations))
        )


PairT = TypeVar("PairT", bound=tuple[str, str])


def _merged(old: tuple[PairT, ...], new: tuple[PairT, ...]) -> tuple[tuple[str, str], ...]:
    return tuple({**dict(old), **dict(new)}.items())
