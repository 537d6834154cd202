"""Why a module that a pod did not find was not sent to it, as only the sender can say."""

from __future__ import annotations

from pathlib import Path

from kubetorch.sdk.deploys.project import MARKERS, ProjectRef


def explain(error: ModuleNotFoundError, where: ProjectRef) -> None:
    """Add to an error from a pod what was sent, and what to do.

    Args:
        error: The error; of a module that is simply not installed it stays as it is.
        where: What was deployed.
    """
    reason = None if error.name is None else reason_of(error.name, where)
    if reason is not None:
        error.msg = f"{error.msg}\n{reason}"
        error.args = (error.msg,)


def reason_of(module: str, where: ProjectRef) -> str | None:
    """Why a module may not be in a pod; `None` if nothing here tells."""
    if where.folder is None:
        if where.remote_dir is not None:
            return f"no code was sent: with remote_dir={where.remote_dir!r} it must lie there"
        return "no code was sent: its own modules must be installed in the pods"
    root = where.folder / where.root
    here = _file_of(module, root)
    if where.only is None:
        if here is None:
            return None
        return (
            f"{here} is here, and was not sent: .ktignore, .gitignore or KT_RSYNC_FILTERS leave it "
            "out"
        )
    found = "" if here is None else f", and not {here}"
    markers = f"{', '.join(MARKERS[:-1])} or {MARKERS[-1]}"
    advice = f"make one of them there, or give sync_dir={str(root)!r}"
    if root.resolve() == Path.home().resolve():
        advice = "move the files into a folder of their own that has one of them"
    return (
        f"only {where.only} was sent{found}: neither {root} nor a folder above it is a project, "
        f"which has {markers}; {advice}"
    )


def _file_of(module: str, root: Path) -> Path | None:
    """The file or folder that a module would be imported from, if it is on this machine."""
    path = root.joinpath(*module.split("."))
    source = path.with_name(f"{path.name}.py")
    if source.is_file():
        return source.relative_to(root)
    return path.relative_to(root) if path.is_dir() else None
