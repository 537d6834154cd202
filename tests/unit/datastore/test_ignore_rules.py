from __future__ import annotations

from pathlib import Path

import pytest

from kubetorch.datastore.ignore_rules import BUILT_IN, IgnoreRules, parse_filters
from kubetorch.errors import SpecError


def rules(root: Path, files: dict[str, str] | None = None, **options: object) -> IgnoreRules:
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return IgnoreRules(str(root), **options)  # type: ignore[arg-type]


def travels(ignore_rules: IgnoreRules, path: str) -> bool:
    """Whether a path travels, when all folders above it are looked into; `/` ends a folder's."""
    folder, _, name = path.rstrip("/").rpartition("/")
    return not ignore_rules.is_ignored(folder, name, is_folder=path.endswith("/"))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_names_stay_at_home_at_any_depth(tmp_path: Path, name: str) -> None:
    assert not travels(rules(tmp_path), f"{name}/")
    assert not travels(rules(tmp_path), f"a/b/{name}/")
    assert travels(rules(tmp_path), f"a/x{name}/")


def test_byte_code_stays_at_home_and_sources_travel(tmp_path: Path) -> None:
    ignore_rules = rules(tmp_path)
    assert not travels(ignore_rules, "a/mod.pyc")
    assert travels(ignore_rules, "a/mod.py")
    assert travels(ignore_rules, "pkg.egg-info/")


def test_a_virtual_environment_stays_at_home_whatever_its_name(tmp_path: Path) -> None:
    ignore_rules = rules(tmp_path, {"my env/pyvenv.cfg": "", "lib/mod.py": ""})
    assert not travels(ignore_rules, "my env/")
    assert travels(ignore_rules, "lib/")


def test_rules_of_the_nearest_folder_go_first(tmp_path: Path) -> None:
    ignore_rules = rules(tmp_path, {".gitignore": "*.bin\n", "d/.gitignore": "!small.bin\n/x\n"})
    assert not travels(ignore_rules, "a.bin")
    assert not travels(ignore_rules, "d/a.bin")
    assert travels(ignore_rules, "d/small.bin")
    assert travels(ignore_rules, "small.txt")
    assert not travels(ignore_rules, "small.bin")
    assert not travels(ignore_rules, "d/x")
    assert travels(ignore_rules, "x")


def test_a_ktignore_goes_before_every_gitignore(tmp_path: Path) -> None:
    files = {".ktignore": "!model.bin\nnotes/\n", ".gitignore": "*.bin\n", "d/.gitignore": "*\n"}
    ignore_rules = rules(tmp_path, files)
    assert travels(ignore_rules, "model.bin")
    assert travels(ignore_rules, "d/model.bin")
    assert not travels(ignore_rules, "other.bin")
    assert not travels(ignore_rules, "d/notes/")


@pytest.mark.parametrize("file", [".gitignore", ".ktignore"])
def test_a_white_list_does_not_open_what_is_built_in(tmp_path: Path, file: str) -> None:
    ignore_rules = rules(tmp_path, {file: "*\n!*/\n!*.py\n"})
    assert travels(ignore_rules, "pkg/")
    assert travels(ignore_rules, "pkg/mod.py")
    assert not travels(ignore_rules, ".git/")
    assert not travels(ignore_rules, "pkg/__pycache__/")


def test_a_ktignore_that_names_what_is_built_in_opens_it(tmp_path: Path) -> None:
    ignore_rules = rules(tmp_path, {".ktignore": "!/web/node_modules/\n"})
    assert travels(ignore_rules, "web/node_modules/")
    assert not travels(ignore_rules, "node_modules/")
    ignore_rules = rules(tmp_path / "other", {".gitignore": "!node_modules/\n"})
    assert not travels(ignore_rules, "node_modules/")


def test_rules_of_the_repository_above_the_project_count(tmp_path: Path) -> None:
    files = {".git/HEAD": "", ".gitignore": "*.ckpt\n/services/shop/data/\n"}
    rules(tmp_path, files)
    ignore_rules = rules(tmp_path / "services/shop", {"main.py": ""})
    assert not travels(ignore_rules, "a.ckpt")
    assert not travels(ignore_rules, "data/")
    assert travels(ignore_rules, "main.py")


