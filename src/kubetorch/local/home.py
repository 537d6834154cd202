"""The folder of a local service: its files, and the check that only their user can read them.

Cheap to import: clients read this folder before each command.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import NamedTuple

from kubetorch.errors import ConfigError
from kubetorch.lib import files, processes
from kubetorch.local.tuning import LIMITS


class Running(NamedTuple):
    """The record that a running service keeps of itself."""

    pid: int
    start_time: str
    started: float
    url: str
    version: str
    #: Whether a bucket keeps its data store: then its folder is no store that programs may use.
    has_bucket: bool = False

    @property
    def is_alive(self) -> bool:
        return processes.start_time(self.pid) == self.start_time


class Home:
    """The folder of a local service; an attribute for the path of each file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Held by the running service.
        self.lock = path / "lock"
        #: Held by a program that starts or stops the service.
        self.start_lock = path / "start.lock"
        #: The user's token.
        self.token = path / "token"
        #: The secret that tokens for calls are derived from.
        self.secret = path / "secret"
        #: `Running` as JSON.
        self.service = path / "service.json"
        #: The controller's base URL, which agents read at each connect.
        self.controller_url = path / "controller-url"
        self.state = path / "state.sqlite"
        self.blobs = path / "blobs"
        self.keys = path / "keys"
        self.secrets = path / "secrets"
        self.volumes = path / "volumes"
        self.log = path / "log" / "service.log"

    def create(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.log.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be made: {error}", hint="KT_LOCAL_DIR names another folder"
            ) from error
        self.check()

    def check(self) -> None:
        """Refuse a folder that others could read or write."""
        for path in (self.path, self.token, self.secret):
            try:
                check_private(path)
            except FileNotFoundError:
                continue

    def running(self) -> Running | None:
        """The record of the service; `None` if no service runs."""
        try:
            running = Running(**json.loads(self.service.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return running if running.is_alive else None

    def write_running(self, running: Running) -> None:
        files.write_atomically(self.controller_url, running.url.encode())
        files.write_atomically(self.service, json.dumps(running._asdict()).encode())

    def read_token(self) -> str:
        try:
            check_private(self.token)
            return self.token.read_text().strip()
        except OSError as error:
            raise ConfigError(f"the token in {self.token} cannot be read: {error}") from error

    def secret_bytes(self, path: Path) -> bytes:
        """The content of a secret file, which is created on first use."""
        if not path.exists():
            files.write_atomically(path, os.urandom(32).hex().encode())
        check_private(path)
        return path.read_bytes().strip()

    def rotate_log(self) -> None:
        try:
            if self.log.stat().st_size > LIMITS.service_log_bytes:
                self.log.replace(self.log.with_suffix(".log.1"))
        except FileNotFoundError:
            return


def check_private(path: Path) -> None:
    """Refuse a file or folder that another user owns, or could read or write."""
    file_stat = path.stat()
    if file_stat.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {file_stat.st_uid}, not to you (user {os.geteuid()})",
            hint="KT_LOCAL_DIR names another folder",
        )
    mode = stat.S_IMODE(file_stat.st_mode)
    if mode & 0o077:
        private_mode = "700" if stat.S_ISDIR(file_stat.st_mode) else "600"
        raise ConfigError(
            f"{path} can be used by others (mode {mode:03o})", hint=f"chmod {private_mode} {path}"
        )
