"""What the pods of a workload need before they can start, in their namespace and their template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kubetorch.controller.backends.kubernetes.attaching import Attaching
from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.manifests import attached, labels, locating, trainjob
from kubetorch.manifests.container import SERVICE_ACCOUNT
from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.place import Place


class Preparing:
    """Has it there, or says what is missing.

    Args:
        namespaces: Makes namespaces ready.
        attaching: Looks for secrets and volumes.
        have_token: Has a token in a namespace for the pods that somebody else made.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        attaching: Attaching,
        have_token: Callable[[str], Awaitable[None]],
    ) -> None:
        self._namespaces = namespaces
        self._attaching = attaching
        self._have_token = have_token

    async def prepare_selected(self, namespace: str) -> None:
        """Prepare a namespace for pods that somebody else made.

        Raises:
            KubernetesNotFoundError: The namespace is missing.
        """
        await self._have_token(namespace)

    async def prepare(self, manifest: Manifest, path: tuple[str, ...] | None = None) -> None:
        """Prepare a namespace for the pods of an object, and the object for the values of secrets.

        Args:
            manifest: The object, whose pod templates get the version of their secrets.
            path: Where the pod template lies, if the user says so.

        Raises:
            KubernetesNotFoundError: The namespace or the service account is missing.
            SecretNotFound: A secret is missing.
            VolumeNotFoundError: A volume is missing.
            SpecError: A secret has no value of that name.
        """
        kind = locating.kind_of(manifest, path)
        places = locating.places(manifest, kind)
        namespace: str = manifest["metadata"]["namespace"]
        for account in dict.fromkeys(_account(place) for place in places):
            await self._namespaces.prepare(namespace, account)
        for place in places:
            found = attached.read(place.pod, place.container)
            version = await self._attaching.check(namespace, found)
            if version:
                *_, of_pods = place.annotations()
                of_pods[labels.SECRETS_VERSION] = version
        if not kind.has_template:
            trainjob.write(manifest, places[0].template)


def _account(place: Place) -> str:
    """Who pods run as; Kubernetes' own choice where nobody names one."""
    # `serviceAccount` is what it was called before.
    found = place.pod.get("serviceAccountName") or place.pod.get("serviceAccount")
    if found is None and place.kind.is_custom:
        return "default"
    return str(found or SERVICE_ACCOUNT)
