"""How many pods a compute has, and how calls run on them: replicas, autoscaling, distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kubetorch.errors import SpecError
from kubetorch.sdk import advice, parameters
from kubetorch.sdk.computing.settings import Settings
from kubetorch.specs import autoscaling, distribution
from kubetorch.specs.autoscaling import AutoscalingSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class Scaling(Settings):
    """The number of pods, and who decides on it."""

    @property
    def replicas(self) -> int:
        """Number of pods; of an autoscaled service the fewest."""
        scaling = self._spec.autoscaling
        if scaling is not None:
            return 1 if scaling.min_scale is None else scaling.min_scale
        return self._spec.pods

    @replicas.setter
    def replicas(self, value: int | None) -> None:
        # 0 stands for "not given", as programs expect.
        wanted = parameters.count("replicas", value) if value else 1
        scaling, distributed = self._spec.autoscaling, self._spec.distribution
        if scaling is not None:
            self._set(autoscaling=autoscaling.with_least(scaling, wanted))
        elif distributed is not None:
            self._set(replicas=wanted, distribution=replace(distributed, workers=None))
        else:
            self._set(replicas=wanted)

    # ------------------------------------------------------------------------------ autoscaling

    def autoscale(  # noqa: PLR0913  # the documented parameters
        self,
        *,
        target: float | None = None,
        window: str | None = None,
        metric: str | None = None,
        target_utilization: int | None = None,
        min_scale: int | None = None,
        max_scale: int | None = None,
        initial_scale: int | None = None,
        concurrency: int | None = None,
        scale_to_zero_pod_retention_period: str | None = None,
        scale_down_delay: str | None = None,
        autoscaler_class: str | None = None,
        progress_deadline: str | None = None,
        **extra_annotations: Any,  # noqa: ANN401  # other spellings, and annotations of Knative
    ) -> Self:
        """Let the load decide on the number of pods; each call goes to one of them.

        The service becomes one of Knative. Where there is no Knative it runs with `min_scale`
        pods, at least one, and says so.

        Args:
            target: Load per pod that is aimed at, in units of `metric`; Knative's default is 100.
            window: Time over which it is averaged, such as `"60s"`, which is Knative's default.
            metric: `"concurrency"`, the default, or `"rps"`; `"cpu"`, `"memory"` and others, which
                need the HPA class and choose it.
            target_utilization: Percentage of the target at which pods are added, 1 to 100.
            min_scale: Fewest pods; 0 allows none. 1 if not given.
            max_scale: Most pods; 0 or not given is no limit.
            initial_scale: Pods to begin with.
            concurrency: Requests that a pod takes at once; more wait.
            scale_to_zero_pod_retention_period: How long the last pod is kept at least; `"10m"`.
            scale_down_delay: How long the load must be lower before a pod goes; `"1m"`.
            autoscaler_class: `"kpa.autoscaling.knative.dev"` or `"hpa.autoscaling.knative.dev"`.
            progress_deadline: How long a revision may take to become ready; longer than
                `launch_timeout`.
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
        given = {
            "target": target,
            "window": window,
            "metric": metric,
            "target_utilization": target_utilization,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "initial_scale": initial_scale,
            "concurrency": concurrency,
            "scale_to_zero_pod_retention_period": scale_to_zero_pod_retention_period,
            "scale_down_delay": scale_down_delay,
            "autoscaler_class": autoscaler_class,
            "progress_deadline": progress_deadline,
            **extra_annotations,
        }
        timeout = self._spec.launch_timeout
        self._set(autoscaling=autoscaling.parse(given, launch_timeout=timeout))
        return self

    @property
    def autoscaling_config(self) -> AutoscalingSpec | None:
        """How it scales; `None` when it does not."""
        return self._spec.autoscaling

    @property
    def concurrency(self) -> int | None:
        """Requests that a pod of an autoscaled service takes at once; `None` is no limit."""
        scaling = self._spec.autoscaling
        return None if scaling is None else scaling.concurrency

    @concurrency.setter
    def concurrency(self, value: int | None) -> None:
        scaling = self._spec.autoscaling
        if scaling is None:
            raise SpecError(
                f"concurrency is {value!r}; it limits the pods of an autoscaled service",
                hint=f"autoscale(concurrency={value!r})",
            )
        self._set(autoscaling=autoscaling.with_concurrency(scaling, value))

    # ----------------------------------------------------------------------------- distribution

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
            monitor_members: Whether a change of the pods ends a running call; not so for Ray and
                Monarch if not given.
            kwargs: The framework's own, such as `num_proc` and `port`; JSON must be able to carry
                them. `distribution_args={}` is another spelling.

        Returns:
            This object.

        Raises:
            SpecError: A value is impossible, a keyword is a near miss of a known one, or it is
                autoscaled.
        """
        given = {
            "distribution_type": distribution_type,
            "workers": workers,
            "quorum_timeout": quorum_timeout,
            "quorum_workers": quorum_workers,
            "monitor_members": monitor_members,
            **kwargs,
        }
        found, warnings = distribution.parse(given)
        self._set(distribution=found)
        for warning in warnings:
            advice.warn(warning)
        return self

    @property
    def distributed_config(self) -> dict[str, Any] | None:
        """How one call runs on many pods; `None` when it runs on one."""
        found = self._spec.distribution
        if found is None:
            return None
        return found.config(replicas=self._spec.replicas, launch_timeout=self._spec.launch_timeout)

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
        """How a call reaches pods: `regular`, or the kind of distribution."""
        found = self._spec.distribution
        return "regular" if found is None else found.distribution_type
