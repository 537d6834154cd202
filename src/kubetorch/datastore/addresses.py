"""Addresses of buckets and files on the web, and what a store needs to be asked for them.

`s3://bucket/a/b` is kept in the data store as the key `s3:/bucket/a/b`, so that what was pulled is
listed, read and deleted as any other key.
"""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from kubetorch.datastore import keys
from kubetorch.errors import DataStoreError

Scheme = Literal["s3", "gs", "az", "https", "http", "hf"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
#: Those to which objects can be written.
WRITABLE: tuple[Scheme, ...] = ("s3", "gs", "az")

#: Variables with credentials, by the schemes that read them. All are values: none names a file, or
#: a server that gives credentials, which would be those of the process that reads it.
VARIABLES: Mapping[Scheme, tuple[str, ...]] = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    ),
    # The content of a file, as that of `gcloud auth application-default login`.
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS_JSON", "GOOGLE_ENDPOINT_URL"),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
        *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_ENDPOINT_URL"),
    ),
    "https": (),
    "http": (),
    "hf": ("HF_TOKEN", "HF_ENDPOINT"),
}

#: Those of them that say where something is, and give no rights.
SETTINGS = (
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    *("GOOGLE_ENDPOINT_URL", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ENDPOINT_URL", "HF_ENDPOINT"),
)

_HOST = re.compile(
    r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?|\[[0-9a-fA-F:.]+\](:\d+)?"
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FOLDERS = ("datasets", "spaces")


class Address(msgspec.Struct, frozen=True):
    """Where objects are.

    Attributes:
        bucket: A bucket, a container, a host with its port, or `[datasets/]owner/name`.
        path: Below the bucket; without `/` at its ends.
        is_folder: Whether the address ended in `/`: no single object is looked for.
        revision: Of a repository of Hugging Face.
    """

    scheme: Scheme
    bucket: str
    path: str
    is_folder: bool = False
    revision: str = ""

    @property
    def key(self) -> str:
        """The key that has the objects in the data store."""
        revision = self.revision and f"@{self.revision}"
        return keys.check(f"{self.scheme}:/{self.bucket}{revision}/{self.path}")

    def __str__(self) -> str:
        revision = self.revision and f"@{self.revision}"
        path = self.path and f"/{self.path}"
        return f"{self.scheme}://{self.bucket}{revision}{path}{'/' if self.is_folder else ''}"


def is_address(text: object) -> bool:
    """True for `scheme://…`, of whatever scheme."""
    return isinstance(text, str) and "://" in text


def scheme_of(key: str) -> Scheme | None:
    """The scheme of the address whose key this is; `None` for any other key."""
    first, _, rest = key.partition("/")
    return next((scheme for scheme in SCHEMES if rest and first == f"{scheme}:"), None)


def parse(text: str) -> Address:
    """An address from text.

    Raises:
        DataStoreError: There is no such scheme, or no such bucket can be.
    """
    name, _, rest = text.partition("://")
    scheme = next((scheme for scheme in SCHEMES if scheme == name), None)
    shown = text[:200]
    if scheme is None:
        raise DataStoreError(
            f"{shown!r} is no address that the data store knows",
            hint=f"it knows {', '.join(f'{scheme}://' for scheme in SCHEMES)}, and keys",
        )
    if "@" in rest.partition("/")[0] or (scheme in ("https", "http") and re.search("[?#]", rest)):
        # They would be read by whoever may list keys.
        raise DataStoreError(
            f"{name}:// addresses have no user, password, query or fragment",
            hint="credentials are those of secret=, which are not kept",
        )
    if any(part in (".", "..") for part in rest.split("/")) or "//" in rest or len(rest) > 1024:
        raise DataStoreError(f"{shown!r} is no address: its path has an empty part, '.' or '..'")
    if scheme == "hf":
        return _repository(shown, rest)
    bucket, _, path = rest.partition("/")
    if not (_HOST if scheme in ("https", "http") else _BUCKET).fullmatch(bucket):
        raise DataStoreError(
            f"{shown!r} names no bucket", hint=f"such as {scheme}://bucket/folder/file.csv"
        )
    if scheme in ("https", "http") and not path.strip("/"):
        raise DataStoreError(f"{shown!r} names no file", hint=f"such as {scheme}://host/data.csv")
    return _checked(Address(scheme, bucket, path.strip("/"), is_folder=path.endswith("/")))


def _repository(shown: str, rest: str) -> Address:
    parts = rest.strip("/").split("/")
    folder = [parts.pop(0)] if parts[0] in _FOLDERS else []
    owner, name = parts[0], parts[1] if len(parts) > 1 else ""
    name, _, revision = name.partition("@")
    is_right = _NAME.fullmatch(owner) and _NAME.fullmatch(name)
    if not is_right or not _REVISION.fullmatch(revision or "main"):
        raise DataStoreError(
            f"{shown!r} names no repository of Hugging Face",
            hint="such as hf://owner/model, hf://datasets/owner/name@revision/folder",
        )
    bucket = "/".join([*folder, owner, name])
    path = "/".join(parts[2:])
    return _checked(Address("hf", bucket, path, rest.endswith("/") and path != "", revision))


def _checked(address: Address) -> Address:
    assert address.key  # it has a length that a key can have
    return address


# ------------------------------------------------------------------------------------ credentials


def options_for(scheme: Scheme, variables: Mapping[str, str]) -> dict[str, str]:
    """Those of some variables that the stores of a scheme read, and none else."""
    return {name: variables[name] for name in VARIABLES[scheme] if variables.get(name)}


def variables_of_files(files: Mapping[str, str]) -> dict[str, str]:
    """The variables for files with credentials, by the names that providers give them."""
    variables: dict[str, str] = {}
    for name, content in files.items():
        if name in ("credentials", "config"):
            variables |= _of_profile(content)
        elif name == "token":
            variables["HF_TOKEN"] = content.strip()
        elif name.endswith(".json") and '"type"' in content:
            variables["GOOGLE_APPLICATION_CREDENTIALS_JSON"] = content
    return variables


def _of_profile(content: str) -> dict[str, str]:
    """The default profile of a file of AWS."""
    profiles = configparser.RawConfigParser()
    try:
        profiles.read_string(content)
    except configparser.Error:
        return {}
    if not profiles.has_section("default"):
        return {}
    settings = dict(profiles.items("default"))
    # `aws_access_key_id`, and `region`.
    return {f"AWS_{name.removeprefix('aws_').upper()}": value for name, value in settings.items()}


def check_options(scheme: Scheme, options: Mapping[str, str]) -> dict[str, str]:
    """Options from outside, checked; URLs without `/` at their ends.

    Raises:
        DataStoreError: An option is none of this scheme, or no value that can be used.
    """
    for name, value in options.items():
        if name not in VARIABLES[scheme]:
            raise DataStoreError(f"{scheme}:// addresses have no option {name[:100]!r}")
        if "ENDPOINT" in name and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", value):
            raise DataStoreError(f"{name} is no URL such as https://storage.example.com")
        if name == "GOOGLE_APPLICATION_CREDENTIALS_JSON":
            _check_google(value)
    return {
        name: value.rstrip("/") if "ENDPOINT" in name else value for name, value in options.items()
    }


def _check_google(value: str) -> None:
    try:
        kind = json.loads(value)["type"]
    except (ValueError, KeyError, TypeError):
        kind = None
    if kind not in ("service_account", "authorized_user"):
        raise DataStoreError(
            "the credentials of Google are no JSON of a service account or of a user",
            hint="kt.Secret(provider='gcp') has those of gcloud auth application-default login",
        )
