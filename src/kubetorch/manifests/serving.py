"""The port that the agent answers at, and the probes with which Kubernetes asks it."""

from __future__ import annotations

from kubetorch.manifests.kinds import Manifest
from kubetorch.manifests.parameter import Parameter
from kubetorch.manifests.place import Place, items, named
from kubetorch.specs.compute import ComputeSpec

PORT = 32300
#: Knative takes ports of this name for HTTP/1.
PORT_NAME = "http1"
#: Seconds between two startup probes; `launch_timeout` is counted in them.
STARTUP_PERIOD = 5

_HEALTH = "/health"
# What Kubernetes assumes where a probe does not say.
_DEFAULT_PERIOD = 10
_DEFAULT_FAILURES = 3
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")

_PORTS = "https://kubernetes.io/docs/concepts/services-networking/service/"
_PROBING = "https://kubernetes.io/docs/concepts/configuration/liveness-readiness-startup-probes/"


def port(container: Manifest) -> int:
    """Port that the agent listens on: the one named `http1`, else 32300."""
    found = named(container.get("ports") or [], PORT_NAME)
    return PORT if found is None else int(found["containerPort"])


def fill(place: Place, compute: ComputeSpec) -> None:
    """Add the port, and the probes that the container does not have."""
    if named(place.container.get("ports") or [], PORT_NAME) is None:
        _write_port(place, compute)
    for name, probe in _probes(compute.launch_timeout, port(place.container)).items():
        place.container.setdefault(name, probe)


def _probes(launch_timeout: int, port: int) -> dict[str, Manifest]:
    def probe(period: int, timeout: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": _HEALTH, "port": port},
            "periodSeconds": period,
            "timeoutSeconds": timeout,
            "failureThreshold": failures,
        }

    startup = probe(STARTUP_PERIOD, 2, max(1, launch_timeout // STARTUP_PERIOD))
    return {
        "startupProbe": startup | {"initialDelaySeconds": 0},
        "readinessProbe": probe(3, 5, 5) | {"successThreshold": 1},
        "livenessProbe": probe(30, 5, 3),
    }


def _read_port(place: Place) -> int | None:
    found = port(place.container)
    return None if found == PORT else found


def _write_port(place: Place, compute: ComputeSpec) -> None:
    before, wanted = port(place.container), compute.server_port or PORT
    found = items(place.container, "ports")
    if place.kind.is_autoscaled:
        # Knative allows one port, and sends calls to it.
        found.clear()
    there = named(found, PORT_NAME)
    if there is None:
        found.append({"name": PORT_NAME, "containerPort": wanted})
    else:
        there["containerPort"] = wanted
    for name in _PROBES:
        asked = (place.container.get(name) or {}).get("httpGet")
        if asked == {"path": _HEALTH, "port": before}:
            asked["port"] = wanted


def _read_timeout(place: Place) -> int | None:
    probe = place.container.get("startupProbe")
    if probe is None:
        return None
    period = int(probe.get("periodSeconds", _DEFAULT_PERIOD))
    return period * int(probe.get("failureThreshold", _DEFAULT_FAILURES))


def _write_timeout(place: Place, compute: ComputeSpec) -> None:
    probe = place.container.get("startupProbe")
    if probe is not None:  # else `fill` makes it
        period = int(probe.get("periodSeconds", _DEFAULT_PERIOD))
        probe["failureThreshold"] = max(1, compute.launch_timeout // period)


PARAMETERS = (
    Parameter(
        "server_port",
        "C.ports: http1",
        _read_port,
        _write_port,
        "32300, or the port of that name in a manifest; the probes ask it too",
        _PORTS,
    ),
    Parameter(
        "launch_timeout",
        "C.startupProbe.failureThreshold",
        _read_timeout,
        _write_timeout,
        f"counted in probes of {STARTUP_PERIOD} seconds; it is the deadline of a deploy too",
        _PROBING,
    ),
)
