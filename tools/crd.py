"""`python -m tools.crd`: the definition of `KubetorchWorkload`.

Its schema comes from the classes of the object's fields, and its descriptions from their
docstrings, so that no new field is forgotten: the API server would drop such a field. The output is
a template of the chart, `src/kubetorch/chart/templates/crd.yaml`; a contract test compares the two.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from kubetorch.controller.cluster import resource
from kubetorch.controller.cluster.resource import WORKLOADS
from kubetorch.k8s.resources import Object
from kubetorch.specs.image import STEPS, Step
from kubetorch.specs.workload import WorkloadSpec

_TEMPLATE = """\
{{{{- /* Made by `python -m tools.crd`. */}}}}
{{{{- if .Values.crd.create }}}}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: {name}
  labels:
    {{{{- include "kubetorch.labels" . | nindent 4 }}}}
  annotations:
    # Whoever has workloads loses them with it, so helm itself never deletes it.
    helm.sh/resource-policy: keep
{spec}{{{{- end }}}}
"""
_SCALARS = {str: "string", bool: "boolean", int: "integer", float: "number"}
#: Name, type and path of the columns of `kubectl get`; those with a priority only with `-o wide`.
_COLUMNS = (
    ("Status", "string", ".status.phase", 0),
    ("Ready", "string", ".status.ready", 0),
    ("Reason", "string", ".status.reason", 0),
    ("Kind", "string", ".status.kind", 0),
    ("Generation", "integer", ".spec.generation", 0),
    ("TTL", "string", ".spec.compute.inactivityTtl", 0),
    ("Creator", "string", ".spec.username", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Callable", "string", ".spec.callable.name", 1),
    ("Last active", "date", ".status.lastActive", 1),
    ("Message", "string", ".status.conditions[?(@.type=='Ready')].message", 1),
)


def definition() -> Object:
    """The CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": str(WORKLOADS)},
        "spec": {
            "group": WORKLOADS.group,
            "scope": "Namespaced",
            "names": {
                "kind": WORKLOADS.kind,
                "listKind": f"{WORKLOADS.kind}List",
                "plural": WORKLOADS.plural,
                "singular": WORKLOADS.kind.lower(),
                "shortNames": ["ktw", "ktworkload", "ktworkloads"],
                "categories": ["all", "kubetorch"],
            },
            "versions": [
                {
                    "name": WORKLOADS.version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
                    "schema": {"openAPIV3Schema": _schema()},
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, priority: int) -> Object:
    column: Object = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": priority} if priority else column


def _schema() -> Object:
    return {
        "description": (
            "A workload of Kubetorch. The controller writes it: change a workload by deploying it "
            "again, delete one by deleting this. What is edited by hand is put right."
        ),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec(),
            "status": _status(),
        },
    }


def _spec() -> Object:
    generation = _object(WorkloadSpec)
    properties = generation["properties"]
    for name in ("namespace", "name"):
        del properties[name]
        generation["required"].remove(name)
    properties["generation"] = {
        "type": "integer",
        "minimum": 1,
        "description": "Number of the generation.",
    }
    generation["required"].append("generation")
    previous = {
        "type": "array",
        "description": "Earlier generations that are kept, since pods may go back to them.",
        "items": _without_descriptions(generation),
    }
    deployed = {
        "type": "string",
        "format": "date-time",
        "description": "When it was deployed last.",
    }
    return {
        **generation,
        "description": (
            "The generation that is wanted. Code and constructor arguments are named by their "
            "digests; values of secrets are not here."
        ),
        "properties": {**properties, "deployedAt": deployed, "previous": previous},
    }


def _status() -> Object:
    number, text, moment = {"type": "integer"}, {"type": "string"}, _moment()
    condition = {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            **dict.fromkeys(("type", "status", "reason", "message"), text),
            "lastTransitionTime": moment,
        },
    }
    described: dict[str, tuple[Object, str]] = {
        "phase": (text, "The word of kt list: Ready, Creating, Scaling, Failed, ...."),
        "ready": (text, "Pods that serve the wanted generation, of those that there should be."),
        "readyPods": (number, "Pods that serve the wanted generation."),
        "pods": (number, "Pods that there should be."),
        "reason": (text, "Kind of the failure that keeps calls from being served."),
        "kind": (text, "Kind of the object that its pods belong to."),
        "ttl": (text, "Idle time after which it is torn down."),
        "generation": (number, "The generation that this status is of."),
        "good": (number, "The last generation that all pods served; 0 when there was none."),
        "epoch": (number, "Number of the last change of its members."),
        "worlds": (text, "The pods that a distributed service runs on, packed."),
        "pool": (text, "Ordinals of the pods that a selector found at the last deploy."),
        "scaling": (text, "Number of pods that the load decides on, as the controller stores it."),
        "lastActive": (moment, "When its last call was, to a minute."),
    }
    return {
        "type": "object",
        "description": "What became of it.",
        "properties": {
            **{
                name: {**kind, "description": description}
                for name, (kind, description) in described.items()
            },
            "failure": {
                "type": "object",
                "description": "Why the wanted generation was given up.",
                "x-kubernetes-preserve-unknown-fields": True,
            },
            "grants": _grants(),
            "conditions": {
                "type": "array",
                "description": "Ready: whether calls are served, and why not.",
                "items": condition,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }


def _grants() -> Object:
    """The schema of the users who deployed, with the secrets and volumes that they named."""
    text: Object = {"type": "string"}
    texts: Object = {"type": "array", "items": text}
    named = {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "identity"],
            "properties": {"name": text, "identity": text},
        },
    }
    user = {
        "type": "object",
        "description": "Who deployed it, as TokenReview said.",
        "properties": {
            "username": text,
            "uid": text,
            "groups": texts,
            "extra": {"type": "object", "additionalProperties": texts},
        },
    }
    return {
        "type": "array",
        "description": (
            "Who deployed each generation that is kept, and the secrets and volumes that it named, "
            "with digests of their uids: other ones of these names need a right of that user."
        ),
        "items": {
            "type": "object",
            "required": ["generation"],
            "properties": {
                "generation": {"type": "integer"},
                "spec": {"type": "string", "description": "Digest of what was deployed."},
                "user": user,
                "secrets": named,
                "volumes": named,
                "creator": {
                    "type": "object",
                    "description": "For whom: a pod deploys for who deployed it.",
                    "properties": {"user": text, "username": text},
                },
            },
        },
    }


