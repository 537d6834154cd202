"""Reads the values of secrets on the user's machine: files of a folder, variables, values.

What is read is `SecretBytes` from here on; no message has a value in it.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import fspath
from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import SpecError
from kubetorch.lib.secret_bytes import SecretBytes
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import SIZE_BYTES, Provider

#: Names of variables, or the name of a value and the variable that it is in.
EnvVars = list[str] | dict[str, str]

_ENV_EXAMPLE = 'for example env_vars=["HF_TOKEN"] or env_vars={"api_key": "OPENAI_API_KEY"}'


@dataclass(frozen=True)
class Credentials:
    values: SecretBytes | None
    path: str | None = None
    filenames: tuple[str, ...] = ()
    env_vars: EnvVars | None = field(default=None, hash=False)


# ------------------------------------------------------------------------------------ variables


def check_env_vars(env_vars: object) -> EnvVars:
    """`env_vars` as a secret has it; a text stands for a list with that one variable."""
    if isinstance(env_vars, str):
        env_vars = [env_vars]
    if isinstance(env_vars, Mapping) and env_vars:
        return {
            specs.check_key(key): specs.check_variable(variable)
            for key, variable in env_vars.items()
        }
    if isinstance(env_vars, Iterable) and not isinstance(env_vars, (Mapping, bytes)):
        names = [specs.check_variable(name) for name in env_vars]
        if names:
            return list(dict.fromkeys(names))
    raise SpecError(
        "env_vars must be a list of names of variables, or a dictionary", hint=_ENV_EXAMPLE
    )


def pairs(env_vars: EnvVars) -> dict[str, str]:
    """The variable of each value."""
    return env_vars if isinstance(env_vars, dict) else {name: name for name in env_vars}


def read_variables(env_vars: EnvVars) -> tuple[SecretBytes, list[str]]:
    """The values of variables, and the variables that are not set.

    Where a variable is not set, the variable with the name of the value is read.
    """
    values: dict[str, bytes] = {}
    missing = []
    for key, variable in pairs(env_vars).items():
        text = environment.variable(variable) or environment.variable(key)
        if text is None:
            missing.append(variable)
        else:
            values[key] = os.fsencode(text)
    return SecretBytes(values), missing


# ---------------------------------------------------------------------------------------- files


def in_folder(path: str, filenames: Sequence[str] | None = None) -> Credentials:
    """The files of a folder, or the one file that `path` is."""
    source_path = _expanded(path)
    folder = path
    if _is_file(source_path):
        folder, filenames = posixpath.dirname(path) or ".", [source_path.name]
        source_path = source_path.parent
    elif filenames is None:
        filenames = _files_in(source_path)
    contents = _read(source_path, filenames)
    if not contents:
        looked_for = f": {', '.join(filenames)}" if filenames else ""
        raise SpecError(
            f"there is nothing to make a secret of in {path!r}{looked_for}",
            hint="name a file that is not empty, or a folder with such files",
        )
    return Credentials(contents, path=_in_pod(folder), filenames=tuple(contents))


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SpecError(f"path is {path!r}; this home folder does not exist: {error}") from error


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


def _read(folder: Path, filenames: Iterable[str]) -> SecretBytes:
    contents: dict[str, bytes] = {}
    for name in filenames:
        try:
            size = (folder / name).stat().st_size
            if size > SIZE_BYTES:
                raise too_large(str(folder / name), size)
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unreadable(folder / name, error) from error
        if content:
            contents[specs.check_key(name)] = content
    return SecretBytes(contents)


def _in_pod(folder: str) -> str:
    if folder.startswith(("/", "~")):
        return specs.check_folder(folder)
    absolute, home = Path(folder).absolute(), Path.home()
    if absolute.is_relative_to(home):
        return specs.check_folder(f"~/{absolute.relative_to(home)}")
    return specs.check_folder(str(absolute))


def too_large(subject: str, size_bytes: int) -> SpecError:
    return SpecError(
        f"{subject} has {size_bytes} bytes; all values of a secret together have at most "
        f"{SIZE_BYTES}",
        hint="put larger values into a kt.Volume or the project's folder",
    )


# ------------------------------------------------------------------------------------ providers


def of_provider(provider: Provider, path: str | None = None) -> Credentials:
    """The credentials of a provider: its files, else its variables."""
    if path is not None:
        is_usual = posixpath.normpath(path) == provider.folder
        filenames = provider.filenames if is_usual or _has_any(path, provider) else None
        return _exposed(provider, in_folder(path, filenames))
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


def _exposed(provider: Provider, credentials: Credentials) -> Credentials:
    """The credentials as a variable, if the provider's programs read a variable."""
    values, variable = credentials.values, provider.exposed_as
    if variable is None or values is None or credentials.filenames != provider.filenames:
        return credentials
    (name,) = provider.filenames
    return Credentials(SecretBytes({variable: values[name].strip()}), env_vars=[variable])


def _places(provider: Provider) -> str:
    files = [f"{provider.folder}/{name}" for name in provider.filenames]
    tried = [f"no file {' or '.join(files)}"] if files else []
    variables = [variable for _, variable in provider.env]
    if variables:
        tried.append(f"{' and '.join(variables)} {'are' if len(variables) > 1 else 'is'} not set")
    return ", and ".join(tried)


def default_env_vars(provider: Provider) -> EnvVars:
    """The variables that a provider's credentials are in; a list where values have their names."""
    variables = dict(provider.env)
    return list(variables) if all(key == name for key, name in variables.items()) else variables


