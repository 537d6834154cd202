"""`kt.config`: the settings of this user and process.

A value set in this process goes before the environment (`KT_*`), that before the file
(`~/.kt/config.yaml`, or what `KT_CONFIG_FILE` names), that before the default. Each value is
checked wherever it comes from, when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from kubetorch.config import values
from kubetorch.config.values import Backend, Plain
from kubetorch.errors import ConfigError, did_you_mean
from kubetorch.lib.files import FileLock, write_atomically
from kubetorch.lib.tuning import TIMING


def read_yaml(path: Path) -> object:
    """The content of a YAML file; `None` if the file is absent or empty."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    import yaml  # noqa: PLC0415  # 13 ms, only where there is a file

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document: object = yaml.load(content, Loader=loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from error
    return document


class SettingsFile:
    """The file of settings, which is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._values: dict[str, object] = {}

    def values(self) -> Mapping[str, object]:
        """The values of the file; values that are `null` are left out."""
        try:
            file_stat = self.path.stat()
        except OSError:  # if the file exists, reading it reports the fault
            stamp = None
        else:
            stamp = (file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino)
        if stamp is None or stamp != self._stamp:
            self._values = self._read()
            self._stamp = stamp
        return self._values

    def merge(self, values: Mapping[str, object], *, replaces: bool = False) -> None:
        """Add these values to the file, or let them replace its content; `None` removes a value."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                merged = {**({} if replaces else self._read()), **values}
                self._write({key: value for key, value in merged.items() if value is not None})
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        self._stamp = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, so that no other program's change is lost."""
        lock = FileLock(self.path.parent)
        try:
            if not lock.get(TIMING.settings_lock_seconds):
                raise ConfigError(
                    f"{self.path} is being written by another program for "
                    f"{TIMING.settings_lock_seconds:g} s"
                )
            yield
        finally:
            lock.close()

    def _write(self, values: Mapping[str, object]) -> None:
        import yaml  # noqa: PLC0415  # 13 ms, only where there is a file

        content = yaml.safe_dump(values, sort_keys=True, allow_unicode=True) if values else ""
        write_atomically(self.path, content.encode(), mode=0o666)

    def _read(self) -> dict[str, object]:
        document = read_yaml(self.path)
        if document is None:
            return {}
        if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
            raise ConfigError(
                f"{self.path} must be a map of settings", hint="one line for each: `name: value`"
            )
        return {key: value for key, value in document.items() if value is not None}


#: The file in which a pod on Kubernetes finds its own namespace.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def of_pod(file: Path = SERVICE_ACCOUNT) -> str | None:
    """The namespace of the pod that this process runs in."""
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def of_context(environ: Mapping[str, str]) -> str | None:
    """The namespace of the kubeconfig's current context.

    A kubeconfig that cannot be read is skipped: connecting to the cluster reports what is wrong.
    """
    configs = []
    for path in _paths(environ):
        try:
            document = read_yaml(path)
        except ConfigError:
            continue
        if isinstance(document, dict):
            configs.append(document)
    current_name = next(
        (
            config_file["current-context"]
            for config_file in configs
            if config_file.get("current-context")
        ),
        None,
    )
    for config in configs:
        contexts = config.get("contexts")
        for named_context in contexts if current_name and isinstance(contexts, list) else ():
            if isinstance(named_context, dict) and named_context.get("name") == current_name:
                context = named_context.get("context")
                namespace = context.get("namespace") if isinstance(context, dict) else None
                return namespace if isinstance(namespace, str) and namespace else None
    return None


def _paths(environ: Mapping[str, str]) -> list[Path]:
    path_list = environ.get("KUBECONFIG")
    if path_list:
        return [Path(path).expanduser() for path in path_list.split(":") if path]
    return [Path("~/.kube/config").expanduser()]


T = TypeVar("T")

INSTALL_NAMESPACE = "kubetorch"
DEFAULT_NAMESPACE = "default"
DEFAULT_IMAGE = "ghcr.io/kubetorch/pod:latest"
DEFAULT_FILE = "~/.kt/config.yaml"


class Setting(Generic[T]):
    """One setting, as an attribute of `KubetorchConfig`; `kubetorch.config.values` parses it."""

    def __init__(self, parse: Callable[[object], T], default: T, doc: str) -> None:
        self.parse = parse
        self.default = default
        self.__doc__ = doc

    def __set_name__(self, owner: type[KubetorchConfig], name: str) -> None:
        self.name = name
        self.variable = f"KT_{name.upper()}"

    @overload
    def __get__(self, config: None, owner: type[KubetorchConfig]) -> Setting[T]: ...
    @overload
    def __get__(self, config: KubetorchConfig, owner: type[KubetorchConfig]) -> T: ...
    def __get__(
        self, config: KubetorchConfig | None, owner: type[KubetorchConfig]
    ) -> Setting[T] | T:
        return self if config is None else self._value(config)

    def _value(self, config: KubetorchConfig) -> T:
        value_and_source = config._value_and_source(self.name, self.variable)
        return copy(self.default) if value_and_source is None else self._parsed(*value_and_source)

    def _origin(self, config: KubetorchConfig) -> str:
        value_and_source = config._value_and_source(self.name, self.variable)
        return "default" if value_and_source is None else value_and_source[1]

    def __set__(self, config: KubetorchConfig, value: object) -> None:
        config._keep(self.name, None if is_nothing(value) else self._parsed(value))

    def _parsed(self, value: object, source: str | None = None) -> T:
        try:
            return self.parse(value)
        except ValueError as error:
            source_note = f" ({source})" if source else ""
            raise ConfigError(f"{self.name} is {value!r}{source_note}: {error}") from error


class _Namespace(Setting[str]):
    """The namespace; an `install_namespace` that the user has set goes before all other sources."""

    def _value(self, config: KubetorchConfig) -> str:
        if config.install_namespace != INSTALL_NAMESPACE:
            return config.install_namespace
        value_and_source = config._value_and_source(self.name, self.variable)
        if value_and_source is not None:
            return self._parsed(*value_and_source)
        return config._suggested_namespace() or self.default

    def _origin(self, config: KubetorchConfig) -> str:
        if config.install_namespace != INSTALL_NAMESPACE:
            return "install_namespace"
        origin = super()._origin(config)
        is_suggested = origin == "default" and config._suggested_namespace() is not None
        return "the cluster's context" if is_suggested else origin


class KubetorchConfig:
    """The settings; see `kubetorch.config.settings` for where values come from.

    Args:
        environ: The environment.
        file: The file, instead of the one that the environment names.
    """

    username = Setting[str | None](values.username, None, "Stands in front of service names.")
    prefix_username = Setting(
        values.boolean, True, "Whether the user name stands in front of service names."
    )
    namespace = _Namespace(values.namespace, DEFAULT_NAMESPACE, "Kubernetes namespace of services.")
    install_namespace = Setting(
        values.namespace, INSTALL_NAMESPACE, "Namespace that Kubetorch is installed in."
    )
    install_url = Setting[str | None](values.text, None, "What pods install Kubetorch from.")
    stream_logs = Setting(values.boolean, True, "Whether calls and deploys show logs of pods.")
    stream_metrics = Setting(values.boolean, True, "Whether calls show the pods' use of resources.")
    post_mortem = Setting(
        values.boolean, False, "Whether calls stop for a debugger at an error of the function."
    )
    volumes = Setting[list[str] | None](values.claims, None, "Volumes of every `kt.Compute`.")
    api_url = Setting[str | None](values.url, None, "Where the controller answers.")
    cluster_config = Setting[dict[str, Plain]](values.mapping, {}, "Settings of the cluster.")
    queue = Setting[str | None](values.queue, None, "Queue that workloads wait in.")
    default_image = Setting(
        values.reference, DEFAULT_IMAGE, "Container image of pods where nobody names one."
    )
    package_managers = Setting(
        values.boolean,
        False,
        "Whether image steps run the system's package manager in pods of this machine.",
    )
    store_bucket = Setting[str | None](
        values.text, None, "Bucket that keeps the local service's data store, s3://bucket/prefix."
    )
    store_endpoint = Setting[str | None](
        values.url, None, "URL of the server of that bucket, if it is not AWS."
    )
    backend = Setting[Backend](values.backend, "auto", "Where pods run: auto, local or kubernetes.")
    quiet = Setting(
        values.boolean,
        False,
        "Whether programs do not say where their pods run, and whose service they found.",
    )

    def __init__(self, environ: Mapping[str, str], file: Path | None = None) -> None:
        self._environ = environ
        self._explicit_file = file
        self._file: SettingsFile | None = None
        self._values: dict[str, object] = {}
        self._revision = 0

    def __setattr__(self, name: str, value: object) -> None:
        # Any other attribute would be a misspelled setting that has no effect.
        if not (name.startswith("_") or hasattr(type(self), name)):
            _existing_name(name)
        super().__setattr__(name, value)

    @property
    def revision(self) -> int:
        """The number of times that a value was set, or unset, in this process."""
        return self._revision

    @property
    def file(self) -> Path:
        """The file of settings."""
        named = self._environ.get("KT_CONFIG_FILE") or DEFAULT_FILE
        return self._explicit_file or Path(named).expanduser()

    # ---------------------------------------------------------------------------- by name

    def get(self, key: str) -> Any:  # noqa: ANN401  # each has a type of its own
        """The value of a setting.

        Raises:
            ConfigError: There is no such setting, or its value cannot be used.
        """
        return getattr(self, _existing_name(key))

    def set(self, key: str, value: object) -> Any:  # noqa: ANN401  # each has a type of its own
        """Set a value for this process, and return it as it is kept; `None` unsets it.

        Raises:
            ConfigError: There is no such setting, or the value cannot be used.
        """
        setattr(self, _existing_name(key), value)
        return self._values.get(key)

    def unset(self, key: str) -> None:
        """Forget the value that was set in this process.

        Raises:
            ConfigError: There is no such setting.
        """
        self._keep(_existing_name(key), None)

    def origin(self, key: str) -> str:
        """The origin of a setting's value: `this program`, a variable, a file, `default`.

        Raises:
            ConfigError: There is no such setting.
        """
        return SETTINGS[_existing_name(key)]._origin(self)

    def write(self, values: Mapping[str, object] | None = None) -> None:
        """Write settings into the file; others in it stay.

        Args:
            values: What to write; `None` as a value removes it. Without it, what was set in this
                process. An empty dictionary empties the file.

        Raises:
            ConfigError: There is no such setting, its value cannot be used, or the file cannot be
                written.
        """
        new_values = self._values if values is None else values
        checked = {
            key: None
            if is_nothing(value)
            else SETTINGS[_existing_name(key)]._parsed(value, "to be written")
            for key, value in new_values.items()
        }
        self._settings_file().merge(checked, replaces=values is not None and not values)

    def keys(self) -> Iterator[str]:
        """The names of all settings."""
        return iter(SETTINGS)

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  # each has a type of its own
        if key not in SETTINGS:
            raise KeyError(key)
        return self.get(key)

    def __repr__(self) -> str:
        return f"KubetorchConfig({dict(self)})"

    # ------------------------------------------------------------------------------- sources

    def _value_and_source(self, name: str, variable: str) -> tuple[object, str] | None:
        """The value of a setting and its source, of the first source that has the setting."""
        if name in self._values:
            return self._values[name], "this program"
        text = self._environ.get(variable)
        if text is not None and not is_nothing(text):
            return text, variable
        value = self._from_file().get(name)
        return None if is_nothing(value) else (value, str(self.file))

    def _keep(self, name: str, value: object) -> None:
        self._revision += 1
        if value is None:
            self._values.pop(name, None)
        else:
            self._values[name] = value

    def _settings_file(self) -> SettingsFile:
        if self._file is None or self._file.path != self.file:
            self._file = SettingsFile(self.file)
        return self._file

    def _from_file(self) -> Mapping[str, object]:
        file_values = self._settings_file().values()
        for key in file_values:
            if key not in SETTINGS:
                raise ConfigError(f"{self.file} has an unknown setting {key!r}", hint=_hint(key))
        return file_values

    def _suggested_namespace(self) -> str | None:
        if self.backend == "local":
            return None
        return of_pod() or of_context(self._environ)


def is_nothing(value: object) -> bool:
    """True if a value means "not set"."""
    return value is None or (isinstance(value, str) and value.strip() in ("", "None", "null"))


def _existing_name(key: str) -> str:
    if key not in SETTINGS:
        raise ConfigError(f"there is no setting {key!r}", hint=_hint(key))
    return key


def _hint(key: str) -> str:
    suggestion = did_you_mean(key, SETTINGS, likeness=0.6)
    return suggestion or f"the settings are {', '.join(SETTINGS)}"


#: All settings by name.
SETTINGS: dict[str, Setting[Any]] = {
    name: setting for name, setting in vars(KubetorchConfig).items() if isinstance(setting, Setting)
}

#: The settings of this process.
config = KubetorchConfig(os.environ)
