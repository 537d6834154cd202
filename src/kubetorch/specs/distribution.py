"""How one call runs on many pods: the frozen form of `.distribute()`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.lib.records import record
from kubetorch.specs.spelling import nearest

FRAMEWORKS = ("spmd", "pytorch", "ray", "monarch", "jax", "tensorflow")
ALIASES = {"tf": "tensorflow", "torch": "pytorch"}
#: A single controller runs the callable; the call returns one value.
SINGLE_CONTROLLER = ("ray", "monarch")

#: The arguments of `.distribute()`, in order.
ARGUMENTS = ("distribution_type", "workers", "quorum_timeout", "quorum_workers", "monitor_members")
#: Keywords that the supervisors know; others are the framework's and pass through.
KNOWN = ("num_proc", "port", "tree_fanout", "tree_minimum", "max_threads_per_proc", "restart_procs")


@record
class DistributionSpec:
    """A distributed service.

    Attributes:
        distribution_type: One of `FRAMEWORKS`.
        workers: Number of pods; `None` keeps the replicas that the compute has.
        quorum_timeout: Seconds to wait for `quorum_workers`.
        quorum_workers: Pods that must be there before a call starts.
        monitor_members: Whether a change of membership ends a running call.
        options: The framework's own, as JSON text of an object.
    """

    distribution_type: str = "spmd"
    workers: int | None = None
    quorum_timeout: int | None = None
    quorum_workers: int | None = None
    monitor_members: bool | None = None
    options: str = "{}"

    def config(self, *, replicas: int, launch_timeout: int) -> dict[str, Any]:
        """As 0.5.x programs read it from `Compute.distributed_config`."""
        workers = self.workers or replicas
        single = self.distribution_type in SINGLE_CONTROLLER
        monitor = self.monitor_members
        return {
            "distribution_type": self.distribution_type,
            "workers": workers,
            "quorum_timeout": self.quorum_timeout or launch_timeout,
            "quorum_workers": self.quorum_workers or workers,
            "monitor_members": not single if monitor is None else monitor,
            **json.loads(self.options),
        }


def parse(arguments: Mapping[str, Any]) -> tuple[DistributionSpec, list[str]]:
    """What the keywords of `.distribute()` mean, and warnings for the user.

    Raises:
        SpecError: An unknown framework, a value that is impossible or cannot travel, or a keyword
            that is a near miss of a known one.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    warnings = []
    extra = given.pop("distribution_args", {})
    if not isinstance(extra, Mapping):
        raise SpecError(f"distribution_args is {extra!r}; it must be a dict")
    for name, value in extra.items():
        if given.get(name, value) != value:
            raise SpecError(
                f"{name} is {given[name]!r}, and {value!r} in distribution_args", hint="say it once"
            )
    given = {**extra, **given}
    kind = _framework(given)
    if given.pop("scale_to_zero_grace_period", None) is not None:
        warnings.append(
            "distribute() ignores scale_to_zero_grace_period: distributed services do not scale "
            "to zero; inactivity_ttl= stops them when they are idle"
        )
    numbers = {
        name: _whole_number(name, given.pop(name, None))
        for name in ("workers", "quorum_timeout", "quorum_workers")
    }
    monitor = given.pop("monitor_members", None)
    if monitor is not None and not isinstance(monitor, bool):
        raise SpecError(f"monitor_members is {monitor!r}; it must be True or False")
    _check_options(given)
    spec = DistributionSpec(
        distribution_type=kind,
        monitor_members=monitor,
        options=json.dumps(given, sort_keys=True),
        **numbers,
    )
    return spec, warnings


def _framework(given: dict[str, Any]) -> str:
    names = {
        given.pop(key) for key in ("distribution_type", "framework", "distribution") if key in given
    }
    if len(names) > 1:
        raise SpecError(f"distribute() was given two frameworks: {sorted(map(str, names))}")
    name = names.pop() if names else "spmd"
    known = ALIASES.get(name, name) if isinstance(name, str) else name
    if known not in FRAMEWORKS:
        near = nearest(str(name).lower(), [*FRAMEWORKS, *ALIASES], likeness=0.5)
        hint = f"did you mean {near!r}?" if near else None
        raise SpecError(
            f"distribution_type {name!r} is not supported; supported are {', '.join(FRAMEWORKS)}",
            hint=hint,
        )
    return str(known)


def _whole_number(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{name} is {value!r}; it must be a whole number, 1 or more")
    return value


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        near = None if name in KNOWN else nearest(name, [*ARGUMENTS, *KNOWN])
        if near:
            raise SpecError(f"distribute() has no {name!r}", hint=f"did you mean {near}?")
    broken = []
    for name, value in options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            broken.append(f"{name}={value!r}")
    if broken:
        raise SpecError(f"distribute() takes values that JSON can carry, not {', '.join(broken)}")
    number = options.get("num_proc", options.get("num_processes"))
    if number is not None and number != "auto":
        _whole_number("num_proc", number)
