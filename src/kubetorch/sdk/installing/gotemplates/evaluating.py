"""Trees of templates, carried out: data in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kubetorch.errors import ConfigError
from kubetorch.sdk.installing.gotemplates import functions, parsing
from kubetorch.sdk.installing.gotemplates.functions import Unfit, Value
from kubetorch.sdk.installing.gotemplates.lexing import Place, Text
from kubetorch.sdk.installing.gotemplates.parsing import (
    Block,
    Call,
    Literal,
    Lookup,
    Node,
    Operand,
    Pipeline,
)

#: Templates that include each other, one inside the other.
_DEPTH = 50


class Templates:
    """The files of one chart, which may include what others define.

    Args:
        sources: The files' contents by their names.

    Raises:
        InstallError: One has what the subset has not.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        parsed = {name: parsing.parse(source, name) for name, source in sources.items()}
        self._bodies = {name: template.body for name, template in parsed.items()}
        self.defined = {
            name: nodes for template in parsed.values() for name, nodes in template.defined.items()
        }

    def render(self, file: str, data: Mapping[str, Any]) -> str:
        """What a file writes.

        Args:
            file: Its name.
            data: What `.` and `$` are.

        Raises:
            ConfigError: The template refused a value with `fail` or `required`.
            InstallError: It cannot be carried out.
        """
        return _Run(self, data, 0).text(self._bodies[file])

    def include(self, name: str, data: Value, depth: int) -> str:
        """What a defined template writes."""
        if name not in self.defined:
            raise Unfit(f"no template {name!r} is defined")
        if depth >= _DEPTH:
            raise Unfit(f"{name!r} includes itself without end")
        return _Run(self, data, depth + 1).text(self.defined[name])


class _Run:
    """One template at work on one value of `.`."""

    def __init__(self, templates: Templates, data: Value, depth: int) -> None:
        self._templates = templates
        self._depth = depth
        self._dot = data
        # The innermost block is the last one.
        self._scopes: list[dict[str, Value]] = [{"$": data}]

    def text(self, nodes: Sequence[Node]) -> str:
        """What the nodes write."""
        return "".join(self._written(nodes))

    def _written(self, nodes: Sequence[Node]) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, Text):
                yield node.text
            elif isinstance(node, Block):
                yield from self._block(node)
            else:
                yield self._output(node.pipeline)

    def _output(self, pipeline: Pipeline) -> str:
        value = self._value(pipeline)
        if not pipeline.variables:
            with _placed(pipeline.place):
                return functions.written(value)
        if len(pipeline.variables) > 1:
            raise pipeline.place.error("only range gives values to two variables")
        self._give(pipeline, pipeline.variables[0], value)
        return ""

    def _give(self, pipeline: Pipeline, name: str, value: Value) -> None:
        if pipeline.declares:
            self._scopes[-1][name] = value
            return
        for scope in reversed(self._scopes):
            if name in scope:
                scope[name] = value
                return
        raise pipeline.place.error(f"{name} is not declared")

    # -------------------------------------------------------------------------------- blocks

    def _block(self, block: Block) -> Iterator[str]:
        value = self._value(block.pipeline)
        with _placed(block.pipeline.place):
            holds = functions.truth(value)
        if block.word == "range":
            yield from self._range(block, value)
        elif holds:
            dot = value if block.word == "with" else self._dot
            yield from self._inside(block, block.body, dot, (value,))
        else:
            yield from self._inside(block, block.otherwise, self._dot, (value,))

    def _range(self, block: Block, value: Value) -> Iterator[str]:
        pairs: list[tuple[Value, Value]]
        if isinstance(value, list):
            pairs = list(enumerate(value))
        elif isinstance(value, Mapping):
            pairs = [(key, value[key]) for key in sorted(value)]
        elif value is None:
            pairs = []
        else:
            raise block.pipeline.place.error("range needs a list or a mapping")
        for key, item in pairs:
            item = functions.figure(item)
            two = len(block.pipeline.variables) == 2
            yield from self._inside(block, block.body, item, (key, item) if two else (item,))
        if not pairs:
            yield from self._inside(block, block.otherwise, self._dot, ())

    def _inside(
        self, block: Block, nodes: Sequence[Node], dot: Value, given: tuple[Value, ...]
    ) -> Iterator[str]:
        """What the nodes write in a scope of their own."""
        before = self._dot
        self._scopes.append({})
        try:
            for name, value in zip(block.pipeline.variables, given, strict=False):
                self._give(block.pipeline, name, value)
            self._dot = dot
            yield from self._written(nodes)
        finally:
            self._scopes.pop()
            self._dot = before

    # -------------------------------------------------------------------------------- values

    def _value(self, pipeline: Pipeline) -> Value:
        with _placed(pipeline.place):
            first, *others = pipeline.commands
            value = self._evaluate(first, pipeline.place, ())
            for command in others:
                value = self._evaluate(command, pipeline.place, (value,))
            return value

    def _evaluate(self, operand: Operand, place: Place, piped: tuple[Value, ...]) -> Value:
        if isinstance(operand, Literal):
            return operand.value
        if isinstance(operand, Lookup):
            return self._look_up(operand)
        if operand.function in ("and", "or"):
            return self._choose(operand, place, piped)
        arguments = [self._evaluate(one, place, ()) for one in operand.arguments]
        return self._call(operand, [*arguments, *piped])

    def _choose(self, call: Call, place: Place, piped: tuple[Value, ...]) -> Value:
        """The first argument that decides; what follows it is not evaluated."""
        value: Value = None
        for one in call.arguments:
            value = self._evaluate(one, place, ())
            if functions.truth(value) == (call.function == "or"):
                return value
        return piped[0] if piped else value

    def _call(self, call: Call, arguments: list[Value]) -> Value:
        if call.function == "include":
            if len(arguments) != 2 or not isinstance(arguments[0], str):
                raise Unfit("include needs a name and a value")
            return self._templates.include(arguments[0], arguments[1], self._depth)
        return functions.call(call.function, arguments)

    def _look_up(self, lookup: Lookup) -> Value:
        value: Value
        if isinstance(lookup.of, Pipeline):
            value = self._value(lookup.of)
        elif lookup.of == ".":
            value = self._dot
        else:
            value = self._variable(lookup.of)
        for name in lookup.fields:
            if not isinstance(value, Mapping):
                raise Unfit(f"there is no field {name!r} in {functions.described(value)}")
            value = functions.figure(value.get(name))
        return value

    def _variable(self, name: str) -> Value:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise Unfit(f"{name} is not declared")


class _placed:  # reads as a word of the language
    """Says where it was that a function could not do with its arguments."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, functions.Refused):
            raise ConfigError(str(error), hint="correct the values of the chart") from error
        if isinstance(error, Unfit):
            raise self._place.error(str(error)) from error