def provider_of_env_vars(env_vars: EnvVars) -> Provider | None:
    """The provider whose variables these are."""
    for provider in specs.PROVIDERS.values():
        if provider.env and env_vars in (dict(provider.env), [name for _, name in provider.env]):
            return provider
    return None


def provider_of_path(path: str) -> Provider | None:
    """The provider whose folder the path is, or whose file."""
    expanded_path = _expanded(path)
    for provider in specs.PROVIDERS.values():
        if provider.folder:
            folder = Path(provider.folder).expanduser()
            if expanded_path == folder or expanded_path in [
                folder / name for name in provider.filenames
            ]:
                return provider
    return None


# -------------------------------------------------------------------- arguments of `kt.Secret`


@dataclass(frozen=True)
class SecretSource:
    """The source of a secret's values: `values` before `path` before variables."""

    provider: Provider | None
    values: SecretBytes | None
    path: str | None
    env_vars: EnvVars | None
    filenames: tuple[str, ...] | None
    may_exist: bool

    @classmethod
    def check(
        cls,
        provider: object,
        values: object,
        path: object,
        env_vars: object,
        env_var: object,
        filenames: object,
    ) -> SecretSource:
        if env_var is not None and env_vars is not None:
            raise SpecError("a secret has `env_var` or `env_vars`, not both")
        declared_variables = env_vars if env_var is None else [env_var]
        variables = None if declared_variables is None else check_env_vars(declared_variables)
        checked_path = None if path is None else _checked_path(path)
        if checked_path is not None and variables is not None:
            raise SpecError("a secret is made of `path` or of variables, not of both")
        if filenames is not None and checked_path is None:
            raise SpecError("`filenames` are files of `path`, which is not given")
        encoded_values = None if values is None else _encoded(values)
        source_provider = None if provider is None else specs.provider(provider)
        if (
            source_provider is None and encoded_values is None
        ):  # perhaps this is a provider's usual place
            if checked_path is not None:
                source_provider = provider_of_path(checked_path)
            elif variables is not None:
                source_provider = provider_of_env_vars(variables)
        files = None if filenames is None else _checked_filenames(filenames)
        return cls(
            source_provider,
            encoded_values,
            checked_path,
            variables,
            files,
            may_exist=env_var is not None,
        )

    def read(self, name: str, *, may_be_missing: bool) -> Credentials:
        try:
            credentials = self._read(name)
        except SpecError:
            if not may_be_missing:
                raise
            return Credentials(None, path=self.path, env_vars=self.env_vars)
        if credentials.values is not None and credentials.values.size_bytes > specs.SIZE_BYTES:
            raise too_large(f"the secret {name!r}", credentials.values.size_bytes)
        return credentials

    def _read(self, name: str) -> Credentials:
        if self.values is not None:
            return self._of_values(self.values)
        if self.path is not None:
            if self.provider is not None and self.filenames is None:
                return of_provider(self.provider, self.path)
            return in_folder(self.path, self.filenames)
        if self.env_vars is not None:
            return self._of_variables(name, self.env_vars)
        if self.provider is not None:
            return of_provider(self.provider)
        raise SpecError(
            f"the secret {name!r} has no values: give `provider`, `path`, `env_vars` or `values`",
            hint=f"a secret that exists is used by its name: kt.Compute(secrets=[{name!r}])",
        )

    def _of_values(self, values: SecretBytes) -> Credentials:
        if self.path is not None:
            return Credentials(values, specs.check_folder(self.path), tuple(values))
        env_vars = list(values) if self.env_vars is None else self.env_vars
        variables = pairs(env_vars)
        for key in variables:
            if key not in values:
                raise SpecError(f"values has no {key!r}, which env_vars names")
        for variable in variables.values():
            specs.check_variable(variable)
        return Credentials(values, env_vars=env_vars)

    def _of_variables(self, name: str, env_vars: EnvVars) -> Credentials:
        values, missing = read_variables(env_vars)
        if missing and not self.may_exist:
            shown = specs.abbreviated(missing[0])
            raise SpecError(
                f"the secret {name!r} needs the environment variable {shown!r}, which is not set",
                hint="env_vars has names of variables; values={...} has values themselves",
            )
        return Credentials(None if missing else values, env_vars=env_vars)


def _checked_path(path: object) -> str:
    try:
        path_text = fspath(path)  # type: ignore[call-overload]  # what is no path raises
    except TypeError:
        path_text = None
    if not isinstance(path_text, str) or not path_text or "\0" in path_text:
        raise SpecError(f"path is {path!r}; it must be a file or a folder")
    return path_text


def _checked_filenames(filenames: object) -> tuple[str, ...]:
    if isinstance(filenames, str) or not isinstance(filenames, Sequence) or not filenames:
        raise SpecError(f"filenames is {filenames!r}; it must be a list of names")
    return tuple(specs.check_key(name) for name in filenames)


def _encoded(values: object) -> SecretBytes:
    if not isinstance(values, Mapping) or not values:
        raise SpecError("values must be a dictionary with at least one value")
    return SecretBytes({specs.check_key(key): _bytes(key, value) for key, value in values.items()})


def _bytes(key: object, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise SpecError(f"values[{key!r}] is of type {type(value).__name__}; it must be text")
    return value.encode("utf-8", "surrogateescape")
