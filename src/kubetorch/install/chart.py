"""The chart of this package, rendered with values into objects. Reads files and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kubetorch.errors import ConfigError, InstallError
from kubetorch.install import earlier_values, values
from kubetorch.install.templates import Templates
from kubetorch.install.values import Values

Object = dict[str, Any]

#: Where the chart lies.
FOLDER = Path(__file__).parents[1] / "chart"
#: What `kt install` calls its release, and what it is called on the objects.
RELEASE = "kubetorch"
SERVICE = "kubetorch"
_HOOK = "helm.sh/hook"
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

    def values(self, given: Mapping[str, Any]) -> Values:
        """All values, those given over the chart's own."""
        if wrong := self.faults(given):
            raise ConfigError(
                "values of the chart cannot be used:\n  " + "\n  ".join(wrong),
                hint=f"{self.folder / 'values.yaml'} has all values with what they mean",
            )
        return values.merged(self.defaults, given)

    def faults(self, given: Mapping[str, Any]) -> list[str]:
        """The given values that the schema refuses, each with its path."""
        schema = json.loads((self.folder / "values.schema.json").read_text(encoding="utf-8"))
        today = {key: value for key, value in given.items() if key not in earlier_values.SECTIONS}
        return earlier_values.faults(given) + values.faults(
            schema, values.merged(self.defaults, today)
        )

    def render(self, given: Mapping[str, Any], *, namespace: str) -> list[Object]:
        """The objects of an installation, in the order in which they are applied.

        What the chart has for helm's hooks is not among them.
        """
        data = self._data(given, namespace)
        found: list[Object] = []
        for path in sorted((self.folder / "templates").glob("*.yaml")):
            name = f"templates/{path.name}"
            text = self.templates.render(name, data)
            try:
                found += [one for one in yaml.safe_load_all(text) if one]
            except yaml.YAMLError as error:
                raise InstallError(f"{name} renders to what is no YAML: {error}") from error
        applied = [one for one in found if _HOOK not in (one["metadata"].get("annotations") or {})]
        return sorted(applied, key=_rank)

    def image(self, given: Mapping[str, Any]) -> str:
        return values.written(self.values(given)["image"], str(self.about["appVersion"]))

    def notes(self, given: Mapping[str, Any], *, namespace: str) -> str:
        return self.templates.render("templates/NOTES.txt", self._data(given, namespace))

    def _data(self, given: Mapping[str, Any], namespace: str) -> dict[str, Any]:
        about = {key[:1].upper() + key[1:]: value for key, value in self.about.items()}
        release = {"Name": RELEASE, "Namespace": namespace, "Service": SERVICE}
        return {"Values": self.values(given), "Chart": about, "Release": release}


def _rank(manifest: Object) -> tuple[int, str]:
    kind = manifest["kind"]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), manifest["metadata"]["name"])


def _yaml(path: Path) -> Mapping[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, Mapping):
        raise InstallError(f"{path} is no mapping")
    return found
