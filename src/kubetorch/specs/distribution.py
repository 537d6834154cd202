"""Calls that run on many pods: the frozen form of `.distribute()`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import SpecError, did_you_mean
from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.specs import hints

FRAMEWORKS = ("spmd", "pytorch", "ray", "monarch", "jax", "tensorflow")
ALIASES = {"tf": "tensorflow", "torch": "pytorch"}
#: A single controller runs the callable; the call returns one value.
SINGLE_CONTROLLER = ("ray", "monarch")

#: Frameworks of which a pod has a process for each of its GPUs, unless `num_proc` says otherwise.
_PROCESS_PER_GPU = ("pytorch", "jax", "tensorflow")
#: Processes that a pod may have, and the last number of a port.
MOST_PROCESSES, LAST_PORT = 1024, 65535
#: The ports of the rendezvous of processes, unless `port` names another.
_FRAMEWORK_PORTS = {"jax": 1234, "tensorflow": 2222, "ray": 6379, "monarch": 26600}
_DEFAULT_PORT = 12345
#: Frameworks in which each process listens on its own port.
_PORT_PER_PROCESS = ("tensorflow", "monarch")

#: Keywords of the earlier release, and the reason why they have no effect.
_WITHOUT_EFFECT = {
    "tree_minimum": "calls are passed on in a tree however many pods there are",
    "restart_procs": "a deploy starts new processes, and a call with restart_procs=True",
}
#: Ports of each node of Ray beside the cluster's rendezvous port, as options of `ray start`; ports
#: of the first node alone; and variables with further ports of the first node.
RAY_NODE_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
RAY_HEAD_PORTS = ("ray-client-server-port", "dashboard-port")
RAY_HEAD_VARIABLES = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
#: The port of the agent, unless a compute names another.
AGENT_PORT = 32300
#: The arguments of `.distribute()`, in order.
ARGUMENTS = ("distribution_type", "workers", "quorum_timeout", "quorum_workers", "monitor_members")
#: Keywords that the supervisors know; others are the framework's and pass through.
SUPERVISOR_OPTIONS = (
    "num_proc",
    "port",
    "tree_fanout",
    "tree_minimum",
    "max_threads_per_proc",
    "restart_procs",
    "monarch_hosts",
)


class DistributionSpec(FrozenValue):
    """A distributed service.

    Attributes:
        distribution_type: One of `FRAMEWORKS`.
        workers: Number of pods; `None` keeps the replicas that the compute has.
        quorum_timeout: Seconds to wait for `quorum_workers`.
        quorum_workers: Pods that must be ready before a call starts.
        monitor_members: Whether a change of membership ends a running call.
        options: The framework's own, as JSON text of an object.
    """

    distribution_type: str = "spmd"
    workers: int | None = None
    quorum_timeout: int | None = None
    quorum_workers: int | None = None
    monitor_members: bool | None = None
    options: str = "{}"

    def check(self) -> None:
        """Refuse an impossible spec, which a user may have written by hand."""
        _framework({"framework": self.distribution_type})
        for name in ("workers", "quorum_timeout", "quorum_workers"):
            _whole_number(name, getattr(self, name))
        try:
            number, port = self.processes("1"), self.port
        except (AttributeError, TypeError, ValueError) as error:
            raise SpecError(f"the options of the distribution are {self.options}") from error
        _whole_number("num_proc", number, MOST_PROCESSES)
        if not 1 <= port <= LAST_PORT:
            raise SpecError(f"port is {port}; it must be between 1 and {LAST_PORT}")

    @property
    def threads(self) -> int | None:
        """Calls that a process runs at the same time, where that is declared."""
        number = json.loads(self.options).get("max_threads_per_proc")
        return None if number is None else int(number)

    def processes(self, gpus: str | None) -> int:
        """Processes of each pod, which has so many GPUs."""
        options = json.loads(self.options)
        number = options.get("num_proc", options.get("num_processes"))
        if self.distribution_type in SINGLE_CONTROLLER:
            return 1
        if number not in (None, "auto"):
            return int(number)
        is_per_gpu = (
            self.distribution_type in _PROCESS_PER_GPU and gpus is not None and gpus.isdecimal()
        )
        return max(1, int(gpus or 1)) if is_per_gpu else 1

    @property
    def port(self) -> int:
        """The port that is declared, or the framework's own."""
        declared = json.loads(self.options).get("port")
        return int(declared or _FRAMEWORK_PORTS.get(self.distribution_type, _DEFAULT_PORT))

    @property
    def is_port_declared(self) -> bool:
        """True if no other port may be taken."""
        return bool(json.loads(self.options).get("port"))

    @property
    def has_port_each(self) -> bool:
        """True if each process listens on a port; false if only the first process does."""
        return self.distribution_type in _PORT_PER_PROCESS

    def further_ports(self, pods: int) -> int:
        """Ports that so many pods need on one machine beside their rendezvous port."""
        if self.distribution_type != "ray":
            return 0
        return len(RAY_HEAD_PORTS) + len(RAY_HEAD_VARIABLES) + pods * len(RAY_NODE_PORTS)

    @property
    def is_monitored(self) -> bool:
        """True if the loss of a pod ends the calls that it is part of.

        Ray and Monarch notice a loss by themselves, Monarch after more than a minute.
        """
        if self.monitor_members is None:
            return self.distribution_type not in SINGLE_CONTROLLER
        return self.monitor_members

    def config(self, *, replicas: int, launch_timeout: int) -> dict[str, Any]:
        """The `Compute.distributed_config` that programs for 0.5 read."""
        workers = self.workers or replicas
        return {
            "distribution_type": self.distribution_type,
            "workers": workers,
            "quorum_timeout": self.quorum_timeout or launch_timeout,
            "quorum_workers": self.quorum_workers or workers,
            "monitor_members": self.is_monitored,
            **json.loads(self.options),
        }


