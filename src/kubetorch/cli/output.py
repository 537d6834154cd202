"""Writes the output of `kt`: data and reports on stdout, remarks and errors on stderr.

The only place that prints. With `--json` nothing but JSON goes to stdout. Colour is used only on a
terminal and never carries meaning alone; `NO_COLOR` and `TERM=dumb` turn it off. What could steer a
terminal is made visible there.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TextIO

import typer

from kubetorch.errors import KubetorchError
from kubetorch.lib import terminal
from kubetorch.sdk import tracebacks

Style = Literal["plain", "bold", "dim", "red", "green", "yellow", "blue", "cyan"]

_CODES: Mapping[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "1;34",
    "cyan": "36",
}

#: Words of a table that are seen at a glance.
_STATUS_COLOURS = {
    **dict.fromkeys(("Ready", "Running", "Succeeded", "succeeded", "running"), "green"),
    **dict.fromkeys(("Failed", "failed"), "red"),
    **dict.fromkeys(
        ("Creating", "Pending", "Scaling", "Terminating", "Waiting", "waiting"), "yellow"
    ),
}
#: The file name in an error that writing to stdout has raised.
_STDOUT = "<stdout>"


class Output:
    def __init__(self, *, as_json: bool = False, is_raw: bool = False) -> None:
        self.as_json = as_json
        self._is_raw = is_raw
        self._stdout = sys.stdout
        self._report_stream = sys.stderr if as_json else sys.stdout

    def note(self, text: str, style: Style = "plain") -> None:
        """A remark about what is going on, for people: on stderr."""
        _write(sys.stderr, text, style)

    def warn(self, text: str) -> None:
        """A remark that the user should act on."""
        self.note(text, "yellow")

    def report(self, text: str, style: Style = "plain") -> None:
        """Write a result on stdout, unless stdout is for JSON."""
        _write(self._report_stream, text, style)

    def value(self, value: object) -> None:
        """The result, for programs: JSON on stdout."""
        indent = 2 if self._stdout.isatty() else None
        _write(self._stdout, _json(value, indent), "plain")

    def result(self, value: object) -> None:
        """What a call has returned."""
        if self.as_json:
            self.value(value)
        else:
            self.text(f"Result: {value}")

    def record(self, value: object) -> None:
        """Write one of several results, for programs: JSON on a line of stdout."""
        _write(self._stdout, _json(value), "plain")

    def panel(self, title: str, lines: Iterable[str], *, style: Style = "blue") -> None:
        """A titled block on stdout, unless that is for JSON.

        Its lines have no frame beside them, so that they can be copied.
        """
        _panel(self._report_stream, title, lines, style)

    def table(self, rows: Sequence[Mapping[str, str]], *, dispensable: Sequence[str] = ()) -> None:
        """A table on stdout, of the cells of each row by column. Cells may have several lines.

        On a terminal that is too narrow, empty columns (`-`) are left out, then `dispensable` ones,
        one after the other, until the table fits; if it never does, cells go on in the next line.
        No cell is cut; in a pipe the table is whole.
        """
        table = [[column, *(row[column] for row in rows)] for column in rows[0]]
        if self._stdout.isatty():
            width = shutil.get_terminal_size().columns
            _write(self._stdout, _draw_table(narrowed(table, width, dispensable), width), "plain")
            return
        for line in layout(table):
            _write(self._stdout, line, "plain")

    def confirm(self, question: str) -> None:
        """Ask on stderr whether to go on, and end the command if not."""
        with _interrupted():
            typer.confirm(question, abort=True, err=True)

    def ask(self, question: str) -> str:
        with _interrupted():
            return str(typer.prompt(question, err=True)).strip()

    def error(self, message: str, hint: str | None = None) -> None:
        _write(sys.stderr, message, "red")
        if hint:
            _write(sys.stderr, f"hint: {hint}", "plain")

    def exception(self, error: BaseException) -> None:
        """Show the error of the command; an error of the user's code with its traceback."""
        if isinstance(error, KubetorchError):
            message, hint = error.message or type(error).__name__, error.hint
        else:
            message, hint = "".join(traceback.format_exception_only(error)).rstrip(), None
        error_text = message if hint is None else str(error)
        trace = _traceback_text(error).rstrip().removesuffix(error_text).rstrip()
        if trace:
            self.note(trace, "dim")
        self.error(message, hint)

    def failure_panel(self, title: str, lines: Iterable[str]) -> None:
        _panel(sys.stderr, title, lines, "red")

    def text(self, text: str) -> None:
        """Data for people and programs alike, such as a line of a log, on stdout."""
        _write(self._stdout, text, "plain", is_raw=self._is_raw)


