"""The environment variables with which a pod starts, and the file with its attachments.

`PodEnv` writes and reads the variables. They have only settings that an agent needs before its
session; all that can change later comes with `Reload`. The agent sets the variables that user code
may read in workers: `POD_NAME`, `POD_NAMESPACE`, `POD_IP`, `KT_SERVICE_NAME`, `KT_SERVICE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kubetorch.errors import ConfigError

#: The backend that the pod runs on, which programs in the pod use, too.
BACKEND = "KT_BACKEND"
#: Identity of one process of an agent, which all its child processes inherit: a backend whose pods
#: are processes finds by it the processes that outlive the agent. Its name does not begin with
#: `KT_POD_`, since workers do not get such variables.
MARK = "KT_PROCESS_MARK"
#: The variables of `PodEnv`.
NAMESPACE = "KT_POD_NAMESPACE"
WORKLOAD = "KT_POD_WORKLOAD"
POD = "KT_POD_NAME"
HOST = "KT_POD_HOST"
PORT = "KT_POD_PORT"
ROOT = "KT_POD_ROOT"
WORKING_DIR = "KT_POD_WORKING_DIR"
ENVIRONMENTS = "KT_POD_ENVIRONMENTS"
#: The controller's base URL, and the file with the token for it, in pods of a cluster.
CONTROLLER_URL = "KT_POD_CONTROLLER_URL"
TOKEN_FILE = "KT_POD_TOKEN_FILE"
#: That token itself, for pods that cannot mount it.
TOKEN = "KT_POD_TOKEN"
#: `true` in a pod that Kubetorch did not make, which goes on when its service is torn down.
JOINED = "KT_POD_JOINED"
#: `~` in the paths of pods: containers run as root unless an image says otherwise.
HOME = "/root"
#: Seconds from SIGTERM until Kubernetes kills the remaining processes.
GRACE = "KT_POD_GRACE"
#: Bytes that all processes of a pod may use together, if no control group limits them.
MEMORY_LIMIT = "KT_POD_MEMORY_LIMIT"
CPU_LIMIT = "KT_POD_CPU_LIMIT"

#: Folder for data that the pods of a node share.
NODE_DATA = "KT_POD_NODE_DATA"

#: Names of the variables that a pod of this machine has from the service, with commas: a program
#: that deploys has its own values of them.
INHERITED = "KT_POD_INHERITED"

#: The variables that are text, with their fields; each pod must have these.
_NEEDED = {
    NAMESPACE: "namespace",
    WORKLOAD: "workload",
    POD: "pod",
    HOST: "host",
    ROOT: "root",
    WORKING_DIR: "working_dir",
    ENVIRONMENTS: "environments",
}
_TEXTS = {
    **_NEEDED,
    "KT_POD_ATTACHMENTS_FILE": "attachments_file",
    "KT_POD_CONTROLLER_FILE": "controller_file",
    "KT_POD_CREDENTIALS_FILE": "credentials_file",
    CONTROLLER_URL: "controller_url",
    TOKEN_FILE: "token_file",
    TOKEN: "token",
    NODE_DATA: "node_data",
    "KT_POD_LISTEN": "listen",
}
#: The variables that a pod of a backend must have besides.
_NEEDED_ON = {
    "local": ("KT_POD_CONTROLLER_FILE", "KT_POD_CREDENTIALS_FILE"),
    "kubernetes": (CONTROLLER_URL,),
}


def own_work(root: Path) -> Path:
    """The folder that is the working directory of a pod that is a process."""
    return root / "work"


def own_data(root: Path) -> Path:
    """The folder with what keys of the data store hold, of a pod."""
    return root / "data"


class PodEnv(msgspec.Struct, frozen=True):
    """The variables with which an agent starts.

    Attributes:
        host, port: Its address for siblings and the controller. On the local backend it listens at
            this address, in a cluster at all addresses of the pod, unless `listen` names another.
        root: Folder of the pod: code, logs, results.
        working_dir: Working directory of the workers.
        environments: Folder with virtual environments that pods of this machine share.
        backend: Backend that the pod runs on, `local` or `kubernetes`.
        attachments_file: File with the volumes and secrets of the pod, JSON of
            `kubetorch.wire.podenv.Attachments`; empty where Kubernetes mounts them.
        memory_limit: Bytes that all its processes may use together, if the agent enforces it.
        cpu_limit: CPUs that they may use, if no control group limits them.
        controller_file: On the local backend the file with the controller's base URL, read again
            at each connect.
        credentials_file: On the local backend the file with the agent's credentials, JSON: `key`
            (hex, of `kubetorch.wire.tokens.workload_key`), `session` (token for the session and
            for fetching blobs), `user` (fingerprint of the user's own token).
        controller_url: In a cluster, the controller's base URL.
        token_file: In a cluster, the file with the token for the session, read again at each
            connect.
        token: That token itself, in a pod that Kubetorch did not make and that has no such file.
        listen: Address to listen on.
        node_data: Folder that pods of the node and namespace share, for declared data.
        is_joined: Whether Kubetorch did not make the pod, and does not end it.
        grace: Seconds from SIGTERM to SIGKILL, if the container's are not the usual ones.
    """

    namespace: str
    workload: str
    pod: str
    host: str
    port: int
    root: str
    working_dir: str
    environments: str
    backend: str = "local"
    attachments_file: str = ""
    memory_limit: int | None = None
    cpu_limit: float | None = None
    controller_file: str = ""
    credentials_file: str = ""
    controller_url: str = ""
    token_file: str = ""
    token: str = ""
    listen: str = ""
    node_data: str = ""
    is_joined: bool = False
    grace: float | None = None

    def write(self) -> dict[str, str]:
        return {
            **{name: text for name, field in _TEXTS.items() if (text := getattr(self, field))},
            PORT: str(self.port),
            BACKEND: self.backend,
            **({} if self.memory_limit is None else {MEMORY_LIMIT: str(self.memory_limit)}),
            **({} if self.cpu_limit is None else {CPU_LIMIT: str(self.cpu_limit)}),
            **({JOINED: "true"} if self.is_joined else {}),
            **({} if self.grace is None else {GRACE: str(self.grace)}),
        }

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PodEnv:
        backend = environ.get(BACKEND, "local")
        if backend not in _NEEDED_ON:
            raise ConfigError(
                f"{BACKEND} is {backend!r}; it must be one of {', '.join(_NEEDED_ON)}"
            )
        for name in (PORT, *_NEEDED, *_NEEDED_ON[backend]):
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: this is not started by a backend")
        port = environ[PORT]
        if not port.isdigit():
            raise ConfigError(f"{PORT} is {port!r}; it must be a number")
        limit, grace = environ.get(MEMORY_LIMIT, ""), environ.get(GRACE, "")
        return cls(
            port=int(port),
            backend=backend,
            memory_limit=int(limit) if limit.isdigit() else None,
            cpu_limit=_number(environ.get(CPU_LIMIT, "")),
            is_joined=environ.get(JOINED) == "true",
            grace=_number(grace),
            **{field: environ.get(name, "") for name, field in _TEXTS.items()},
        )


def _number(text: str) -> float | None:
    return float(text) if text.replace(".", "", 1).isdigit() else None


class FolderAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A folder of the machine at a path of the pod."""

    source: str
    target: str
    read_only: bool = False


class FilesAt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The values of a secret as files of a folder.

    `secret` is the file with the values, a `kubetorch.wire.secrets.SecretFile`; `items` are pairs
    of key and file name, none for all keys.
    """

    secret: str
    target: str
    items: tuple[tuple[str, str], ...] = ()


class Attachments(msgspec.Struct, frozen=True, omit_defaults=True):
    """The volumes and the secrets' files of a pod."""

    folders: tuple[FolderAt, ...] = ()
    files: tuple[FilesAt, ...] = ()
