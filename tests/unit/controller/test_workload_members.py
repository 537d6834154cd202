"""What the pods of a workload are told of each other."""

from __future__ import annotations

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.views import PodReport
from kubetorch.controller.workload import MemberList
from kubetorch.wire import messages
from kubetorch.wire.messages import Members


def pod(name: str, *, url: str = "http://a", is_retiring: bool = False) -> PodStatus:
    return PodStatus(name, int(name[-1]), "Running", url, is_retiring=is_retiring)


def announced_members(membership: MemberList, epoch: int) -> list[tuple[str, str]]:
    members = messages.decode(Members, membership.message(epoch))
    assert members.epoch == epoch
    return [(member.pod, member.url) for member in members.members]


def test_pods_are_news_once() -> None:
    membership = MemberList()
    assert membership.update([pod("a0"), pod("a1", is_retiring=True)], {})
    assert not membership.update([pod("a0")], {})
    assert announced_members(membership, 1) == [("a0", "http://a")]
    assert membership.update([pod("a0"), pod("a1")], {})
    assert announced_members(membership, 2) == [("a0", "http://a"), ("a1", "http://a")]


def test_where_a_pod_is_counts_as_it_says_until_its_backend_knows() -> None:
    membership = MemberList()
    membership.update([pod("a0", url="")], {})
    assert membership.reported("a0", {"a0": PodReport(url="http://b")})
    assert announced_members(membership, 1) == [("a0", "http://b")]
    assert not membership.reported("a0", {"a0": PodReport(url="http://b")})
    assert membership.reported("a0", {})
    assert not membership.reported("stranger0", {"stranger0": PodReport(url="http://c")})
