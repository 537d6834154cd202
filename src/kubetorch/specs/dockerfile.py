"""Parses a Dockerfile: text in, instructions out.

The parser follows Docker's own reference (https://docs.docker.com/reference/dockerfile/):
parser directives (`# escape=`), comments, continuation lines, here-documents, the exec and the
shell form, `KEY=value` and the older `KEY value` form of ENV, and `$NAME`, `${NAME}`,
`${NAME:-word}`, `${NAME:+word}` in the instructions that expand them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping

from kubetorch.errors import SpecError
from kubetorch.lib.frozen_values import FrozenValue

#: Instructions that a live image can follow; see `kubetorch.sdk.image.Image.from_dockerfile`.
SUPPORTED = (
    "FROM",
    "RUN",
    "ENV",
    "COPY",
    "CMD",
    "ENTRYPOINT",
    "ARG",
    "WORKDIR",
    "USER",
    "ADD",
    "SHELL",
    # Without effect, but for a warning.
    "EXPOSE",
    "HEALTHCHECK",
    "LABEL",
    "VOLUME",
)


class Instruction(FrozenValue):
    """One instruction, its keyword in upper case and continuation lines joined.

    `line` is the number of its first line, from 1.
    """

    keyword: str
    text: str
    line: int


def parse(text: str, *, path: str) -> list[Instruction]:
    """The instructions of a Dockerfile; comments are kept as instructions with keyword `#`."""
    escape = "`" if re.match(r"^\s*#\s*escape\s*=\s*`\s*$", text.partition("\n")[0]) else "\\"
    instructions = []
    for number, line in _logical_lines(text, escape, path):
        if line.startswith("#"):
            instructions.append(Instruction("#", line, number))
            continue
        keyword, _, rest = line.partition(" ")
        keyword, rest = keyword.upper(), rest.strip()
        if keyword not in SUPPORTED:
            raise SpecError(
                f"{path}, line {number}: {keyword!r} is not supported; "
                f"supported are {', '.join(SUPPORTED)}"
            )
        if not rest:
            raise SpecError(f"{path}, line {number}: {keyword} needs an argument")
        instructions.append(Instruction(keyword, rest, number))
    return instructions


def _logical_lines(text: str, escape: str, path: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        start, line = index + 1, lines[index].strip()
        index += 1
        if not line:
            continue
        if line.startswith("#"):
            yield start, line
            continue
        while line.endswith(escape):
            if index >= len(lines):
                raise SpecError(f"{path}, line {start}: the continued line does not end")
            following = lines[index].strip()
            index += 1
            # Empty lines and comments inside a continued instruction are no part of it.
            if following and not following.startswith("#"):
                line = f"{line[:-1].rstrip()} {following}"
        line = re.sub(r"^(\S+)\s+", r"\1 ", line)
        body = index
        for document in _here_documents(line):
            index = _skip_here_document(lines, index, document, f"{path}, line {start}")
        yield start, "\n".join([line, *lines[body:index]])


#: A word of a shell command, with its quotes.
_SHELL_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s"'\\])+""")
#: The word that announces a here-document: `-` if its lines may begin with tabs, and its last line.
_HERE_DOCUMENT = re.compile(r"""\d*<<(-?)(["']?)([^<"'\\]+)\2""")


def _here_documents(line: str) -> Iterator[tuple[bool, str]]:
    """The here-documents of an instruction: whether tabs may indent their lines, and the last."""
    keyword, _, rest = line.partition(" ")
    if keyword.upper() not in ("RUN", "COPY", "ADD"):
        return
    for word in _SHELL_WORD.findall(rest):
        if match := _HERE_DOCUMENT.fullmatch(word):
            yield bool(match[1]), match[3]


def _skip_here_document(
    lines: list[str], index: int, document: tuple[bool, str], position_text: str
) -> int:
    is_indented, end = document
    for number, line in enumerate(lines[index:], start=index + 1):
        if (line.lstrip("\t") if is_indented else line) == end:
            return number
    raise SpecError(f"{position_text}: the here-document {end!r} does not end")


