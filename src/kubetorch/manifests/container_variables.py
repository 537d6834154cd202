"""The variables of a container: their sources in its manifest, and their values on a machine.

Kubernetes takes `envFrom` first, then `env` in its order. `$(NAME)` in a value is replaced by an
earlier variable, `$$` stands for `$`, and references to unknown variables stay:
https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from kubetorch.errors import SpecError
from kubetorch.specs import quantity

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_RESOURCE = re.compile(r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-\w+)", re.ASCII)
_SOURCES = ("fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef")


class TextVariable(msgspec.Struct, frozen=True):
    name: str
    text: str


class FieldVariable(msgspec.Struct, frozen=True):
    """A field of the pod's own object."""

    name: str
    path: str


class ResourceVariable(msgspec.Struct, frozen=True):
    """An amount of a container's resources, in units of the divisor, rounded up.

    `amount` is `None` where the manifest has none: the limit is then the node's amount.
    """

    name: str
    resource: str
    divisor: Fraction
    amount: Fraction | None


class SecretVariables(msgspec.Struct, frozen=True):
    secret: str
    variable: str | None = None
    key: str = ""
    prefix: str = ""
    optional: bool = False


class ConfigVariables(msgspec.Struct, frozen=True):
    """Variables from a config map; only a cluster has config maps."""

    config_map: str
    variable: str | None = None
    optional: bool = False


Variable = TextVariable | FieldVariable | ResourceVariable | SecretVariables | ConfigVariables


def expand_references(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does."""

    def value(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def read_variables(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[Variable]:
    """The variables of a container, in the order in which they are set."""
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix") or ""
        secret, config_map = source.get("secretRef"), source.get("configMapRef")
        if secret is not None:
            optional = bool(secret.get("optional"))
            yield SecretVariables(secret["name"], prefix=prefix, optional=optional)
        elif config_map is not None:
            yield ConfigVariables(config_map["name"], optional=bool(config_map.get("optional")))
    for variable in container.get("env") or ():
        yield _read_variable(variable, pod, container)


def _read_variable(
    variable: Mapping[str, Any], pod: Mapping[str, Any], container: Mapping[str, Any]
) -> Variable:
    name, source = str(variable["name"]), variable.get("valueFrom") or {}
    if not source:
        value = variable.get("value")
        return TextVariable(name, "" if value is None else str(value))
    if "fieldRef" in source:
        return FieldVariable(name, str(source["fieldRef"]["fieldPath"]))
    if "resourceFieldRef" in source:
        return _read_resource(name, source["resourceFieldRef"], pod, container)
    for kind in ("secretKeyRef", "configMapKeyRef"):
        ref = source.get(kind)
        if ref is not None:
            optional = bool(ref.get("optional"))
            if kind == "secretKeyRef":
                return SecretVariables(ref["name"], name, ref["key"], optional=optional)
            return ConfigVariables(ref["name"], name, optional=optional)
    raise SpecError(
        f"env[{name!r}].valueFrom has {', '.join(source)}, which is not known",
        hint=f"one of {', '.join(_SOURCES)}",
    )


def _read_resource(
    name: str, ref: Mapping[str, Any], pod: Mapping[str, Any], container: Mapping[str, Any]
) -> ResourceVariable:
    resource, container_name = str(ref["resource"]), ref.get("containerName")
    match = _RESOURCE.fullmatch(resource)
    divisor = quantity.parse(ref.get("divisor") or "1")
    if match is None or divisor is None:
        raise SpecError(
            f"env[{name!r}].valueFrom.resourceFieldRef is {dict(ref)!r}, which a cluster refuses",
            hint='for example {"resource": "limits.memory", "divisor": "1Mi"}',
        )
    if container_name is not None and container_name != container.get("name"):
        containers = [*(pod.get("containers") or ()), *(pod.get("initContainers") or ())]
        named_container = next(
            (candidate for candidate in containers if candidate.get("name") == container_name), None
        )
        if named_container is None:
            raise SpecError(
                f"env[{name!r}] names the container {container_name!r}, which there is not"
            )
        container = named_container
    resources = container.get("resources") or {}
    amounts = [(resources.get(section) or {}).get(match[2]) for section in (match[1], "limits")]
    # Without a request, Kubernetes requests the limit.
    amount = next(
        (
            quantity.parse(written_amount)
            for written_amount in amounts
            if written_amount is not None
        ),
        None,
    )
    if amount is None and match[1] == "requests":
        amount = Fraction(0)
    return ResourceVariable(name, match[2], divisor or Fraction(1), amount)


class PodFacts(msgspec.Struct, frozen=True):
    """The pod and its node, as far as variables can ask for them.

    Attributes:
        fields: Values by field path, such as `metadata.name`.
        labels, annotations: Those of the pod.
        node: The node's amounts, by resource.
    """

    fields: Mapping[str, str]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node: Mapping[str, int]

    def field(self, variable: FieldVariable) -> str:
        match = _KEYED.fullmatch(variable.path)
        if match is not None:
            pairs = self.labels if match[1] == "labels" else self.annotations
            return pairs.get(match[2], "")
        if variable.path not in self.fields:
            raise SpecError(
                f"env[{variable.name!r}].valueFrom.fieldRef names {variable.path!r}, which no "
                "variable can have",
                hint=f"one of {', '.join(self.fields)}, metadata.labels['KEY'] and "
                "metadata.annotations['KEY']",
            )
        return self.fields[variable.path]

    def amount(self, variable: ResourceVariable) -> str:
        amount = variable.amount
        if amount is None:
            amount = Fraction(self.node.get(variable.resource, 0))
        return str(math.ceil(amount / variable.divisor))
