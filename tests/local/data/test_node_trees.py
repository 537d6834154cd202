"""Trees that the pods of a node share: who leases, who fetches, what is removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kubetorch.datastore.node_trees import NodeTrees

DIGEST = "a" * 64

# Fetches half of a tree, and says so; it has to be killed.
FETCHER = """
import sys, time
from pathlib import Path
from kubetorch.datastore.node_trees import NodeTrees
trees = NodeTrees(Path(sys.argv[1]))
content = trees.content(sys.argv[2], "data")
lease = trees.new_lease()
trees.add(lease.path, content)
with trees.fetching(content, 60) as is_there:
    (content.parent / "half").write_text("half")
    print(is_there, flush=True)
    time.sleep(600)
"""


def write(trees: NodeTrees, content: Path) -> None:
    with trees.fetching(content, 1) as is_there:
        assert not is_there
        content.mkdir()


def test_a_tree_stays_while_a_pod_leases_it_and_goes_with_the_last_lease(tmp_path: Path) -> None:
    trees = NodeTrees(tmp_path)
    content, first, second = trees.content(DIGEST, "data"), trees.new_lease(), trees.new_lease()
    assert not trees.add(first.path, content)
    write(trees, content)
    assert trees.add(second.path, content)

    trees.update(first, ())
    assert content.is_dir()
    trees.update(second, ())
    assert not content.parent.exists()
    assert not list(tmp_path.glob("*/removed-*"))


def test_a_lease_ends_with_its_agent(tmp_path: Path) -> None:
    trees = NodeTrees(tmp_path)
    content, lease = trees.content(DIGEST, "data"), trees.new_lease()
    with fetcher(tmp_path) as process:
        trees.update(lease, ())
        assert (content.parent / "half").exists()
        process.kill()
        process.wait(60)
    trees.update(lease, ())
    assert not content.parent.exists()


def fetcher(root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FETCHER, str(root), DIGEST], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    return process


def test_a_program_that_waits_takes_over_when_the_one_that_fetches_dies(tmp_path: Path) -> None:
    trees = NodeTrees(tmp_path)
    content, lease = trees.content(DIGEST, "data"), trees.new_lease()
    with fetcher(tmp_path) as process:
        assert not trees.add(lease.path, content)
        with pytest.raises(TimeoutError), trees.fetching(content, 0.05):
            pass
        process.kill()
        process.wait(60)
        with trees.fetching(content, 60) as is_there:
            assert not is_there
            assert list(content.parent.iterdir()) == []


def test_paths_with_and_without_a_suffix_have_trees_of_their_own(tmp_path: Path) -> None:
    trees = NodeTrees(tmp_path)
    assert trees.content(DIGEST, "models") == trees.content(DIGEST, "data")
    assert trees.content(DIGEST, "a.json") != trees.content(DIGEST, "models")
    assert trees.content("b" * 64, "models") != trees.content(DIGEST, "models")


def test_the_folder_is_of_its_user_alone(tmp_path: Path) -> None:
    content = NodeTrees(tmp_path).content(DIGEST, "data")
    assert content.parents[2].stat().st_mode & 0o777 == 0o700
