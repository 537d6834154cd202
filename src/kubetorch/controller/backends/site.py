"""Where the pods of the process backend live: their folders, credentials and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kubetorch.controller.backends.attaching import Given
from kubetorch.controller.state import PodRecord
from kubetorch.lib import files, ports
from kubetorch.wire import tokens
from kubetorch.wire.podenv import PodEnv

# 10 years: the token of a pod ends with the pod, which the controller then does not know any more.
_SESSION_LIFETIME = 10 * 365 * 86400.0


class Site(msgspec.Struct, frozen=True):
    """Where pods live, and what all of them share.

    Attributes:
        home: Folder of the installation.
        secret: Secret of the installation, see `kubetorch.wire.tokens`.
        user: Fingerprint of the user's own token.
        environment: What every pod's processes find in their environment.
        command: What starts an agent.
        marks: What the marks of its processes begin with, unlike those of any other installation
            on the machine.
    """

    home: Path
    secret: bytes
    user: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    marks: str

    def folder(self, namespace: str, pod: str) -> Path:
        """The folder of a pod."""
        return self.home / "pods" / namespace / pod

    def new_mark(self) -> str:
        """A value of `MARK` that nobody has."""
        return self.marks + os.urandom(8).hex()

    def prepare(self, pod: PodRecord, given: Given, *, now: float) -> dict[str, str]:
        """Make the folder of a pod and its credentials; the environment of its agent.

        Args:
            pod: The pod.
            given: Variables of its container, and what it is shown at absolute paths.
            now: Seconds since the epoch.

        Raises:
            OSError: They cannot be written.
        """
        folder = self.folder(pod.namespace, pod.name)
        work = folder / "work"
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        audience = tokens.audience(pod.namespace, pod.workload)
        key = tokens.workload_key(self.secret, audience)
        claims = tokens.Claims(audience, now + _SESSION_LIFETIME, f"pod:{pod.name}")
        credentials = {"key": key.hex(), "session": tokens.sign(key, claims), "user": self.user}
        file = folder / "credentials.json"
        files.write_atomically(file, json.dumps(credentials).encode())
        shown = folder / "attachments.json"
        files.write_atomically(shown, msgspec.json.encode(given.paths))
        own = PodEnv(
            namespace=pod.namespace,
            workload=pod.workload,
            pod=pod.name,
            controller_file=str(self.home / "controller-url"),
            credentials_file=str(file),
            host=ports.LOOPBACK,
            port=pod.port,
            root=str(folder),
            working_dir=str(work),
            attachments_file=str(shown),
            environments=str(self.home / "environments"),
        )
        return {**self.environment, **given.variables, **own.write()}
