"""Which secrets a service sees, and how: references only. A value never lies in a spec.

`PROVIDERS` says where each provider keeps its credentials on the user's machine; reading them is
`kubetorch.sdk.secret`'s part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kubetorch.errors import SpecError

MountType = Literal["env", "volume"]


@dataclass(frozen=True)
class Provider:
    """Where a provider keeps its credentials.

    Attributes:
        name: As users write it.
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
            "azure",
            "~/.azure",
            ("clouds.config",),
            (("subscription_id", "AZURE_SUBSCRIPTION_ID"),),
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
    """The provider of that name.

    Raises:
        SpecError: There is none.
    """
    if not isinstance(name, str) or name not in PROVIDERS:
        raise SpecError(f"{name!r} is not a supported provider: {sorted(PROVIDERS)}")
    return PROVIDERS[name]


@dataclass(frozen=True)
class SecretRef:
    """A secret as a pod sees it.

    Attributes:
        name: Name that the user knows it by.
        object_name: Name of the Kubernetes Secret.
        mount_type: As variables or as files.
        keys: The secret's keys; for `env` each becomes the variable of that name.
        path: Folder of the files in the pod, for `volume`.
        all_keys: An existing secret whose keys are not known here: all become variables.
    """

    name: str
    object_name: str
    mount_type: MountType
    keys: tuple[str, ...] = ()
    path: str | None = None
    all_keys: bool = False


def object_name(name: str, *, username: str | None) -> str:
    """Name of the Kubernetes Secret: `kt.secret.<username or "global">.<name>`.

    A name that has the user's already, as a whole part between `-` or `.`, stays as it is.
    """
    parts = name.replace(".", "-").split("-")
    if username and "-".join(parts).startswith(f"{username}-"):
        return name
    return f"kt.secret.{username or 'global'}.{name}"
