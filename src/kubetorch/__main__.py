"""`python -m kubetorch` is `kt`."""

import atexit
import gc
import sys

#: Objects that may be made between two looks of the garbage collector.
_OBJECTS_BETWEEN_COLLECTIONS = 100_000


def main() -> None:
    """Run `kt`; Ctrl-C while it is still being imported is one line, as later."""
    # Imports make what stays until the end: to look there for garbage, once more at the very end,
    # is a quarter of the time of most commands.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
    try:
        from kubetorch.cli.main import main as run  # noqa: PLC0415  # 0.1 s, during which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
