"""What the container of a user's manifest or image would run, as one line for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from kubetorch.manifests import locating
from kubetorch.manifests.kinds import Path
from kubetorch.specs.image import Command

#: What a pod runs when nobody says what.
IDLE = "sleep infinity"
_REFERENCE = re.compile(r"\$(\$?)\(([A-Za-z_.-][\w.-]*)\)", re.ASCII)


def of_manifest(manifest: Mapping[str, Any], pod_template_path: Path | None = None) -> str | None:
    """`command` and `args` of the container, if it has any.

    References to the container's variables, `$(NAME)`, are replaced as Kubernetes does; `$$(NAME)`
    stands for the text itself, and what is not known stays.

    Raises:
        SpecError: The kind is not known, or there is no pod template.
    """
    kind = locating.kind_of(manifest, pod_template_path)
    container = locating.places(dict(manifest), kind)[0].container
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not words:
        return None
    known = variables(container)
    return shlex.join(_expand(str(word), known) for word in words)


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container that have a value in its manifest, their references replaced."""
    found: dict[str, str] = {}
    for one in container.get("env") or ():
        if "valueFrom" not in one:
            found[str(one["name"])] = _expand(str(one.get("value", "")), found)
    return found


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        return variables.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def line(command: Command) -> str | None:
    """What a Dockerfile says, see `ImageSpec.command`, if it says anything."""
    return command if command is None or isinstance(command, str) else shlex.join(command)