@pytest.mark.parametrize("line", ["*", "/services/", "shop", "/services/*"])
def test_a_repository_that_ignores_the_whole_project_has_no_say(tmp_path: Path, line: str) -> None:
    rules(tmp_path, {".git/HEAD": "", ".gitignore": f"{line}\n*.ckpt\n"})
    ignore_rules = rules(tmp_path / "services/shop", {"main.py": ""})
    assert travels(ignore_rules, "main.py")
    assert travels(ignore_rules, "a.ckpt")


def test_rules_above_a_project_that_is_in_no_repository_do_not_count(tmp_path: Path) -> None:
    rules(tmp_path, {".gitignore": "*\n"})
    assert travels(rules(tmp_path / "shop", {"main.py": ""}), "main.py")


def test_the_signature_changes_with_the_rules_above(tmp_path: Path) -> None:
    rules(tmp_path, {".git/HEAD": "", ".gitignore": "a\n"})
    before = rules(tmp_path / "shop", {"main.py": ""}).signature()
    (tmp_path / ".gitignore").write_text("a\nb\n")
    assert rules(tmp_path / "shop").signature() != before
    assert rules(tmp_path / "shop", filters=("x",)).signature() == ["filters", "x"]


def test_a_byte_order_mark_and_windows_lines_are_no_part_of_a_pattern(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_bytes(b"\xef\xbb\xbfa.bin\r\nb.bin\r\n")
    ignore_rules = rules(tmp_path)
    assert [travels(ignore_rules, name) for name in ("a.bin", "b.bin", "c.bin")] == [
        False,
        False,
        True,
    ]


def test_a_file_of_rules_that_is_not_utf_8_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_bytes(b"\xff\xfe\n*.bin\n")
    assert not travels(rules(tmp_path), "a.bin")


# ---------------------------------------------------------------------------------- the variable


def test_filters_replace_all_rules(tmp_path: Path) -> None:
    filters = parse_filters("--exclude=*.log --exclude 'my data/'")
    ignore_rules = rules(tmp_path, {".gitignore": "*.py\n"}, filters=filters)
    assert travels(ignore_rules, "main.py")
    assert travels(ignore_rules, ".venv/")
    assert not travels(ignore_rules, "d/x.log")
    assert not travels(ignore_rules, "my data/")


@pytest.mark.parametrize(
    ("filters", "path", "expected"),
    [
        ("--include=keep.log --exclude=*.log", "keep.log", True),
        ("--exclude=*.log --include=keep.log", "keep.log", False),
        ("--exclude=/top", "top", False),
        ("--exclude=/top", "d/top", True),
        ("--exclude=a/b", "x/a/b", False),
        ("--exclude=a/***", "a/", False),
        ("--exclude=a/***", "x/a/b/c", False),
        ("--exclude=dir/", "dir", True),
        ("--exclude=#x", "#x", False),
        ("--include=*/ --include=*.py --exclude=*", "d/", True),
        ("--include=*/ --include=*.py --exclude=*", "d/a.txt", False),
    ],
)
def test_filters_mean_what_they_mean_to_rsync(
    tmp_path: Path, filters: str, path: str, expected: bool
) -> None:
    assert travels(rules(tmp_path, filters=parse_filters(filters)), path) == expected


def test_no_filters_let_everything_travel(tmp_path: Path) -> None:
    assert parse_filters("") == ()
    assert travels(rules(tmp_path, filters=()), ".git/")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("--delete", "--delete"),
        ("--exclude", "without a pattern"),
        ("--exclude=", "without a pattern"),
        ("--exclude-from=x", "--exclude-from"),
        ("*.log", "'*.log'"),
        ("--exclude='a", "quotation"),
    ],
)
def test_filters_that_mean_nothing_are_refused(text: str, named: str) -> None:
    with pytest.raises(SpecError, match="KT_RSYNC_FILTERS") as caught:
        parse_filters(text)
    assert named in str(caught.value)
