"""The API server and its user: from kubeconfig files, or from the service account of this pod.

Several files are merged as Kubernetes documents it: the first file that sets a value wins, and of
two clusters, users or contexts of one name the first file's counts in full. Files that `KUBECONFIG`
lists and that do not exist are left out; the file of `kubeconfig_path` has to exist. Paths in a
file are relative to its folder.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kubetorch.config import environment
from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s.tuning import TIMING


@dataclass(frozen=True)
class Pem:
    """A certificate or key: a file that is read when it is needed, or the data itself."""

    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def is_given(self) -> bool:
        return self.path is not None or self.data is not None


#: No certificate, no key.
ABSENT = Pem()


@dataclass(frozen=True)
class Cluster:
    server: str
    authority: Pem = ABSENT
    is_insecure: bool = False
    tls_name: str | None = None
    proxy: str | None = None
    config: Any = None


@dataclass(frozen=True)
class Plugin:
    """A program that gives credentials (`client.authentication.k8s.io`)."""

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_version: str = "client.authentication.k8s.io/v1"
    install_hint: str | None = None
    wants_cluster: bool = False
    interaction: str = "IfAvailable"
    timeout: float = TIMING.plugin_seconds


@dataclass(frozen=True)
class Impersonation:
    """The user as whom requests act."""

    user: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class User:
    """A user. At most one of token, password and plugin is used, in this order."""

    certificate: Pem = ABSENT
    key: Pem = ABSENT
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    plugin: Plugin | None = None
    impersonation: Impersonation = Impersonation()


@dataclass(frozen=True)
class Access:
    """The cluster, the user and the namespace of a client.

    Attributes:
        origin: The source of these settings, for error messages.
    """

    cluster: Cluster
    user: User = User()
    namespace: str = "default"
    context: str | None = None
    origin: str = "the program"


_EXTENSION = "client.authentication.k8s.io/exec"
_PLUGIN_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
_INTERACTIONS = ("Never", "IfAvailable", "Always")


@dataclass(frozen=True)
class Kubeconfig:
    """Merged files: the entries of each kind (`cluster`, `user`, `context`) by their names."""

    files: tuple[Path, ...]
    current_context: str
    entries: Mapping[str, Mapping[str, _Fields]]

    @property
    def contexts(self) -> list[str]:
        return sorted(self.entries["context"])

    def access(self, context: str | None = None) -> Access:
        """Resolve a context to its cluster and user."""
        name = context or self.current_context
        if not name:
            raise KubernetesCredentialsError(
                f"the kubeconfig ({self._file_names}) has no current context",
                hint="kubectl config use-context chooses one of "
                f"{', '.join(self.contexts) or 'those that you add'}",
            )
        settings = self._fields_of("context", name)
        cluster_name, user_name = settings.text("cluster"), settings.text("user")
        if cluster_name is None:
            raise settings.wrong("cluster", "names no cluster")
        return Access(
            cluster=_cluster(self._fields_of("cluster", cluster_name)),
            user=User() if user_name is None else _user(self._fields_of("user", user_name)),
            namespace=settings.text("namespace") or "default",
            context=name,
            origin=settings.where,
        )

    @property
    def _file_names(self) -> str:
        return ", ".join(map(str, self.files)) or "no file"

    def _fields_of(self, kind: str, name: str) -> _Fields:
        entries = self.entries[kind]
        if name not in entries:
            raise KubernetesCredentialsError(
                f"the kubeconfig ({self._file_names}) has no {kind} {name!r}",
                hint=f"it has {sorted(entries)}",
            )
        return entries[name]


def paths(variable: str | None, home: Path) -> list[Path]:
    """The files that `KUBECONFIG` lists, or the default one."""
    listed = [name for name in (variable or "").split(os.pathsep) if name]
    if not listed:
        return [home / ".kube" / "config"]
    return [Path(name) for name in dict.fromkeys(listed)]


def load(files: Sequence[Path]) -> Kubeconfig:
    """Read and merge files; those that do not exist are left out."""
    documents: list[tuple[Path, str]] = []
    for file in files:
        try:
            documents.append((file, file.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise KubernetesCredentialsError(
                f"kubeconfig {file} cannot be read: {getattr(error, 'strerror', None) or error}",
                hint="correct its permissions, or name another one in KUBECONFIG",
            ) from error
    return merge(documents)


def load_file(file: Path) -> Kubeconfig:
    config = load([file])
    if not config.files:
        raise KubernetesCredentialsError(
            f"there is no kubeconfig {file}", hint="correct kubeconfig_path"
        )
    return config


def merge(documents: Sequence[tuple[Path, str]]) -> Kubeconfig:
    current = ""
    merged: dict[str, dict[str, _Fields]] = {"cluster": {}, "user": {}, "context": {}}
    for file, text in documents:
        document = _parse(file, text)
        current = current or str(document.get("current-context") or "")
        for kind, entries in merged.items():
            for name, value in _entries_by_name(document, kind, file).items():
                where = f"{kind} {name!r} of {file}"
                entries.setdefault(name, _Fields(value, file.parent, where))
    return Kubeconfig(tuple(file for file, _ in documents), current, merged)


def _parse(file: Path, text: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(text, loader)  # both are safe ones
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # there are days that are none
        raise _unusable(file, f"is no YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict) or document.get("kind", "Config") != "Config":
        raise _unusable(file, "is no kubeconfig: it should be a mapping with kind: Config")
    return document


def _entries_by_name(document: dict[str, Any], kind: str, file: Path) -> dict[str, dict[str, Any]]:
    """The clusters, users or contexts of a file by name; of two with one name, the first."""
    entries_by_name: dict[str, dict[str, Any]] = {}
    listed = document.get(f"{kind}s") or []
    if not isinstance(listed, list):
        raise _unusable(file, f"{kind}s should be a list")
    for item in listed:
        value = item.get(kind) or {} if isinstance(item, dict) else None
        if not isinstance(value, dict) or not isinstance(item.get("name"), str):
            raise _unusable(file, f"an item of {kind}s should have name and {kind}: {item!r:.80}")
        entries_by_name.setdefault(item["name"], value)
    return entries_by_name


def _unusable(file: Path, why: str) -> KubernetesCredentialsError:
    return KubernetesCredentialsError(
        f"kubeconfig {file} {why}", hint="correct the file, or name another one in KUBECONFIG"
    )


# ------------------------------------------------------------------------------- single entries


class _Fields:
    """The fields of an entry, checked as they are read; `folder` is that of its file."""

    def __init__(self, value: Mapping[str, Any], folder: Path, where: str) -> None:
        self._value = value
        self._folder = folder
        self.where = where

    def wrong(self, name: str, why: str) -> KubernetesCredentialsError:
        return KubernetesCredentialsError(f"{self.where}: {name} {why}", hint="correct the file")

    def get(self, name: str) -> Any:  # noqa: ANN401  # what YAML has
        return self._value.get(name)

    def text(self, name: str) -> str | None:
        value = self._value.get(name)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise self.wrong(name, f"should be a string, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self._value.get(name)
        if value not in (None, True, False):
            raise self.wrong(name, f"should be true or false, not {value!r}")
        return bool(value)

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name) or []
        if not isinstance(value, list):
            raise self.wrong(name, f"should be a list, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.items(name)
        if not all(isinstance(item, str) for item in value):
            raise self.wrong(name, f"should be a list of strings, not {value!r}")
        return tuple(value)

    def path(self, name: str) -> Path | None:
        value = self.text(name)
        try:
            return None if value is None else self._folder / Path(value).expanduser()
        except RuntimeError as error:
            raise self.wrong(name, f"is {value!r}: {error}") from error

    def pem(self, name: str) -> Pem:
        data = self.text(f"{name}-data")
        if data is None:
            return Pem(path=self.path(name))
        try:
            return Pem(data=base64.b64decode("".join(data.split()), validate=True))
        except binascii.Error as error:
            raise self.wrong(f"{name}-data", f"is no base64: {error}") from error

    def program_path(self, command: str) -> str:
        """The path of a program: with a slash, relative to the file's folder; else on `PATH`."""
        return str(self._folder / command) if os.sep in command else command

    def nested(self, name: str) -> _Fields | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"should be a mapping, not {value!r}")
        return _Fields(value, self._folder, f"{self.where}: {name}")


