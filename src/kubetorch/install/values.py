"""Values of the chart: merged as helm merges them, checked, and read from `--set`. Pure.

The check reads `values.schema.json`, which helm reads too. A keyword of JSON Schema that is unknown
here is an error rather than a check that is left out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kubetorch.errors import ConfigError, InstallError, did_you_mean

Values = dict[str, Any]

_NUMBER = re.compile(r"0|-?[1-9]\d*")
_LITERALS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
#: A comma, dot, brace or equals sign that is not escaped.
_UNESCAPED_MARKS = {mark: re.compile(rf"(?<!\\){re.escape(mark)}") for mark in ",.="}
#: A key with the indexes of items: `tolerations[0]`.
_SEGMENT = re.compile(r"(?P<key>(?:\\.|[^\\\[\]])+)(?P<indexes>(?:\[\d{1,9}\])*)")
#: As in helm: an index makes all items before it.
_INDEX_LIMIT = 65536


def merged(
    lower: Mapping[str, Any], upper: Mapping[str, Any], *, keeps_none: bool = False
) -> Values:
    """Values over values: mappings are merged, `None` removes, all else replaces."""
    merged_values = {key: copy.deepcopy(value) for key, value in lower.items()}
    for key, value in upper.items():
        below = merged_values.get(key)
        if value is None and not keeps_none:
            merged_values.pop(key, None)
        elif isinstance(value, Mapping):
            # A null in a mapping that replaces another value removes nothing and is left out too.
            below = below if isinstance(below, Mapping) else {}
            merged_values[key] = merged(below, value, keeps_none=keeps_none)
        else:
            merged_values[key] = copy.deepcopy(value)
    return merged_values


def layered(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Values:
    """The user's values over earlier ones: as `merged`, but a `None` stays, to remove a default."""
    return merged(lower, upper, keeps_none=True)


def parse_set(text: str, below: Mapping[str, Any] | None = None) -> Values:
    r"""Parse a `--set` argument, over values below: `a.b=1,c={x,y},d[0].e=2`; `\` escapes a mark.

    As with helm, an index changes one item of a list below; items left out before it are null.
    """
    assigned_values = copy.deepcopy(dict(below or {}))
    for part in _assignments(text):
        path, *assigned = _UNESCAPED_MARKS["="].split(part, maxsplit=1)
        if not assigned or not path:
            raise ConfigError(
                f"--set {text!r} cannot be read: {part!r} is no key=value",
                hint="for example --set replicas=2,image.pullPolicy=Always",
            )
        steps = _steps(path)
        if steps is None:
            raise ConfigError(
                f"--set {text!r} cannot be read: {path!r} is no path of keys",
                hint="for example tolerations[0].operator=Exists; an index is below "
                f"{_INDEX_LIMIT}",
            )
        changed = _assigned_at(assigned_values, steps, _value(assigned[0]))
        assert isinstance(changed, dict)  # the first step is a key
        assigned_values = changed
    return assigned_values


def _steps(path: str) -> list[str | int] | None:
    """The keys and indexes of a path; `None` if it cannot be read."""
    steps: list[str | int] = []
    for segment in _UNESCAPED_MARKS["."].split(path):
        match = _SEGMENT.fullmatch(segment)
        indexes = [int(index) for index in re.findall(r"\d+", match["indexes"])] if match else []
        if match is None or any(index >= _INDEX_LIMIT for index in indexes):
            return None
        steps += [_unescaped(match["key"]), *indexes]
    return steps


def _assigned_at(value: object, steps: list[str | int], assigned: object) -> object:
    """A value with another value assigned at the end of the steps; missing parts are made."""
    if not steps:
        return assigned
    step, *further = steps
    if isinstance(step, int):
        items = list(value) if isinstance(value, list) else []
        items += [None] * (step + 1 - len(items))
        items[step] = _assigned_at(items[step], further, assigned)
        return items
    mapping = dict(value) if isinstance(value, Mapping) else {}
    mapping[step] = _assigned_at(mapping.get(step), further, assigned)
    return mapping


def _assignments(text: str) -> list[str]:
    """The assignments: split at commas, but for commas in braces."""
    parts: list[str] = []
    for piece in _UNESCAPED_MARKS[","].split(text):
        if parts and "={" in parts[-1] and not parts[-1].endswith("}"):
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def _value(text: str) -> object:
    if text.startswith("{") and text.endswith("}"):
        inside = text[1:-1]
        return [_value(item) for item in _UNESCAPED_MARKS[","].split(inside)] if inside else []
    if text in _LITERALS:
        return _LITERALS[text]
    return int(text) if _NUMBER.fullmatch(text) else _unescaped(text)


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


Schema = Mapping[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}
_KNOWN_WORDS = {
    "$schema",
    "type",
    "enum",
    "required",
    "properties",
    "additionalProperties",
    "items",
}
_KNOWN_WORDS |= {"pattern", "minLength", "minimum", "maximum"}


