"""The first page of the documents is true of a cluster, block by block."""

from __future__ import annotations

from pathlib import Path

import documents
from cluster.conftest import Installed


def test_the_blocks_of_the_readme_run_in_their_order(tmp_path: Path, installed: Installed) -> None:
    for block in documents.blocks(documents.ROOT / "README.md"):
        block.run(tmp_path, **installed.environ)
