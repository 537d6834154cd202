"""Templates as trees: what is written, chosen, repeated and called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kubetorch.sdk.installing.gotemplates import lexing
from kubetorch.sdk.installing.gotemplates.lexing import Action, Place, Text, Token


@dataclass(frozen=True)
class Literal:
    """A value as it is written."""

    value: str | int | bool | None


@dataclass(frozen=True)
class Lookup:
    """A variable, `.`, or a pipeline in parentheses, and fields of it.

    Attributes:
        of: Name of the variable with its `$`, `.`, or the pipeline.
        fields: Names, from the outside in.
    """

    of: str | Pipeline
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A function and its arguments, without the one that a pipe adds."""

    function: str
    arguments: tuple[Operand, ...]


Operand = Literal | Lookup | Call


@dataclass(frozen=True)
class Pipeline:
    """Commands, each with the value of the one before as its last argument.

    Attributes:
        commands: At least one.
        place: Where it stands.
        variables: What its value is given to.
        declares: Whether they are new, rather than assigned.
    """

    commands: tuple[Operand, ...]
    place: Place
    variables: tuple[str, ...] = ()
    declares: bool = False


@dataclass(frozen=True)
class Output:
    """A pipeline whose value is written, unless it goes into a variable."""

    pipeline: Pipeline


@dataclass(frozen=True)
class Block:
    """`if`, `with` or `range`.

    Attributes:
        word: Which.
        pipeline: What it is about.
        body: When that is true, or for each of it.
        otherwise: Else.
    """

    word: str
    pipeline: Pipeline
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...] = ()


Node = Text | Output | Block


@dataclass(frozen=True)
class Template:
    """One file.

    Attributes:
        body: What it writes.
        defined: The templates that it defines, by name.
    """

    body: tuple[Node, ...]
    defined: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)


def parse(source: str, file: str) -> Template:
    """The tree of a template.

    Args:
        source: What is in the file.
        file: Its name, for errors.

    Raises:
        InstallError: It has what the subset has not.
    """
    parser = _Parser(lexing.split(source, file))
    body, ending = parser.body()
    if ending is not None:
        raise ending.place.error(f"there is nothing that {ending.tokens[0].text} would end")
    return Template(tuple(body), parser.defined)


_BLOCKS = ("if", "with", "range")
_UNKNOWN = ("block", "break", "continue", "template")


class _Parser:
    """Goes through the pieces of one file."""

    def __init__(self, pieces: list[Text | Action]) -> None:
        self._pieces = iter(pieces)
        self.defined: dict[str, tuple[Node, ...]] = {}

    def body(self) -> tuple[list[Node], Action | None]:
        """Nodes up to the `else` or `end` that closes them, and that; `None` at the file's end."""
        nodes: list[Node] = []
        for piece in self._pieces:
            if isinstance(piece, Text):
                nodes.append(piece)
                continue
            first = piece.tokens[0]
            word = first.text if first.kind == "word" else ""
            if word in ("else", "end"):
                return nodes, piece
            if word == "define":
                self._define(piece)
            elif word in _BLOCKS:
                nodes.append(self._block(piece, word, 1))
            elif word in _UNKNOWN:
                raise piece.place.error(f"{word} is not known here; include may do instead")
            else:
                nodes.append(Output(_Commands(piece, 0).pipeline()))
        return nodes, None

    def _define(self, action: Action) -> None:
        tokens = action.tokens
        if [token.kind for token in tokens] != ["word", "text", "end"]:
            raise action.place.error("define needs a name between quotes and nothing else")
        nodes, ending = self.body()
        _expect_end(action, ending)
        self.defined[tokens[1].text] = tuple(nodes)

    def _block(self, action: Action, word: str, start: int) -> Block:
        """The block whose pipeline begins at a token of its action."""
        pipeline = _Commands(action, start).pipeline()
        nodes, ending = self.body()
        otherwise: list[Node] = []
        if ending is not None and ending.tokens[0].text == "else":
            follower = ending.tokens[1]
            if follower.kind == "word" and follower.text in ("if", "with"):
                # Its end is that of the whole chain.
                inner = self._block(ending, follower.text, 2)
                return Block(word, pipeline, tuple(nodes), (inner,))
            if follower.kind != "end":
                raise ending.place.error("else may be followed by if or with only")
            otherwise, ending = self.body()
        _expect_end(action, ending)
        return Block(word, pipeline, tuple(nodes), tuple(otherwise))


