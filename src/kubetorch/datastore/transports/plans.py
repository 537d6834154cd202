"""Who passes tensors to whom, as each participant of a window concludes for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kubetorch.wire.transports import Offer


@dataclass(frozen=True)
class Plan:
    """What a putter passes on.

    Attributes:
        putter: The participant that has the tensors.
        grouped, sharing: The getters that get them as members of a process group, and by CUDA IPC.
        refused: The getters that have no device of their own.
    """

    putter: str
    offer: Offer
    grouped: tuple[str, ...]
    sharing: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def getters(self) -> tuple[str, ...]:
        return (*self.grouped, *self.sharing)


def plan(offers: Mapping[str, Offer], key: str) -> Plan | None:
    """The plan for a key; `None` if no putter of it, or several with different tensors, take part.

    NCCL has one rank for a device. Getters that can read the putter's device need no rank.
    """
    names = sorted(name for name, offer in offers.items() if offer.key == key)
    ordered = [(name, offers[name]) for name in names]
    putters = [(name, offer) for name, offer in ordered if offer.manifest]
    if len({offer.manifest for _, offer in putters}) != 1:
        return None
    putter, source = putters[0]
    grouped, sharing, refused = [], [], []
    device_ids = {source.device_id}
    for name, offer in ordered:
        if offer.manifest or offer.device != source.device:
            continue
        if source.device == "cpu":
            grouped.append(name)
        elif offer.host == source.host and source.device_id in offer.readable_ids:
            sharing.append(name)
        elif offer.device_id in device_ids:
            refused.append(name)
        else:
            device_ids.add(offer.device_id)
            grouped.append(name)
    return Plan(putter, source, tuple(grouped), tuple(sharing), tuple(refused))
