"""The secrets of a service: references only; a spec never has a value of a secret.

`PROVIDERS` has the files and variables in which each provider keeps its credentials on the user's
machine; `kubetorch.sdk.credentials` reads them.
"""

from __future__ import annotations

import posixpath
import re
from typing import Literal

from kubetorch.errors import SpecError, did_you_mean
from kubetorch.lib.frozen_values import FrozenValue

MountType = Literal["env", "volume"]

#: Characters of a secret's name, which is the value of a label too.
NAME_CHARACTERS = 63
#: Bytes of all values of one secret; Kubernetes takes no more.
SIZE_BYTES = 1024 * 1024
_OBJECT_CHARACTERS = 253

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Folders that programs need: a secret mounted over such a folder would hide its files.
_SYSTEM_FOLDERS = frozenset(
    (
        *("~", "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib64", "/mnt", "/opt"),
        *("/proc", "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/usr/local", "/var"),
    )
)


class Provider(FrozenValue):
    """The places where a provider keeps its credentials.

    Attributes:
        folder: Folder of its files, `""` when it has none.
        filenames: The files in it.
        env: Pairs of the name of a value and the variable that holds it.
        exposed_as: Variable that the first file's content becomes in the pod, instead of a file.
    """

    name: str
    folder: str = ""
    filenames: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    exposed_as: str | None = None


def _api_key(name: str) -> Provider:
    return Provider(name, env=(("api_key", f"{name.upper()}_API_KEY"),))


PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(
            "aws",
            "~/.aws",
            ("config", "credentials"),
            (("access_key", "AWS_ACCESS_KEY_ID"), ("secret_key", "AWS_SECRET_ACCESS_KEY")),
        ),
        Provider(
            "azure", "~/.azure", ("clouds.config",), (("subscription_id", "AZURE_SUBSCRIPTION_ID"),)
        ),
        Provider(
            "gcp",
            "~/.config/gcloud",
            ("application_default_credentials.json",),
            (("client_id", "CLIENT_ID"), ("client_secret", "CLIENT_SECRET")),
        ),
        Provider("github", "~/.config/gh", ("hosts.yml",)),
        Provider(
            "huggingface",
            "~/.cache/huggingface",
            ("token",),
            (("HF_TOKEN", "HF_TOKEN"),),
            exposed_as="HF_TOKEN",
        ),
        Provider("kubernetes", "~/.kube", ("config",)),
        Provider("lambda", "~/.lambda_cloud", ("lambda_keys",)),
        Provider("ssh", "~/.ssh", ("id_rsa",)),
        _api_key("anthropic"),
        _api_key("cohere"),
        _api_key("langchain"),
        _api_key("openai"),
        _api_key("pinecone"),
        _api_key("wandb"),
    )
}


def provider(name: object) -> Provider:
    if not isinstance(name, str) or name not in PROVIDERS:
        raise SpecError(
            f"{name!r} is not a supported provider; the providers are "
            f"{', '.join(sorted(PROVIDERS))}",
            hint=did_you_mean(str(name), PROVIDERS),
        )
    return PROVIDERS[name]


class SecretRef(FrozenValue):
    """A secret as a pod sees it.

    Attributes:
        name: Its name for the user.
        object_name: Name of the Kubernetes Secret.
        mount_type: As variables or as files.
        keys: The secret's keys; for `env` each becomes a variable, for `volume` a file.
        path: Folder of the files in the pod, for `volume`.
        all_keys: True for an existing secret with unknown keys: all keys become variables.
        renamed: Pairs of a key and its variable, for variables with another name than the key.
        version: A text that changes with the values; `""` if unknown.
    """

    name: str
    object_name: str
    mount_type: MountType
    keys: tuple[str, ...] = ()
    path: str | None = None
    all_keys: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    version: str = ""

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a variable and the key that it gets its value from."""
        if self.mount_type != "env":
            return ()
        names = dict(self.renamed)
        return tuple((names.get(key, key), key) for key in self.keys)


def object_name(name: str, *, username: str | None) -> str:
    """Name of the Kubernetes Secret: `kt.secret.<username or "global">.<name>`.

    A name that has the username already, as a whole part between `-` or `.`, stays as it is.
    """
    if username and re.search(rf"(^|[-.]){re.escape(username)}([-.]|$)", name):
        return name
    return f"kt.secret.{username or 'global'}.{name}"


def object_names(name: str, *, username: str | None) -> tuple[str, ...]:
    """Names that the Kubernetes Secret of this name may have, the likeliest first."""
    cleaned = name.replace("_", "-")
    if not _NAME.fullmatch(cleaned) or len(cleaned) > _OBJECT_CHARACTERS:
        check_name(name)
    user_name, shared_name = (object_name(cleaned, username=user) for user in (username, None))
    return tuple(dict.fromkeys((user_name, shared_name, cleaned)))


def check_name(name: object) -> str:
    """The name of a secret, with `-` for `_`."""
    cleaned = name.replace("_", "-") if isinstance(name, str) else ""
    if not _NAME.fullmatch(cleaned) or len(cleaned) > NAME_CHARACTERS:
        raise SpecError(
            f"the secret's name is {name!r}; it must be at most {NAME_CHARACTERS} lower-case "
            "letters, digits, '-' and '.', and begin and end, as each part between dots, with a "
            "letter or digit",
            hint=_name_hint(name),
        )
    return cleaned


def _name_hint(given: object) -> str:
    """A name that a secret can have, as like the given one as may be."""
    words = re.findall(r"[a-z0-9]+", given.lower()) if isinstance(given, str) else []
    return f"such as {'-'.join(words)[:NAME_CHARACTERS].strip('-') or 'my-token'}"


def check_object_name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _OBJECT_CHARACTERS:
        raise SpecError(
            f"{name!r} cannot be the name of a secret: at most {_OBJECT_CHARACTERS} lower-case "
            "letters, digits, '-' and '.'"
        )
    return name


def check_key(key: object) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key) or key == "." or key[:2] == "..":
        raise SpecError(
            f"a secret cannot have the key {key!r}: a key is at most 253 letters, digits, '-', '_' "
            "and '.', is not '.' and does not begin with '..'"
        )
    return key


def check_size(size_bytes: int) -> None:
    """The bytes of all values of a secret together."""
    if size_bytes > SIZE_BYTES:
        raise SpecError(
            f"the values of a secret together have at most {SIZE_BYTES} bytes, not {size_bytes}",
            hint="put larger values into a volume",
        )


def check_variable(name: object) -> str:
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        shown = abbreviated(name) if isinstance(name, str) else name
        raise SpecError(
            f"{shown!r} cannot be the name of an environment variable: letters, digits and '_'",
            hint="env_vars has names of variables; values={...} has values themselves",
        )
    return name


def abbreviated(name: str) -> str:
    """The showable part of a text that should be a variable's name, and may be its value."""
    return name if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) else f"{name[:3]}…"


def check_folder(path: str) -> str:
    """The folder of a secret's files in pods: absolute, or below `~`."""
    folder = posixpath.normpath(path)
    if not folder.startswith(("/", "~")) or (folder[0] == "~" and folder[1:2] not in ("", "/")):
        raise SpecError(f"a secret's files cannot be in {path!r}: it is not absolute")
    if folder in _SYSTEM_FOLDERS:
        raise SpecError(
            f"a secret's files cannot be in {path!r}: they would hide all else that is there",
            hint='put them into a folder of their own, such as "~/.secrets"',
        )
    return folder