@contextlib.contextmanager
def _interrupted() -> Iterator[None]:
    """Raise Ctrl-C at a question as such, which `typer` takes for a no."""
    try:
        yield
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise


#: A column: its header, and its cells.
Column = Sequence[str]


def layout(table: Sequence[Column]) -> list[str]:
    """The lines of a table: a header, and one for each line of the tallest cell of a row."""
    widths = [_width(column) for column in table]
    lines = []
    for row in zip(*table, strict=True):
        for cells in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            padded = (cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def narrowed(table: Sequence[Column], width: int, dispensable: Sequence[str] = ()) -> list[Column]:
    """The columns that are shown on so narrow a terminal."""
    shown = list(table)
    if not _fits(shown, width):
        shown = [column for column in shown if any(cell != "-" for cell in column[1:])] or shown
        for name in dispensable:
            if not _fits(shown, width):
                shown = [column for column in shown if column[0] != name]
    return shown


def _fits(table: Sequence[Column], width: int) -> bool:
    return sum(_width(column) + 2 for column in table) - 2 <= width


def _width(column: Column) -> int:
    return max(len(line) for cell in column for line in cell.split("\n"))


def _draw_table(table: Sequence[Column], width: int) -> str:
    """A table for a terminal: long cells go on in the next line, between words where they can."""
    from rich.console import Console  # noqa: PLC0415  # 50 ms, on terminals alone
    from rich.table import Table  # noqa: PLC0415  # as above
    from rich.text import Text  # noqa: PLC0415  # as above

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard" if _has_colour(sys.stdout) else None,
    )
    rich_table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header, *_ in table:
        rich_table.add_column(Text(header), overflow="fold")
    for row in zip(*(column[1:] for column in table), strict=True):
        rich_table.add_row(
            *(Text(cell, _STATUS_COLOURS.get(cell, "")) for cell in map(terminal.visible, row))
        )
    with console.capture() as captured:
        console.print(rich_table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _traceback_text(error: BaseException) -> str:
    """The traceback of an error in code that is not ours; empty for other errors."""
    remote = getattr(error, "remote_traceback", None)
    if remote:
        # A refusal of the agent was raised at no line of the user's code.
        is_refusal = isinstance(error, KubetorchError) and 'File "' not in remote
        return "" if is_refusal else str(remote)
    if not tracebacks.is_full():
        # The text of a SyntaxError has its line.
        if isinstance(error, (KubetorchError, TimeoutError, SyntaxError)):
            return ""
        tracebacks.shorten(error)
    return "".join(traceback.format_exception(error))


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(_jsonable(value), indent=indent, ensure_ascii=False, default=str)


def _jsonable(value: object) -> object:
    """A value for `json.dumps`, which writes numbers that JSON lacks, and refuses other keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {_json_key(key): _jsonable(item) for key, item in value.items()}
    return [*map(_jsonable, value)] if isinstance(value, (list, tuple)) else value


def _json_key(key: object) -> object:
    is_plain = key is None or isinstance(key, (str, int, float))
    return _jsonable(key) if is_plain else str(key)


def _panel(stream: TextIO, title: str, lines: Iterable[str], style: Style) -> None:
    width = min(shutil.get_terminal_size().columns, 100)
    _write(stream, f"── {title} ".ljust(width, "─"), style)
    for line in lines:
        _write(stream, line, "plain")
    _write(stream, "", "plain")


def _write(stream: TextIO, text: str, style: Style, *, is_raw: bool = False) -> None:
    if not is_raw:
        text = terminal.shown(text, stream)
    if text and style in _CODES and _has_colour(stream):
        text = f"\033[{_CODES[style]}m{text}\033[0m"
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        if stream is sys.stdout:
            error.filename = _STDOUT
        raise


def _has_colour(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def discard_if_lost(error: OSError) -> bool:
    """Discard the rest of the output if stdout could not be written; returns whether it was so."""
    try:
        sys.stdout.flush()
    except OSError:
        is_lost = True
    else:
        # A stream without a buffer does not fail again.
        is_lost = error.filename == _STDOUT
    if is_lost:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    return is_lost


def tolerate_narrow_encodings() -> None:
    """Show `?` for characters that the terminal lacks, instead of failing the command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


@contextlib.contextmanager
def browser(url: str) -> Iterator[None]:
    """Open a URL with a token in the browser, by a page that leads there.

    Other users of the machine see the arguments of a program, and so not the token.
    """
    import tempfile  # noqa: PLC0415  # few commands open a page
    import webbrowser  # noqa: PLC0415  # as above

    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:  # only its owner reads it
        page.write(f'<meta http-equiv="refresh" content="0; url={html.escape(url, quote=True)}">')
        page.flush()
        webbrowser.open(Path(page.name).as_uri())
        yield
