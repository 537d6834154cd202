"""The program that an agent starts in the user's interpreter, by the path of this file.

    python .../kubetorch/pod/user_process/__main__.py zygote
    python .../kubetorch/pod/user_process/__main__.py worker <socket> <pipe>

The arguments are descriptors; a zygote's socket is its standard input. The interpreter need not
have this package installed, and does not use an installed one: agent and worker are of one version.
"""

import gc
import importlib.util
import sys
from pathlib import Path


def _find_package() -> None:
    """Make `kubetorch` the package that this file belongs to, without a change of `sys.path`."""
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "kubetorch", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["kubetorch"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def main() -> None:
    """Start a worker or a zygote, as the arguments say."""
    script_folder = str(Path(__file__).parent)
    sys.path[:] = [entry for entry in sys.path if entry != script_folder]
    _find_package()
    kind, *rest = sys.argv[1:]
    if kind == "zygote":
        gc.disable()  # before its imports; its workers turn it on again
        from kubetorch.pod.user_process import zygote  # noqa: PLC0415  # now Python can find it

        zygote.main()
    else:
        import socket  # noqa: PLC0415

        from kubetorch.pod.user_process import process  # noqa: PLC0415

        process.run(socket.socket(fileno=int(rest[0])), int(rest[1]), None)


if __name__ == "__main__":
    main()
