"""Commands in the pods of a compute while they serve; its image does not change by them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kubetorch.errors import ControllerUnavailableError, SpecError
from kubetorch.sdk.computing.pods import Pods
from kubetorch.specs import requirements
from kubetorch.specs.image import PipStep, RunStep, Step

if TYPE_CHECKING:
    from kubetorch.sdk.pod_commands import Done
    from kubetorch.wire.messages import WorkloadView

#: Names of distributions as requirements begin with them.
_NAME = re.compile(r"^\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*$")


class Commands(Pods):
    """What can be run in the pods."""

    def run_bash(
        self,
        commands: str | Iterable[str],
        node: str | Iterable[str] | None = None,
        container: str | None = None,
    ) -> list[list[int | str]]:
        """Run shell commands in the pods, one after the other.

        Args:
            commands: A command, or several.
            node: The pods to run them in: a name, several, or `"all"`; all that run if not given.
            container: The container; pods of this release have the one.

        Returns:
            For each command, and for each pod: exit code, output, errors. What a failing command
            wrote is among its errors.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
        """
        if container not in (None, "kubetorch"):
            raise SpecError(f"container is {container!r}; pods have the container 'kubetorch'")
        steps = [RunStep(command) for command in _texts("commands", commands)]
        return [done.as_list() for step in steps for done in self._run(step, node)]

    def pip_install(
        self,
        reqs: str | Iterable[str],
        node: str | Iterable[str] | None = None,
        override_remote_version: bool = False,
    ) -> None:
        """Install requirements in the pods, beside what their image has.

        What is importable both here and there is left as it is.

        Args:
            reqs: Requirements, as `kt.Image.pip_install` takes them.
            node: As for `run_bash`.
            override_remote_version: Have the version that is installed here.

        Raises:
            SpecError: Nothing was deployed to this compute, or there is no such pod.
            ImageStepError: A requirement cannot be installed; the message has the output.
        """
        for requirement in _texts("reqs", reqs):
            for pod in self._chosen(self._view(), node):
                wanted = self._requirement(requirement, pod, override=override_remote_version)
                if wanted is not None:
                    for done in self._run(PipStep(requirements.quoted(wanted)), pod):
                        done.check()

    def sync_package(self, package: str, node: str | Iterable[str] | None = None) -> None:
        """Copy a Python package of this machine into the pods, importable there.

        Args:
            package: A path, or the name of an installed package whose source is a folder.
            node: As for `run_bash`.

        Raises:
            SpecError: There is no such folder or package, nothing was deployed to this compute, or
                there is no such pod.
        """
        from kubetorch.sdk import pod_commands  # noqa: PLC0415  # few programs run commands
        from kubetorch.sdk.image import Image  # noqa: PLC0415

        found = Image().sync_package(package).to_spec()
        image = pod_commands.uploaded(self.session(), found, self._view().spec.namespace)
        for step in image.steps:
            for done in self._run(step, node):
                done.check()

    def _requirement(self, requirement: str, pod: str, *, override: bool) -> str | None:
        """What to install in a pod for a requirement; `None` if that is nothing."""
        match = _NAME.match(requirement)
        if match is None:
            return requirement
        name = match[1]
        (found,) = self._run(RunStep(f"test -d {name}"), pod)
        if found.exit_code == 0:  # a folder that was copied there
            return f"./{requirement.strip()}"
        import importlib.metadata  # noqa: PLC0415  # few programs run commands

        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return requirement
        if override:
            return f"{requirement.strip()}=={here}"
        code = f"import importlib.metadata as m; m.version({name!r})"
        (there,) = self._run(RunStep(f'python -c "{code}"'), pod)
        return None if there.exit_code == 0 else requirement

    def _run(self, step: Step, node: str | Iterable[str] | None) -> list[Done]:
        from kubetorch.sdk import pod_commands  # noqa: PLC0415  # few programs run commands

        view, session = self._view(), self.session()
        pods = {pod.name: pod for pod in view.pods}
        names = self._chosen(view, node)
        return [pod_commands.run(session, view, pods[name], step) for name in names]

    def _chosen(self, view: WorkloadView, node: str | Iterable[str] | None) -> list[str]:
        running = [pod.name for pod in view.pods if pod.phase == "Running"]
        if node in (None, "all"):
            if not running:
                raise ControllerUnavailableError(f"{view.spec.name} has no pod that runs")
            # A pod that serves nothing, such as one that a deploy replaces, runs nothing either.
            serving = [pod.name for pod in view.pods if pod.name in running and pod.generation]
            return serving or running
        names = [node] if isinstance(node, str) else list(node or ())
        for name in names:
            if name not in running:
                raise SpecError(
                    f"node is {name!r}; {view.spec.name} has no such pod that runs",
                    hint=f"it has {', '.join(running) or 'none'}",
                )
        return names


def _texts(parameter: str, given: object) -> list[str]:
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, Iterable) or isinstance(items, (bytes, dict)):
        raise SpecError(f"{parameter} is {given!r}; it must be text or a list of texts")
    found = list(items)
    for item in found:
        if not isinstance(item, str) or not item.strip():
            raise SpecError(f"{parameter} has {item!r} in it; each must be text that is not empty")
    return found
