"""What a compute is to Kubernetes: the manifest that a deploy applies, and parts of it."""

from __future__ import annotations

from typing import Any

from kubetorch.config.settings import config
from kubetorch.sdk.computing.scaling import Scaling
from kubetorch.specs.compute import ComputeSpec

Manifest = dict[str, Any]


class ManifestView(Scaling):
    """The manifest, to be looked at. Changing what these properties return changes nothing."""

    _service_name: str | None
    # Whether it is that of a service that exists, and not declared by this program.
    _is_found: bool

    @property
    def namespace(self) -> str:
        """Kubernetes namespace of the service."""
        raise NotImplementedError

    def to_spec(self) -> ComputeSpec:
        """What is sent to the controller: frozen."""
        raise NotImplementedError

    @property
    def manifest(self) -> Manifest | None:
        """The Kubernetes object that a deploy applies; `None` when it only names pods."""
        spec = self.to_spec()
        if spec.is_selector_only:
            return None
        from kubetorch.manifests import rendering  # noqa: PLC0415  # few programs look at it

        return rendering.render(
            spec, namespace=self.namespace, name=self._service_name, username=config.username
        )

    @property
    def _manifest(self) -> Manifest | None:
        """The name under which programs read it."""
        return self.manifest

    @property
    def selector_only(self) -> bool:
        """Whether it names pods that are there, and asks for none."""
        return self._spec.is_selector_only

    @property
    def metrics_enabled(self) -> bool:
        """Whether calls show the pods' use of resources: not in this release."""
        return False

    @property
    def kind(self) -> str:
        """Kind of the manifest."""
        return str((self.manifest or {}).get("kind", "Deployment"))

    @property
    def api_version(self) -> str:
        """API version of the manifest."""
        return str((self.manifest or {}).get("apiVersion", "apps/v1"))

    @property
    def deployment_mode(self) -> str:
        """What it is for Kubernetes: `deployment`, `knative`, `raycluster`, or another kind."""
        manifest = self.manifest or {}
        if str(manifest.get("apiVersion")).startswith("serving.knative.dev/"):
            return "knative"
        return str(manifest.get("kind", "Deployment")).lower()

    @property
    def raycluster(self) -> Manifest | None:
        """The manifest, if it is a RayCluster."""
        manifest = self.manifest
        return manifest if manifest is not None and manifest["kind"] == "RayCluster" else None

    # --------------------------------------------------------------------------------- its pods

    def _places(self) -> list[Any]:
        manifest = self.manifest
        if manifest is None:
            return []
        from kubetorch.manifests import locating  # noqa: PLC0415  # few programs look at it

        kind = locating.kind_of(manifest, self._spec.pod_template_path)
        return locating.places(manifest, kind)

    @property
    def pod_template(self) -> Manifest:
        """Metadata and spec of the pods that calls go to."""
        places = self._places()
        return places[0].template if places else {}

    @property
    def pod_spec(self) -> Manifest:
        """Spec of the pods that calls go to."""
        found: Manifest = self.pod_template.get("spec") or {}
        return found

    def _container(self) -> Manifest:
        places = self._places()
        return places[0].container if places else {}

    @property
    def resources(self) -> Manifest:
        """Requests and limits of the container that calls go to."""
        return self._container().get("resources") or {}

    @property
    def volume_mounts(self) -> list[Manifest]:
        """What is mounted into the container that calls go to."""
        return self._container().get("volumeMounts") or []

    @property
    def secret_env_vars(self) -> list[Manifest]:
        """Variables whose values come from secrets."""
        variables = self._container().get("env") or []
        return [one for one in variables if "secretKeyRef" in (one.get("valueFrom") or {})]

    @property
    def secret_volumes(self) -> list[Manifest]:
        """Volumes whose files come from secrets."""
        return [one for one in self.pod_spec.get("volumes") or [] if "secret" in one]

    def get_env_vars(self, keys: list[str] | str | None = None) -> dict[str, str]:
        """Variables of the container that have a value of their own.

        Args:
            keys: Only these; all if not given.
        """
        wanted = [keys] if isinstance(keys, str) else keys
        found = {one["name"]: one.get("value", "") for one in self._container().get("env") or []}
        found |= self.env_vars
        return {key: text for key, text in found.items() if wanted is None or key in wanted}

    # -------------------------------------------------------------------- labels and annotations

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the service; `add_labels` changes them."""
        return self._metadata("labels") if not self.selector_only else dict(self._spec.labels)

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the service; `add_annotations` changes them."""
        is_pool = self.selector_only
        return dict(self._spec.annotations) if is_pool else self._metadata("annotations")

    @property
    def user_labels(self) -> dict[str, str]:
        """Labels of the service that are not Kubetorch's own."""
        from kubetorch.manifests import metadata  # noqa: PLC0415  # few programs look at it

        return {key: text for key, text in self.labels.items() if metadata.is_own_label(key)}

    @property
    def user_annotations(self) -> dict[str, str]:
        """Annotations of the service that are not Kubetorch's own."""
        from kubetorch.manifests import metadata  # noqa: PLC0415  # few programs look at it

        found = self.annotations.items()
        return {key: text for key, text in found if metadata.is_own_annotation(key)}

    @property
    def gpu_annotations(self) -> dict[str, str]:
        """Annotations that say which part of a GPU is wanted."""
        from kubetorch.manifests.labels import GPU_MEMORY  # noqa: PLC0415  # as above

        wanted = self._spec.gpu_memory
        return {} if wanted is None else {GPU_MEMORY: wanted}

    def _metadata(self, key: str) -> dict[str, str]:
        metadata = (self.manifest or {}).get("metadata") or {}
        return dict(metadata.get(key) or {})