def command(instruction: Instruction, *, path: str) -> tuple[str, ...] | str:
    """The exec form as a tuple, the shell form as text."""
    text = instruction.text
    if not text.startswith("["):
        return text
    try:
        parts = json.loads(text)
    except ValueError as error:
        raise SpecError(
            f"{path}, line {instruction.line}: {instruction.keyword} {text} is no JSON list: "
            f"{error}"
        ) from error
    if not isinstance(parts, list) or not parts or not all(isinstance(p, str) for p in parts):
        raise SpecError(
            f"{path}, line {instruction.line}: {instruction.keyword} {text} must be a list of "
            "strings"
        )
    return tuple(parts)


def words(text: str) -> list[str]:
    """Words of a line, with quotes and escapes resolved."""
    line_words: list[str] = []
    word: list[str] | None = None
    quote = ""
    characters = iter(text)
    for character in characters:
        if character == "\\" and quote != "'":
            following = next(characters, "")
            # In double quotes a backslash escapes these characters only; elsewhere any character.
            backslash = "" if not quote or following in '"\\$`' else "\\"
            word = [*(word or ()), backslash + following]
        elif quote:
            if character == quote:
                quote = ""
            else:
                assert word is not None
                word.append(character)
        elif character in "\"'":
            quote, word = character, word if word is not None else []
        elif character.isspace():
            if word is not None:
                line_words.append("".join(word))
            word = None
        else:
            word = [*(word or ()), character]
    if word is not None:
        line_words.append("".join(word))
    return line_words


def assignments(instruction: Instruction, *, path: str) -> list[tuple[str, str]]:
    """Names and values of ENV, in both of its forms."""
    first = instruction.text.split(maxsplit=1)[0]
    if "=" not in first:
        name, _, value = instruction.text.partition(" ")
        if not value.strip():
            raise SpecError(f"{path}, line {instruction.line}: ENV {name} needs a value")
        return [(name, value.strip())]
    pairs = []
    for word in words(instruction.text):
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise SpecError(f"{path}, line {instruction.line}: {word!r} is no KEY=value")
        pairs.append((name, value))
    return pairs


def flags(text: str) -> tuple[dict[str, str], str]:
    """The leading `--name=value` options, and the text behind them."""
    options = {}
    while text.startswith("--"):
        option, _, text = text.partition(" ")
        name, _, value = option[2:].partition("=")
        options[name] = value
        text = text.lstrip()
    return options, text


#: `$NAME`, `${NAME}`, `${NAME:-word}` or `${NAME:+word}`, to be a part of the pattern of a text. A
#: word may have variables in it.
VARIABLE = (
    r"\$(?:(?P<plain>[A-Za-z0-9_]+)|\{(?P<braced>[A-Za-z0-9_]+)"
    r"(?::(?P<form>[-+])(?P<word>(?:[^{}]|\{[^{}]*\})*))?\})"
)
_VARIABLE = re.compile(rf"\\\$|{VARIABLE}")


def variable_value(
    match: re.Match[str], variables: Mapping[str, str], expand: Callable[[str], str]
) -> str | None:
    """The value of a variable; `None` if it is unknown and the text gives no default."""
    current = variables.get(match["plain"] or match["braced"])
    if match["form"] is None:
        return current
    is_word = bool(current) == (match["form"] == "+")
    return expand(match["word"]) if is_word else current or ""


def expand(text: str, variables: Mapping[str, str], *, keep_unknown_defaults: bool = False) -> str:
    """`text` with its variables replaced; unknown variables stay as they are.

    With `keep_unknown_defaults`, an unknown variable with a default stays, too: a later expansion
    may know it.
    """

    def expand_word(word: str) -> str:
        return expand(word, variables, keep_unknown_defaults=keep_unknown_defaults)

    def replaced(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name is None:
            return "$"
        if keep_unknown_defaults and name not in variables and match["form"] is not None:
            return f"${{{name}:{match['form']}{expand_word(match['word'])}}}"
        value = variable_value(match, variables, expand_word)
        return match[0] if value is None else value

    return _VARIABLE.sub(replaced, text)