def _moment() -> Object:
    return {"type": "string", "format": "date-time"}


def _of(kind: Any) -> Object:  # noqa: ANN401  # a type, which may be a union
    """The schema of a type that fields of specs have."""
    union_members = resource.union_members(kind)
    if len(union_members) > 1 and set(union_members) != {int, float}:
        # A schema that is structural cannot say that something is one of two.
        return {"x-kubernetes-preserve-unknown-fields": True}
    arm = float if len(union_members) > 1 else union_members[0]
    if (value := resource.value_of_pairs(arm)) is not None:
        pair = {"name": {"type": "string"}, "value": {"type": _SCALARS[value]}}
        item = {"type": "object", "required": ["name", "value"], "properties": pair}
        return {"type": "array", "items": item}
    if get_origin(arm) is tuple:
        return {"type": "array", "items": _of(get_args(arm)[0])}
    if get_origin(arm) is Literal:
        return {"type": "string"}
    if arm is Step:
        return _steps()
    return _object(arm) if dataclasses.is_dataclass(arm) else {"type": _SCALARS[arm]}


def _object(kind: type[Any]) -> Object:
    """The schema of a class."""
    hints, descriptions = get_type_hints(kind), _descriptions(kind)
    properties, required = {}, []
    for field in dataclasses.fields(kind):
        name = resource.key(field.name)
        properties[name] = _of(hints[field.name])
        if field.name.lstrip("_") in descriptions:
            properties[name]["description"] = descriptions[field.name.lstrip("_")]
        is_given = resource.default_of(field) is not dataclasses.MISSING
        if not is_given and type(None) not in get_args(hints[field.name]):
            required.append(name)
    schema: Object = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _steps() -> Object:
    """The schema of a step of any class: its fields identify the class."""
    properties: Object = {}
    for kind in STEPS.values():
        properties |= _object(kind)["properties"]
    return {"type": "object", "properties": properties}


def _descriptions(kind: type[Any]) -> dict[str, str]:
    """The descriptions of the fields of a class, from its docstring."""
    descriptions: dict[str, str] = {}
    section = re.search(
        r"\n(?:Attributes|Args):\n(.*?)(?:\n\n|\Z)", inspect.getdoc(kind) or "", re.S
    )
    names: list[str] = []
    for line in (section[1] if section else "").splitlines():
        start = re.match(r"    (\w[\w, ]*): (.*)", line)
        if start:
            names = start[1].split(", ")
            descriptions |= dict.fromkeys(names, start[2])
        else:
            descriptions |= {name: f"{descriptions[name]} {line.strip()}" for name in names}
    return {name: text.replace("`", "") for name, text in descriptions.items()}


def _without_descriptions(schema: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(schema, list):
        return [_without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_descriptions(value)
        for name, value in schema.items()
        if name != "description" or not isinstance(value, str)
    }


class _Plain(yaml.SafeDumper):
    """Writes a repeated value again, without YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def template() -> str:
    """The definition as a template of the chart."""
    spec = yaml.dump({"spec": definition()["spec"]}, Dumper=_Plain, sort_keys=False, width=100)
    return _TEMPLATE.format(name=WORKLOADS, spec=spec)


if __name__ == "__main__":
    sys.stdout.write(template())