def _cluster(fields: _Fields) -> Cluster:
    server = fields.text("server")
    try:
        parts = urlsplit(server or "")
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # half an IPv6 address, a port that is none
        is_usable = False
    if not is_usable:
        raise fields.wrong("server", f"should be an http:// or https:// URL, not {server!r}")
    authority, is_insecure = fields.pem("certificate-authority"), False
    if fields.flag("insecure-skip-tls-verify"):
        if authority.is_given:
            raise fields.wrong("insecure-skip-tls-verify", "contradicts certificate-authority")
        is_insecure = True
    return Cluster(
        server=str(server).rstrip("/"),
        authority=authority,
        is_insecure=is_insecure,
        tls_name=fields.text("tls-server-name"),
        proxy=fields.text("proxy-url"),
        config=_plugin_config(fields),
    )


def _plugin_config(fields: _Fields) -> Any:  # noqa: ANN401  # belongs to the plugin
    for extension in fields.items("extensions"):
        if isinstance(extension, dict) and extension.get("name") == _EXTENSION:
            return extension.get("extension")
    return None


def _user(fields: _Fields) -> User:
    provider = fields.nested("auth-provider")
    if provider is not None:
        raise KubernetesCredentialsError(
            f"{fields.where}: auth-provider {provider.text('name')!r} is not supported: it is of a "
            "kind that kubectl has not had since 1.26",
            hint="kubectl oidc-login, as an exec plugin of the user, gets and refreshes tokens: "
            "kubectl krew install oidc-login; kubectl oidc-login setup --oidc-issuer-url=..."
            if provider.text("name") == "oidc"
            else "configure the provider's exec plugin instead",
        )
    certificate, key = fields.pem("client-certificate"), fields.pem("client-key")
    if certificate.is_given != key.is_given:
        raise fields.wrong("client-certificate and client-key", "belong together")
    execution = fields.nested("exec")
    return User(
        certificate=certificate,
        key=key,
        token=fields.text("token"),
        token_file=fields.path("tokenFile"),
        username=fields.text("username"),
        password=fields.text("password"),
        plugin=None if execution is None else _plugin(execution),
        impersonation=_impersonation(fields),
    )


