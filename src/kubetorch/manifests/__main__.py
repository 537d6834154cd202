"""`python -m kubetorch.manifests FILE.py`: the YAML of every compute that a file defines.

The file is run as a module, so what stands below `if __name__ == "__main__"` is not. Each
`kt.Compute` at its top level is printed as the objects that a deploy would apply, named after its
variable, with a comment of where each field comes from. With `--into FOLDER` each goes to a file of
its own.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import isclass
from pathlib import Path

from kubetorch.manifests import commented, origins, rendering, services, storage
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.compute import ComputeSpec


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the objects; the exit status is 1 if the file defines none."""
    parser = argparse.ArgumentParser(prog="python -m kubetorch.manifests", description=__doc__)
    parser.add_argument("file", help="a Python file that defines kt.Compute objects")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write a file for each")
    options = parser.parse_args(arguments)
    computes = dict(render_file(options.file))
    if not computes:
        sys.stderr.write(f"{options.file} defines no kt.Compute at its top level\n")
        return 1
    if options.into is None:
        sys.stdout.write("---\n".join(f"# {name}\n{text}" for name, text in computes.items()))
        return 0
    options.into.mkdir(parents=True, exist_ok=True)
    for name, text in computes.items():
        (options.into / f"{name}.yaml").write_text(text)
    return 0


def render_file(file: str) -> Iterator[tuple[str, str]]:
    """The variable of each compute of a file, in the order of their definition, and its YAML."""
    for variable, value in runpy.run_path(file).items():
        # The facade is a layer above: known by what it becomes.
        spec = value.to_spec() if hasattr(value, "to_spec") and not isclass(value) else None
        if not isinstance(spec, ComputeSpec):
            continue
        name = value.service_name or variable.replace("_", "-")
        yield variable, "---\n".join(documents(spec, name=name, namespace=value.namespace))


def documents(compute: ComputeSpec, *, name: str, namespace: str) -> Iterator[str]:
    """All objects of a service as commented YAML: its pods, its Services, the claims of volumes."""

    def render(compute: ComputeSpec) -> list[Manifest]:
        return _objects(compute, name=name, namespace=namespace)

    for key in map(_key, render(compute)):
        yield commented.dump(*origins.explain(compute, partial(_one, render, key)))


def _objects(compute: ComputeSpec, *, name: str, namespace: str) -> list[Manifest]:
    pods = (
        None
        if compute.is_selector_only
        else rendering.render(compute, namespace=namespace, name=name)
    )
    claims = [storage.claim(volume, namespace=namespace) for volume in compute.volumes]
    found = [pods, *services.render(compute, pods, namespace=namespace, name=name), *claims]
    return [one for one in found if one is not None]


def _one(
    render: Callable[[ComputeSpec], list[Manifest]], key: tuple[str, str], compute: ComputeSpec
) -> Manifest:
    """The object of that key, which without some parameter may be another, or none."""
    return next((one for one in render(compute) if _key(one) == key), {})


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


if __name__ == "__main__":
    raise SystemExit(main())
