"""`kt config`: show or change settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kubetorch.cli.args import AsJson
from kubetorch.cli.output import Output
from kubetorch.config.settings import SETTINGS, config
from kubetorch.errors import ConfigError, KubetorchError, did_you_mean

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
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="New value of the setting.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or change settings.

    They are kept in ~/.kt/config.yaml; a KT_* variable of the environment goes before the file.
    """
    output = Output(as_json=as_json)
    if action == "list":
        _list(output)
    elif action == "get":
        _get(_checked_key(key, "Key is required for 'get'", action), output)
    elif action == "unset" or (action == "set" and (value or "").lower() in ("none", "null")):
        _unset(_checked_key(key, f"Key is required for '{action}'", action), output)
    elif action == "set":
        if value is None:
            raise ConfigError("Both key and value are required for 'set'", hint=_EXAMPLES["set"])
        _set(_checked_key(key, "Both key and value are required for 'set'", action), value, output)
    else:
        raise ConfigError(f"Unknown action: {action}\nValid actions are: set, get, list, unset")


def _list(output: Output) -> None:
    settings = dict(config)
    if output.as_json:
        output.value(settings)
        return
    output.table(
        [
            {"SETTING": key, "VALUE": _shown(value), "FROM": _origin(key)}
            for key, value in settings.items()
        ]
    )


def _shown(value: object) -> str:
    """A value as `kt config set` takes it; `-` where there is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value) if value else "-"
    return ",".join(value) if isinstance(value, list) else str(value or "-")


def _origin(key: str) -> str:
    origin = config.origin(key)
    home = str(Path.home())
    return f"~{origin[len(home) :]}" if origin.startswith(f"{home}/") else origin


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
    _warn_of_others(key, output)
    if output.as_json:
        output.value({key: None})


def _set(key: str, value: str, output: Output) -> None:
    try:
        stored = config.set(key, value)
    except KubetorchError as error:
        raise ConfigError(f"Error setting {key}: {error.message}", hint=error.hint) from error
    config.write({key: stored})
    config.unset(key)
    output.report(f"{key} set to: {stored}", "green")
    _warn_of_others(key, output)
    if output.as_json:
        output.value({key: stored})


def _warn_of_others(key: str, output: Output) -> None:
    """Warn that another source than the file decides on a setting."""
    origin = config.origin(key)
    if origin in (SETTINGS[key].variable, "install_namespace"):
        shown = _shown(config.get(key))
        output.warn(f"{key} is still {shown}, because {origin} goes before the file")


def _checked_key(key: str | None, missing: str, action: str) -> str:
    if key is None:
        raise ConfigError(missing, hint=_EXAMPLES[action])
    name = key.replace("-", "_")
    if name not in SETTINGS:
        suggestion = did_you_mean(name, SETTINGS, likeness=0.6)
        explanation = suggestion or f"the settings are {', '.join(SETTINGS)}"
        raise typer.BadParameter(f"there is no setting {key!r}; {explanation}", param_hint="KEY")
    return name
