"""What who asks for a workload sees of it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kubetorch.controller.access import Access, Need, Principal, User
from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.blobs import BlobStores
from kubetorch.controller.relay import NO_HOSTS, Hosts
from kubetorch.controller.routes.workloads import WorkloadRoutes
from kubetorch.controller.workloads import Workloads
from kubetorch.specs.callable import AppSpec, CallableRef
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire.messages import Creator, TokenView, WorkloadView

FN = WorkloadSpec("team", "f", CallableRef("fn", "f", "m", "f"))
HOSTS = Hosts("kt.example.com", are_per_service=True)


def app(port: int | None) -> WorkloadSpec:
    return WorkloadSpec(
        "team", "web", CallableRef("app", "web", "m", "web", app=AppSpec("serve", port=port))
    )


class AskedWorkload:
    """One workload with a pod of its own and one that somebody else made, and who asks for it."""

    def opened_by(self, program: str) -> None:
        pass

    def query(self, name: str) -> str:
        return ""

    def __init__(self, spec: WorkloadSpec = FN, *rights: str, creator: str = "ann") -> None:
        self._rights = rights
        self.spec = spec
        self.answer: Any = None
        self.asker = self
        self.name = "ann"
        self.backend = self
        self.creator_of = Creator(creator)
        self.pods = [
            PodStatus("f-0", 0, "Running", ""),
            PodStatus("postgres-0", 1, "Running", "", is_ours=False),
        ]

    # the workloads, and the one

    def get(self, namespace: str, name: str) -> AskedWorkload:
        return self

    def view(self) -> WorkloadView:
        return WorkloadView(spec=self.spec, generation=1, status="Ready", creator=self.creator_of)

    def token(self, namespace: str, name: str, *, ttl: float, subject: str) -> TokenView:
        return TokenView(f"of {subject}", ttl)

    def pod_manifests(self, namespace: str, name: str) -> list[dict[str, Any]]:
        env = [{"name": "PASSWORD", "value": "secret"}]
        return [
            {"metadata": {"name": pod.name}, "spec": {"containers": [{"env": env}]}}
            for pod in self.pods
        ]

    # who asks, and the answer

    async def may(self, need: Need) -> bool:
        return need.kind in self._rights

    @property
    def principal(self) -> Principal:
        return User("ann")

    def creator(self, principal: Principal, username: str | None) -> Creator:
        return Creator("ann")

    async def respond_message(self, message: object) -> None:
        self.answer = message

    def ask(self, action: str, hosts: Hosts = NO_HOSTS) -> Any:
        workloads, access = cast("Workloads", self), cast("Access", self)
        routes = WorkloadRoutes(workloads, access, cast("BlobStores", None), hosts)
        asyncio.run(getattr(routes, action)(self, namespace="team", name="f"))
        return self.answer


def test_who_may_not_get_pods_sees_no_values_and_no_pods_of_others() -> None:
    (pod,) = AskedWorkload().ask("pods")
    assert pod["metadata"]["name"] == "f-0"
    assert "secret" not in str(pod)
    pods = AskedWorkload(FN, "pods").ask("pods")
    assert [pod["metadata"]["name"] for pod in pods] == ["f-0", "postgres-0"]
    assert "secret" in str(pods)


def test_who_may_call_gets_a_token() -> None:
    assert AskedWorkload().ask("get").token == ""
    assert AskedWorkload(FN, "kubetorchworkloads/call").ask("get").token == "of ann"


@pytest.mark.parametrize(("creator", "is_own"), [("ann", True), ("bob", False)])
def test_a_workload_is_ones_own_or_not(creator: str, is_own: bool) -> None:
    assert AskedWorkload(creator=creator).ask("get").is_own is is_own


@pytest.mark.parametrize(
    ("spec", "host"), [(app(80), "web--team.kt.example.com"), (app(None), ""), (FN, "")]
)
def test_what_listens_has_a_host(spec: WorkloadSpec, host: str) -> None:
    assert AskedWorkload(spec).ask("get", HOSTS).app_host == host


def test_without_hosts_of_services_there_is_none() -> None:
    assert AskedWorkload(app(80)).ask("get").app_host == ""
