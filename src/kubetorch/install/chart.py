"""The chart of this package, rendered with values into objects. It only reads files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install import values
from kubetorch.install.templates import Templates
from kubetorch.install.values import Values

Object = dict[str, Any]

#: Folder of the chart.
FOLDER = Path(__file__).parents[1] / "chart"
#: Values of helm's `.Release.Name` and `.Release.Service` in a chart that `kt install` applies.
RELEASE = "kubetorch"
SERVICE = "kubetorch"
_HOOK = "helm.sh/hook"
#: Both are safe ones.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Kinds in the order in which helm applies them; others come after these.
_ORDER = (
    "Namespace",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "PersistentVolumeClaim",
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "Service",
    "Deployment",
    "Job",
    "Ingress",
)


@dataclass(frozen=True)
class Chart:
    folder: Path = field(default=FOLDER)

    @cached_property
    def about(self) -> dict[str, Any]:
        return dict(_yaml(self.folder / "Chart.yaml"))

    @cached_property
    def defaults(self) -> Values:
        return dict(_yaml(self.folder / "values.yaml"))

    @cached_property
    def templates(self) -> Templates:
        """The templates by their names, such as `templates/service.yaml`."""
        files = sorted((self.folder / "templates").iterdir())
        return Templates(
            {f"templates/{path.name}": path.read_text(encoding="utf-8") for path in files}
        )

    def values(self, user_values: Mapping[str, Any]) -> Values:
        """All values: the user's over the chart's defaults."""
        if faults := self.faults(user_values):
            raise ConfigError(
                "values of the chart cannot be used:\n  " + "\n  ".join(faults),
                hint=f"{self.folder / 'values.yaml'} has all values with what they mean",
            )
        return values.merged(self.defaults, user_values)

    def faults(self, user_values: Mapping[str, Any]) -> list[str]:
        """A line for each of the user's values that the schema refuses, with its path."""
        schema = json.loads((self.folder / "values.schema.json").read_text(encoding="utf-8"))
        current_values = {
            key: value for key, value in user_values.items() if key not in values.EARLIER_SECTIONS
        }
        return values.earlier_faults(user_values) + values.faults(
            schema, values.merged(self.defaults, current_values)
        )

    def render(self, user_values: Mapping[str, Any], *, namespace: str) -> list[Object]:
        """The objects of an installation, in the order in which they are applied.

        Objects for helm's hooks are not among them.
        """
        data = self._template_data(user_values, namespace)
        manifests: list[Object] = []
        for path in sorted((self.folder / "templates").glob("*.yaml")):
            name = f"templates/{path.name}"
            text = self.templates.render(name, data)
            try:
                documents = yaml.load_all(text, _LOADER)
                manifests += [document for document in documents if document]
            except yaml.YAMLError as error:
                raise InstallError(f"{name} renders to what is no YAML: {error}") from error
        applied = [
            manifest
            for manifest in manifests
            if _HOOK not in (manifest["metadata"].get("annotations") or {})
        ]
        return sorted(applied, key=_rank)

    def image(self, user_values: Mapping[str, Any]) -> str:
        return values.image_reference(
            self.values(user_values)["image"], str(self.about["appVersion"])
        )

    def notes(self, user_values: Mapping[str, Any], *, namespace: str) -> str:
        return self.templates.render(
            "templates/NOTES.txt", self._template_data(user_values, namespace)
        )

    def _template_data(self, user_values: Mapping[str, Any], namespace: str) -> dict[str, Any]:
        about = {key[:1].upper() + key[1:]: value for key, value in self.about.items()}
        release = {"Name": RELEASE, "Namespace": namespace, "Service": SERVICE}
        return {"Values": self.values(user_values), "Chart": about, "Release": release}


def _rank(manifest: Object) -> tuple[int, str]:
    kind = manifest["kind"]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), manifest["metadata"]["name"])


def _yaml(path: Path) -> Mapping[str, Any]:
    document = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    if not isinstance(document, Mapping):
        raise InstallError(f"{path} is no mapping")
    return document
