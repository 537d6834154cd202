"""The variables of the container."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, items, named
from kubetorch.specs.app import AppSpec
from kubetorch.specs.compute import ComputeSpec, Pairs
from kubetorch.specs.logging import LEVELS, LoggingConfig

LOG_LEVEL = "KT_LOG_LEVEL"
APP_PORT = "KT_APP_PORT"
APP_HEALTH_CHECK = "KT_APP_HEALTHCHECK"

_ENV = "https://kubernetes.io/docs/tasks/inject-data-application/define-environment-variable-container/"


def _variables(place: Place) -> Iterable[dict[str, Any]]:
    """Those with a value of their own, not one from elsewhere."""
    found = place.container.get("env") or ()
    return (one for one in found if "valueFrom" not in one)


def _read_variables(place: Place) -> Pairs | None:
    found = ((one["name"], str(one.get("value", ""))) for one in _variables(place))
    return tuple(one for one in found if one[0] != LOG_LEVEL) or None


def _set(place: Place, name: str, value: str) -> None:
    """Set a variable; one that is there keeps its place in the order."""
    found = items(place.container, "env")
    there = named(found, name)
    if there is None:
        found.append({"name": name, "value": value})
    elif there.get("value") != value:
        there.pop("valueFrom", None)
        there["value"] = value


def _write_variables(place: Place, compute: ComputeSpec) -> None:
    # By name: the order in which a program says them is no reason to replace pods.
    for name, value in sorted(compute.env_vars):
        if not mentions_itself(name, value):
            _set(place, name, value)


def mentions_itself(name: str, value: str) -> bool:
    """Whether a value is made of the variable's own, as `$PATH:/opt/bin` is.

    Only who starts a worker can expand that: set for the container, it would hide what the image
    says, and the agent's own start would break on such a `PATH`.
    """
    return re.search(rf"\$(?:{re.escape(name)}\b|\{{{re.escape(name)}\}})", value) is not None


def _read_level(place: Place) -> LoggingConfig | None:
    there = named(list(_variables(place)), LOG_LEVEL)
    level = str(there.get("value", "")).lower() if there is not None else None
    return next((LoggingConfig(level=known) for known in LEVELS if known == level), None)


def _write_level(place: Place, compute: ComputeSpec) -> None:
    if LOG_LEVEL not in dict(compute.env_vars):
        _set(place, LOG_LEVEL, compute.logging.level.upper())


def write_app(place: Place, app: AppSpec) -> None:
    """Say where the app listens."""
    if app.port is not None:
        _set(place, APP_PORT, str(app.port))
    if app.health_check is not None:
        _set(place, APP_HEALTH_CHECK, app.health_check)


def fill(place: Place, compute: ComputeSpec) -> None:
    """Say the level of logs where nobody has."""
    if named(place.container.get("env") or [], LOG_LEVEL) is None:
        _write_level(place, compute)


PARAMETERS = (
    Parameter(
        "env_vars",
        "C.env",
        _read_variables,
        _write_variables,
        "`$NAME` in a value is expanded when a worker starts, not by Kubernetes; a variable that "
        "mentions itself, such as `$PATH:/opt/bin`, is told to the workers alone",
        _ENV,
    ),
    Parameter(
        "logging",
        "C.env: KT_LOG_LEVEL",
        _read_level,
        _write_level,
        "only the level, in capitals, unless `env_vars` has that variable",
        _ENV,
    ),
)
