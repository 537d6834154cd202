"""Which pods are named as those that have a version."""

from __future__ import annotations

import pytest

from kubetorch.controller.holders import Holders
from kubetorch.controller.tuning import LIMITS
from kubetorch.errors import DataStoreError
from kubetorch.wire.data import Holder, JoinGet, KeyView
from kubetorch.wire.messages import PodView

VIEW = KeyView(key="a", kind="folder", manifest="m")


class Service:
    """A service whose pods come and go; those that are not connected have no URL."""

    def __init__(self, *pods: str) -> None:
        self.connected = set(pods)
        self.running = set(pods)
        self.pod_names = frozenset(pods)
        self.listings = 0

    def pod_views(self) -> tuple[PodView, ...]:
        self.listings += 1
        return tuple(
            PodView(
                name=pod,
                ordinal=0,
                phase="Running" if pod in self.running else "Unknown",
                url="http://agent" if pod in self.connected else "",
            )
            for pod in sorted(self.pod_names)
        )


def holders_of(service: Service) -> Holders:
    def find(namespace: str, name: str) -> Service | None:
        return service if (namespace, name) == ("ns", "s") else None

    return Holders(find, lambda namespace, name: "token")


def test_pods_that_do_not_exist_are_no_holders() -> None:
    holders = holders_of(Service("p0"))
    holders.add("ns", "m", Holder("s", "p0"))
    for namespace, service, pod in [("ns", "s", "p1"), ("ns", "t", "p0"), ("other", "s", "p0")]:
        with pytest.raises(DataStoreError, match=f"the service '{service}' has no pod '{pod}'"):
            holders.add(namespace, "m", Holder(service, pod))
    assert holders.pods("ns", VIEW) == ["p0"]


def test_a_pod_that_went_away_is_forgotten_and_one_that_connects_again_is_not() -> None:
    service = Service("p0", "p1")
    holders = holders_of(service)
    holders.add("ns", "m", Holder("s", "p0"))
    holders.add("ns", "m", Holder("s", "p1"))
    service.connected, service.pod_names = set(), frozenset({"p1"})
    assert holders.pods("ns", VIEW) == []
    service.connected, service.pod_names = {"p0", "p1"}, frozenset({"p0", "p1"})
    assert holders.pods("ns", VIEW) == ["p1"]


def test_a_manifest_has_so_many_holders_at_most_of_which_those_that_exist_stay() -> None:
    pods = [f"p{number}" for number in range(LIMITS.manifest_holders)]
    service = Service(*pods, "more")
    holders = holders_of(service)
    for pod in [*pods, "more"]:
        holders.add("ns", "m", Holder("s", pod))
    assert holders.pods("ns", VIEW) == pods
    assert service.listings == 1
    service.pod_names -= {"p7"}
    holders.add("ns", "m", Holder("s", "more"))
    assert set(holders.pods("ns", VIEW)) == {*pods, "more"} - {"p7"}


class Gets:
    """Gets of one version, by the names of their pods, which are all of one service."""

    def __init__(self, *pods: str, view: KeyView = VIEW) -> None:
        self.view = view
        self.service = Service(*pods)
        self.holders = holders_of(self.service)
        self.now = 0.0

    def join(
        self,
        pod: str,
        *,
        failed: str = "",
        fanout: int = 0,
        offers: bool = True,
        getter: str = "",
        part: str = "",
    ) -> str:
        """The source of a pod; empty for the store."""
        join = JoinGet(
            key="a",
            manifest="m",
            getter=getter or pod,
            part=part,
            holder=Holder("s", pod, part) if offers else None,
            failed=Holder("s", failed, part) if failed else None,
            fanout=fanout,
        )
        source = self.holders.join("ns", self.view, join, now=self.now, end=self.now + 100)
        return "" if source is None else source.pod

    def finish(self, pod: str) -> None:
        self.holders.add("ns", "m", Holder("s", pod))
        self.leave(pod)

    def leave(self, pod: str) -> None:
        done = JoinGet(key="a", manifest="m", getter=pod, is_done=True)
        self.holders.join("ns", self.view, done, now=self.now, end=0)


def test_getters_at_the_same_time_form_a_tree_of_two() -> None:
    pods = [f"p{number}" for number in range(14)]
    gets = Gets(*pods)
    parents = [gets.join(pod) for pod in pods]
    assert parents == ["", "", *["p0", "p1"] * 2, *["p2", "p3", "p4", "p5"] * 2]


def test_a_fanout_of_one_is_a_chain_and_a_larger_one_is_wide() -> None:
    gets = Gets("p0", "p1", "p2")
    assert [gets.join(pod, fanout=1) for pod in ("p0", "p1", "p2")] == ["", "p0", "p1"]
    pods = [f"p{number}" for number in range(60)]
    gets = Gets(*pods)
    parents = [gets.join(pod, fanout=50) for pod in pods]
    # The store sends two copies nevertheless.
    assert parents == ["", "", *["p0", "p1"] * 29]


