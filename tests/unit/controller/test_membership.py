"""What the pods of a workload are told of each other."""

from __future__ import annotations

from kubetorch.controller.backends.base import PodStatus
from kubetorch.controller.membership import Membership
from kubetorch.controller.views import Heard
from kubetorch.wire import messages
from kubetorch.wire.messages import Members


def pod(name: str, *, url: str = "http://a", is_retiring: bool = False) -> PodStatus:
    return PodStatus(name, int(name[-1]), "Running", url, is_retiring=is_retiring)


def told(membership: Membership, epoch: int) -> list[tuple[str, str]]:
    found = messages.decode(Members, membership.message(epoch))
    assert found.epoch == epoch
    return [(member.pod, member.url) for member in found.members]


def test_pods_are_news_once() -> None:
    membership = Membership()
    assert membership.update([pod("a0"), pod("a1", is_retiring=True)], {})
    assert not membership.update([pod("a0")], {})
    assert told(membership, 1) == [("a0", "http://a")]
    assert membership.update([pod("a0"), pod("a1")], {})
    assert told(membership, 2) == [("a0", "http://a"), ("a1", "http://a")]


def test_where_a_pod_is_counts_as_it_says_until_its_backend_knows() -> None:
    membership = Membership()
    membership.update([pod("a0", url="")], {})
    assert membership.heard("a0", {"a0": Heard(url="http://b")})
    assert told(membership, 1) == [("a0", "http://b")]
    assert not membership.heard("a0", {"a0": Heard(url="http://b")})
    assert membership.heard("a0", {})
    assert not membership.heard("stranger0", {"stranger0": Heard(url="http://c")})
