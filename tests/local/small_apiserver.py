"""An API server that keeps objects: enough of one to install into and to remove from.

What is deleted is gone at once, and a definition takes the objects of its kind along. Nothing else
happens: no controller makes or collects anything.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any
from urllib.parse import unquote

from kubetorch.install.releases import DEFINITION
from kubetorch.k8s.client import Client
from local.fake_apiserver import Exchange, FakeApiServer, listing

Object = dict[str, Any]

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
WORKLOADS = "kubetorch.com/v1alpha1"
#: By version: plural and kind, with a `/` before the kind of what lies in no namespace.
KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "configmaps": "ConfigMap",
        "namespaces": "/Namespace",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "apps/v1": {"deployments": "Deployment"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions": "/CustomResourceDefinition"},
    "coordination.k8s.io/v1": {"leases": "Lease"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "rbac.authorization.k8s.io/v1": {
        "clusterroles": "/ClusterRole",
        "clusterrolebindings": "/ClusterRoleBinding",
        "roles": "Role",
        "rolebindings": "RoleBinding",
    },
}
#: Version, plural, namespace (empty for none) and name.
Key = tuple[str, str, str, str]


class SmallApiServer(FakeApiServer):
    """Serves until it is left.

    Attributes:
        objects: What there is.
        refused: Statuses of lists, by plural.
        kinds: As `KINDS`; the first version of a group is the one that it prefers.
        silent: Versions of API groups whose server does not answer.
    """

    def __init__(self) -> None:
        super().__init__(self._serve_objects)
        self.objects: dict[Key, Object] = {}
        self.refused: dict[str, int] = {}
        self.kinds = copy.deepcopy(KINDS)
        self.silent: set[str] = set()
        self._numbers = itertools.count(1)

    def client(self) -> Client:
        """A client that asks once."""
        return Client(self.access(), patience=0.0)

    def put(self, api_version: str, kind: str, where: str, name: str, **more: Any) -> Object:
        """There is an object, with these parts of its metadata, and a `spec` if given."""
        spec = {"spec": more.pop("spec")} if "spec" in more else {}
        metadata = {"name": name, **({"namespace": where} if where else {}), **more}
        manifest = {"apiVersion": api_version, "kind": kind, "metadata": metadata, **spec}
        return self._store((api_version, self._plural(api_version, kind), where, name), manifest)

    def workload(self, namespace: str, name: str) -> None:
        """There is a service."""
        self.kinds[WORKLOADS] = {"kubetorchworkloads": "KubetorchWorkload"}
        self.put(WORKLOADS, "KubetorchWorkload", namespace, name)

    def controller(self, namespace: str, *watched: str, **more: Any) -> None:
        """There is another installation."""
        labels = {
            "app.kubernetes.io/name": "kubetorch",
            "app.kubernetes.io/component": "controller",
            "app.kubernetes.io/managed-by": "kubetorch",
            "kubetorch.com/install-namespace": namespace,
        }
        env = [{"name": "KT_WATCH_NAMESPACES", "value": ",".join(watched)}]
        spec = {"template": {"spec": {"containers": [{"env": env}]}}}
        name = "kubetorch-controller"
        self.put("apps/v1", "Deployment", namespace, name, labels=labels, spec=spec, **more)

    def take(self, kind: str, name: str, where: str = "") -> Object | None:
        """An object, if it is there."""
        return next(
            (
                stored
                for (_, _, namespace, named), stored in self.objects.items()
                if (stored["kind"], namespace, named) == (kind, where, name)
            ),
            None,
        )

    def names(self, kind: str) -> set[str]:
        """The objects of a kind, `namespace/name`."""
        return {
            f"{namespace}/{name}"
            for (_, _, namespace, name), stored in self.objects.items()
            if stored["kind"] == kind
        }

    # ------------------------------------------------------------------------------------ inside

    def _plural(self, api_version: str, kind: str) -> str:
        plurals = self.kinds[api_version].items()
        return next(plural for plural, named in plurals if named.lstrip("/") == kind)

    def _store(self, key: Key, manifest: Object) -> Object:
        before = self.objects.get(key)
        stored = copy.deepcopy(manifest)
        stored["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        if before is not None:
            stored["metadata"]["uid"] = before["metadata"]["uid"]
            stored["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if stored["kind"] == DEFINITION.kind:
            stored["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
            self.kinds[WORKLOADS] = {"kubetorchworkloads": "KubetorchWorkload"}
        if stored != before:
            stored["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.objects[key] = stored
        return stored

    async def _serve_objects(self, exchange: Exchange) -> None:
        parts = [unquote(part) for part in exchange.request.path.strip("/").split("/")]
        if parts == ["apis"]:
            exchange.answer(200, {"groups": self._groups()})
            return
        size = 2 if parts[0] == "api" else 3
        version, rest = "/".join(parts[1:size]), parts[size:]
        if version in self.silent:
            exchange.refuse(503, "ServiceUnavailable")
        elif version not in self.kinds:
            exchange.refuse(404, "NotFound")
        elif not rest:
            exchange.answer(200, self._resources(version))
        else:
            namespace = rest[1] if rest[0] == "namespaces" and len(rest) > 2 else ""
            plural, *name = rest[2:] if namespace else rest
            await self._serve_kind(exchange, (version, plural, namespace, "".join(name)))

    def _groups(self) -> list[Object]:
        versions_by_group: dict[str, list[str]] = {}
        for version in self.kinds:
            if "/" in version:
                versions_by_group.setdefault(version.partition("/")[0], []).append(version)
        return [
            {
                "name": group,
                "versions": [{"groupVersion": served_version} for served_version in versions],
                "preferredVersion": {"groupVersion": versions[0]},
            }
            for group, versions in versions_by_group.items()
        ]

    def _resources(self, version: str) -> Object:
        return {
            "resources": [
                {
                    "name": plural,
                    "kind": kind.lstrip("/"),
                    "namespaced": not kind.startswith("/"),
                    "verbs": _VERBS,
                }
                for plural, kind in self.kinds[version].items()
            ]
        }

    async def _serve_kind(self, exchange: Exchange, key: Key) -> None:
        method, (version, plural, namespace, name) = exchange.request.method, key
        if plural not in self.kinds[version]:
            exchange.refuse(404, "NotFound")
        elif method == "POST":
            manifest = exchange.request.json
            key = (version, plural, namespace, manifest["metadata"]["name"])
            exchange.answer(201, self._store(key, manifest))
        elif not name:
            await self._list(exchange, version, plural, namespace)
        elif method == "PATCH" and (exchange.request.header("content-type") or "").startswith(
            "application/apply"
        ):
            exchange.answer(200, self._store(key, exchange.request.json))
        elif key not in self.objects:
            exchange.refuse(404, "NotFound")
        elif method == "PATCH":
            exchange.answer(
                200, self._store(key, _merged(self.objects[key], exchange.request.json))
            )
        elif method == "DELETE":
            self._delete(key)
            exchange.answer(200, {"kind": "Status", "status": "Success"})
        else:
            exchange.answer(200, self.objects[key])

    def _delete(self, key: Key) -> None:
        removed = self.objects.pop(key)
        if removed["kind"] == DEFINITION.kind:
            self.kinds.pop(WORKLOADS, None)
            for workload_key in [
                workload_key for workload_key in self.objects if workload_key[0] == WORKLOADS
            ]:
                del self.objects[workload_key]
        if removed["kind"] == "Namespace":
            for member_key in [
                member_key for member_key in self.objects if member_key[2] == key[3]
            ]:
                del self.objects[member_key]

    async def _list(self, exchange: Exchange, version: str, plural: str, namespace: str) -> None:
        query = exchange.request.query
        if plural in self.refused:
            exchange.refuse(self.refused[plural], "Refused")
        elif "watch" in query:
            await exchange.say()
            await exchange.hang()
        else:
            selector, fields = query.get("labelSelector", ""), query.get("fieldSelector", "")
            selected = [
                stored
                for (of, kind, where, name), stored in self.objects.items()
                if (of, kind) == (version, plural)
                and namespace in ("", where)
                and fields in ("", f"metadata.name={name}")
                and _is_selected(stored, selector)
            ]
            exchange.answer(200, listing(next(self._numbers), *selected))


def _is_selected(stored: Object, selector: str) -> bool:
    labels = stored["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        name, has_value, value = term.partition("=")
        if labels.get(name) != value if has_value else name not in labels:
            return False
    return True


def _merged(stored: Object, patch: Object) -> Object:
    merged = copy.deepcopy(stored)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merged(merged.get(key) or {}, value)
        else:
            merged[key] = value
    return merged
