"""`kt.Secret` and `kt.secret`: credentials that services see.

The values are read when a secret is declared, from files, variables or the program itself, and
stay in this process until a deploy hands them to the controller: a secret's repr, its pickle and
the declarations that it stands in have its name and nothing more. In pods, whose machine may not
have the files, a secret without values stands for the one of its name that the controller has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

from kubetorch.config.settings import config
from kubetorch.errors import KubetorchError, SecretNotFound, SpecError
from kubetorch.lib.secret_bytes import SecretBytes
from kubetorch.sdk import backend, credentials, inpod, parameters
from kubetorch.sdk.credentials import Credentials, EnvVars, SecretSource
from kubetorch.specs import names
from kubetorch.specs import secret as specs
from kubetorch.specs.secret import MountType, Provider, SecretRef

if TYPE_CHECKING:
    from kubetorch.wire.secrets import SecretView


_SOURCES = (
    "You must provide exactly one of: `provider`, `path`, `env_vars` or `values`. "
    "Alternatively, you may provide `name` to load a secret from name."
)
#: Parameters that `from_config` takes.
_PARAMETERS = (
    *("name", "provider", "values", "path", "env_vars", "override"),
    *("env_var", "namespace", "filenames"),
)


class Secret:
    """Credentials that services see, as environment variables or as files.

    Without `values`, `path` and variables, those of the provider are taken: its files, else its
    variables.

    Args:
        name: Its name; `<username>-<provider>` if not given.
        provider: Whose credentials they are; `kt.Secret.builtin_providers(as_str=True)`.
        values: The values themselves, by name: variables, or with `path` the files there.
        path: A file or folder, which is read here and lies at the same place in pods.
        env_vars: Variables that are read here and set in pods: a list of them, or a dictionary
            with a name for the value of each.
        override: Whether a deploy replaces the values of a secret of this name.
        env_var: One variable. If it is not set here, the secret is one that exists.
        namespace: Namespace, if not that of the service.
        filenames: Files of `path` to take; all of a folder if not given.

    Raises:
        SpecError: It is declared wrongly, or there are no values.
    """

    def __init__(  # noqa: PLR0913  # the documented constructor
        self,
        name: str | None = None,
        provider: str | None = None,
        values: Mapping[str, str | bytes] | None = None,
        path: str | PathLike[str] | None = None,
        env_vars: Sequence[str] | Mapping[str, str] | None = None,
        override: bool = False,
        *,
        env_var: str | None = None,
        namespace: str | None = None,
        filenames: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(override, bool):
            raise SpecError(f"override is {override!r}; it must be True or False")
        source = SecretSource.check(provider, values, path, env_vars, env_var, filenames)
        checked_provider = source.provider
        self._name = _checked_name(name, checked_provider)
        self._namespace = None if namespace is None else names.check_namespace(namespace)
        self._override = override
        #: The name of the Kubernetes object, of a secret that exists.
        self._object_name: str | None = None
        self.provider: str | None = None if checked_provider is None else checked_provider.name
        self._content = source.read(self._name, may_be_missing=inpod.is_worker())

    # --------------------------------------------------------------------------------- questions

    @property
    def name(self) -> str:
        """Name of the secret."""
        return self._name

    @property
    def namespace(self) -> str | None:
        """Namespace of the secret; `None` is that of the service it is used in."""
        return self._namespace

    @property
    def override(self) -> bool:
        """True if a deploy replaces the values of a secret of this name."""
        return self._override

    @property
    def values(self) -> dict[str, str | bytes]:
        """The values by name; bytes where they are no text. Empty if they are not known here."""
        hidden = self._content.values
        return {} if hidden is None else {name: _text(hidden[name]) for name in hidden}

    @property
    def path(self) -> str | None:
        """Folder of its files in pods; `None` when it becomes variables."""
        return self._content.path

    @property
    def filenames(self) -> list[str]:
        """The files in that folder."""
        return list(self._content.filenames)

    @property
    def env_vars(self) -> EnvVars | None:
        """The variables: a list, or a dictionary with the variable of each value."""
        variables = self._content.env_vars
        return None if variables is None else variables.copy()

    @property
    def mount_type(self) -> MountType:
        """`volume` when it lies in pods as files, `env` when it becomes variables."""
        return "env" if self.path is None else "volume"

    def to_upload(self) -> SecretBytes | None:
        """The values that a deploy brings to the controller; `None` for a secret that exists."""
        return None if self.is_found else self._content.values

    @property
    def is_found(self) -> bool:
        """True if only its name is known: pods see the secret of that name in their namespace."""
        return self._object_name is not None

    def to_ref(self) -> SecretRef:
        """The secret as pods see it, without its values."""
        content = self._content
        variables = credentials.pairs(content.env_vars or [])
        return SecretRef(
            name=self._name,
            object_name=self._object_name
            or specs.object_name(self._name, username=config.username),
            mount_type=self.mount_type,
            keys=tuple(content.values or variables or content.filenames),
            path=self.path,
            all_keys=content == Credentials(None),
            renamed=tuple((key, name) for key, name in variables.items() if key != name),
        )

    # ------------------------------------------------------------------------------ constructors

    @classmethod
    def from_provider(
        cls,
        provider: str,
        name: str | None = None,
        path: str | PathLike[str] | None = None,
        override: bool = False,
    ) -> Secret:
        """The credentials of a provider.

        Args:
            provider: One of `kt.Secret.builtin_providers(as_str=True)`.
            name: Its name; `<username>-<provider>` if not given.
            path: Where the provider's files are, if not in their usual place.
            override: Whether a deploy replaces the values of a secret of this name.

        Raises:
            SpecError: There is no such provider, or there are no credentials of it.
        """
        return cls(name, provider, path=path, override=override)

    @classmethod
    def from_path(
        cls, path: str | PathLike[str], name: str | None = None, override: bool = False
    ) -> Secret:
        """A file, or the files of a folder.

        Args:
            path: Where they are; they lie at the same place in pods.
            name: Its name; needed unless the folder is a provider's.
            override: Whether a deploy replaces the values of a secret of this name.

        Raises:
            SpecError: There is nothing, or a name is missing.
        """
        return cls(name, path=path, override=override)

    @classmethod
    def from_env(
        cls,
        env_vars: Sequence[str] | Mapping[str, str],
        name: str | None = None,
        override: bool = False,
    ) -> Secret:
        """Environment variables of this program.

        Args:
            env_vars: A list of them, or a dictionary with a name for the value of each.
            name: Its name; needed unless they are a provider's.
            override: Whether a deploy replaces the values of a secret of this name.

        Raises:
            SpecError: One is not set, or a name is missing.
        """
        return cls(name, env_vars=env_vars, override=override)

    @classmethod
    def from_name(cls, name: str, namespace: str | None = None) -> Secret | None:
        """A secret that exists, with its values; `None` if there is none of that name.

        Args:
            name: Its name, as it was declared or as Kubernetes has it.
            namespace: Its namespace. Without it a deploy takes the secret of that name that is
                where the service is; the values here are those in `kt.config.namespace`.
        """
        searched_namespace = (
            config.namespace if namespace is None else names.check_namespace(namespace)
        )
        if inpod.is_importing():
            # A module that a pod imports must not ask the controller.
            return cls.reference(name, namespace=namespace)
        session = backend.session()
        try:
            view = session.ask(lambda controller: controller.secrets.find(searched_namespace, name))
            values = session.ask(
                lambda controller: controller.secrets.values(searched_namespace, view.object_name)
            )
        except SecretNotFound:
            if namespace is not None:
                return None
            with suppress(KubetorchError):  # without the right to list secrets there is no other
                stored_secrets = session.ask(lambda controller: controller.secrets.list(None))
                object_names = specs.object_names(name, username=config.username)
                if any(
                    stored_secret.object_name in object_names for stored_secret in stored_secrets
                ):
                    return cls.reference(name)
            return None
        return cls._existing(name, view, values, namespace)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Secret:
        """A secret of a dictionary with the arguments of `kt.Secret`; `override` may be text.

        Raises:
            SpecError: It has something else in it, or declares a secret wrongly.
        """
        if not isinstance(config, Mapping):
            raise SpecError(f"the secret is {type(config).__name__}; it must be a dictionary")
        unknown = [key for key in config if key not in _PARAMETERS]
        if unknown:
            raise SpecError(f"a secret has no {unknown[0]!r}; it has {', '.join(_PARAMETERS)}")
        override = str(config.get("override", False)).lower() == "true"
        return cls(**{**config, "override": override})

    @overload
    @classmethod
    def builtin_providers(cls, as_str: Literal[True]) -> list[str]: ...
    @overload
    @classmethod
    def builtin_providers(cls, as_str: Literal[False] = ...) -> list[Provider]: ...
    @classmethod
    def builtin_providers(cls, as_str: bool = False) -> list[str] | list[Provider]:
        """The providers whose credentials can be found by the provider's name.

        Args:
            as_str: Their names, instead of where each keeps its credentials.
        """
        return list(specs.PROVIDERS) if as_str else list(specs.PROVIDERS.values())

    @classmethod
    def reference(cls, name: str, *, namespace: str | None = None) -> Secret:
        """A secret that exists, by its name alone."""
        named_secret = cls.__new__(cls)
        named_secret._name = name
        named_secret._namespace = namespace
        named_secret._override = False
        named_secret._object_name = name
        named_secret.provider = None
        named_secret._content = Credentials(None)
        return named_secret

    @classmethod
    def _existing(
        cls, name: str, view: SecretView, values: SecretBytes, namespace: str | None
    ) -> Secret:
        existing_secret = cls.reference(name, namespace=namespace)
        existing_secret._object_name = view.object_name
        existing_secret._override = view.override
        existing_secret.provider = view.provider
        if view.path is not None:
            existing_secret._content = Credentials(values, view.path, view.keys)
        else:
            names = dict(view.renamed)
            variables = {key: names.get(key, key) for key in view.keys}
            existing_secret._content = Credentials(
                values, env_vars=variables if names else list(variables)
            )
        return existing_secret

    # ------------------------------------------------------------------------------- as a value

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the values."""
        content = self._content
        bare = Credentials(None, content.path, content.filenames, content.env_vars)
        return {**self.__dict__, "_content": bare}

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> Secret:
        return self

    def __repr__(self) -> str:
        arguments = {
            "name": self._name,
            "provider": self.provider,
            "path": self.path,
            "env_vars": self.env_vars,
            "override": self._override or None,
            "namespace": self._namespace,
        }
        return parameters.expression("Secret", arguments)


