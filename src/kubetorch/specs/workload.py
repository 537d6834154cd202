"""A workload as a whole: the spec that a deploy sends and the controller keeps."""

from __future__ import annotations

from dataclasses import field, replace

from kubetorch.lib.frozen_values import FrozenValue
from kubetorch.specs.callable import CallableRef
from kubetorch.specs.compute import ComputeSpec
from kubetorch.specs.image import CopyStep


class RuntimeSpec(FrozenValue):
    """The interpreter that the pods of the local backend run the user's code with.

    Attributes:
        python: Absolute path of the interpreter of the program that deploys.
        version: Its version, such as `3.11.7`.
        path: Entries of the caller's `sys.path` outside the project that the interpreter would
            not have by itself, such as those of `PYTHONPATH`.
        preload: Third-party modules that the project imports, for the zygote.
        site: Folders that its packages are installed in.
        package_managers: Whether steps of an image may call the system's package manager.
        pretends_gpus: Whether pods that ask for GPUs run without any, and see numbers of devices.
        environ: Variables of the machine and the user, such as `PATH`, `TZ` and proxies, as the
            program that deploys has them.
        umask: The file mode creation mask of that program.
        project_folder: The project's folder on this machine, if pods run it in place.
        project_digest: Digest of the folder at the deploy: another content is another generation.
    """

    python: str | None = None
    version: str | None = None
    path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    site: tuple[str, ...] = ()
    package_managers: bool = False
    pretends_gpus: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    umask: int | None = None
    project_folder: str | None = None
    project_digest: str | None = None


class Origin(FrozenValue):
    """The code that a workload runs; the controller knows the creator.

    Attributes:
        project: Digest of the project's git remote and the path in it, else of machine and folder.
        name: The project for people, such as `github.com/acme/shop`.
        callable: The file in the project and the name in it, such as `ml/train.py:train`; of an app
            its file, of a manifest its name.
        machine: Digest of the id of the machine and home that deployed it; empty if not known.
        is_named: Whether the user chose the name of the service, and not the callable.
    """

    project: str
    name: str
    callable: str
    machine: str = ""
    is_named: bool = False

    @property
    def key(self) -> str:
        """Equal for the same callable of the same project."""
        return f"{self.project}:{self.callable}"

    @property
    def file(self) -> str:
        return self.callable.rpartition(":")[0] or self.callable

    @property
    def qualname(self) -> str:
        """The name of the callable in its file."""
        return self.callable.rpartition(":")[2]

    def __str__(self) -> str:
        return f"{self.callable} of project {self.name}"


class WorkloadSpec(FrozenValue):
    """One workload.

    Attributes:
        namespace: Kubernetes namespace; locally only a prefix of the name.
        name: The service name.
        callable: The function, class or app that runs.
        compute: The pods that it runs on.
        tree: Digest (64 hex digits) of the project's tree, or `None` when no code is synced.
        init_args: Digest of the JSON object of a class's constructor arguments, or `None`.
        runtime: The interpreter to use.
        username: The user who deployed it, when a user name is configured.
        prefix_username: Whether names of services begin with that user name, by the deployer's
            settings.
        instance: Identity of a deploy that has an effect though the spec has not changed: a class
            gets a new instance, an app runs again, and forced steps of an image run. Else `None`.
        origin: The project and the callable of its code; `None` if it is not known.
    """

    namespace: str
    name: str
    callable: CallableRef
    compute: ComputeSpec = field(default_factory=ComputeSpec)
    tree: str | None = None
    init_args: str | None = None
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    username: str | None = None
    instance: str | None = None
    origin: Origin | None = None
    prefix_username: bool = True

    @property
    def trees(self) -> tuple[str, ...]:
        """Digests of its trees: the project, and the folders that its image copies."""
        steps = self.compute.image.steps if self.compute.image is not None else ()
        copied = [step.digest for step in steps if isinstance(step, CopyStep) and step.digest]
        return tuple(dict.fromkeys([*([self.tree] if self.tree else []), *copied]))

    def is_like(self, spec: WorkloadSpec) -> bool:
        """True if the specs are equal but for the instance."""
        return replace(self, instance=spec.instance) == spec
