"""`kt config`: show or change settings."""

from __future__ import annotations

from typing import Annotated

import typer

from kubetorch.cli.args import AsJson
from kubetorch.cli.output import Output
from kubetorch.config.settings import SETTINGS, config
from kubetorch.errors import ConfigError, KubetorchError

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_EXAMPLES = {
    "get": "for example kt config get namespace",
    "set": "for example kt config set namespace research",
    "unset": "for example kt config unset namespace",
}


@app.command("config")
def configure(
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, get, set or unset.")
    ] = "list",
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Name of a setting.")] = None,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="Its new value.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show or change settings.

    They are kept in ~/.kt/config.yaml; a KT_* variable of the environment goes before the file.
    """
    output = Output(as_json=as_json)
    if action == "list":
        _list(output)
    elif action == "get":
        _get(_known(key, "Key is required for 'get'", action), output)
    elif action == "unset" or (action == "set" and (value or "").lower() in ("none", "null")):
        _unset(_known(key, f"Key is required for '{action}'", action), output)
    elif action == "set":
        if value is None:
            raise ConfigError("Both key and value are required for 'set'", hint=_EXAMPLES["set"])
        _set(_known(key, "Both key and value are required for 'set'", action), value, output)
    else:
        raise ConfigError(f"Unknown action: {action}\nValid actions are: set, get, list, unset")


def _list(output: Output) -> None:
    settings = dict(config)
    if output.as_json:
        output.value(settings)
    else:
        output.report(str(settings))


def _get(key: str, output: Output) -> None:
    value = config.get(key)
    if output.as_json:
        output.value({key: value})
    elif value is None:
        output.report(f"{key.capitalize()} not set")
    else:
        output.report(str(value))


def _unset(key: str, output: Output) -> None:
    config.write({key: None})
    output.report(f"{key} unset", "green")
    if output.as_json:
        output.value({key: None})


def _set(key: str, value: str, output: Output) -> None:
    try:
        stored = config.set(key, value)
    except KubetorchError as error:
        raise ConfigError(f"Error setting {key}: {error.message}", hint=error.hint) from error
    config.write({key: stored})
    output.report(f"{key} set to: {stored}", "green")
    if output.as_json:
        output.value({key: stored})


def _known(key: str | None, missing: str, action: str) -> str:
    """The setting that `key` names."""
    if key is None:
        raise ConfigError(missing, hint=_EXAMPLES[action])
    name = key.replace("-", "_")
    if name not in SETTINGS:
        raise typer.BadParameter(
            f"there is no setting {key!r}; there are {', '.join(SETTINGS)}", param_hint="KEY"
        )
    return name
