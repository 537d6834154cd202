"""Where the controller is, and the token that the agent shows to it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kubetorch.wire.podenv import PodEnv


class Contact(Protocol):
    """Asked again for each connection: both may have changed."""

    @property
    def is_lost(self) -> bool:
        """Whether there can be no controller any more, nor anybody else who ends this agent."""

    def url(self) -> str:
        """The controller's base URL.

        Raises:
            OSError: It is unknown.
        """

    def token(self) -> str:
        """The token for the session and for blobs.

        Raises:
            OSError: There is none.
        """


class LocalContact:
    """The controller of this machine: its URL is in a file, its folder is there as long as it is.

    Args:
        url_file: The file.
        token: The token, which stays the same.
    """

    def __init__(self, url_file: str, token: str) -> None:
        self._url_file = Path(url_file)
        self._token = token

    @property
    def is_lost(self) -> bool:
        """Whether its folder is gone."""
        return not self._url_file.parent.is_dir()

    def url(self) -> str:
        """What the file says."""
        return self._url_file.read_text().strip().rstrip("/")

    def token(self) -> str:
        """The token."""
        return self._token


class ClusterContact:
    """The controller of a cluster; a pod there is ended by Kubernetes, never by itself.

    Args:
        pod: What the pod was started with.
    """

    is_lost = False

    def __init__(self, pod: PodEnv) -> None:
        self._url = pod.controller_url.rstrip("/")
        self._token_file = pod.token_file
        self._token = pod.token

    def url(self) -> str:
        """The address of its Service."""
        return self._url

    def token(self) -> str:
        """What the file says, which Kubernetes replaces before the token in it ends."""
        if not self._token_file:
            return self._token
        return Path(self._token_file).read_text().strip()


def contact_of(pod: PodEnv, session: str) -> Contact:
    """How a pod reaches its controller.

    Args:
        pod: What it was started with.
        session: The token that came with its credentials.
    """
    if pod.backend == "local":
        return LocalContact(pod.controller_file, session)
    return ClusterContact(pod)
