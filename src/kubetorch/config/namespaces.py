"""The namespace that Kubernetes itself suggests: the pod's own, or that of the current context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kubetorch.config.store import read_yaml
from kubetorch.errors import ConfigError

#: Where a pod on Kubernetes finds its own namespace.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def of_pod(file: Path = SERVICE_ACCOUNT) -> str | None:
    """The namespace of the pod that this process runs in."""
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def of_context(environ: Mapping[str, str]) -> str | None:
    """The namespace of the kubeconfig's current context.

    A kubeconfig that cannot be read says nothing here: whoever needs the cluster says what is
    wrong with it.
    """
    configs = []
    for path in _paths(environ):
        try:
            found = read_yaml(path)
        except ConfigError:
            continue
        if isinstance(found, dict):
            configs.append(found)
    current = next((c["current-context"] for c in configs if c.get("current-context")), None)
    for config in configs:
        contexts = config.get("contexts")
        for item in contexts if current and isinstance(contexts, list) else ():
            if isinstance(item, dict) and item.get("name") == current:
                context = item.get("context")
                namespace = context.get("namespace") if isinstance(context, dict) else None
                return namespace if isinstance(namespace, str) and namespace else None
    return None


def _paths(environ: Mapping[str, str]) -> list[Path]:
    given = environ.get("KUBECONFIG")
    if given:
        return [Path(item).expanduser() for item in given.split(":") if item]
    return [Path("~/.kube/config").expanduser()]
