"""The part of Go's templates that the chart is written in. Pure.

    {{ .Values.name | quote }}    {{- if and .a (not .b) }} … {{- else }} … {{- end }}
    {{- with .Values.labels }} {{ toYaml . | nindent 4 }} {{- end }}    {{- range .Values.names }} …
    {{- define "name" }} … {{- end }}    {{ include "name" . }}    {{/* a comment */}}

Every other feature of Go or helm is refused, with file and line. `tests/cluster` compares the
output with that of helm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install.tuning import LIMITS

#: A value of a pipeline: text, a number, a truth value, `None`, a list, a mapping.
Value = Any

_TEXT_PATTERN = r'"(?:\\.|[^"\\\n])*"|`[^`]*`'
#: A comment or an action in double braces; a dash trims the space on its side.
_ACTION = re.compile(
    rf"\{{\{{(?P<left>-(?=\s))?\s*(?:/\*.*?\*/|(?P<code>(?:{_TEXT_PATTERN}|(?!\}}\}}|/\*)[^\"`])*?))"
    r"\s*(?P<right>(?<=\s)-)?\}\}",
    re.DOTALL,
)
_TOKEN = re.compile(
    rf"\s*(?:(?P<text>{_TEXT_PATTERN})|(?P<number>-?\d+)(?![\w.])|(?P<path>\$?(?:\.[A-Za-z_]\w*)+|\$|\.)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark>[()|]))"
)
_CONSTANTS = {"true": True, "false": False, "nil": None}


class _ArgumentError(Exception):  # becomes an InstallError that says where
    """A function cannot use its arguments."""


# ------------------------------------------------------------------------------------ functions


def _describe(value: Value) -> str:
    kind = type(value).__name__
    return "nothing (a value that is not set)" if value is None else f"the {kind} {value!r}"


def _text_of(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, (str, int)):
        return "" if value is None else str(value)
    raise _ArgumentError(f"{_describe(value)} cannot be written as it is: use toYaml")


def _quote(value: Value) -> str:
    return "" if value is None else json.dumps(_text_of(value), ensure_ascii=False)


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
        raise _ArgumentError(f"{_describe(first)} is compared with {_describe(second)}")
    return bool(first == second)


def _fail(message: str) -> Value:
    raise ConfigError(message, hint="correct the values of the chart")


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "not": lambda value: not value,
    "eq": _is_equal,
    "ne": lambda first, second: not _is_equal(first, second),
    "gt": lambda first, second: first > second,
    "int": int,
    "default": lambda replacement, value: value or replacement,
    "quote": _quote,
    "nindent": _nindent,
    "join": lambda separator, values: separator.join(map(_text_of, values)),
    "toJson": _to_json,
    "toYaml": _to_yaml,
    "fail": _fail,
}

# --------------------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _SourceLine:
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
    """An output, or with a keyword a block that writes one of its bodies."""

    source_line: _SourceLine
    value: _Expression
    keyword: str = ""
    body: Sequence[str | _Block] = ()
    otherwise: Sequence[str | _Block] = ()


@dataclass
class _Tokens:
    source_line: _SourceLine
    tokens: list[tuple[str, str]] = field(default_factory=list)

    def read(self, code: str) -> _Expression:
        position = 0
        while code[position:].strip():
            match = _TOKEN.match(code, position)
            if match is None:
                raise self.source_line.error(f"this is no token: {code[position:].strip()!r}")
            self.tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
            position = match.end()
        value = self.pipeline()
        if self.tokens:
            raise self.source_line.error(
                f"{self.tokens[0][1]!r} stands where a pipe or an end is expected"
            )
        return value

    def pipeline(self) -> _Expression:
        value = self.command(())
        while self.tokens and self.tokens[0] == ("mark", "|"):
            self.tokens.pop(0)
            value = self.command((value,))
        return value

    def command(self, piped: tuple[_Expression, ...]) -> _Expression:
        kind, name = self.tokens[0] if self.tokens else ("", "")
        if kind != "word" or name in _CONSTANTS:
            if piped:
                raise self.source_line.error("behind a pipe there must be a function")
            return self.operand()
        if name not in _FUNCTIONS and name != "include":
            function_names = ", ".join(sorted([*_FUNCTIONS, "include"]))
            raise self.source_line.error(
                f"the function {name} is not known; the functions are {function_names}"
            )
        self.tokens.pop(0)
        arguments = []
        while self.tokens and self.tokens[0] not in (("mark", "|"), ("mark", ")")):
            arguments.append(self.operand())
        return _call(name, (*arguments, *piped))

    def operand(self) -> _Expression:
        kind, text = self.tokens.pop(0) if self.tokens else ("", "the end")
        if kind == "path":
            return _look_up(text)
        if kind == "mark" and text == "(":
            value = self.pipeline()
            if not self.tokens or self.tokens.pop(0) != ("mark", ")"):
                raise self.source_line.error("a bracket is not closed")
            return value
        constant: Value
        if kind == "text":
            constant = text[1:-1] if text[0] == "`" else json.loads(text)
        elif kind == "number":
            constant = int(text)
        elif text in _CONSTANTS:
            constant = _CONSTANTS[text]
        else:
            raise self.source_line.error(f"{text!r} stands where a value is expected")
        return lambda frame: constant


def _call(name: str, arguments: Sequence[_Expression]) -> _Expression:
    def value(frame: _Frame) -> Value:
        values = [argument(frame) for argument in arguments]
        function = frame.include if name == "include" else _FUNCTIONS[name]
        try:
            return function(*values)
        except ConfigError:
            raise
        except (TypeError, AttributeError, ValueError) as error:
            raise _ArgumentError(
                f"{name} cannot do with {', '.join(map(_describe, values))}"
            ) from error

    return value


def _look_up(path: str) -> _Expression:
    start, *names = path.split(".")

    def value(frame: _Frame) -> Value:
        node = frame.root if start == "$" else frame.dot
        for name in filter(None, names):
            if not isinstance(node, Mapping):
                raise _ArgumentError(f"there is no field {name!r} in {_describe(node)}")
            node = node.get(name)
        return node

    return value


class _File:
    def __init__(self, name: str, source: str) -> None:
        self.defined: dict[str, Sequence[str | _Block]] = {}
        self._pieces = self._split(name, source)
        self._end = _SourceLine(name, source.count("\n") + 1)
        self.body, _ = self._read(self._end, "")

    @staticmethod
    def _split(name: str, source: str) -> Iterator[tuple[_SourceLine, str, bool]]:
        """The texts and the codes of a file: line, text, and true for a code."""
        position, trims = 0, False
        for match in _ACTION.finditer(source):
            text = source[position : match.start()]
            text = text.lstrip() if trims else text
            source_line = _SourceLine(name, source.count("\n", 0, match.start()) + 1)
            if "{{" in text:
                raise source_line.error("an action has no end")
            yield source_line, text.rstrip() if match["left"] else text, False
            if match["code"] is not None:
                yield source_line, match["code"].strip(), True
            position, trims = match.end(), bool(match["right"])
        source_line = _SourceLine(name, source.count("\n", 0, position) + 1)
        if "{{" in source[position:]:
            raise source_line.error("an action has no end")
        yield source_line, source[position:].lstrip() if trims else source[position:], False

    def _read(self, start: _SourceLine, keyword: str) -> tuple[list[str | _Block], str]:
        """The nodes up to `end` or `else`, and that word; it is empty at the end of the file."""
        nodes: list[str | _Block] = []
        for source_line, text, is_code in self._pieces:
            first, _, rest = text.partition(" ")
            if not is_code:
                nodes.append(text)
            elif text in ("end", "else"):
                if not keyword or (text == "else" and keyword in ("else", "define")):
                    raise source_line.error(f"there is nothing that {text} would end")
                return nodes, text
            elif first == "define":
                name = _Tokens(source_line).read(rest)
                self.defined[name(_Frame(None, None, _no_include))] = self._read(
                    source_line, first
                )[0]
            elif first in ("if", "with", "range"):
                value = _Tokens(source_line).read(rest)
                body, end = self._read(source_line, first)
                otherwise = self._read(source_line, "else")[0] if end == "else" else []
                nodes.append(_Block(source_line, value, first, body, otherwise))
            else:
                nodes.append(_Block(source_line, _Tokens(source_line).read(text)))
        if keyword:
            raise start.error(f"{keyword} has no end")
        return nodes, ""


def _no_include(name: str, data: Value) -> str:
    raise _ArgumentError("a name is a text between quotes")


# ------------------------------------------------------------------------------------- rendering


class Templates:
    """The files of one chart, which may include the templates that other files define."""

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
                raise _ArgumentError(f"no template {name!r} is defined")
            if depth >= LIMITS.nested_templates:
                raise _ArgumentError(f"{name!r} includes itself without end")
            return self._render(self._defined[name], value, depth + 1)

        return "".join(_write_nodes(body, _Frame(data, data, include)))


def _write_nodes(nodes: Sequence[str | _Block], frame: _Frame) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node
            continue
        try:
            value = node.value(frame)
            text = "" if node.keyword else _text_of(value)
        except _ArgumentError as error:
            raise node.source_line.error(str(error)) from error
        if not node.keyword:
            yield text
        elif not value:
            yield from _write_nodes(node.otherwise, frame)
        elif node.keyword == "range":
            if not isinstance(value, list):
                raise node.source_line.error("range needs a list")
            for item in value:
                yield from _write_nodes(node.body, _Frame(item, frame.root, frame.include))
        else:
            dot = value if node.keyword == "with" else frame.dot
            yield from _write_nodes(node.body, _Frame(dot, frame.root, frame.include))
