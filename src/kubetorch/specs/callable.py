"""Which callable or app is deployed, and where its source lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: What stands for the port of the pod in the command of an app; `${port}` is the shell's.
APP_PORT = re.compile(r"(?<!\$)\{port\}")


@dataclass(frozen=True)
class AppSpec:
    """One app.

    Attributes:
        command: What a shell runs, with `{port}` for the port of the pod.
        port: Port that it listens on; `None` for a command that serves nothing, such as a script.
        health_check: Path that answers with 200 once it serves; `None` when an open port is
            enough.
        public: Whether requests reach it without a token.
        folder: Where it runs, relative to the project: what the program that declared it calls its
            working directory. Where no project travels, relative to the pods' own working
            directory: what the image calls its. `None` is that of the pods.
        within: The apps in whose pods it was deployed, the nearest first.
    """

    command: str
    port: int | None = None
    health_check: str | None = None
    public: bool = False
    folder: str | None = None
    within: tuple[str, ...] = ()


CallableKind = Literal["fn", "cls", "app"]
#: What every class answers to, besides its own methods: which names of its instance can be called.
CALLABLES = "__callables__"
#: Stands for those that wait for a call which a worker makes outside of the context of its own.
UNKNOWN_CHAIN = "?"
OnReplace = Literal["warn", "error"]


@dataclass(frozen=True)
class CallableRef:
    """The place where a pod finds the user's callable.

    The project that travels is the tree whose digest the deploy carries; it lies in a pod at
    `<working directory>/<project>`, and `root` is the entry of `sys.path` in it.

    Attributes:
        kind: A function, a class or an app.
        name: What `POST /{callable}` and OPEN frames call it: its `__qualname__`.
        module: Dotted name to import it from.
        qualname: Its `__qualname__` in that module.
        project: Name of the synced folder, or `None` when no code is synced.
        root: Path of the `sys.path` entry relative to the project; `""` is the project itself.
        roots: Further entries of `sys.path` in the project, relative to it.
        remote_dir: Absolute or working-directory-relative `sys.path` entry of code that the
            container already has.
        source_file: Path of the module's file relative to the project, when it is synced.
        is_script: The module is the file that the user ran (`__main__` there), so the names of
            its classes in pickles are to be translated.
        own_options: What the user's signatures declare of the keywords that are options of a call
            otherwise, such as `workers`: of a function as they are, of a class `train.workers`.
        on_replace: What the first calls of a class get when its instance was made anew without a
            deploy: a warning, or an error instead of running.
        app: The app, for that kind; `module` is then the file that declared it, if there is one.
        code: Digest of the callable's own text in its file; empty where there is none.
    """

    kind: CallableKind
    name: str
    module: str
    qualname: str
    project: str | None = None
    root: str = ""
    roots: tuple[str, ...] = ()
    remote_dir: str | None = None
    source_file: str | None = None
    is_script: bool = False
    own_options: tuple[str, ...] = ()
    on_replace: OnReplace = "warn"
    app: AppSpec | None = None
    code: str = ""

    def options_of(self, method: str | None) -> frozenset[str]:
        """The keywords of `own_options` of a function, or of a method of a class."""
        before = f"{method or '__call__'}." if self.kind == "cls" else ""
        found = (name for name in self.own_options if name.startswith(before))
        return frozenset(name[len(before) :] for name in found)
