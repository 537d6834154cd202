"""`python -m kubetorch` is `kt`."""

from kubetorch.cli.main import main

if __name__ == "__main__":
    main()
