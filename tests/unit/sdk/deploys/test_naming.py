"""Under which names a service is looked for."""

from pathlib import Path

import pytest

from kubetorch.errors import SpecError
from kubetorch.sdk.deploys import naming


def test_the_users_own_service_comes_first_then_the_branchs_then_the_bare_name():
    found = naming.candidates("train", [], username="alice", branch="feature/x")

    assert found == ("alice-train", "feature-x-train", "train")


def test_without_user_name_and_branch_there_is_the_bare_name():
    assert naming.candidates("train", [], username=None, branch=None) == ("train",)


def test_prefixes_are_tried_alone():
    found = naming.candidates("train", ["main", "bob"], username="alice", branch="x")

    assert found == ("main-train", "bob-train")


def test_a_name_with_the_user_name_is_not_prefixed_again():
    assert naming.candidates("alice-train", [], username="alice", branch=None) == ("alice-train",)


def test_a_branch_that_can_be_no_name_is_left_out():
    assert naming.candidates("train", [], username=None, branch="2024") == ("train",)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, []), ("main", ["main"]), (["a", "b"], ["a", "b"]), (("a",), ["a"])]
)
def test_prefixes_are_text_or_a_list(given, kept):
    assert naming.parse_prefixes(given) == kept


@pytest.mark.parametrize("given", [3, [1], {"a": 1}])
def test_other_prefixes_are_refused(given):
    with pytest.raises(SpecError, match="reload_prefixes"):
        naming.parse_prefixes(given)


def make_repository(folder: Path, head: str) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text(head)


def test_the_branch_is_read_from_the_repository_above(tmp_path):
    make_repository(tmp_path, "ref: refs/heads/topic/one\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)

    assert naming.checked_out_branch(inner) == "topic/one"


def test_a_detached_head_has_no_branch(tmp_path):
    make_repository(tmp_path, "0123456789abcdef\n")

    assert naming.checked_out_branch(tmp_path) is None


def test_a_work_tree_names_its_repository(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "HEAD").write_text("ref: refs/heads/topic\n")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text("gitdir: ../real\n")

    assert naming.checked_out_branch(tree) == "topic"
