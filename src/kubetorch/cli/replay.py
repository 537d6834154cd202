"""`kt replay`: runs a call that has left a record again."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import traceback
from collections import Counter
from typing import Annotated, Any

import typer

from kubetorch.cli.args import AsJson
from kubetorch.cli.output import Output
from kubetorch.cli.services import Services
from kubetorch.cli.views import age
from kubetorch.errors import SpecError
from kubetorch.lib import terminal
from kubetorch.sdk.debugger.terminal import is_at_terminal
from kubetorch.sdk.replay import Code, Replay
from kubetorch.sdk.tuning import LIMITS

#: A closed terminal, and `kill`.
_ENDS = (signal.SIGHUP, signal.SIGTERM)

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command("replay")
def replay(  # noqa: PLR0913  # the documented options
    call_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the call, or its first 6 digits or more.")
    ],
    code: Annotated[
        str,
        typer.Option(
            "--code", help="recorded: the code that the call ran. here: the working directory's."
        ),
    ] = "recorded",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another argument, as JSON or text: lr=0.1. May be repeated."),
    ] = None,
    times: Annotated[
        int, typer.Option("--times", min=1, help="Run it so often, and count how it ends.")
    ] = 1,
    in_pod: Annotated[
        bool, typer.Option("--in-pod", help="Run it in a pod of the service, with its code of now.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run code and arguments of another user here.")
    ] = False,
    no_debugger: Annotated[
        bool, typer.Option("--no-debugger", help="Do not stop where the call raises its error.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a call again with its arguments.

    It runs on this machine, or in a pod of the service, and kt fails as the call does. At a
    terminal the debugger stops where the error was raised. Calls that
    fail can be replayed for 7 days, with kt.fn(..., record="all") all calls; kt calls shows ids.
    """
    output = Output(as_json=as_json)
    if code not in ("recorded", "here"):
        raise typer.BadParameter(f"{code!r} is none of: recorded, here", param_hint="--code")
    if in_pod and code == "here":
        raise typer.BadParameter("a pod of the service runs the code of the service: no --code")
    values = _changes(changes or [])
    services = Services(None, output, is_changing=in_pod)
    replayed = Replay.of(services.call_id(call_id), services.session)
    replayed.check(in_pod=in_pod, trust=trust, has_terminal=terminal.is_terminal(sys.stdin))
    chosen: Code = "here" if code == "here" else "recorded"
    # Of many runs, and for a program that reads the result, none is to wait for a command.
    is_single = times == 1 and not as_json
    is_debugged = is_single and not no_debugger and is_at_terminal()
    for number in _ENDS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    recorded_call = replayed.recorded_call(
        in_pod=in_pod,
        code=chosen,
        changes=values,
        post_mortem=is_debugged,
        is_trusted=trust and terminal.is_terminal(sys.stdin),
        stops=is_debugged,
        before_start=lambda: _describe(replayed, output, in_pod=in_pod, code=code),
    )
    with contextlib.ExitStack() as stack:
        if not is_debugged:  # stdout, where the SDK shows what the function prints, is for results
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        call = stack.enter_context(recorded_call)
        if times == 1:
            output.result(call())
            return
        ends = _count(call, times, output)
    _report(ends, output)
    raise typer.Exit(0 if set(ends) == {_RETURNED} else 1)


def _end(number: int, _: object) -> None:
    """End, and delete the service of the replay before that."""
    for end_signal in _ENDS:  # a closed terminal sends more than one
        signal.signal(end_signal, signal.SIG_IGN)
    sys.exit(128 + number)


def _changes(words: list[str]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier():
            raise SpecError(f"--set {word!r} is no name and value", hint="for example --set lr=0.1")
        try:
            changes[name] = json.loads(text)
        except ValueError:
            changes[name] = text
    return changes


def _describe(replayed: Replay, output: Output, *, in_pod: bool, code: str) -> None:
    call, end = replayed.view.call, _line(replayed.record.outcome)
    output.note(f"{call.callable} ({call.id}) {end}, {age(call.ended or call.started)} ago", "bold")
    where = "in a pod, with the code that the service has now"
    if not in_pod:
        where = "on this machine, with the code " + (
            "of the working directory" if code == "here" else "that it ran"
        )
    output.note(f"It runs again {where}.")
    output.note("A replay does not have:")
    for part in replayed.missing_parts(in_pod=in_pod):
        output.note(f"  - {part}")


_RETURNED = "returned"


def _count(call: Any, times: int, output: Output) -> Counter[str]:  # noqa: ANN401  # a call
    """How so many runs end."""
    ends: Counter[str] = Counter()
    for number in range(1, times + 1):
        try:
            call()
        except Exception as error:  # noqa: BLE001  # the user's own
            end = _line(f"raised {traceback.format_exception_only(error)[0]}")
        else:
            end = _RETURNED
        ends[end] += 1
        output.note(f"{number}/{times}: {end}", "dim")
    return ends


def _report(ends: Counter[str], output: Output) -> None:
    if output.as_json:
        output.value(dict(ends))
    for end, count in ends.most_common():
        output.report(f"{count:>5}  {end}")


def _line(text: str) -> str:
    """The end of a call on one line."""
    return text.strip().splitlines()[0][: LIMITS.replay_error_characters]
