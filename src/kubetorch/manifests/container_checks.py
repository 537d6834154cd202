"""Checks of containers that a cluster would make: text values of variables, possible amounts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests.workload_manifest import WorkloadManifest
from kubetorch.specs import quantity

_AMOUNT_HINT = 'for example "512Mi", "2Gi" or "1G" of memory, "500m" or 2 of cpu'


def check_containers(workload: WorkloadManifest) -> None:
    for template in workload.templates:
        for section in ("initContainers", "containers"):
            for container in template.spec.get(section) or ():
                where = f"the container {container.get('name', '')!r}"
                _check_variables(container, where)
                _check_resources(container, where)


def _check_variables(container: Mapping[str, Any], where: str) -> None:
    for variable in container.get("env") or ():
        name, value = variable.get("name"), variable.get("value")
        if not isinstance(name, str) or not name:
            raise SpecError(f"{where} has a variable with the name {name!r}; it must be text")
        if value is not None and not isinstance(value, str):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            raise SpecError(
                f"{where} has the variable {name!r} with the value {value!r}, which is no text",
                hint=f'write value: "{text}"; a cluster takes text alone',
            )
        if value and variable.get("valueFrom"):
            raise SpecError(
                f"{where} has the variable {name!r} with both value and valueFrom",
                hint="leave one of them out",
            )


def _check_resources(container: Mapping[str, Any], where: str) -> None:
    resources = container.get("resources") or {}
    limits, requests = (resources.get(section) or {} for section in ("limits", "requests"))
    for section, amounts in (("limits", limits), ("requests", requests)):
        for name, value in amounts.items():
            parsed = None if isinstance(value, bool) else quantity.parse(value)
            if parsed is None:
                raise SpecError(
                    f"{where} has resources.{section}.{name} {value!r}, which is not a Kubernetes "
                    "quantity",
                    hint=quantity.suggestion(str(value), _AMOUNT_HINT),
                )
    for name in requests.keys() & limits.keys():
        request, limit = quantity.parse(requests[name]), quantity.parse(limits[name])
        assert request is not None
        assert limit is not None
        if request > limit or ("/" in name and request != limit):
            relation = "other than" if "/" in name else "above"
            raise SpecError(
                f"{where} asks for {name} {requests[name]}, {relation} its limit {limits[name]}",
                hint=f"set resources.limits.{name} in the manifest or in service_template, or ask "
                "for as much",
            )
