"""Amounts as Kubernetes writes them: CPUs, bytes, and durations.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kubetorch.errors import SpecError

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[A-Za-z]*)", re.ASCII)
_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}
#: Kubernetes keeps amounts in 64 bits.
_LARGEST = 2**63 - 1

_DURATION = re.compile(r"([0-9]+)([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_CPU_HINT = 'cores such as 0.5 or "2", or thousandths such as "500m"'
_MEMORY_HINT = 'for example "512Mi", "2Gi" or "1G"; a plain number is bytes'
_DURATION_HINT = 'a whole number and one of s, m, h, d, for example "30m"'


def cpus(value: object) -> str:
    """An amount of CPUs as a manifest has it."""
    text = _text(value, "cpus", _CPU_HINT)
    amount = _amount(text, value, "cpus", _CPU_HINT)
    if (amount * 1000).denominator != 1 or not amount:
        raise SpecError(
            f"cpus is {value!r}; it must be a whole number of thousandths of a core, "
            "and more than 0",
            hint=_CPU_HINT,
        )
    return text


def cores(text: str) -> float:
    """The CPUs of an amount that a manifest has."""
    return float(_amount(text, text, "cpus", _CPU_HINT))


def memory(value: object, *, parameter: str = "memory") -> str:
    """An amount of bytes as a manifest has it."""
    text = _text(value, parameter, _MEMORY_HINT)
    if text.endswith("K"):  # as in the other units; Kubernetes writes a lower-case k only
        text = f"{text[:-1]}k"
    amount = _amount(text, value, parameter, _MEMORY_HINT)
    if amount.denominator != 1 or not amount:
        raise SpecError(
            f"{parameter} is {value!r}; it must be a whole number of bytes, and more than 0",
            hint=_MEMORY_HINT,
        )
    return text


def size_bytes(value: object, *, parameter: str = "memory") -> int:
    """An amount of bytes, rounded up, as Kubernetes does."""
    return math.ceil(_amount(_text(value, parameter, _MEMORY_HINT), value, parameter, _MEMORY_HINT))


def parse(value: object) -> Fraction | None:
    """An amount from the API server; `None` if the value is no amount."""
    try:
        return _amount(_text(value, "amount", ""), value, "amount", "")
    except SpecError:
        return None


def seconds(value: object, *, parameter: str = "inactivity_ttl") -> int:
    """A duration such as `30m`, in seconds."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]):
        raise SpecError(
            f"{parameter} is {value!r}; it must be a duration above zero", hint=_DURATION_HINT
        )
    return int(match[1]) * _SECONDS[match[2]]


def _text(value: object, parameter: str, hint: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        whole = int(value)
        # repr() of a float is exact for what a user would write, but may have an exponent.
        return str(whole) if whole == value else f"{value:.9f}".rstrip("0")
    raise SpecError(f"{parameter} is {value!r}; it must be a number or text", hint=hint)


def _amount(text: str, value: object, parameter: str, hint: str) -> Fraction:
    match = _QUANTITY.fullmatch(text)
    number, suffix = (match[1], match[2]) if match else ("", "?")
    if suffix[:1] in ("e", "E") and suffix[1:].lstrip("+-").isdigit():
        scale: Fraction | None = Fraction(10) ** int(suffix[1:])
    else:
        scale = _SUFFIXES.get(suffix)
    if match is None or scale is None:
        raise SpecError(
            f"{parameter} is {value!r}, which is not a Kubernetes quantity",
            hint=suggestion(text, hint),
        )
    amount = Fraction(number if number[-1] != "." else number[:-1]) * scale
    if amount > _LARGEST:
        raise SpecError(f"{parameter} is {value!r}, which is too much", hint=hint)
    return amount


def suggestion(text: str, hint: str) -> str:
    """The correction of a likely mistake: `4 GB` is `4G`, `2 gi` is `2Gi`."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT])(i?)[bB]?\s*", text)
    if match is None:
        return hint
    number, letter, binary = match.groups()
    unit = f"{letter.upper()}i" if binary else {"K": "k"}.get(letter.upper(), letter.upper())
    return f"did you mean {number}{unit}? {hint}"