def faults(schema: Schema, value: object, path: str = "") -> list[str]:
    """The faults of a value, each with its path; empty if there are none."""
    if unknown := set(schema) - _KNOWN_WORDS:
        raise InstallError(f"values.schema.json has {unknown}, which is not known here")
    type_name = schema.get("type")
    is_of_type = type_name is None or isinstance(value, _TYPES[type_name])
    if not is_of_type or (isinstance(value, bool) and type_name not in (None, "boolean")):
        return [f"{path or 'values'} is {value!r}; it must be of type {type_name}"]
    problems = []
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"it must be one of {', '.join(map(str, schema['enum']))}")
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        problems.append("it must be longer")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        problems.append(f"it must match {schema['pattern']}")
    if isinstance(value, int) and value < schema.get("minimum", value):
        problems.append(f"it must be at least {schema['minimum']}")
    if isinstance(value, int) and value > schema.get("maximum", value):
        problems.append(f"it must be at most {schema['maximum']}")
    wrong = [f"{path} is {value!r}; {problem}" for problem in problems]
    if isinstance(value, dict):
        return wrong + _faults_of_mapping(schema, value, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            wrong += faults(schema.get("items", {}), item, f"{path}[{index}]")
    return wrong


def _faults_of_mapping(schema: Schema, value: Values, path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    properties: Schema = schema.get("properties", {})
    additional = schema.get("additionalProperties", True)
    required = schema.get("required", ())
    mapping_faults = [f"{prefix}{name} is missing" for name in required if name not in value]
    for name, item in value.items():
        if name in properties:
            mapping_faults += faults(properties[name], item, f"{prefix}{name}")
        elif additional is False:
            meant = did_you_mean(str(name), properties, likeness=0.6)
            meant = meant or f"the values are {', '.join(properties)}"
            mapping_faults.append(f"{prefix}{name} is not a value of the chart; {meant}")
        elif isinstance(additional, Mapping):
            mapping_faults += faults(additional, item, f"{prefix}{name}")
    return mapping_faults


# https://github.com/distribution/reference: a registry may have a port, a path has no capitals.
_REFERENCE = re.compile(
    r"(?P<repository>(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


def parse(reference: str) -> dict[str, str]:
    """The `repository`, `tag` and `digest` of the reference of an image."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{reference!r} is no reference of a container image",
            hint="for example ghcr.io/kubetorch/kubetorch:0.6.0, or @sha256:… in place of the tag",
        )
    parts = {key: value or "" for key, value in match.groupdict().items()}
    if not parts["tag"] and not parts["digest"]:
        parts["tag"] = "latest"
    return parts


def image_reference(image: Mapping[str, Any], version: str) -> str:
    """The reference of an image, as the chart makes it of the image's values."""
    if digest := image.get("digest"):
        return f"{image['repository']}@{digest}"
    return f"{image['repository']}:{image.get('tag') or version}"


# --------------------------------------------------------------------- values of the chart of 0.5

_NO_PROXY = "no proxy stands between clients and the controller"
_NO_PROMETHEUS = "the chart installs no Prometheus, and nothing needs one"
_NO_LOG_STORE = "logs come from the pods themselves"
_IDLE = "the controller ends idle services itself, without Prometheus"
_ELSEWHERE = "install it with its own chart"

#: By the path of an earlier value or section: the paths of the values in its place.
SUCCESSORS: Mapping[str, tuple[str, ...]] = {
    "kubetorchConfig.deployment_namespaces": ("watchNamespaces",),
    "kubetorchConfig.serviceAccountAnnotations": ("workloads.serviceAccountAnnotations",),
    "dataStore.cpu": ("resources.requests.cpu",),
    "dataStore.memory": ("resources.requests.memory", "resources.limits.memory"),
    "dataStore.ephemeralStorage": ("blobs.emptyDir.sizeLimit",),
    "dataStore.storage.size": ("blobs.persistence.size", "blobs.persistence.enabled"),
    "dataStore.storage.storageClassName": (
        "blobs.persistence.storageClassName",
        "blobs.persistence.enabled",
    ),
    "dataStore.tolerations": ("tolerations",),
    "dataStore.affinity": ("affinity",),
    "nginxProxy.tolerations": ("tolerations",),
    "nginxProxy.affinity": ("affinity",),
    "metrics.enabled": ("serviceMonitor.enabled",),
    "metrics.prometheus.scrapeInterval": ("serviceMonitor.interval",),
    "kubetorchController.tolerations": ("tolerations",),
    "kubetorchController.affinity": ("affinity",),
}
#: By the path of an earlier value or section without a successor: why it needs none.
WITHOUT_SUCCESSOR: Mapping[str, str] = {
    "kubetorchConfig": "docs/install.md has the values of today",
    "kubetorchConfig.otelEnabled": "the chart installs no collector of OpenTelemetry",
    "dataStore": "the controller keeps code and arguments itself, see blobs",
    "nginxProxy": _NO_PROXY,
    "metrics": _NO_PROMETHEUS,
    "logStreaming": _NO_LOG_STORE,
    "opentelemetry-collector": _ELSEWHERE,
    "nvidia-device-plugin": _ELSEWHERE,
    "dcgm-exporter": _ELSEWHERE,
    "kubetorchController": "docs/install.md has the values of today",
    "kubetorchController.nginx": _NO_PROXY,
    "kubetorchController.ttl": _IDLE,
}
EARLIER_SECTIONS = frozenset(path.partition(".")[0] for path in (*SUCCESSORS, *WITHOUT_SUCCESSOR))


def earlier_faults(user_values: Mapping[str, Any]) -> list[str]:
    """A line for each value of the earlier chart: its successor, or that of its section."""
    earlier = _paths({key: user_values[key] for key in user_values if key in EARLIER_SECTIONS})
    return [f"{path} was a value of 0.5{_outcome(path)}" for path in earlier]


def _outcome(path: str) -> str:
    if successors := SUCCESSORS.get(path):
        return f": use {' and '.join(successors)}"
    section = path
    while section not in WITHOUT_SUCCESSOR:
        section = section.rpartition(".")[0]
    return f", and has no successor: {WITHOUT_SUCCESSOR[section]}"


def _paths(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of the values, down to those that the table has; `None` takes a value away."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if value is None:
            continue
        if isinstance(value, Mapping) and value and path not in SUCCESSORS:
            yield from _paths(value, f"{path}.")
        else:
            yield path
