"""Who passes tensors to whom, as all participants of a window conclude it."""

from __future__ import annotations

from kubetorch.datastore.transports.plans import plan
from kubetorch.wire.transports import Offer


def cpu(manifest: str = "") -> Offer:
    return Offer(key="policy", manifest=manifest)


def cuda(number: int, *readable: int, host: str = "a", manifest: str = "") -> Offer:
    return Offer(
        key="policy",
        manifest=manifest,
        device="cuda",
        device_id=f"gpu{number}",
        readable_ids=tuple(f"gpu{index}" for index in (number, *readable)),
        host=host,
    )


def test_getters_on_cpus_are_a_group() -> None:
    made_plan = plan({"c": cpu(), "a": cpu("m"), "b": cpu()}, "policy")
    assert made_plan is not None
    assert (made_plan.putter, made_plan.grouped, made_plan.sharing) == ("a", ("b", "c"), ())


def test_without_a_putter_or_with_two_versions_there_is_no_plan() -> None:
    assert plan({"a": cpu(), "b": cpu()}, "policy") is None
    assert plan({"a": cpu("m"), "b": cpu("n"), "c": cpu()}, "policy") is None
    assert plan({"a": cpu("m"), "b": cpu()}, "other") is None


def test_of_putters_of_the_same_version_the_first_sends() -> None:
    made_plan = plan({"b": cpu("m"), "a": cpu("m"), "c": cpu()}, "policy")
    assert made_plan is not None
    assert (made_plan.putter, made_plan.getters) == ("a", ("c",))


def test_getters_of_another_kind_of_device_are_left_out() -> None:
    made_plan = plan({"a": cuda(0, manifest="m"), "b": cpu(), "c": cuda(1, host="b")}, "policy")
    assert made_plan is not None
    assert (made_plan.grouped, made_plan.sharing, made_plan.refused) == (("c",), (), ())


def test_who_can_read_the_putters_gpu_shares_it_and_the_others_are_a_group() -> None:
    offers = {
        "putter": cuda(0, 1, manifest="m"),
        "same": cuda(0),
        "peer": cuda(1, 0),
        "blind": cuda(2),
        "elsewhere": cuda(3, 0, host="b"),
    }
    made_plan = plan(offers, "policy")
    assert made_plan is not None
    assert made_plan.sharing == ("peer", "same")
    assert made_plan.grouped == ("blind", "elsewhere")


def test_a_group_has_each_gpu_once() -> None:
    offers = {
        "putter": cuda(0, manifest="m"),
        "a": cuda(3, host="b"),
        "b": cuda(3, host="b"),
        "same": cuda(0, host="b"),  # as another container sees it
    }
    made_plan = plan(offers, "policy")
    assert made_plan is not None
    assert (made_plan.grouped, made_plan.refused) == (("a",), ("b", "same"))
