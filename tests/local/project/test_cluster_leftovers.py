"""What `.ci/leftovers` ends of a cluster of the kit that `down --purge` did not end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: A network of their own, in which links have the kit's names without being the kit's.
APART = ("unshare", "--map-root-user", "--net")


def _has_networks() -> bool:
    try:
        return subprocess.run([*APART, "ip", "link"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not _has_networks(), reason="this user cannot make a network")


@contextmanager
def _shim(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that looks like a shim of a node of a cluster, and its container's id."""
    arguments = f"-namespace k8s.io -id x -address {shlex.quote(str(folder))}/node2/containerd.sock"
    program = "sleep 1000 & echo $!; read"
    command = f"exec -a /usr/bin/containerd-shim-runc-v2 bash -c {shlex.quote(program)} {arguments}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", command], **pipes) as shim:
        container = int(shim.stdout.readline())
        try:
            yield shim, container
        finally:
            shim.kill()
            with suppress(ProcessLookupError):
                os.kill(container, signal.SIGKILL)


def _clean_up(folder: Path) -> None:
    """Run it twice on a link that is there; the second time it has nothing to do."""
    leftovers = f"{ROOT}/.ci/leftovers {shlex.quote(str(folder))}"
    program = f"""
    set -e
    ip link add kt-other type veth peer name eth0
    ip link add kt-n2 type veth peer name eth1
    {leftovers}
    {leftovers}
    ip link add kt-n2 type veth peer name eth1
    ip link show kt-other >/dev/null
    """
    completed = subprocess.run([*APART, "bash", "-c", program], capture_output=True, text=True)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


def test_shims_their_containers_and_links_are_ended_and_no_other_cluster_is_touched(
    tmp_path: Path,
) -> None:
    with _shim(tmp_path / "one") as (shim, container), _shim(tmp_path / "other") as (other_shim, _):
        _clean_up(tmp_path / "one")
        assert shim.wait(timeout=60) == -signal.SIGKILL
        # Nobody waits for the container but the init process of the machine.
        state = Path(f"/proc/{container}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
        assert other_shim.poll() is None