def _impersonation(fields: _Fields) -> Impersonation:
    extra = fields.nested("as-user-extra")
    names = fields.get("as-user-extra") or {}
    impersonation = Impersonation(
        user=fields.text("as") or "",
        uid=fields.text("as-uid") or "",
        groups=fields.texts("as-groups"),
        extra={} if extra is None else {name: extra.texts(name) for name in names},
    )
    if not impersonation.user and impersonation != Impersonation():
        raise fields.wrong("as-uid, as-groups and as-user-extra", "need a user in as")
    return impersonation


def _plugin(fields: _Fields) -> Plugin:
    command = fields.text("command")
    if command is None:
        raise fields.wrong("command", "is missing")
    version = fields.text("apiVersion")
    if version not in _PLUGIN_VERSIONS:
        raise fields.wrong("apiVersion", f"{version!r} should be one of {_PLUGIN_VERSIONS}")
    interaction = fields.text("interactiveMode") or "IfAvailable"
    if interaction not in _INTERACTIONS:
        raise fields.wrong("interactiveMode", f"{interaction!r} should be one of {_INTERACTIONS}")
    environment: dict[str, str] = {}
    for item in fields.items("env"):
        if not isinstance(item, dict) or not {"name", "value"} <= item.keys():
            raise fields.wrong("env", f"should be a list of name and value, not {item!r}")
        environment[str(item["name"])] = str(item["value"])
    return Plugin(
        command=fields.program_path(command),
        arguments=fields.texts("args"),
        environment=environment,
        api_version=version,
        install_hint=fields.text("installHint"),
        wants_cluster=fields.flag("provideClusterInfo"),
        interaction=interaction,
    )


#: Folder of a pod's service account.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def find(kubeconfig_path: str | None = None, *, context: str | None = None) -> Access:
    """The cluster and user of this process.

    The first of: the file `kubeconfig_path`; the files that `KUBECONFIG` lists; in a pod, its
    cluster as its service account; `~/.kube/config`.
    """
    if kubeconfig_path is not None:
        return load_file(Path(kubeconfig_path).expanduser()).access(context)
    listed = environment.kubeconfig_list()
    if listed is None and context is None:
        inside = in_cluster()
        if inside is not None:
            return inside
    files = paths(listed, Path.home())
    config = load(files)
    if not config.files:
        raise KubernetesCredentialsError(
            f"there is no kubeconfig: {', '.join(map(str, files))} does not exist",
            hint="set KUBECONFIG to one; programs, not kt install, run without a cluster with "
            "KT_BACKEND=local",
        )
    return config.access(context)


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """The cluster of the pod that this process runs in, as the pod's service account."""
    service = environment.kubernetes_service()
    token, authority = folder / "token", folder / "ca.crt"
    if service is None or not token.exists():
        return None
    host, port = service
    address = f"[{host}]" if ":" in host else host
    try:
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        namespace = ""
    return Access(
        cluster=Cluster(f"https://{address}:{port}", authority=Pem(path=authority)),
        user=User(token_file=token),
        namespace=namespace or "default",
        origin=f"the service account in {folder}",
    )
