"""What parameters of `kt.Compute` may be that say which nodes pods run on.

Every function raises `SpecError` with the parameter, the value, and what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.sdk import parameters
from kubetorch.sdk.parameters import Pairs
from kubetorch.specs import quantity
from kubetorch.specs.compute import Toleration
from kubetorch.specs.spelling import nearest

_OPERATORS = ("Exists", "Equal")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
#: The words of Kubernetes, and the fields that they become.
_WORDS = {
    "key": "key",
    "operator": "operator",
    "value": "value",
    "effect": "effect",
    "tolerationSeconds": "seconds",
}
_EXAMPLE = '{"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}'


def gpus(value: object) -> str | None:
    """A number of whole GPUs; 0 is none."""
    text = value.strip() if isinstance(value, str) else value
    number = parameters.whole(text)
    if number is None or number < 0:
        raise SpecError(
            f"gpus is {value!r}; it must be a whole number, 0 or more", hint=_gpu_hint(text)
        )
    return str(number) if number else None


def _gpu_hint(value: object) -> str:
    kind, colon, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if colon and number.isdecimal():
        return f"did you mean gpus={number}, gpu_type={kind!r}?"
    if re.fullmatch(r"0?\.\d+", str(value)):
        return 'a part of one is asked for by its memory: gpu_memory="4Gi"'
    return "for example kt.Compute(gpus=1)"


def gpu_type(value: object) -> str:
    """A value of the node label for GPUs, or `key: value` of another."""
    hint = 'for example gpu_type="L4", or "cloud.google.com/gke-accelerator: nvidia-l4"'
    if not isinstance(value, str) or not value.strip():
        raise SpecError(f"gpu_type is {value!r}; it must be text", hint=hint)
    key, colon, last = value.partition(":")
    found = {key.strip(): last.strip()} if colon else {"product": value}
    if colon and not last.strip():
        raise SpecError(f"gpu_type is {value!r}; the value of the label is missing", hint=hint)
    try:
        parameters.labels(found, parameter="gpu_type")
    except SpecError as error:
        raise SpecError(
            f"gpu_type is {value!r}; it must be a value of a node's label, or `key: value`",
            hint=hint,
        ) from error
    return value


def gpu_memory(value: object) -> str:
    """Memory of a GPU."""
    return quantity.memory(value, parameter="gpu_memory")


def node_selector(value: object) -> Pairs:
    """Labels that a node must have."""
    return parameters.labels(value, parameter="node_selector")


def tolerations(value: object) -> tuple[Toleration, ...]:
    """Tolerations, each a dictionary in the words of Kubernetes."""
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise SpecError(
            f"tolerations is {value!r}; it must be a list of dictionaries",
            hint=f"for example kt.Compute(tolerations=[{_EXAMPLE}])",
        )
    return tuple(dict.fromkeys(_toleration(one) for one in value))


def _toleration(value: object) -> Toleration:
    if isinstance(value, Toleration):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(
            f"tolerations has {value!r}; each must be a dictionary", hint=f"for example {_EXAMPLE}"
        )
    found: dict[str, Any] = {}
    for word, text in value.items():
        if word not in _WORDS:
            near = nearest(str(word), _WORDS)
            raise SpecError(
                f"tolerations has {word!r} in {dict(value)!r}; there are {', '.join(_WORDS)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        # Text that is empty is the same as none.
        found[_WORDS[word]] = text if text != "" else None
    one = Toleration(**found)
    _check_toleration(one, dict(value))
    return one


def _check_toleration(one: Toleration, given: dict[str, Any]) -> None:
    def refuse(what: str, hint: str | None = None) -> SpecError:
        return SpecError(f"tolerations has {given!r}; {what}", hint=hint)

    for word in ("key", "operator", "value", "effect"):
        text: object = getattr(one, word)
        if text is not None and not isinstance(text, str):
            raise refuse(f"{word} must be text", f'for example "{word}": {str(text)!r}')
    for word, known in (("operator", _OPERATORS), ("effect", _EFFECTS)):
        if getattr(one, word) not in (None, *known):
            raise refuse(f"{word} must be one of {', '.join(known)}")
    if one.operator == "Exists" and one.value is not None:
        raise refuse("a taint that only has to exist has no value", 'leave "value" out')
    if one.key is None and one.operator != "Exists":
        raise refuse("a key is missing", 'without one, "operator": "Exists" accepts every taint')
    seconds: object = one.seconds
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int) or one.effect != "NoExecute"
    ):
        raise refuse('tolerationSeconds is a whole number, for the effect "NoExecute" alone')
