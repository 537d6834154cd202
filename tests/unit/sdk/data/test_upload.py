"""The blobs of a put stay in the store while the put goes on."""

from __future__ import annotations

from collections.abc import Mapping

from kubetorch.errors import StorageFullError
from kubetorch.sdk.data.upload import Renewal
from kubetorch.sdk.tuning import TIMING


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_put_that_goes_on_asks_for_all_that_it_sent_each_time_that_the_pause_is_over() -> None:
    questions: list[Mapping[str, int]] = []
    clock = Clock()
    renewal = Renewal(questions.append, clock)
    renewal.add({"a": 1})
    renewal.renew()
    assert questions == []

    clock.now += TIMING.blob_renewal_seconds
    renewal.renew()
    renewal.add({"b": 2})
    renewal.renew()
    assert questions == [{"a": 1}]

    clock.now += TIMING.blob_renewal_seconds
    renewal.renew()
    assert questions == [{"a": 1}, {"a": 1, "b": 2}]


def test_a_store_that_is_full_does_not_end_a_put_that_only_asks_for_its_blobs() -> None:
    def missing(sizes: Mapping[str, int]) -> None:
        raise StorageFullError("full")

    clock = Clock()
    renewal = Renewal(missing, clock)
    renewal.add({"a": 1})
    clock.now += TIMING.blob_renewal_seconds
    renewal.renew()
