"""The annotations of the chart on the service account that pods of a namespace run as."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import cast

from kubetorch.controller.backends.kubernetes.namespaces import Namespaces
from kubetorch.errors import KubernetesConflictError, KubernetesNotFoundError
from kubetorch.k8s.client import Client
from kubetorch.k8s.resources import Object, Ref
from kubetorch.manifests import labels

ROLE = "eks.amazonaws.com/role-arn"


class Accounts:
    """An API server with one service account, which knows who annotated it."""

    def __init__(self, account: Object | None = None) -> None:
        self._account = account
        self._by_others = dict(account["metadata"].get("annotations") or {}) if account else {}

    @property
    def annotations(self) -> Mapping[str, str]:
        assert self._account is not None
        return dict(self._account["metadata"].get("annotations") or {})

    async def get(self, ref: Ref) -> Object:
        if self._account is None:
            raise KubernetesNotFoundError(f"no {ref.resource.kind}")
        return copy.deepcopy(self._account)

    async def create(self, manifest: Object) -> Object:
        if manifest["kind"] == "ServiceAccount":
            self._account = copy.deepcopy(manifest)
            self._account["metadata"]["uid"] = "uid"
        return manifest

    async def apply(self, manifest: Object) -> Object:
        assert self._account is not None
        applied = manifest["metadata"].get("annotations") or {}
        conflicts = [
            {"reason": "FieldManagerConflict", "field": f".metadata.annotations.{key}"}
            for key, value in applied.items()
            if self._by_others.get(key, value) != value
        ]
        if conflicts:
            error = KubernetesConflictError("conflict with kubectl-annotate")
            error.causes = conflicts
            raise error
        self._account["metadata"]["annotations"] = self._by_others | applied
        return manifest


def account(*, is_ours: bool = True, **annotations: str) -> Object:
    metadata = {"name": "kubetorch-service-account", "namespace": "team", "uid": "uid"}
    own_labels = dict(labels.MANAGED) if is_ours else {}
    return {"metadata": {**metadata, "labels": own_labels, "annotations": annotations}}


def prepare(accounts: Accounts, annotations: Mapping[str, str]) -> None:
    """A controller with these annotations deploys in the namespace, twice."""
    namespaces = Namespaces(cast("Client", accounts), annotations)
    asyncio.run(namespaces.prepare("team"))
    asyncio.run(namespaces.prepare("team"))


def test_an_account_is_made_with_the_annotations_and_follows_their_changes() -> None:
    accounts = Accounts()
    prepare(accounts, {ROLE: "first"})
    assert accounts.annotations == {ROLE: "first"}
    prepare(accounts, {ROLE: "second", "team": "ml"})
    assert accounts.annotations == {ROLE: "second", "team": "ml"}
    prepare(accounts, {})
    assert accounts.annotations == {}


def test_an_account_that_was_made_before_is_annotated() -> None:
    accounts = Accounts(account())
    prepare(accounts, {ROLE: "mine"})
    assert accounts.annotations == {ROLE: "mine"}


def test_what_somebody_annotated_stays_and_the_other_annotations_are_set() -> None:
    accounts = Accounts(account(**{ROLE: "by hand", "note": "x"}))
    prepare(accounts, {ROLE: "of the chart", "team": "ml"})
    assert accounts.annotations == {ROLE: "by hand", "note": "x", "team": "ml"}


def test_an_account_of_the_administrator_stays_as_it_is() -> None:
    accounts = Accounts(account(is_ours=False))
    prepare(accounts, {ROLE: "of the chart"})
    assert accounts.annotations == {}
