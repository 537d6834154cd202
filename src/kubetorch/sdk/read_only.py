"""Dictionaries and lists that `kt.Compute` shows: read-only copies, which refuse changes.

They are equal to plain ones, JSON and YAML write them as plain ones, and a copy or a pickle of one
is plain, and can be changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from kubetorch.errors import SpecError

ShownT = TypeVar("ShownT")
_MANIFEST = (
    "each parameter is an attribute (compute.cpus = 2); compute.pod_spec = {...} replaces what the "
    "pods are, and compute.service_template = {...} is laid over the whole"
)
_LABELS, _ANNOTATIONS = "compute.add_labels({...})", "compute.add_annotations({...})"
_SECRETS = "compute.secrets = [...]"
#: The statement that changes an attribute, by attribute, where assigning to it does not.
_SETTERS = {
    "manifest": _MANIFEST,
    "raycluster": _MANIFEST,
    "pod_template": "compute.pod_spec = {...}, and compute.add_pod_template_labels({...})",
    "pod_spec": "change a copy (copy.deepcopy), and set it: compute.pod_spec = {...}",
    "resources": "compute.cpus = 2, compute.memory = '4Gi', compute.gpus = 1",
    "labels": _LABELS,
    "user_labels": _LABELS,
    "annotations": _ANNOTATIONS,
    "user_annotations": _ANNOTATIONS,
    "gpu_annotations": "compute.gpu_memory = '4Gi'",
    "env_vars": "compute.add_env_vars({...})",
    "tolerations": "compute.add_tolerations([...])",
    "volume_mounts": "compute.volumes = [...]",
    "secret_env_vars": _SECRETS,
    "secret_volumes": _SECRETS,
}


class ReadOnlyDict(dict[str, Any]):
    """A dictionary that an attribute of a `kt.Compute` shows."""

    __slots__ = ("attribute",)
    attribute: str

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class ReadOnlyList(list[Any]):
    """A list that an attribute of a `kt.Compute` shows."""

    __slots__ = ("attribute",)
    attribute: str

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return list, (list(self),)


def _refuse(self: ReadOnlyDict | ReadOnlyList, *_: object, **__: object) -> NoReturn:
    name = self.attribute
    raise SpecError(
        f"what compute.{name} shows is a copy: to change it would change no service",
        hint=_SETTERS.get(name, f"set it: compute.{name} = ..."),
    )


_MUTATORS = ("__setitem__", "__delitem__", "clear", "pop")
for _name in (*_MUTATORS, "__ior__", "popitem", "setdefault", "update"):
    setattr(ReadOnlyDict, _name, _refuse)
_LIST_MUTATORS = ("__iadd__", "__imul__", "append", "extend", "insert", "remove", "reverse", "sort")
for _name in (*_MUTATORS, *_LIST_MUTATORS):
    setattr(ReadOnlyList, _name, _refuse)


def shown(attribute: str, value: ShownT) -> ShownT:
    """The value of an attribute; a dictionary or list in a form that cannot be changed."""
    if not isinstance(value, (dict, list)):
        return value
    _teach_yaml()
    read_only_value: ShownT = _read_only(value, attribute)
    return read_only_value


def _read_only(value: Any, attribute: str) -> Any:  # noqa: ANN401  # of the same type
    read_only_copy: ReadOnlyDict | ReadOnlyList
    if isinstance(value, dict):
        read_only_copy = ReadOnlyDict(
            (key, _read_only(member, attribute)) for key, member in value.items()
        )
    elif isinstance(value, list):
        read_only_copy = ReadOnlyList(_read_only(member, attribute) for member in value)
    else:
        return value
    read_only_copy.attribute = attribute
    return read_only_copy


@functools.cache
def _teach_yaml() -> None:
    """Make YAML write these types as plain ones: its representers ignore base classes."""
    try:
        from yaml.representer import SafeRepresenter  # noqa: PLC0415  # 13 ms
    except ImportError:  # the interpreter of a user, in a pod
        return
    representer: Any
    for representer in (SafeRepresenter, *_subclasses(SafeRepresenter)):
        if "yaml_representers" in vars(representer):  # else it has those of its base
            representer.add_representer(ReadOnlyDict, SafeRepresenter.represent_dict)
            representer.add_representer(ReadOnlyList, SafeRepresenter.represent_list)


def _subclasses(kind: type[Any]) -> Iterable[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
