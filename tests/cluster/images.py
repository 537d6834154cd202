"""Images for the tests, built with the cluster kit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[2].parent / "shared" / "cluster"
KIT = Path(os.environ.get("KT_CLUSTER_KIT", _BESIDE))
#: The only base image that the kit has.
BASE = "localhost/python:3.11"


def build(name: str, context: Path, *arguments: str | Path) -> None:
    """Build an image, and load it into every node."""
    cluster = Path(os.environ["KUBECONFIG"]).parent
    built = subprocess.run(
        [KIT / "image", name, context, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "KT_CLUSTER_DIR": str(cluster)},
        check=False,
    )
    if "the cluster is not up" in built.stderr:
        pytest.skip("the cluster of the kit is not up")
    assert built.returncode == 0, f"{built.stdout[-3000:]}\n{built.stderr[-3000:]}"


def remove(name: str) -> None:
    """Remove an image from every node, by each name that it has there."""
    cluster = Path(os.environ["KUBECONFIG"]).parent
    for socket in cluster.glob("node*/containerd.sock"):
        on_node = ["ctr", "-a", socket, "-n", "k8s.io", "images"]
        listed = subprocess.run(
            [*on_node, "ls", "-q"], capture_output=True, text=True, timeout=30, check=True
        )
        image_names = [image for image in listed.stdout.split() if name in image]
        if image_names:
            subprocess.run(
                [*on_node, "rm", *image_names], check=True, capture_output=True, timeout=30
            )


def has_image(name: str) -> bool:
    """Whether a node has an image."""
    cluster = Path(os.environ["KUBECONFIG"]).parent
    listed = subprocess.run(
        ["ctr", "-a", cluster / "node1" / "containerd.sock", "-n", "k8s.io", "images", "ls", "-q"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return name in listed.stdout.split()