def test_where_all_sources_are_full_the_one_with_least_to_do_is_next() -> None:
    gets = Gets("p0", "p1", "p2", "p3", "p4")
    gets.holders.add("ns", "m", Holder("s", "p0"))
    parents = [gets.join(pod, offers=False) for pod in ("p1", "p2", "p3", "p4")]
    assert parents == ["p0", "p0", "", ""]
    assert gets.join("p5", offers=False) == "p0"


def test_getters_come_and_go_and_pods_that_have_all_serve_first() -> None:
    gets = Gets("p0", "p1", "p2", "p3", "p4")
    gets.join("p0")
    gets.finish("p0")
    assert [gets.join("p1"), gets.join("p2")] == ["p0", "p0"]
    gets.leave("p1")
    assert gets.join("p3") == "p0"


def test_a_getter_whose_source_fails_gets_another_one_that_does_not_get_from_it() -> None:
    gets = Gets("p0", "p1", "p2", "p3")
    assert [gets.join(pod) for pod in ("p0", "p1", "p2", "p3")] == ["", "", "p0", "p1"]
    # Of p2, which gets from p0, p0 gets nothing.
    assert gets.join("p0", failed="p9") == ""
    assert gets.join("p2", failed="p0") == "p1"
    gets.service.pod_names -= {"p1"}
    gets.service.connected -= {"p1"}
    # Of the two that the store serves one is gone.
    assert gets.join("p3", failed="p1") == ""


def test_a_pod_that_two_getters_got_nothing_from_is_named_no_more() -> None:
    gets = Gets("p0", "p1", "p2", "p3", "p4")
    gets.join("p0", fanout=1)
    assert gets.join("p1", fanout=1) == "p0"
    gets.join("p1", failed="p0")
    gets.join("p2", failed="p0")
    assert all(gets.join(pod) != "p0" for pod in ("p1", "p2", "p3", "p4"))
    assert gets.join("p0") is not None  # it goes on itself


def test_of_a_key_that_pods_alone_have_the_publisher_is_the_root() -> None:
    view = KeyView(key="a", kind="folder", manifest="m", publisher=Holder("s", "p0"))
    gets = Gets("p0", "p1", "p2", "p3", view=view)
    assert [gets.join(pod) for pod in ("p1", "p2", "p3")] == ["p0", "p0", "p1"]


def test_a_get_that_ended_without_a_word_counts_until_its_lease_ends() -> None:
    gets = Gets("p0", "p1", "p2", "p3")
    assert [gets.join("p0", fanout=1), gets.join("p1", fanout=1)] == ["", "p0"]
    gets.now = 101
    assert gets.join("p2", fanout=1) == ""


def test_a_pod_that_does_not_exist_cannot_join() -> None:
    with pytest.raises(DataStoreError, match="has no pod 'p9'"):
        Gets("p0").join("p9")


def test_pods_without_a_connection_and_those_behind_them_are_no_sources() -> None:
    gets = Gets("p0", "p1", "p2", "p3", "p4")
    assert [gets.join(pod) for pod in ("p0", "p1", "p2", "p3")] == ["", "", "p0", "p1"]
    gets.service.running -= {"p0"}
    assert gets.join("p1", failed="p3") == ""
    assert gets.join("p4", fanout=1) == "p3"
    gets.finish("p3")
    gets.service.running -= {"p3"}
    assert gets.join("p4", fanout=1) == "p1"


def test_a_publisher_without_a_connection_is_asked_as_no_other_pod_has_the_key() -> None:
    view = KeyView(key="a", kind="folder", manifest="m", publisher=Holder("s", "p0"))
    gets = Gets("p0", "p1", view=view)
    gets.service.running.clear()
    assert gets.join("p1") == "p0"


def test_a_get_of_a_pod_ends_the_one_of_a_program_that_was_killed_there() -> None:
    gets = Gets("p0", "p1", "p2", "p3")
    assert [gets.join("p0"), gets.join("p1"), gets.join("p2")] == ["", "", "p0"]
    assert gets.join("p1", getter="again") == ""
    assert [gets.join("p3"), gets.join("p2", failed="p0")] == ["p1", "p1"]


def test_getters_of_a_part_get_it_from_each_other_and_from_pods_that_have_all() -> None:
    gets = Gets(*(f"p{number}" for number in range(9)))
    assert [gets.join("p0", fanout=1), gets.join("p1", fanout=1)] == ["", "p0"]
    # What gets all may take long to get to the part.
    assert [gets.join(pod, part="a", fanout=1) for pod in ("p2", "p3")] == ["", "p2"]
    assert [gets.join(pod, part="b", fanout=1) for pod in ("p4", "p5")] == ["", "p4"]
    gets.holders.add("ns", "m", Holder("s", "p6", "a"))
    assert gets.holders.pods("ns", VIEW) == []
    assert gets.holders.sources("ns", VIEW) == ()
    assert gets.join("p7", part="a") == "p6"
    assert gets.join("p7", part="a", failed="p6") == "p2"
    gets.holders.add("ns", "m", Holder("s", "p8"))
    assert gets.join("p7", part="b") == "p8"
