"""Which backend is meant: a cluster, or this machine. Loads nothing that reaches a cluster.

`local` is this machine, `kubernetes` the cluster of the kubeconfig's context, or the one that this
pod runs in. `auto` is the first of:

- in a pod of Kubetorch, what that runs on: `KT_BACKEND` says so;
- with `api_url`, the cluster of that controller;
- a cluster whose API server answers at once, and that has a controller;
- this machine.

What `auto` found is kept for the process: nothing is deployed half here and half there.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import NamedTuple

from kubetorch.config import environment
from kubetorch.config.settings import config

#: Seconds in which an API server has to say whether it has a controller.
PATIENCE = 1.5


class Cluster(NamedTuple):
    """A cluster, as a user means one.

    Attributes:
        kubeconfig: Files that lead there, as `KUBECONFIG` lists them; `None` for the usual ones.
        install_namespace: Where Kubetorch is installed.
        api_url: Where its controller answers, when it is not reached through the API server.
    """

    kubeconfig: str | None
    install_namespace: str
    api_url: str | None


class _Choices:
    """What `auto` came to, and whether it was said."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_quiet = False
        #: By cluster: whether it is the backend.
        self.found: dict[Cluster, bool] = {}


_choices = _Choices()


def choose(kubeconfig: str | None = None) -> Cluster | None:
    """The cluster that is meant; `None` for this machine.

    Args:
        kubeconfig: The kubeconfig that a `kt.Compute` names.

    Raises:
        KubetorchError: A setting cannot be used.
    """
    backend = config.backend
    if backend == "local":
        return None
    if kubeconfig is not None:
        file = Path(kubeconfig).expanduser()
        is_elsewhere = environment.kubernetes_service() is not None and not file.exists()
        # In a pod the declaration is of the machine that deployed it.
        kubeconfig = None if is_elsewhere else str(file)
    listed = kubeconfig or environment.kubeconfig_list()
    cluster = Cluster(listed, config.install_namespace, config.api_url)
    if backend == "kubernetes" or kubeconfig is not None or cluster.api_url is not None:
        return cluster
    with _choices.lock:
        known = _choices.found.get(cluster)
        if known is None:
            known, why = _look(cluster)
            _choices.found[cluster] = known
            _say(known, why)
    return cluster if known else None


def _look(cluster: Cluster) -> tuple[bool, str]:
    """Whether a cluster is there to be used, and why or why not."""
    named = cluster.kubeconfig is not None or (Path.home() / ".kube" / "config").exists()
    if not named and environment.kubernetes_service() is None:
        return False, "there is no kubeconfig"
    from kubetorch.sdk.reach import detecting  # noqa: PLC0415  # not for programs without a cluster

    return detecting.detect(cluster, patience=PATIENCE)


def _say(is_cluster: bool, why: str) -> None:
    if _choices.is_quiet or sys.stderr is None or not sys.stderr.isatty():
        return
    where = "in Kubernetes" if is_cluster else "on this machine"
    sys.stderr.write(f"kubetorch: pods run {where}: {why} (KT_BACKEND is not set)\n")


def forget() -> None:
    """Look anew when it matters next."""
    _choices.found.clear()


def be_quiet() -> None:
    """Do not say in this process which backend was chosen, and why."""
    _choices.is_quiet = True
