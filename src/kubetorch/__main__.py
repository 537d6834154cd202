"""`python -m kubetorch` is `kt`."""

import sys


def main() -> None:
    """Run `kt`; Ctrl-C while it is still being imported is one line, as later."""
    try:
        from kubetorch.cli.main import main as run  # noqa: PLC0415  # 0.1 s, during which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
