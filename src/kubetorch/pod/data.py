"""Shows in a pod what keys of the data store hold, at the paths of `kt.Compute(data=)`.

    <root>/data/<number>/…      what was fetched at once, for one or several paths, or links to
                                trees that pods of the node share (`datastore.node_trees`)
    <path>                      a link into it, which is switched in one step

A program of the SDK fetches (`kubetorch.sdk.data.mounts`), on the agent's interpreter. What a path
led to before stays until the path is switched once more, so that a reader finds the rest of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kubetorch.datastore.node_trees import Lease, NodeTrees
from kubetorch.errors import DataStoreError, ResourceNotAvailableError
from kubetorch.lib import deadlines, files, process_watch, runtime
from kubetorch.pod.environment import INTERNAL, worker_environ
from kubetorch.pod.filesystem import PodFilesystem
from kubetorch.pod.tuning import LIMITS
from kubetorch.specs.data import DataMount
from kubetorch.specs.workload import WorkloadSpec
from kubetorch.wire import exceptions, messages, podenv
from kubetorch.wire.pod_commands import FetchData
from kubetorch.wire.podenv import PodEnv

_log = logging.getLogger(__name__)

#: The program that fetches; the agent itself does without the SDK.
_PROGRAM = "kubetorch.sdk.data.mounts"
_HAS_SAFE_PATH = sys.version_info >= (3, 11)


class DataMounts:
    def __init__(self, pod: PodEnv, environ: Mapping[str, str], filesystem: PodFilesystem) -> None:
        self._pod = pod
        self._environ = environ
        self._filesystem = filesystem
        self._root = podenv.own_data(Path(pod.root))
        # Of an earlier agent of the pod, whose records are lost.
        files.remove_tree(self._root)
        self._trees: NodeTrees | None = None
        self._lease: Lease | None = None
        self._count = 0
        self._lock = asyncio.Lock()
        # By path: the link there; what was declared and what was fetched; where the link leads to,
        # after where it led to before.
        self._links: dict[str, Path] = {}
        self._declared: dict[str, DataMount] = {}
        self._shown: dict[str, DataMount] = {}
        self._targets: dict[str, deque[Path]] = {}

    @property
    def shown(self) -> list[DataMount]:
        """The mounts of the pod, with the versions that it has."""
        return [self._shown[path] for path in sorted(self._shown)]

    async def prepare(self, spec: WorkloadSpec, on_fetch: Callable[[str], object]) -> None:
        """Show what a generation declares, as far as the pod has not shown it yet."""
        async with self._lock:
            mounts = [
                mount for mount in spec.compute.data if self._declared.get(mount.path) != mount
            ]
            if mounts:
                on_fetch(", ".join(f"{mount.key} for {mount.path}" for mount in mounts))
                await self._update(spec, mounts)
                self._declared |= {mount.path: mount for mount in mounts}

    async def refresh(self, spec: WorkloadSpec) -> list[DataMount]:
        """Show what the keys hold now; returns the mounts of the pod."""
        async with self._lock:
            if spec.compute.data:
                await self._update(spec, spec.compute.data)
            return self.shown

    async def _update(self, spec: WorkloadSpec, mounts: Sequence[DataMount]) -> None:
        """Fetch what is new, then switch the paths to it."""
        self._count += 1
        folder = self._root / str(self._count)
        try:
            async with deadlines.timeout(float(spec.compute.launch_timeout)):
                fetched = await self._fetch(spec, folder, mounts)
            await asyncio.to_thread(self._show, folder, fetched)
        except TimeoutError:
            keys = ", ".join(repr(mount.key) for mount in mounts)
            raise DataStoreError(
                f"pod {self._pod.pod} did not get {keys} within {spec.compute.launch_timeout} s",
                hint="kt.Compute(launch_timeout=...) gives it more time",
            ) from None
        finally:
            await asyncio.shield(asyncio.to_thread(self._clean, folder))

    def _clean(self, folder: Path) -> None:
        """Remove a folder that no path leads to, and let go of the trees that none leads to."""
        targets = [target for queue in self._targets.values() for target in queue]
        if not any(folder in target.parents for target in targets):
            files.remove_tree(folder)
        if self._trees is not None and self._lease is not None:
            # The next one to look removes them.
            with contextlib.suppress(OSError):
                self._trees.update(self._lease, [target.resolve() for target in targets])

    def _share(self) -> None:
        """Prepare to share trees with the pods of the node, where there is a folder for them."""
        if self._pod.node_data and self._lease is None:
            try:
                self._trees = NodeTrees(Path(self._pod.node_data))
                self._lease = self._trees.new_lease()
            except OSError as error:
                _log.warning("no trees of the node folder=%s error=%s", self._pod.node_data, error)

    async def close(self) -> None:
        """Let go of the trees of the node, when the processes of the pod have ended."""
        async with self._lock:
            if self._trees is not None and self._lease is not None:
                lease, self._lease = self._lease, None
                await asyncio.to_thread(self._end, self._trees, lease)

    def _end(self, trees: NodeTrees, lease: Lease) -> None:
        with contextlib.suppress(OSError):
            trees.update(lease, ())
        lease.close()

    # ----------------------------------------------------------------------------------- fetching

    async def _fetch(
        self, spec: WorkloadSpec, folder: Path, mounts: Sequence[DataMount]
    ) -> list[DataMount]:
        """Fetch what the pod does not show yet; the mounts with what their keys hold."""
        await asyncio.to_thread(self._share)
        order = FetchData(
            namespace=self._pod.namespace,
            folder=str(folder),
            mounts=tuple(self._with_shown(mount) for mount in mounts),
            former={path: str(targets[-1].resolve()) for path, targets in self._targets.items()},
            node="" if self._lease is None else self._pod.node_data,
            lease="" if self._lease is None else str(self._lease.path),
            wait_seconds=spec.compute.launch_timeout * LIMITS.shared_fetch_share,
        )
        await asyncio.to_thread(folder.mkdir, mode=0o755, parents=True)
        # As the agent itself is started.
        options = ("-I", "-X", "utf8") if runtime.is_used() else ("-P",) * _HAS_SAFE_PATH
        answers: deque[str] = deque(maxlen=1)
        errors: deque[str] = deque(maxlen=LIMITS.step_error_lines)
        status = await process_watch.run(
            [sys.executable, *options, "-m", _PROGRAM, messages.encode(order).decode()],
            self._program_environ(spec),
            folder="/",
            on_line=answers.append,
            on_error_line=errors.append,
        )
        if status == 0 and answers:
            return messages.decode(list[DataMount], answers[0])
        if status == 1 and answers:
            raise exceptions.rebuild(exceptions.parse_json(answers[0].encode()))
        output = "".join(f"\n  {line}" for line in errors)
        raise DataStoreError(
            f"the program that fetches data for {self._pod.pod} ended with exit code {status}"
            f"{output and ':'}{output}"
        )

    def _with_shown(self, mount: DataMount) -> DataMount:
        """A mount with the digest of what the pod shows there already, if it does."""
        shown = self._shown.get(mount.path)
        is_same = shown is not None and (shown.key, shown.mode) == (mount.key, mount.mode)
        return replace(mount, digest=shown.digest if shown is not None and is_same else "")

    def _program_environ(self, spec: WorkloadSpec) -> dict[str, str]:
        """The variables of the agent's interpreter, and those by which the SDK knows its pod."""
        agent_variables = {
            name: text for name, text in os.environ.items() if not name.startswith(INTERNAL)
        }
        pod_variables = {
            name: text
            for name, text in worker_environ({}, self._pod, spec).items()
            if name.startswith(("KT_", "POD_"))
        }
        home = {"HOME": self._environ["HOME"]} if "HOME" in self._environ else {}
        return {**agent_variables, **pod_variables, **home}

    # ---------------------------------------------------------------------------------- switching

    def _show(self, folder: Path, fetched: Iterable[DataMount]) -> None:
        for number, mount in enumerate(fetched):
            target = folder / str(number) / Path(mount.path).name
            if os.path.lexists(target):  # else the pod shows it already
                self._switch(mount, target)
            self._shown[mount.path] = mount

    def _switch(self, mount: DataMount, target: Path) -> None:
        path = mount.path
        if Path(path) in target.parents:
            raise ResourceNotAvailableError(
                f"{mount.key!r} cannot be shown at {path}: the pod's own files are below it, in "
                f"{target.parent.parent}",
                hint="choose another path",
            )
        try:
            if path not in self._links:
                self._links[path] = self._filesystem.clear(path, self._pod.working_dir)
            link = self._links[path]
            new_link = link.with_name(f".{link.name}.kt-new")
            new_link.unlink(missing_ok=True)
            new_link.symlink_to(target)
            new_link.replace(link)
        except OSError as error:
            hint = "choose a path at which the image has no files"
            if isinstance(error, PermissionError):
                hint = (
                    f"the pod runs as user {os.geteuid()}: choose a path in the working directory, "
                    f"{self._pod.working_dir}, or another one that this user can write to"
                )
            raise ResourceNotAvailableError(
                f"{mount.key!r} cannot be shown at {path}: {error.strerror or error}", hint=hint
            ) from error
        targets = self._targets.setdefault(path, deque())
        targets.append(target)
        while len(targets) > LIMITS.shown_versions:
            files.remove_tree(targets.popleft().parent)
