"""Where the pods of a user's manifest are described, or why that cannot be told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kubetorch.errors import SpecError
from kubetorch.manifests import kinds, trainjob
from kubetorch.manifests.kinds import Kind, Manifest, Path
from kubetorch.manifests.place import Place, named

_WHERE = "pod_template_path"


def kind_of(manifest: Mapping[str, Any], path: Path | None = None) -> Kind:
    """The row of a manifest's kind.

    Args:
        manifest: The user's manifest.
        path: Where its pod template lies, if the user says so.

    Raises:
        SpecError: It has no kind, the kind is not known and no path is given, or there is no pod
            template, or more than one, where one has to be.
    """
    for key in ("apiVersion", "kind"):
        if not isinstance(manifest.get(key), str) or not manifest[key]:
            raise SpecError(
                f"the manifest has no {key!r}", hint="it must be a Kubernetes object, such as a Job"
            )
    if path is not None:
        row = kinds.custom(manifest, path)
    else:
        known = kinds.find(manifest)
        if known is None:
            raise _unknown(manifest)
        row = known
        _check_unique(manifest, row)
    if row.has_template:
        _check_template(manifest, row)
    return row


def _unknown(manifest: Mapping[str, Any]) -> SpecError:
    namesakes = [
        repr("/".join(filter(None, (row.group, row.versions[0]))))
        for row in kinds.KINDS.values()
        if row.kind == manifest["kind"]
    ]
    found = [".".join(path) for path in candidates(manifest)]
    hint = "nothing in it looks like a pod template (a `spec` with `containers`)"
    if found:
        which = "it seems to be" if len(found) == 1 else "it may be one of"
        hint = f"{which} " + ", ".join(f'{_WHERE}="{path}"' for path in found)
    if namesakes:
        hint = f"did you mean apiVersion {' or '.join(namesakes)}? Else, {hint}"
    return SpecError(
        f"the kind {manifest['kind']!r} of {manifest['apiVersion']!r} is not known, so {_WHERE} "
        "has to say where its pod template lies",
        hint=hint,
    )


def _check_unique(manifest: Mapping[str, Any], row: Kind) -> None:
    """The list of equals in which the pod template lies has one entry."""
    if "0" not in row.primary.template:
        return
    before = row.primary.template[: row.primary.template.index("0")]
    several = kinds.get(manifest, before, [])
    if len(several) > 1:
        rest = row.primary.template[len(before) + 1 :]
        found = [".".join((*before, str(number), *rest)) for number in range(len(several))]
        raise SpecError(
            f"the {row.kind} has {len(several)} pod templates at {'.'.join(before)}, so {_WHERE} "
            "has to say which one is called",
            hint=" or ".join(f'{_WHERE}="{path}"' for path in found),
        )


def _check_template(manifest: Mapping[str, Any], row: Kind) -> None:
    where = row.primary.template
    template = kinds.get(manifest, where)
    shown = ".".join(where) or "its top"
    if not isinstance(template, Mapping) or not isinstance(template.get("spec"), Mapping):
        found = [".".join(path) for path in candidates(manifest) if path != where]
        raise SpecError(
            f"the {row.kind} has no pod template at {shown}",
            hint=f'there is one at {found[0]}: {_WHERE}="{found[0]}"'
            if found
            else f"a pod template has a `spec` with `containers`; {_WHERE} says where it lies",
        )
    containers = template["spec"].get("containers")
    if not isinstance(containers, list) or not containers:
        raise SpecError(
            f"the pod template of the {row.kind} at {shown} has no containers",
            hint=f"one, with an image, is enough: it may be named {row.container!r}",
        )
    if not all(isinstance(one, Mapping) for one in containers):
        raise SpecError(f"{shown}.spec.containers of the {row.kind} is no list of dictionaries")


def candidates(manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Paths of what looks like a pod template."""
    pending: list[tuple[Path, Any]] = [((), manifest)]
    while pending:
        path, node = pending.pop(0)
        if isinstance(node, Mapping):
            spec = node.get("spec")
            if isinstance(spec, Mapping) and isinstance(spec.get("containers"), list):
                yield path
                continue
            pending += [((*path, str(key)), value) for key, value in node.items()]
        elif isinstance(node, list):
            pending += [((*path, str(number)), value) for number, value in enumerate(node)]


# ---------------------------------------------------------------------------------------- places


def places(manifest: Manifest, kind: Kind) -> list[Place]:
    """The pods of a manifest, those that are called first.

    Groups of workers that the manifest does not have are left out.
    """
    if not kind.has_template:
        return [_place(manifest, kind, trainjob.template(manifest))]
    found = [_place(manifest, kind, kinds.get(manifest, kind.primary.template))]
    for group in kind.workers:
        for path in kinds.expand(manifest, group.template):
            template = kinds.get(manifest, path)
            if isinstance(template, Mapping) and kinds.get(template, ("spec", "containers")):
                found.append(replace(_place(manifest, kind, template), is_primary=False))
    return found


def _place(manifest: Manifest, kind: Kind, template: Any) -> Place:  # noqa: ANN401  # a node of it
    containers = template["spec"]["containers"]
    container = named(containers, kind.container) or containers[0]
    return Place(manifest, kind, template, container)
