"""The arguments of `kt.Compute` for type checkers, where they come as keywords."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from kubetorch.sdk.image import Image
from kubetorch.sdk.secrets.secret import Secret
from kubetorch.sdk.volume import Volume
from kubetorch.specs.endpoint import Endpoint
from kubetorch.specs.logging import LoggingConfig


class ComputeArguments(TypedDict, total=False):
    """See `kt.Compute`."""

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
