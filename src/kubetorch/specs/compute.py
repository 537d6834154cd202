"""What a workload asks for: the frozen form of `kt.Compute`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kubetorch.specs.logging import LoggingConfig


@dataclass(frozen=True)
class ComputeSpec:
    """Resources and settings of a workload's pods, validated by `kubetorch.sdk.compute`.

    Attributes:
        cpus: CPU request of a pod, a Kubernetes quantity such as `0.5` or `500m`.
        memory: Memory request of a pod, a Kubernetes quantity such as `2Gi`.
        env_vars: Environment of the pods; `$NAME` is expanded when a worker starts.
        replicas: Number of pods.
        working_dir: Absolute path of the pods' working directory.
        launch_timeout: Seconds until a deploy that is not ready fails.
        labels: Labels of the workload and its pods.
        allowed_serialization: Codecs that callers may use.
        logging: How it logs.
        inactivity_ttl: Idle time after which it is torn down, such as `30m`; `None` is never.
    """

    cpus: str | None = None
    memory: str | None = None
    env_vars: tuple[tuple[str, str], ...] = ()
    replicas: int = 1
    working_dir: str | None = None
    launch_timeout: int = 900
    labels: tuple[tuple[str, str], ...] = ()
    allowed_serialization: tuple[str, ...] = ("json",)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    inactivity_ttl: str | None = None
