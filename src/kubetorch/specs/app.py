"""A command that runs in each pod of a workload: the frozen form of `kt.app`."""

from __future__ import annotations

from kubetorch.lib.records import record


@record
class AppSpec:
    """One app.

    Attributes:
        command: What a shell runs.
        port: Port that it listens on; `None` for a command that serves nothing, such as a script.
        health_check: Path that answers with 200 once it serves; `None` when an open port is
            enough.
        public: Whether requests reach it without a token.
        folder: Where it runs, relative to the project: what the program that declared it calls its
            working directory. Where no project travels, relative to the pods' own working
            directory: what the image calls its. `None` is that of the pods.
    """

    command: str
    port: int | None = None
    health_check: str | None = None
    public: bool = False
    folder: str | None = None
