"""The environment variables that a pod starts with: writer and reader in one place.

Only what an agent must know before its session lies here; everything that can change later comes
with `Reload`. Variables that user code may read are set in workers by the agent: `POD_NAME`,
`POD_NAMESPACE`, `POD_IP`, `KT_SERVICE_NAME`, `KT_SERVICE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kubetorch.errors import ConfigError

#: Says inside a pod which backend the pod runs on, so that its programs use it too.
BACKEND = "KT_BACKEND"
#: Identity of one process of an agent, inherited by all that it starts: a backend whose pods are
#: processes finds by it what is left when the agent has ended. It is not one of `KT_POD_`, which
#: workers do not get.
MARK = "KT_PROCESS_MARK"
#: What `PodEnv` has, name by name.
NAMESPACE = "KT_POD_NAMESPACE"
WORKLOAD = "KT_POD_WORKLOAD"
POD = "KT_POD_NAME"
HOST = "KT_POD_HOST"
PORT = "KT_POD_PORT"
ROOT = "KT_POD_ROOT"
WORKING_DIR = "KT_POD_WORKING_DIR"
ENVIRONMENTS = "KT_POD_ENVIRONMENTS"
#: Where the controller answers, and the file with the token for it, in pods of a cluster.
CONTROLLER_URL = "KT_POD_CONTROLLER_URL"
TOKEN_FILE = "KT_POD_TOKEN_FILE"
#: Bytes that all processes of a pod may use together, where nothing else keeps them to that.
MEMORY_LIMIT = "KT_POD_MEMORY_LIMIT"


@dataclass(frozen=True)
class PodEnv:
    """What an agent starts with.

    Attributes:
        namespace, workload, pod: Who it is.
        controller_file: File with the controller's base URL, read again at each connect.
        credentials_file: File with the agent's credentials, JSON: `key` (hex, of
            `kubetorch.wire.tokens.workload_key`), `session` (token for the session and for
            fetching blobs), `user` (fingerprint of the user's own token).
        host, port: Where it listens.
        root: Folder of the pod: code, logs, results.
        working_dir: Working directory of the workers.
        environments: Folder with environments that pods of this machine share.
        backend: Backend that the pod runs on, `local` or `kubernetes`.
        attachments_file: File with what is shown at absolute paths, JSON of
            `kubetorch.wire.attachments.Attachments`; empty where Kubernetes does that.
        memory_limit: Bytes that all its processes may use together, if the agent is to see to it.
    """

    namespace: str
    workload: str
    pod: str
    controller_file: str
    credentials_file: str
    host: str
    port: int
    root: str
    working_dir: str
    environments: str
    backend: str = "local"
    attachments_file: str = ""
    memory_limit: int | None = None

    def write(self) -> dict[str, str]:
        """As environment variables."""
        return {
            "KT_POD_NAMESPACE": self.namespace,
            "KT_POD_WORKLOAD": self.workload,
            "KT_POD_NAME": self.pod,
            "KT_POD_CONTROLLER_FILE": self.controller_file,
            "KT_POD_CREDENTIALS_FILE": self.credentials_file,
            "KT_POD_HOST": self.host,
            "KT_POD_PORT": str(self.port),
            "KT_POD_ROOT": self.root,
            "KT_POD_WORKING_DIR": self.working_dir,
            "KT_POD_ATTACHMENTS_FILE": self.attachments_file,
            "KT_POD_ENVIRONMENTS": self.environments,
            BACKEND: self.backend,
            **({} if self.memory_limit is None else {MEMORY_LIMIT: str(self.memory_limit)}),
        }

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PodEnv:
        """What `write` wrote.

        Raises:
            ConfigError: A variable is missing or no number; the message names it.
        """

        def value(name: str) -> str:
            if not environ.get(name):
                raise ConfigError(f"{name} is not set: this is not started by a backend")
            return environ[name]

        port = value("KT_POD_PORT")
        if not port.isdigit():
            raise ConfigError(f"KT_POD_PORT is {port!r}; it must be a number")
        limit = environ.get(MEMORY_LIMIT, "")
        return cls(
            namespace=value("KT_POD_NAMESPACE"),
            workload=value("KT_POD_WORKLOAD"),
            pod=value("KT_POD_NAME"),
            controller_file=value("KT_POD_CONTROLLER_FILE"),
            credentials_file=value("KT_POD_CREDENTIALS_FILE"),
            host=value("KT_POD_HOST"),
            port=int(port),
            root=value("KT_POD_ROOT"),
            working_dir=value("KT_POD_WORKING_DIR"),
            environments=value("KT_POD_ENVIRONMENTS"),
            backend=environ.get(BACKEND, "local"),
            attachments_file=environ.get("KT_POD_ATTACHMENTS_FILE", ""),
            memory_limit=int(limit) if limit.isdigit() else None,
        )
