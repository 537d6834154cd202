"""Files of this machine in the pods of a compute while they serve."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath

from kubetorch.errors import SpecError
from kubetorch.sdk import advice
from kubetorch.sdk.computing.commands import Commands


class Syncing(Commands):
    """What can be sent to the pods."""

    def rsync(
        self,
        source: str | PathLike[str] | Iterable[str | PathLike[str]],
        dest: str | None = None,
        local_port: int | None = None,
        contents: bool = False,
        filter_options: str | None = None,
        force: bool = False,
    ) -> None:
        """Copy files and folders of this machine into all pods that run; only changes travel.

        The image does not change by it: pods that are started later do not have them.

        Args:
            source: A file, a folder, or several.
            dest: Where they go, as for `kt.Image.copy`: relative to the pods' working directory,
                absolute, or `~/…`; under their own names if not given.
            local_port: Deprecated: nothing needs a port.
            contents: Copy what is in a folder, not the folder itself.
            filter_options: `--include=PATTERN` and `--exclude=PATTERN`, separated by spaces.
            force: Copy also what has not changed.

        Raises:
            SpecError: There is no such file or folder, or nothing was deployed to this compute.
            ImageStepError: A pod cannot store them.
        """
        if local_port is not None:
            advice.warn("rsync(local_port=) has no meaning any more", DeprecationWarning)
        from kubetorch.sdk import pod_commands  # noqa: PLC0415  # few programs copy files so
        from kubetorch.sdk.image import Image  # noqa: PLC0415  # as above

        image = Image()
        for path in _paths(source):
            image.copy(path, dest, contents, filter_options, force)
        namespace = self._view().spec.namespace
        for step in pod_commands.uploaded(self.session(), image.to_spec(), namespace).steps:
            for done in self._run(step, None):
                done.check()

    async def rsync_async(
        self,
        source: str | PathLike[str] | Iterable[str | PathLike[str]],
        dest: str | None = None,
        local_port: int | None = None,
        contents: bool = False,
        filter_options: str | None = None,
        force: bool = False,
    ) -> None:
        """Copy files and folders of this machine into all pods that run; only changes travel.

        The image does not change by it: pods that are started later do not have them.

        Args:
            source: A file, a folder, or several.
            dest: Where they go, as for `kt.Image.copy`: relative to the pods' working directory,
                absolute, or `~/…`; under their own names if not given.
            local_port: Deprecated: nothing needs a port.
            contents: Copy what is in a folder, not the folder itself.
            filter_options: `--include=PATTERN` and `--exclude=PATTERN`, separated by spaces.
            force: Copy also what has not changed.

        Raises:
            SpecError: There is no such file or folder, or nothing was deployed to this compute.
            ImageStepError: A pod cannot store them.
        """
        import asyncio  # noqa: PLC0415  # loaded already by whoever awaits

        await asyncio.to_thread(
            self.rsync, source, dest, local_port, contents, filter_options, force
        )


def _paths(source: object) -> list[str]:
    """The paths that were given."""
    items = [source] if isinstance(source, (str, PathLike)) else source
    if not isinstance(items, Iterable) or isinstance(items, (bytes, dict)):
        raise SpecError(
            f"source is {source!r}; it must be a path, or a list of paths",
            hint='for example compute.rsync(["./src", "./data"])',
        )
    found = list(items)
    for item in found:
        if not isinstance(item, (str, PathLike)):
            raise SpecError(f"source has {item!r} in it; each must be a path")
    return [str(fspath(item)) for item in found]
