"""The token by which a controller knows a program in a pod: that of the pod's service account."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import KubernetesCredentialsError

#: Seconds after which the file is read again; the kubelet replaces it long before it ends.
_LOOK = 60.0


class PodToken:
    """A file that is read again and again (a `kubetorch.lib.http.Credential`).

    Args:
        file: Where it is mounted.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._text = ""
        self._read = -_LOOK

    def token(self, path: str) -> str:
        """What the file has.

        Raises:
            KubernetesCredentialsError: It cannot be read.
        """
        del path
        with self._lock:
            if time.monotonic() - self._read >= _LOOK:
                try:
                    self._text = self._file.read_text(encoding="utf-8").strip()
                except OSError as error:
                    raise KubernetesCredentialsError(
                        f"the token of this pod, {self._file}, cannot be read: {error.strerror}",
                        hint="is the service account's token mounted, and readable for this user?",
                    ) from error
                self._read = time.monotonic()
            return self._text

    def reject(self, token: str) -> bool:
        """Whether the file has another one by now."""
        self._read = -_LOOK
        return self.token("") != token


def find() -> PodToken | None:
    """The token of the pod that this program runs in, if it runs in one and has one."""
    file = environment.pod_token_file()
    return None if file is None else PodToken(file)
