"""The GPUs of this machine, and which pod has which of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kubetorch.errors import ResourceNotAvailableError

#: Says to CUDA which GPUs a process sees.
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
_NODES = Path("/dev")


class Devices:
    """Hands out GPUs.

    Args:
        names: What CUDA calls them: numbers, or UUIDs.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = tuple(names)

    @classmethod
    def of_machine(
        cls, environ: Mapping[str, str], driver: Path = _DRIVER, nodes: Path = _NODES
    ) -> Devices:
        """Those of this machine, or the part of them that the service itself may see."""
        visible = environ.get(VISIBLE)
        if visible is not None:
            return cls([name.strip() for name in visible.split(",") if name.strip()])
        # A container may have the devices and not the driver's folder.
        found = driver.iterdir() if driver.is_dir() else nodes.glob("nvidia[0-9]*")
        return cls([str(number) for number in range(len(list(found)))])

    def check(self, service: str, *, each: int, pods: int, taken: Iterable[str]) -> None:
        """Refuse a service that asks for more GPUs than there are.

        Args:
            service: Its name.
            each: GPUs of each pod.
            pods: Number of pods.
            taken: GPUs of other services, as `choose` gave them.

        Raises:
            ResourceNotAvailableError: There are too few.
        """
        wanted = each * pods
        if not wanted:
            return
        free = len(self._free(taken))
        if wanted <= free:
            return
        has = f"{len(self._names)} GPU{'' if len(self._names) == 1 else 's'}"
        if len(self._names) > free:
            has += f", of which other services have {len(self._names) - free}"
        raise ResourceNotAvailableError(
            f"{service} asks for {wanted} GPU{'' if wanted == 1 else 's'}, and this machine has "
            f"{has if self._names else 'none'}",
            hint="leave gpus out to run without one, or deploy to a cluster"
            if not self._names
            else "kt list shows who has them",
        )

    def choose(self, count: int, taken: Iterable[str]) -> str:
        """GPUs for one pod, with commas; what others have is given again when there is no other."""
        free = self._free(taken)
        others = [name for name in self._names if name not in free]
        return ",".join([*free, *others][:count])

    def _free(self, taken: Iterable[str]) -> list[str]:
        used = {name for one in taken for name in one.split(",")}
        return [name for name in self._names if name not in used]
