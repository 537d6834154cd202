"""Whether there is a cluster with Kubetorch: asked once, and only for a moment."""

from __future__ import annotations

from kubetorch.errors import KubernetesForbiddenError, KubernetesUnavailableError, KubetorchError
from kubetorch.sdk.reach import choosing, sessions


def detect(cluster: choosing.Cluster, *, patience: float) -> tuple[bool, str]:
    """Whether pods are to run in a cluster, and why or why not.

    Args:
        cluster: The cluster.
        patience: Seconds that this may take.
    """
    origin = "the kubeconfig"
    try:
        inside = sessions.inside(cluster)
        if inside is not None:
            answers = inside.answers(patience)
            return answers, f"{inside.url} {'answers' if answers else 'does not answer'}"
        way = sessions.way_to(cluster)
        origin = way.access.origin
        if way.is_installed(timeout=patience):
            return True, f"Kubetorch is installed in {origin}"
    except KubernetesForbiddenError as error:
        return False, f"whether Kubetorch is installed is not known: {error.message}"
    except KubernetesUnavailableError:
        return False, f"the API server does not answer ({origin})"
    except KubetorchError as error:
        return False, error.message
    return False, f"Kubetorch is not installed in namespace {way.install_namespace} ({origin})"
