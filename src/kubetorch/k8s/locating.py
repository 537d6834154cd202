"""Finding the cluster that is meant: a kubeconfig, or the one that this pod runs in."""

from __future__ import annotations

from pathlib import Path

from kubetorch.config import environment
from kubetorch.errors import KubernetesCredentialsError
from kubetorch.k8s import kubeconfig
from kubetorch.k8s.access import Access, Cluster, Pem, User

#: Where a pod finds its service account.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def find(kubeconfig_path: str | None = None, *, context: str | None = None) -> Access:
    """The cluster that is meant.

    The first of: the file `kubeconfig_path`; the files that `KUBECONFIG` lists; in a pod, its
    cluster as its service account; `~/.kube/config`.

    Args:
        kubeconfig_path: A file that has to exist.
        context: A context of the kubeconfig instead of its current one; a pod's own cluster is
            not meant then.

    Raises:
        KubernetesCredentialsError: There is none, or it cannot be used.
    """
    if kubeconfig_path is not None:
        return kubeconfig.load_file(Path(kubeconfig_path).expanduser()).access(context)
    listed = environment.kubeconfig_list()
    if listed is None and context is None:
        inside = in_cluster()
        if inside is not None:
            return inside
    files = kubeconfig.paths(listed, Path.home())
    config = kubeconfig.load(files)
    if not config.files:
        raise KubernetesCredentialsError(
            f"there is no kubeconfig: {', '.join(map(str, files))} does not exist",
            hint="set KUBECONFIG to one, or KT_BACKEND=local to do without a cluster",
        )
    return config.access(context)


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access | None:
    """The cluster that this process runs in a pod of, as the pod's service account.

    Args:
        folder: Where the service account is mounted.
    """
    service = environment.kubernetes_service()
    token, authority = folder / "token", folder / "ca.crt"
    if service is None or not token.exists():
        return None
    host, port = service
    address = f"[{host}]" if ":" in host else host
    try:
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
    except OSError:
        namespace = ""
    return Access(
        cluster=Cluster(f"https://{address}:{port}", authority=Pem(path=authority)),
        user=User(token_file=token),
        namespace=namespace or "default",
        origin=f"the service account in {folder}",
    )
