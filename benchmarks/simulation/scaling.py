"""What the scaler costs: services with load of a real shape, simulated second by second.

The CPU time of the scaler is measured; the load, the reports and the pods are made outside of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator

from kubetorch.controller.scaler import Scaler, ScalerSettings
from kubetorch.specs import autoscaling
from kubetorch.wire.messages import PodLoad

#: A pod takes so many calls: 70 % of a target of 4.
_SETTINGS = ScalerSettings.of(
    autoscaling.parse({"target": 4, "min_scale": 0, "max_scale": 60}, launch_timeout=900),
    cpu_cores=None,
    memory_bytes=None,
)
_DAY_SECONDS = 86400
_START = 1_800_000_000.0

#: The calls of a service at a second, for services that have so many at their usual.
Trace = Callable[[int, int, float], float]


def steady(service: int, second: int, usual: float) -> float:
    """All services are as busy as usual, and no two seconds are alike."""
    return usual * (0.9 + 0.2 * random.Random(service * 7919 + second).random())


def day_and_night(service: int, second: int, usual: float) -> float:
    """Each service has its noon at another time; a simulated second is ten minutes of its day."""
    phase = service / 1000 + second * 600 / _DAY_SECONDS
    return max(0.0, usual * math.sin(2 * math.pi * phase))


def bursts(service: int, second: int, usual: float) -> float:
    """A tenth of the services has three times its load for 10 s; the others have little."""
    is_bursting = (service + second // 10) % 10 == 0
    return 3 * usual if is_bursting else usual / 20


def avalanche(service: int, second: int, usual: float) -> float:
    """All load ends at the same time."""
    return usual if second < 10 else 0.0


TRACES: dict[str, tuple[Trace, int]] = {
    "steady": (steady, 20),
    "day and night": (day_and_night, 40),
    "bursts of 10 s": (bursts, 40),
    "scale-down avalanche": (avalanche, 160),
}


class _Service:
    """A service with pods that share its calls, and start within a second."""

    def __init__(self, number: int, pods: int) -> None:
        self.number = number
        self.scaler = Scaler(_SETTINGS, size=pods, now=_START)
        self.names: list[str] = []
        self._next_name = 0
        self._call_seconds: dict[str, float] = {}
        self._busy: set[str] = set()

    def follow_size(self, now: float) -> None:
        """Have as many pods as the scaler wants."""
        surplus = len(self.names) - self.scaler.size
        if not surplus:
            return
        if surplus > 0:
            for name in self.scaler.leaving(self.scaler.size):
                self.names.remove(name)
        for _ in range(-surplus):
            self.names.append(f"pod-{self._next_name}")
            self._next_name += 1
        self.scaler.pods_changed(self.names, self.names, now)

    def reports(self, calls: float) -> Iterator[tuple[str, PodLoad]]:
        """What the pods say of the last second: those that have calls, or had some before."""
        share = calls / max(1, len(self.names))
        for index, name in enumerate(self.names):
            count = int(share) + (index < round((share % 1) * len(self.names)))
            total = self._call_seconds.get(name, 0.0)
            if count or name in self._busy:
                (self._busy.add if count else self._busy.discard)(name)
                self._call_seconds[name] = total + count
                yield name, PodLoad(calls=count, call_seconds=total + count, started=int(total))


def cost(trace: str, services: int, pods: int) -> float:
    """CPU seconds of the scalers of services, with so many pods each, per second of a trace."""
    load, seconds = TRACES[trace]
    usual = pods * _SETTINGS.share
    all_services = [_Service(number, pods) for number in range(services)]
    used = 0.0
    for second in range(seconds):
        # In a second, services send and decide at different moments of it.
        now = _START + second
        messages = []
        for service in all_services:
            service.follow_size(now)
            moment = now + service.number / services
            scaler = service.scaler
            messages += [
                (scaler, name, report, moment)
                for name, report in service.reports(load(service.number, second, usual))
            ]
        began = time.thread_time()
        for scaler, name, report, moment in messages:
            scaler.report(name, report, moment)
        for service in all_services:
            moment = now + service.number / services + 1e-3
            delay = service.scaler.next_decision(moment)
            if delay is not None and delay < 1.0:
                service.scaler.decide(moment)
        used += time.thread_time() - began
    return used / seconds
