"""The part of Go's templates that the chart is written in. Pure.

    {{ .Values.name | quote }}    {{- if and .a (not .b) }} … {{- else }} … {{- end }}
    {{- with .Values.labels }} {{ toYaml . | nindent 4 }} {{- end }}    {{- range .Values.names }} …
    {{- define "name" }} … {{- end }}    {{ include "name" . }}    {{/* a comment */}}

Whatever else Go or helm has is refused, with file and line. `tests/cluster` compares the output
with that of helm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kubetorch.errors import ConfigError, InstallError

#: What a pipeline has: text, numbers, truth, nothing, lists, mappings.
Value = Any

#: Templates that include each other, one inside the other.
_DEPTH = 50
_TEXT = r'"(?:\\.|[^"\\\n])*"|`[^`]*`'
#: Comment, or what stands between two braces; a dash trims the space on its side.
_ACTION = re.compile(
    rf"\{{\{{(?P<left>-(?=\s))?\s*(?:/\*.*?\*/|(?P<code>(?:{_TEXT}|(?!\}}\}}|/\*)[^\"`])*?))"
    r"\s*(?P<right>(?<=\s)-)?\}\}",
    re.DOTALL,
)
_TOKEN = re.compile(
    rf"\s*(?:(?P<text>{_TEXT})|(?P<number>-?\d+)(?![\w.])|(?P<path>\$?(?:\.[A-Za-z_]\w*)+|\$|\.)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark>[()|]))"
)
_CONSTANTS = {"true": True, "false": False, "nil": None}


class _Unfit(Exception):  # becomes an InstallError that says where
    """A function cannot do with its arguments."""


# ------------------------------------------------------------------------------------ functions


def _shown(value: Value) -> str:
    kind = type(value).__name__
    return "nothing (a value that is not set)" if value is None else f"the {kind} {value!r}"


def _written(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, (str, int)):
        return "" if value is None else str(value)
    raise _Unfit(f"{_shown(value)} cannot be written as it is: use toYaml")


def _quote(value: Value) -> str:
    return "" if value is None else json.dumps(_written(value), ensure_ascii=False)


def _nindent(spaces: int, text: str) -> str:
    return "\n" + "\n".join(" " * spaces + line for line in text.split("\n"))


def _to_yaml(value: Value) -> str:
    text = yaml.safe_dump(value, default_flow_style=False, allow_unicode=True, width=2**30)
    # A document of one scalar has an end of its own.
    return text.removesuffix("\n...\n").removesuffix("\n")


def _to_json(value: Value) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for mark in "<>&":  # as Go writes them
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _is_equal(first: Value, second: Value) -> bool:
    if type(first) is not type(second) and None not in (first, second):
        raise _Unfit(f"{_shown(first)} is compared with {_shown(second)}")
    return bool(first == second)


def _fail(message: str) -> Value:
    raise ConfigError(message, hint="correct the values of the chart")


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "and": lambda *values: next((one for one in values if not one), values[-1]),
    "or": lambda *values: next((one for one in values if one), values[-1]),
    "not": lambda value: not value,
    "eq": _is_equal,
    "ne": lambda first, second: not _is_equal(first, second),
    "gt": lambda first, second: first > second,
    "int": int,
    "default": lambda replacement, value: value or replacement,
    "quote": _quote,
    "nindent": _nindent,
    "join": lambda separator, values: separator.join(map(_written, values)),
    "toJson": _to_json,
    "toYaml": _to_yaml,
    "fail": _fail,
}

# --------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _Place:
    file: str
    line: int

    def error(self, message: str) -> InstallError:
        return InstallError(f"{self.file}:{self.line}: {message}")


@dataclass(frozen=True)
class _Frame:
    """The environment of a pipeline: `.`, `$`, and the templates that it can include."""

    dot: Value
    root: Value
    include: Callable[[str, Value], str]


_Expression = Callable[[_Frame], Value]


@dataclass(frozen=True)
class _Block:
    """An output, or with a word a block that writes one of its bodies."""

    place: _Place
    value: _Expression
    word: str = ""
    body: Sequence[str | _Block] = ()
    otherwise: Sequence[str | _Block] = ()


@dataclass
class _Tokens:
    place: _Place
    left: list[tuple[str, str]] = field(default_factory=list)

    def read(self, code: str) -> _Expression:
        position = 0
        while code[position:].strip():
            match = _TOKEN.match(code, position)
            if match is None:
                raise self.place.error(f"this is no token: {code[position:].strip()!r}")
            self.left.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()
        value = self.pipeline()
        if self.left:
            raise self.place.error(f"{self.left[0][1]!r} stands where a pipe or an end is expected")
        return value

    def pipeline(self) -> _Expression:
        value = self.command(())
        while self.left and self.left[0] == ("mark", "|"):
            self.left.pop(0)
            value = self.command((value,))
        return value

    def command(self, piped: tuple[_Expression, ...]) -> _Expression:
        kind, name = self.left[0] if self.left else ("", "")
        if kind != "word" or name in _CONSTANTS:
            if piped:
                raise self.place.error("behind a pipe there must be a function")
            return self.operand()
        if name not in _FUNCTIONS and name != "include":
            known = ", ".join(sorted([*_FUNCTIONS, "include"]))
            raise self.place.error(f"the function {name} is not known; the functions are {known}")
        self.left.pop(0)
        arguments = []
        while self.left and self.left[0] not in (("mark", "|"), ("mark", ")")):
            arguments.append(self.operand())
        return _call(name, (*arguments, *piped))

    def operand(self) -> _Expression:
        kind, text = self.left.pop(0) if self.left else ("", "the end")
        if kind == "path":
            return _look_up(text)
        if kind == "mark" and text == "(":
            value = self.pipeline()
            if not self.left or self.left.pop(0) != ("mark", ")"):
                raise self.place.error("a bracket is not closed")
            return value
        constant: Value
        if kind == "text":
            constant = text[1:-1] if text[0] == "`" else json.loads(text)
        elif kind == "number":
            constant = int(text)
        elif text in _CONSTANTS:
            constant = _CONSTANTS[text]
        else:
            raise self.place.error(f"{text!r} stands where a value is expected")
        return lambda frame: constant


def _call(name: str, arguments: Sequence[_Expression]) -> _Expression:
    def value(frame: _Frame) -> Value:
        values = [one(frame) for one in arguments]
        function = frame.include if name == "include" else _FUNCTIONS[name]
        try:
            return function(*values)
        except ConfigError:
            raise
        except (TypeError, AttributeError, ValueError) as error:
            raise _Unfit(f"{name} cannot do with {', '.join(map(_shown, values))}") from error

    return value


def _look_up(path: str) -> _Expression:
    start, *names = path.split(".")

    def value(frame: _Frame) -> Value:
        found = frame.root if start == "$" else frame.dot
        for name in filter(None, names):
            if not isinstance(found, Mapping):
                raise _Unfit(f"there is no field {name!r} in {_shown(found)}")
            found = found.get(name)
        return found

    return value


class _File:
    def __init__(self, name: str, source: str) -> None:
        self.defined: dict[str, Sequence[str | _Block]] = {}
        self._pieces = self._split(name, source)
        self._end = _Place(name, source.count("\n") + 1)
        self.body, _ = self._read(self._end, "")

    @staticmethod
    def _split(name: str, source: str) -> Iterator[tuple[_Place, str, bool]]:
        """Texts and codes, each with its place."""
        position, trims = 0, False
        for match in _ACTION.finditer(source):
            text = source[position : match.start()]
            text = text.lstrip() if trims else text
            place = _Place(name, source.count("\n", 0, match.start()) + 1)
            if "{{" in text:
                raise place.error("an action has no end")
            yield place, text.rstrip() if match["left"] else text, False
            if match["code"] is not None:
                yield place, match["code"].strip(), True
            position, trims = match.end(), bool(match["right"])
        place = _Place(name, source.count("\n", 0, position) + 1)
        if "{{" in source[position:]:
            raise place.error("an action has no end")
        yield place, source[position:].lstrip() if trims else source[position:], False

    def _read(self, begun: _Place, word: str) -> tuple[list[str | _Block], str]:
        """The nodes up to `end` or `else`, and which of the two."""
        found: list[str | _Block] = []
        for place, text, is_code in self._pieces:
            first, _, rest = text.partition(" ")
            if not is_code:
                found.append(text)
            elif text in ("end", "else"):
                if not word or (text == "else" and word in ("else", "define")):
                    raise place.error(f"there is nothing that {text} would end")
                return found, text
            elif first == "define":
                name = _Tokens(place).read(rest)
                self.defined[name(_Frame(None, None, _no_include))] = self._read(place, first)[0]
            elif first in ("if", "with", "range"):
                value = _Tokens(place).read(rest)
                body, end = self._read(place, first)
                otherwise = self._read(place, "else")[0] if end == "else" else []
                found.append(_Block(place, value, first, body, otherwise))
            else:
                found.append(_Block(place, _Tokens(place).read(text)))
        if word:
            raise begun.error(f"{word} has no end")
        return found, ""


def _no_include(name: str, data: Value) -> str:
    raise _Unfit("a name is a text between quotes")


# ------------------------------------------------------------------------------------- rendering


class Templates:
    """The files of one chart, which may include what others define."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        files = {name: _File(name, source) for name, source in sources.items()}
        self._bodies = {name: file.body for name, file in files.items()}
        self._defined = {
            name: body for file in files.values() for name, body in file.defined.items()
        }

    def render(self, file: str, data: Mapping[str, Any]) -> str:
        return self._render(self._bodies[file], data, 0)

    def _render(self, body: Sequence[str | _Block], data: Value, depth: int) -> str:
        def include(name: str, value: Value) -> str:
            if name not in self._defined:
                raise _Unfit(f"no template {name!r} is defined")
            if depth >= _DEPTH:
                raise _Unfit(f"{name!r} includes itself without end")
            return self._render(self._defined[name], value, depth + 1)

        return "".join(_write(body, _Frame(data, data, include)))


def _write(nodes: Sequence[str | _Block], frame: _Frame) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
            continue
        try:
            value = node.value(frame)
            text = "" if node.word else _written(value)
        except _Unfit as error:
            raise node.place.error(str(error)) from error
        if not node.word:
            yield text
        elif not value:
            yield from _write(node.otherwise, frame)
        elif node.word == "range":
            if not isinstance(value, list):
                raise node.place.error("range needs a list")
            for item in value:
                yield from _write(node.body, _Frame(item, frame.root, frame.include))
        else:
            dot = value if node.word == "with" else frame.dot
            yield from _write(node.body, _Frame(dot, frame.root, frame.include))
