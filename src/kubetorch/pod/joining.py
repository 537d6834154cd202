"""`kt server start`: the agent in a pod that somebody else made.

What the backend tells the agent of a pod that it made is found out here, or asked for. The runtime
has this as `/kubetorch/bin/kt`, where the rest of the command line is not.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubetorch.config import environment
from kubetorch.config.settings import INSTALL_NAMESPACE
from kubetorch.errors import ConfigError, KubetorchError
from kubetorch.pod import identity
from kubetorch.wire import podenv
from kubetorch.wire.podenv import PodEnv

#: Where the agent listens unless it is told otherwise.
HOST, PORT = "0.0.0.0", 32300
#: Where a token is mounted: the pod's own, or that of its namespace.
TOKEN_FILES = (
    "/var/run/secrets/kubetorch.com/token",
    "/var/run/secrets/kubetorch-pod-token/token",
)
#: Folders for the agent's files, the first that it may write to.
ROOTS = ("/var/run/kubetorch", "/tmp/kubetorch")
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        workload: Name of the service; else the variable `KT_SERVICE`.
        controller_url: The controller's base URL; else that of the usual installation.
        host, port: Where to listen.
    """

    workload: str | None = None
    controller_url: str | None = None
    host: str = HOST
    port: int = PORT


def environ_of(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the agent.

    Args:
        options: What the command line says.
        environ: The environment of the container.

    Raises:
        ConfigError: Something can neither be found out nor was said.
    """

    def given(*variables: str) -> str:
        return next((environ[name] for name in variables if environ.get(name)), "")

    workload = options.workload or given(podenv.WORKLOAD, "KT_SERVICE", "KT_SERVICE_NAME")
    if not workload:
        raise ConfigError(
            "the service is not known that this pod is one of",
            hint="kt server start --workload NAME, or the variable KT_SERVICE; it is the name that "
            "the Compute with this pod's labels is deployed with",
        )
    namespace = given(podenv.NAMESPACE, "POD_NAMESPACE") or _read(f"{_SERVICE_ACCOUNT}/namespace")
    if not namespace:
        raise ConfigError(
            "the pod's namespace is not known",
            hint="set POD_NAMESPACE from the field metadata.namespace",
        )
    installed = given("KT_INSTALL_NAMESPACE") or INSTALL_NAMESPACE
    url = options.controller_url or given(podenv.CONTROLLER_URL, "KT_CONTROLLER_URL")
    url = url or f"http://kubetorch-controller.{installed}.svc.cluster.local:8080"
    token, file = given(podenv.TOKEN), given(podenv.TOKEN_FILE)
    file = file or next((each for each in TOKEN_FILES if Path(each).exists()), "")
    if not (token or file):
        raise ConfigError(
            "this pod has no token for the controller",
            hint="mount the key token of the Secret kubetorch-pod-token at "
            f"{Path(TOKEN_FILES[1]).parent}, or project a service account token for the audience "
            f"kubetorch to {TOKEN_FILES[0]}; docs/byo.md shows both",
        )
    root = given(podenv.ROOT) or _writable(ROOTS)
    own = PodEnv(
        namespace=namespace,
        workload=workload,
        pod=given(podenv.POD, "POD_NAME") or socket.gethostname(),
        host=given(podenv.HOST, "POD_IP") or identity.address(url),
        port=options.port,
        root=root,
        working_dir=given(podenv.WORKING_DIR) or str(Path.cwd()),
        environments=given(podenv.ENVIRONMENTS) or f"{root}/environments",
        backend="kubernetes",
        controller_url=url,
        token_file=file,
        token=token,
        listen=options.host,
        is_joined=True,
    )
    return {**environ, **own.write()}


def start(options: Options) -> int:
    """Be the agent; its exit status.

    Raises:
        ConfigError: Something can neither be found out nor was said.
    """
    from kubetorch.pod.main import main as be_agent  # noqa: PLC0415  # not to print usage

    environ = environ_of(options, environment.for_programs())
    return be_agent(environ)


def _read(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def _writable(folders: Sequence[str]) -> str:
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise ConfigError(
        f"none of {', '.join(folders)} can be written to",
        hint=f"mount an emptyDir at {folders[0]}, or set {podenv.ROOT}",
    )


def main(arguments: Sequence[str]) -> int:
    """`kt server start` where nothing else of the command line is; the exit status."""
    parser = argparse.ArgumentParser(prog="kt server start", add_help=False)
    parser.add_argument("server", choices=["server"])
    parser.add_argument("start", choices=["start"])
    parser.add_argument("-p", "--port", type=int, default=PORT)
    parser.add_argument("-h", "--host", default=HOST)
    parser.add_argument("-n", "--workload")
    parser.add_argument("-u", "--controller-url")
    parser.add_argument("--help", action="help")
    found = parser.parse_args(arguments)
    try:
        return start(Options(found.workload, found.controller_url, found.host, found.port))
    except KubetorchError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