def parse(arguments: Mapping[str, Any]) -> tuple[DistributionSpec, list[str]]:
    """Parse the keywords of `.distribute()`; the second result are warnings for the user."""
    keywords = {key: value for key, value in arguments.items() if value is not None}
    warnings = []
    extra = keywords.pop("distribution_args", {})
    if not isinstance(extra, Mapping):
        raise SpecError(f"distribution_args is {extra!r}; it must be a dict")
    for name, value in extra.items():
        if keywords.get(name, value) != value:
            raise SpecError(
                f"{name} is {keywords[name]!r}, and {value!r} in distribution_args",
                hint="say it once",
            )
    keywords = {**extra, **keywords}
    kind = _framework(keywords)
    if keywords.pop("scale_to_zero_grace_period", None) is not None:
        warnings.append(
            "distribute() ignores scale_to_zero_grace_period: distributed services do not scale "
            "to zero; inactivity_ttl= stops them when they are idle"
        )
    numbers = {
        name: _whole_number(name, keywords.pop(name, None))
        for name in ("workers", "quorum_timeout", "quorum_workers")
    }
    hosts = _whole_number("monarch_hosts", keywords.pop("monarch_hosts", None))
    if hosts is not None:
        if kind != "monarch" or numbers["workers"] not in (None, hosts):
            raise SpecError(
                f"monarch_hosts is {hosts}, of {kind} on {numbers['workers'] or 'its'} workers",
                hint="it is another name for the workers of a service distributed as monarch",
            )
        numbers["workers"] = hosts
    monitor = keywords.pop("monitor_members", None)
    if monitor is not None and not isinstance(monitor, bool):
        raise SpecError(f"monitor_members is {monitor!r}; it must be True or False")
    _check_options(keywords)
    for name in _WITHOUT_EFFECT:
        if name in keywords:
            warnings.append(f"distribute() ignores {name}: {_WITHOUT_EFFECT[name]}")
    unknown = sorted(keywords.keys() - {*SUPERVISOR_OPTIONS, "num_processes"})
    if unknown:
        warnings.append(
            f"distribute() does not know {', '.join(unknown)}: kept in distributed_config, without "
            "effect on the pods; env_vars= sets variables that a framework reads"
        )
    spec = DistributionSpec(
        distribution_type=kind,
        monitor_members=monitor,
        options=json.dumps(keywords, sort_keys=True),
        **numbers,
    )
    return spec, warnings


def _framework(keywords: dict[str, Any]) -> str:
    names = {
        keywords.pop(key)
        for key in ("distribution_type", "framework", "distribution")
        if key in keywords
    }
    if len(names) > 1:
        raise SpecError(f"distribute() was given two frameworks: {sorted(map(str, names))}")
    name = (names.pop() if names else None) or "spmd"
    framework = ALIASES.get(name, name) if isinstance(name, str) else name
    if framework not in FRAMEWORKS:
        raise SpecError(
            f"distribution_type {name!r} is not supported; supported are {', '.join(FRAMEWORKS)}",
            hint=did_you_mean(str(name), [*FRAMEWORKS, *ALIASES], likeness=0.5),
        )
    return str(framework)


def _whole_number(name: str, value: object, most: int | None = None) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= (most or value):
        allowed = "1 or more" if most is None else f"from 1 to {most}"
        hint = 'num_proc="auto" is one for each GPU of the pod' if name == "num_proc" else None
        raise SpecError(f"{name} is {value!r}; it must be a whole number, {allowed}", hint=hint)
    return value


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in SUPERVISOR_OPTIONS:
            continue
        suggestion = hints.hint("distribute", name)
        suggestion = suggestion or did_you_mean(name, [*ARGUMENTS, *SUPERVISOR_OPTIONS])
        if suggestion:
            raise SpecError(f"distribute() has no {name!r}", hint=suggestion)
    unfit_options = []
    for name, value in options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            unfit_options.append(f"{name}={value!r}")
    if unfit_options:
        raise SpecError(
            f"distribute() takes values that JSON can carry, not {', '.join(unfit_options)}"
        )
    number = options.get("num_proc", options.get("num_processes"))
    if number != "auto":
        _whole_number("num_proc", number, MOST_PROCESSES)
    for name in ("tree_fanout", "max_threads_per_proc"):
        _whole_number(name, options.get(name))
    port = _whole_number("port", options.get("port"))
    if port is not None and (port > LAST_PORT or port == AGENT_PORT):
        raise SpecError(
            f"port is {port}; it must be between 1 and {LAST_PORT}, and not {AGENT_PORT}, where "
            "pods answer",
            hint="without port= the framework's own is taken, or one that is free",
        )