def _expect_end(action: Action, ending: Action | None) -> None:
    if ending is None or ending.tokens[0].text != "end":
        where = "the end of the file" if ending is None else f"line {ending.place.line}"
        raise action.place.error(f"{action.tokens[0].text} has no end at {where}")


class _Commands:
    """Goes through the tokens of one action."""

    def __init__(self, action: Action, start: int) -> None:
        self._tokens = action.tokens
        self._place = action.place
        self._position = start

    def pipeline(self) -> Pipeline:
        """What is left of the action, as a pipeline."""
        names: list[str] = []
        declares = False
        marks = [token.text for token in self._tokens[self._position :] if token.kind == "mark"]
        if ":=" in marks or "=" in marks:
            names, declares = self._variables()
        commands = self._commands(closed_by="end")
        return Pipeline(commands, self._place, tuple(names), declares)

    def _variables(self) -> tuple[list[str], bool]:
        names: list[str] = []
        while True:
            token = self._next()
            if token.kind != "variable" or token.text == "$" or len(names) == 2:
                raise self._place.error(f"{token.text} cannot be given a value")
            names.append(token.text)
            token = self._next()
            if token.text in (":=", "="):
                return names, token.text == ":="
            if token.text != ",":
                raise self._place.error(f"{token.text} stands where := or = was expected")

    def _commands(self, closed_by: str) -> tuple[Operand, ...]:
        """Commands up to a closing parenthesis or the end."""
        commands: list[Operand] = []
        while True:
            commands.append(self._command(is_first=not commands))
            token = self._next()
            if token.text == ")" if closed_by == ")" else token.kind == "end":
                return tuple(commands)
            if token.text != "|" or token.kind != "mark":
                raise self._place.error(f"{token.text!r} stands where a pipe or an end is expected")

    def _command(self, *, is_first: bool) -> Operand:
        token = self._peek()
        if token.kind == "word" and token.text not in _CONSTANTS:
            self._next()
            arguments = []
            while not self._is_closed():
                arguments.append(self._operand())
            return Call(token.text, tuple(arguments))
        operand = self._operand()
        if not self._is_closed():
            raise self._place.error("only functions take arguments; methods are not known")
        if not is_first:
            raise self._place.error("behind a pipe there must be a function")
        return operand

    def _is_closed(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "mark" and token.text in ("|", ")"))

    def _operand(self) -> Operand:
        token = self._next()
        if token.kind == "text":
            return Literal(token.text)
        if token.kind == "number":
            return Literal(int(token.text))
        if token.kind == "word":
            if token.text in _CONSTANTS:
                return Literal(_CONSTANTS[token.text])
            return Call(token.text, ())
        if token.kind == "variable":
            return Lookup(token.text, self._fields())
        if token.kind == "field":
            return Lookup(".", (token.text[1:], *self._fields()))
        if token.text == ".":
            return Lookup(".")
        if token.text == "(":
            return Lookup(Pipeline(self._commands(")"), self._place), self._fields())
        raise self._place.error(f"{token.text!r} stands where a value is expected")

    def _fields(self) -> tuple[str, ...]:
        """Fields that are written right behind a value."""
        names: list[str] = []
        while self._peek().kind == "field" and self._peek().is_glued:
            names.append(self._next().text[1:])
        return tuple(names)

    def _peek(self) -> Token:
        return self._tokens[self._position]

    def _next(self) -> Token:
        token = self._tokens[self._position]
        if token.kind != "end":
            self._position += 1
        return token


_CONSTANTS: Mapping[str, bool | None] = {"true": True, "false": False, "nil": None}
