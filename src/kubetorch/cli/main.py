"""Entry point of `kt`: finds the command, runs it, and turns an error into a message and a status.

A command's module is imported when that command runs, so that `kt --help` imports none of them.
Exit statuses: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kubetorch._version import __version__
from kubetorch.cli.output import Output, discard_if_lost, tolerate_narrow_encodings
from kubetorch.specs import hints

#: The commands in the order of `kt --help`: the module of `kubetorch.cli` whose `app` has the
#: command, and the first line of the help.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "deploy": ("deploy", "Deploy functions or classes from a file or module."),
    "run": ("apps", "Run a command in pods, as the kt.app of its file says."),
    "call": ("call", "Call a service, or a method of it."),
    "list": ("inspection", "List the services of a namespace."),
    "describe": ("inspection", "Show a service, and how to call it."),
    "status": ("inspection", "Show the pods of a service and its last failure."),
    "logs": ("pods", "Show the log of a service."),
    "stacks": ("pods", "Show what the workers of a service do at this moment."),
    "debug": ("debug", "Attach a debugger to a call that has stopped."),
    "port-forward": ("pods", "Connect a port of this machine with a pod, or its app."),
    "apply": ("apps", "Run the command of a manifest's container."),
    "ssh": ("pods", "Open a shell in a pod, or run a command there."),
    "notebook": ("notebook", "Open JupyterLab in a pod."),
    "check": ("check", "Check that a service works, or without a name, the cluster."),
    "teardown": ("teardown", "Delete services and their pods."),
    "calls": ("call", "List, inspect, cancel and await spawned calls."),
    "replay": ("replay", "Run a call again with its arguments."),
    "token": ("call", "Print a token that may call one service."),
    "scale": ("inspection", "Show or change how an autoscaled service scales."),
    "secrets": ("stores", "List, create, update, delete or describe secrets."),
    "volumes": ("stores", "List, create or delete volumes, or open a shell in one."),
    "put": ("data", "Store files or folders under a key, or in a bucket."),
    "get": ("data", "Get the file or folder under a key or address, or all keys below it."),
    "ls": (
        "data",
        "List what is stored below a key; -v shows sizes, ages, versions and who has them.",
    ),
    "rm": ("data", "Delete a key, or a path in its folder."),
    "store": ("data", "Verify keys of the data store, or delete what nothing needs."),
    "config": ("config", "Show or change settings."),
    "install": ("install", "Install Kubetorch in the cluster of the kubeconfig."),
    "upgrade": ("install", "Upgrade the Kubetorch of the cluster, or change its values."),
    "uninstall": ("install", "Remove Kubetorch and its services from the cluster."),
    "server": ("servers", "Run Kubetorch's agent in a pod of your own."),
    "local": ("servers", "Start, stop or inspect the local service."),
}

#: Other spellings of commands.
_ALIASES = {"secret": "secrets", "exec": "ssh"}


class Commands(TyperGroup):
    """The commands of `kt`; help and completion need no more of them than name and summary."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401  # passed through
        super().__init__(**settings)
        for name, (_, summary) in COMMANDS.items():
            command = TyperCommand(name, help=summary, rich_markup_mode=None)
            self.commands[name] = command

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  # typer's own
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            # The module is loaded with the SDK, and only the SDK has work that could go on.
            tracebacks = sys.modules.get("kubetorch.sdk.tracebacks")
            line = None if tracebacks is None else tracebacks.interruption(interrupt)
            Output().note(f"\n{line or 'Interrupted.'}")
            raise typer.Exit(130) from interrupt

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401  # typer's own
        if args:
            args = [_ALIASES.get(args[0], args[0]), *args[1:]]
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        elif args:
            # A word after an option may be its value.
            words = (word for before, word in itertools.pairwise(args) if before[:1] != "-")
            service = next((word for word in words if not word.startswith("-")), "")
            meant = hints.hint("kt", args[0], service)
            if meant is not None:
                ctx.fail(f"No such command {args[0]!r}.\nhint: {' '.join(meant.split())}")
        return super().resolve_command(ctx, args)


def load(name: str) -> TyperCommand | TyperGroup:
    module = importlib.import_module(f"kubetorch.cli.{COMMANDS[name][0]}")
    command = typer.main.get_group(module.app).commands[name]
    assert isinstance(command, (TyperCommand, TyperGroup))
    return command


app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        Output().text(__version__)
        raise typer.Exit


@app.callback()
def kt(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "-v", "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run Python on Kubernetes, or on a laptop without one."""
    del version  # its callback has done all
    if context.invoked_subcommand is None:
        Output().text(context.get_help())


def main() -> None:
    """Run `kt` with the arguments of this process."""
    tolerate_narrow_encodings()
    try:
        app(prog_name="kt")
    except Exception as error:  # noqa: BLE001  # around one command: every error becomes a message
        if isinstance(error, OSError) and discard_if_lost(error):
            Output().error(f"stdout cannot be written: {error.strerror}")
        else:
            Output().exception(error)
        sys.exit(1)
