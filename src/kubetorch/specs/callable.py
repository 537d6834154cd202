"""The callable or app of a workload, and the place of its source."""

from __future__ import annotations

import re
from typing import Literal

from kubetorch.lib.frozen_values import FrozenValue

#: What stands for the port of the pod in the command of an app; `${port}` is the shell's.
APP_PORT = re.compile(r"(?<!\$)\{port\}")


class AppSpec(FrozenValue):
    """One app.

    Attributes:
        command: The command line for a shell, with `{port}` for the port of the pod.
        port: Port that it listens on; `None` for a command that serves nothing, such as a script.
        health_check: Path that answers with 200 once it serves; `None` when an open port is
            enough.
        public: Whether requests reach it without a token.
        folder: Its working directory, relative to the project: that of the program that declared
            it. If no project travels, it is relative to the pods' own working directory, which the
            image sets. `None` is the working directory of the pods.
        within: The apps in whose pods it was deployed, the nearest first.
    """

    command: str
    port: int | None = None
    health_check: str | None = None
    public: bool = False
    folder: str | None = None
    within: tuple[str, ...] = ()


class BatchedMethod(FrozenValue):
    """A method whose calls run together.

    Attributes:
        name: Its name; empty for a function.
        max_size: Calls that run together at most.
    """

    name: str
    max_size: int


CallableKind = Literal["fn", "cls", "app"]
#: A method that every class has besides its own: it lists the callable names of the instance.
CALLABLES = "__callables__"
#: Methods of handles that a method of the user's class goes before.
OVERRIDABLE_METHODS = (
    *("autoscale", "autoscale_async", "refresh_data", "refresh_data_async"),
    *("stats", "stats_async"),
)
#: The chain of waiting calls of a call that a worker makes outside of the context of any call.
UNKNOWN_CHAIN = "?"
OnReplace = Literal["warn", "error"]
#: The calls that leave a record for `kt replay`.
RecordMode = Literal["failed", "all", "none"]


class CallableRef(FrozenValue):
    """The place where a pod finds the user's callable.

    The project that travels is the tree whose digest the deploy carries; it lies in a pod at
    `<working directory>/<project>`, and `root` is the entry of `sys.path` in it.

    Attributes:
        kind: A function, a class or an app.
        name: Its name in `POST /{callable}` and OPEN frames: its `__qualname__`.
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
        own_options: Parameters of the user's signatures that have the name of an option of calls,
            such as `workers`: they go to the user's function. For a method, `train.workers`.
        batched: The batched methods, or the function itself if it is batched.
        own_methods: Methods of a class that have the name of a method of its handle, such as
            `stats`, and go before that one.
        on_replace: The effect of a new instance without a deploy on the first calls of a class: a
            warning, or an error instead of a run.
        app: The app, for that kind; `module` is then the file that declared it, if there is one.
        code: Digest of the callable's own text in its file; empty without a file.
        record: The calls that leave a record with their arguments.
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
    batched: tuple[BatchedMethod, ...] = ()
    on_replace: OnReplace = "warn"
    app: AppSpec | None = None
    code: str = ""
    own_methods: tuple[str, ...] = ()
    record: RecordMode = "failed"

    def options_of(self, method: str | None) -> frozenset[str]:
        """The keywords of `own_options` of a function, or of a method of a class."""
        prefix = f"{method or '__call__'}." if self.kind == "cls" else ""
        option_names = (name for name in self.own_options if name.startswith(prefix))
        return frozenset(name[len(prefix) :] for name in option_names)

    @property
    def largest_batch(self) -> int:
        """Calls that run together at most, in one slot; 1 without a batched method."""
        return max((method.max_size for method in self.batched), default=1)

    def batch_size_of(self, method: str | None) -> int:
        """Calls of a method or function that run together at most; 0 if it is not batched."""
        name = (method or "__call__") if self.kind == "cls" else ""
        return next((method.max_size for method in self.batched if method.name == name), 0)
