"""`image.contents` is a Dockerfile that a builder takes as it stands, with another base image.

It is built with the `image` tool of the cluster kit, whose folder `KT_CLUSTER_KIT` names
(`../shared/cluster` beside the repository otherwise), into the cluster that `KUBECONFIG` names.
Without either the test is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kubetorch as kt
from cluster.images import BASE, KIT, build


def test_the_contents_of_an_image_are_built_as_they_stand(tmp_path: Path) -> None:
    if not (KIT / "image").exists():
        pytest.skip(f"there is no cluster kit in {KIT}: KT_CLUSTER_KIT names its folder")
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG names no cluster")
    folder = tmp_path / "code"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a b.txt").write_text("copied")
    image = (
        kt.Image(image_id=BASE)
        .set_env_vars({"PLAIN": "a b", "QUOTED": 'say "x" \\ #', "EMPTY": "", "NEXT": "$PLAIN c"})
        .run_bash('test "$NEXT" = "a b c" && test "$QUOTED" = \'say "x" \\ #\'')
        .run_bash("set -e\nline=one\ntest $line = one")
        .run_bash('test "$BASH_VERSION" || true', force=True)
        .run_bash("set -e\necho two > /two", force=True)
        .copy(str(folder), "app")
        .copy(str(folder), "/data", contents=True, force=True)
        .copy(str(folder / "inner" / "a b.txt"), "~/c d.txt")
        .run_bash("cat app/code/inner/a\\ b.txt /data/inner/a\\ b.txt 'c d.txt' /two")
        .pip_install("pip>=20")
    )
    file = tmp_path / "Dockerfile"
    file.write_text(image.contents)
    build("localhost/kubetorch-contents:test", Path("/"), "-f", file)
