"""Reading the values of secrets on the user's machine: files of a folder, variables.

What is read is `Hidden` from here on; no message has a value in it.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import SpecError
from kubetorch.lib.hidden import Hidden
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import SIZE_LIMIT, Provider

#: Names of variables, or the name of a value and the variable that it is in.
EnvVars = list[str] | dict[str, str]

_ENV_EXAMPLE = 'for example env_vars=["HF_TOKEN"] or env_vars={"api_key": "OPENAI_API_KEY"}'


@dataclass(frozen=True)
class Credentials:
    """What a secret consists of.

    Attributes:
        values: The values; `None` if they are not known here.
        path: Folder of the files, here and in pods; `None` when the values become variables.
        filenames: The files in it.
        env_vars: The variables, as the user gave them.
    """

    values: Hidden | None
    path: str | None = None
    filenames: tuple[str, ...] = ()
    env_vars: EnvVars | None = field(default=None, hash=False)


# ------------------------------------------------------------------------------------ variables


def check_env_vars(given: object) -> EnvVars:
    """`env_vars` as it is kept: text stands for a list of one.

    Raises:
        SpecError: It is no list of names and no dictionary of them, or it is empty.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping) and given:
        return {
            specs.check_key(key): specs.check_variable(variable) for key, variable in given.items()
        }
    if isinstance(given, Iterable) and not isinstance(given, (Mapping, bytes)):
        names = [specs.check_variable(name) for name in given]
        if names:
            return list(dict.fromkeys(names))
    raise SpecError(
        "env_vars must be a list of names of variables, or a dictionary",
        hint=_ENV_EXAMPLE,
    )


def pairs(env_vars: EnvVars) -> dict[str, str]:
    """The variable of each value."""
    return env_vars if isinstance(env_vars, dict) else {name: name for name in env_vars}


def read_variables(env_vars: EnvVars) -> tuple[Hidden, list[str]]:
    """The values that variables have, and the variables that are not set.

    A variable that is not set may have its value in one that is called like the value.
    """
    found: dict[str, bytes] = {}
    missing = []
    for key, variable in pairs(env_vars).items():
        text = environment.variable(variable) or environment.variable(key)
        if text is None:
            missing.append(variable)
        else:
            found[key] = os.fsencode(text)
    return Hidden(found), missing


# ---------------------------------------------------------------------------------------- files


def in_folder(path: str, filenames: Sequence[str] | None = None) -> Credentials:
    """The files of a folder, or the one file that `path` is.

    Args:
        path: A folder or a file; `~` is the home of the user.
        filenames: Files of the folder to take, of which some may be missing; all that lie
            directly in it if not given.

    Raises:
        SpecError: There is none of them, or one cannot be read or is too large.
    """
    place = _expanded(path)
    folder = path
    if _is_file(place):
        folder, filenames = posixpath.dirname(path) or ".", [place.name]
        place = place.parent
    elif filenames is None:
        filenames = _files_in(place)
    found = _read(place, filenames)
    if not found:
        looked_for = f": {', '.join(filenames)}" if filenames else ""
        raise SpecError(
            f"there is nothing to make a secret of in {path!r}{looked_for}",
            hint="name a file that is not empty, or a folder with such files",
        )
    return Credentials(found, path=_in_pod(folder), filenames=tuple(found))


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SpecError(f"path is {path!r}; there is no such home: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _files_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except FileNotFoundError:
        raise SpecError(f"there is no file or folder {str(folder)!r}") from None
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> SpecError:
    reason = getattr(error, "strerror", None) or error
    return SpecError(f"{str(path)!r} cannot be read: {reason}")


def _read(folder: Path, filenames: Iterable[str]) -> Hidden:
    found: dict[str, bytes] = {}
    for name in filenames:
        try:
            size = (folder / name).stat().st_size
            if size > SIZE_LIMIT:
                raise too_large(str(folder / name), size)
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if content:
            found[specs.check_key(name)] = content
    return Hidden(found)


def _in_pod(folder: str) -> str:
    """Where files of a folder are in pods: the same place, for which `~` stands if it is relative.

    Raises:
        SpecError: They cannot be there.
    """
    if folder.startswith(("/", "~")):
        return specs.check_folder(folder)
    absolute, home = Path(folder).absolute(), Path.home()
    if absolute.is_relative_to(home):
        return specs.check_folder(f"~/{absolute.relative_to(home)}")
    return specs.check_folder(str(absolute))


def too_large(what: str, size_bytes: int) -> SpecError:
    """The error for what does not fit into a secret."""
    return SpecError(
        f"{what} has {size_bytes} bytes; all values of a secret together have at most {SIZE_LIMIT}",
        hint="a kt.Volume, or the project's folder, holds what is larger",
    )


# ------------------------------------------------------------------------------------ providers


def of_provider(provider: Provider, path: str | None = None) -> Credentials:
    """The credentials of a provider: its files, else its variables.

    Args:
        provider: The provider.
        path: Where its files are, if not in their usual place.

    Raises:
        SpecError: There are none.
    """
    if path is not None:
        is_usual = posixpath.normpath(path) == provider.folder
        given = provider.filenames if is_usual or _has_any(path, provider) else None
        return _exposed(provider, in_folder(path, given))
    if provider.folder and _has_any(provider.folder, provider):
        return _exposed(provider, in_folder(provider.folder, provider.filenames))
    if provider.env:
        env_vars = default_env_vars(provider)
        values, missing = read_variables(env_vars)
        if not missing:
            return Credentials(values, env_vars=env_vars)
    raise SpecError(
        f"there are no credentials of {provider.name} here: {_places(provider)}",
        hint="kt.secret(provider=..., path=...) takes them from elsewhere",
    )


def _has_any(path: str, provider: Provider) -> bool:
    folder = _expanded(path)
    return any(_is_file(folder / name) for name in provider.filenames)


def _exposed(provider: Provider, found: Credentials) -> Credentials:
    """The same, as a variable if that is how the provider's programs want it."""
    values, variable = found.values, provider.exposed_as
    if variable is None or values is None or found.filenames != provider.filenames:
        return found
    (name,) = provider.filenames
    return Credentials(Hidden({variable: values[name].strip()}), env_vars=[variable])


def _places(provider: Provider) -> str:
    """Where was looked, for people."""
    files = [f"{provider.folder}/{name}" for name in provider.filenames]
    tried = [f"no file {' or '.join(files)}"] if files else []
    variables = [variable for _, variable in provider.env]
    if variables:
        tried.append(f"{' and '.join(variables)} {'are' if len(variables) > 1 else 'is'} not set")
    return ", and ".join(tried)


def default_env_vars(provider: Provider) -> EnvVars:
    """The variables that a provider's credentials are in; a list where values have their names."""
    given = dict(provider.env)
    return list(given) if all(key == name for key, name in given.items()) else given


def provider_of_env_vars(env_vars: EnvVars) -> Provider | None:
    """The provider whose variables these are."""
    for provider in specs.PROVIDERS.values():
        if provider.env and env_vars in (dict(provider.env), [name for _, name in provider.env]):
            return provider
    return None


def provider_of_path(path: str) -> Provider | None:
    """The provider whose folder this is, or one of whose files."""
    place = _expanded(path)
    for provider in specs.PROVIDERS.values():
        if provider.folder:
            folder = Path(provider.folder).expanduser()
            if place == folder or place in [folder / name for name in provider.filenames]:
                return provider
    return None
