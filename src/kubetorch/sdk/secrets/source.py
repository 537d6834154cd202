"""What a secret is made of, as the arguments of `kt.Secret` say it, and reading it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import fspath

from kubetorch.errors import SpecError
from kubetorch.lib.hidden import Hidden
from kubetorch.sdk.secrets import credentials
from kubetorch.sdk.secrets.credentials import Credentials, EnvVars
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import Provider


@dataclass(frozen=True)
class Source:
    """Where the values of a secret come from; `values` before `path` before variables.

    Attributes:
        provider: Whose credentials they are.
        values: The values themselves.
        path: A file or folder.
        env_vars: Variables.
        filenames: Files of the folder.
        may_exist: Whether the secret may be one that exists, if the variables are not set.
    """

    provider: Provider | None
    values: Hidden | None
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
    ) -> Source:
        """The source that arguments say.

        Raises:
            SpecError: They contradict each other, or one is wrong.
        """
        if env_var is not None and env_vars is not None:
            raise SpecError("a secret has `env_var` or `env_vars`, not both")
        given = env_vars if env_var is None else [env_var]
        variables = None if given is None else credentials.check_env_vars(given)
        place = None if path is None else _checked_path(path)
        if place is not None and variables is not None:
            raise SpecError("a secret is made of `path` or of variables, not of both")
        if filenames is not None and place is None:
            raise SpecError("`filenames` are files of `path`, which is not given")
        hidden = None if values is None else _encoded(values)
        known = None if provider is None else specs.provider(provider)
        if known is None and hidden is None:
            known = _recognised(place, variables)
        files = None if filenames is None else _checked_filenames(filenames)
        return cls(known, hidden, place, variables, files, may_exist=env_var is not None)

    def read(self, name: str, *, may_be_missing: bool) -> Credentials:
        """The values, and how pods see them.

        Args:
            name: Name of the secret, for messages.
            may_be_missing: Whether values that are not here are no error.

        Raises:
            SpecError: There are none, or they are too large.
        """
        try:
            found = self._read(name)
        except SpecError:
            if not may_be_missing:
                raise
            return Credentials(None, path=self.path, env_vars=self.env_vars)
        if found.values is not None and found.values.size_bytes > specs.SIZE_LIMIT:
            raise credentials.too_large(f"the secret {name!r}", found.values.size_bytes)
        return found

    def _read(self, name: str) -> Credentials:
        if self.values is not None:
            return self._of_values(self.values)
        if self.path is not None:
            if self.provider is not None and self.filenames is None:
                return credentials.of_provider(self.provider, self.path)
            return credentials.in_folder(self.path, self.filenames)
        if self.env_vars is not None:
            return self._of_variables(name, self.env_vars)
        if self.provider is not None:
            return credentials.of_provider(self.provider)
        raise SpecError(
            f"the secret {name!r} has no values: give `provider`, `path`, `env_vars` or `values`",
            hint=f"a secret that exists is used by its name: kt.Compute(secrets=[{name!r}])",
        )

    def _of_values(self, values: Hidden) -> Credentials:
        if self.path is not None:
            return Credentials(values, specs.check_folder(self.path), tuple(values))
        env_vars = list(values) if self.env_vars is None else self.env_vars
        variables = credentials.pairs(env_vars)
        for key in variables:
            if key not in values:
                raise SpecError(f"values has no {key!r}, which env_vars names")
        for variable in variables.values():
            specs.check_variable(variable)
        return Credentials(values, env_vars=env_vars)

    def _of_variables(self, name: str, env_vars: EnvVars) -> Credentials:
        values, missing = credentials.read_variables(env_vars)
        if missing and not self.may_exist:
            shown = specs.abbreviated(missing[0])
            raise SpecError(
                f"the secret {name!r} needs the environment variable {shown!r}, which is not set",
                hint="env_vars has names of variables, not their values",
            )
        return Credentials(None if missing else values, env_vars=env_vars)


def _recognised(path: str | None, variables: EnvVars | None) -> Provider | None:
    """The provider whose usual place or variables these are."""
    if path is not None:
        return credentials.provider_of_path(path)
    return None if variables is None else credentials.provider_of_env_vars(variables)


def _checked_path(path: object) -> str:
    try:
        place = fspath(path)  # type: ignore[call-overload]  # what is no path raises
    except TypeError:
        place = None
    if not isinstance(place, str) or not place or "\0" in place:
        raise SpecError(f"path is {path!r}; it must be a file or a folder")
    return place


def _checked_filenames(filenames: object) -> tuple[str, ...]:
    if isinstance(filenames, str) or not isinstance(filenames, Sequence) or not filenames:
        raise SpecError(f"filenames is {filenames!r}; it must be a list of names")
    return tuple(specs.check_key(name) for name in filenames)


def _encoded(values: object) -> Hidden:
    if not isinstance(values, Mapping) or not values:
        raise SpecError("values must be a dictionary with at least one value")
    return Hidden({specs.check_key(key): _bytes(key, value) for key, value in values.items()})


def _bytes(key: object, value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise SpecError(f"values[{key!r}] is of type {type(value).__name__}; it must be text")
    return value.encode("utf-8", "surrogateescape")