def secret(  # noqa: PLR0913  # the documented arguments
    name: str | None = None,
    provider: str | None = None,
    path: str | PathLike[str] | None = None,
    env_vars: Sequence[str] | Mapping[str, str] | None = None,
    namespace: str | None = None,
    override: bool = False,
    *,
    values: Mapping[str, str | bytes] | None = None,
    env_var: str | None = None,
) -> Secret | None:
    """A secret of exactly one source, or one that exists, by its name.

    Args:
        name: Its name; alone it finds a secret that exists.
        provider: Whose credentials they are; `path` may say where those are.
        path: A file or folder, which is read here and lies at the same place in pods.
        env_vars: Variables that are read here and set in pods: a list of them, or a dictionary
            with a name for the value of each.
        namespace: Its namespace, if not that of the service.
        override: Whether a deploy replaces the values of a secret of this name.
        values: The values themselves, by name.
        env_var: One variable; if it is not set here, the secret of this name that exists.

    Returns:
        The secret; `None` if only a name was given and there is none of that name.

    Raises:
        SpecError: There is no source or more than one, or it has no values.
    """
    sources = (provider, path, env_vars, values, env_var)
    count = sum(source is not None for source in sources)
    if count == 1 or (count == 2 and provider is not None and path is not None):
        return Secret(
            name, provider, values, path, env_vars, override, namespace=namespace, env_var=env_var
        )
    if count or not name:
        raise SpecError(_SOURCES)
    return Secret.from_name(name, namespace)


def _checked_name(name: object, provider: Provider | None) -> str:
    if name is not None:
        return specs.check_name(name)
    if provider is None:
        raise SpecError("the secret's name must be provided", hint='for example name="my-token"')
    username = config.username
    return specs.check_name(f"{username}-{provider.name}" if username else provider.name)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
