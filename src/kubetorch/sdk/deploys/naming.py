"""Under which names a service may already exist: the user's, the git branch's, the bare one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kubetorch.errors import SpecError
from kubetorch.specs import names


def candidates(
    name: str, prefixes: Sequence[str], *, username: str | None, branch: str | None
) -> tuple[str, ...]:
    """Service names to look for, in order.

    Args:
        name: What the user calls the service.
        prefixes: Prefixes that the user gave; the bare name is then not tried.
        username: The configured user name.
        branch: The branch of the git repository.

    Raises:
        SpecError: A name would be no name of a service.
    """
    if prefixes:
        found = [names.service_name(f"{prefix}-{name}") for prefix in prefixes]
    else:
        found = [names.service_name(name, username=username)]
        if branch is not None:
            found += _with_branch(name, branch)
        found += [names.service_name(name)]
    return tuple(dict.fromkeys(found))


def _with_branch(name: str, branch: str) -> list[str]:
    try:
        return [names.service_name(f"{names.username(branch)}-{name}")]
    except SpecError:  # a branch such as "2024-01" has no name that a service could have
        return []


def parse_prefixes(value: object) -> list[str]:
    """What the user gave as `reload_prefixes`: `None`, text, or a list of texts.

    Raises:
        SpecError: It is something else.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return list(value)
    raise SpecError(
        f"reload_prefixes is {value!r}; it must be text or a list of texts",
        hint='for example reload_prefixes=["main", "alice"]',
    )


def checked_out_branch(folder: Path) -> str | None:
    """The branch of the git repository that `folder` lies in; none on a detached head."""
    for parent in (folder, *folder.parents):
        entry = parent / ".git"
        if entry.exists():
            return _branch_of(entry)
    return None


def _branch_of(entry: Path) -> str | None:
    try:
        if entry.is_file():  # a work tree or a submodule: "gitdir: <path>"
            target = entry.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
            entry = entry.parent / target
        head = (entry / "HEAD").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    prefix = "ref: refs/heads/"
    return head[len(prefix) :] if head.startswith(prefix) else None
