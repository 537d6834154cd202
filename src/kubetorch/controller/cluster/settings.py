"""What the controller in a cluster is told by its environment, which the chart sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.errors import ConfigError
from kubetorch.manifests.agent import Runtime

#: Name of the controller's Deployment, Service and service account.
NAME = "kubetorch-controller"
PORT = 8080


@dataclass(frozen=True)
class Settings:
    """What it is told.

    Attributes:
        namespace: Namespace that Kubetorch is installed in.
        identity: Name of its own pod.
        host, port: Where it listens.
        blobs: Folder of the blobs.
        runtime: Where pods get their agent from.
        watched: Namespaces that workloads may be in; all if there are none.
        log_level: Level of its own lines.
    """

    namespace: str
    identity: str
    host: str
    port: int
    blobs: Path
    runtime: Runtime
    watched: tuple[str, ...] = ()
    log_level: str = "INFO"

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """What the environment says.

        Raises:
            ConfigError: A variable is missing, or is not what it has to be; the message names it.
        """

        def value(name: str) -> str:
            if not environ.get(name):
                raise ConfigError(
                    f"{name} is not set", hint="the chart sets it; see docs/design/kubernetes.md"
                )
            return environ[name]

        namespace = environ.get("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE
        port = environ.get("KT_LISTEN_PORT") or str(PORT)
        if not port.isdigit():
            raise ConfigError(f"KT_LISTEN_PORT is {port!r}; it must be a number")
        default_url = f"http://{NAME}.{namespace}.svc.cluster.local:{PORT}"
        return cls(
            namespace=namespace,
            identity=value("POD_NAME"),
            host=environ.get("KT_LISTEN_HOST") or "0.0.0.0",  # a pod has one network
            port=int(port),
            blobs=Path(environ.get("KT_BLOBS_DIR") or "/var/lib/kubetorch"),
            runtime=Runtime(
                image=value("KT_RUNTIME_IMAGE"),
                default_image=value("KT_DEFAULT_IMAGE"),
                controller_url=environ.get("KT_CONTROLLER_URL") or default_url,
                pull_policy=environ.get("KT_IMAGE_PULL_POLICY") or None,
            ),
            watched=tuple((environ.get("KT_WATCH_NAMESPACES") or "").replace(",", " ").split()),
            log_level=(environ.get("KT_LOG_LEVEL") or "INFO").upper(),
        )
