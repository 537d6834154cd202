"""`python -m kubetorch.manifests FILE.py`: the YAML of every compute that a file defines.

The file is run as a module, so what stands below `if __name__ == "__main__"` is not. Each
`kt.Compute` at its top level is printed as the object that a deploy would apply, named after its
variable, with a comment of where each field comes from.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence

from kubetorch.manifests import commented, origins, rendering
from kubetorch.manifests.kinds import Manifest
from kubetorch.specs.compute import ComputeSpec

NAMESPACE = "default"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the objects; the exit status is 1 if the file has none."""
    parser = argparse.ArgumentParser(prog="python -m kubetorch.manifests", description=__doc__)
    parser.add_argument("file", help="a Python file that defines kt.Compute objects")
    file: str = parser.parse_args(arguments).file
    documents = list(render_file(file))
    if not documents:
        sys.stderr.write(f"{file} defines no kt.Compute with a manifest at its top level\n")
        return 1
    sys.stdout.write("---\n".join(documents))
    return 0


def render_file(file: str) -> Iterator[str]:
    """The commented YAML of each compute of a file, in the order of their definition."""
    for variable, value in runpy.run_path(file).items():
        spec = value.to_spec() if hasattr(value, "to_spec") else value
        if not isinstance(spec, ComputeSpec) or spec.is_selector_only:
            continue
        name = getattr(value, "service_name", None) or variable.replace("_", "-")
        namespace = getattr(value, "namespace", NAMESPACE)
        yield f"# {variable}\n{document(spec, name=name, namespace=namespace)}"


def document(compute: ComputeSpec, *, name: str, namespace: str) -> str:
    """One object as commented YAML."""

    def render(compute: ComputeSpec) -> Manifest:
        return rendering.render(compute, namespace=namespace, name=name)

    return commented.dump(*origins.explain(compute, render))


if __name__ == "__main__":
    raise SystemExit(main())
