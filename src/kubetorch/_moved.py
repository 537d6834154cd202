"""Modules of 0.5, whose names are in other modules now.

The import system asks `find_spec` for modules of `kubetorch` that have no file. Programs for 0.5
import modules of 0.5: `_EARLIER_MODULES` has the present paths of their names, and importing such a
module warns that it is deprecated.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType


def _package_names(names: str) -> dict[str, str]:
    """The paths of names that `kubetorch` itself has."""
    return {name: f"kubetorch.{name}" for name in names.split()}


_LABELS = "kubetorch.manifests.labels"
_ERRORS_OF_COMPUTE = (
    "ControllerRequestError ImagePullError KnativeServiceConflictError PodContainerError "
    "ResourceNotAvailableError RsyncError SecretNotFound ServiceHealthError ServiceTimeoutError "
    "VersionMismatchError"
)
#: The modules of 0.5 that programs import, with the present path of each name; `*` is the module of
#: all names that are not listed.
_EARLIER_MODULES = {
    "kubetorch.data_store": _package_names("BroadcastWindow DataStoreError get ls put rm"),
    "kubetorch.store.types": _package_names("BroadcastWindow"),
    "kubetorch.distributed": {"*": "kubetorch.sdk.distributed"},
    "kubetorch.globals": {
        **_package_names("DebugConfig LoggingConfig MetricsConfig config"),
        "ControllerClient": "kubetorch.sdk.controller.Controller",
        "*": "kubetorch.sdk.backend",
    },
    "kubetorch.provisioning.autoscaling": {
        **_package_names("AutoScalingError"),
        "AutoscalingConfig": "kubetorch.sdk.scaling.AutoscalingConfig",
    },
    "kubetorch.provisioning.constants": {
        "ALLOWED_SERIALIZATION_ANNOTATION": f"{_LABELS}.ALLOWED_SERIALIZATION",
        "DEFAULT_DEBUG_PORT": "kubetorch.sdk.debugger.breakpoints.DebugConfig.port",
        "DEFAULT_K8S_SERVICE_PORT": "kubetorch.manifests.services.PORT",
        "DEFAULT_KT_SERVER_PORT": "kubetorch.specs.compute.AGENT_PORT",
        "DEFAULT_NAMESPACE": "kubetorch.config.settings.DEFAULT_NAMESPACE",
        "DEFAULT_SERVICE_ACCOUNT_NAME": "kubetorch.manifests.agent_container.SERVICE_ACCOUNT",
        "INACTIVITY_TTL_ANNOTATION": f"{_LABELS}.INACTIVITY_TTL",
        "KT_APP_LABEL": f"{_LABELS}.APP",
        "KT_INACTIVITY_TTL_LABEL": f"{_LABELS}.INACTIVITY_TTL",
        "KT_LAUNCH_TIMEOUT": "kubetorch.specs.compute.ComputeSpec.launch_timeout",
        "KT_MODULE_LABEL": f"{_LABELS}.MODULE",
        "KT_SECRET_NAME_LABEL": f"{_LABELS}.SECRET_NAME",
        "KT_SERVICE_LABEL": f"{_LABELS}.SERVICE",
        "KT_TEMPLATE_LABEL": f"{_LABELS}.TEMPLATE",
        "KT_USERNAME_LABEL": f"{_LABELS}.USERNAME",
        "KT_USER_IDENTIFIER_LABEL": f"{_LABELS}.USER_IDENTIFIER",
        "KT_VERSION_LABEL": f"{_LABELS}.VERSION",
        "KUBECONFIG_PATH_ANNOTATION": f"{_LABELS}.KUBECONFIG_PATH",
        "KUBETORCH_CONTROLLER": "kubetorch.wire.routes.CONTROLLER",
        "KUBETORCH_NAMESPACE": "kubetorch.config.settings.INSTALL_NAMESPACE",
        "KUEUE_QUEUE_NAME_LABEL": f"{_LABELS}.KUEUE",
        "SERVER_IMAGE_MINIMAL": "kubetorch.config.settings.DEFAULT_IMAGE",
    },
    "kubetorch.provisioning.utils": _package_names("KubernetesCredentialsError"),
    "kubetorch.resources.callables.cls.cls": _package_names("Cls cls"),
    "kubetorch.resources.callables.fn.fn": _package_names("Fn fn"),
    "kubetorch.resources.callables.module": _package_names("Module"),
    "kubetorch.resources.callables.utils": _package_names("NotebookError"),
    "kubetorch.resources.compute.app": _package_names("App app"),
    "kubetorch.resources.compute.compute": _package_names("Compute"),
    "kubetorch.resources.compute.decorators": _package_names("async_ autoscale compute distribute"),
    "kubetorch.resources.compute.endpoint": _package_names("Endpoint"),
    "kubetorch.resources.compute.utils": _package_names(_ERRORS_OF_COMPUTE),
    "kubetorch.resources.images": {"*": "kubetorch.sdk.images"},
    "kubetorch.resources.images.image": _package_names("Image"),
    "kubetorch.resources.images.images": {"*": "kubetorch.sdk.images"},
    "kubetorch.resources.secrets": _package_names("Secret secret"),
    "kubetorch.resources.secrets.secret": _package_names("Secret"),
    "kubetorch.resources.secrets.secret_factory": _package_names("secret"),
    "kubetorch.resources.volumes.volume": _package_names("Volume"),
    "kubetorch.serving.utils": _package_names(
        "PodTerminatedError StartupError WorkerMembershipChanged deep_breakpoint"
    ),
    "kubetorch.utils": {"validate_username": "kubetorch.config.values.clean_username"},
}


class _Module(ModuleType):
    """A module of 0.5, whose names are read and set in other modules."""

    def __getattr__(self, name: str) -> object:
        new_paths = _EARLIER_MODULES[self.__name__]
        if name in new_paths:
            return _find(new_paths[name])
        if name.startswith("__") or "*" not in new_paths:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        attribute: object = getattr(import_module(new_paths["*"]), name)
        return attribute

    def __setattr__(self, name: str, value: object) -> None:
        new_module = sys.modules.get(_EARLIER_MODULES[self.__name__].get("*", ""))
        if not name.startswith("__") and hasattr(new_module, name):
            setattr(new_module, name, value)
        else:
            super().__setattr__(name, value)


def _find(path: str) -> object:
    """The object at a path: an attribute of a module, or of an object in a module."""
    parent_path, _, name = path.rpartition(".")
    try:
        parent: object = import_module(parent_path)
    except ModuleNotFoundError:
        parent = _find(parent_path)
    return getattr(parent, name)


class _Loader(Loader):
    """Makes a module of 0.5, or a package that contains one."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Module(spec.name) if spec.name in _EARLIER_MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _Module):
            warnings.warn(
                f"{module.__name__} is a module of kubetorch 0.5, kept for programs that import "
                "it; the public names are those of `import kubetorch as kt`",
                DeprecationWarning,
                stacklevel=2,
            )


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module or package of 0.5; `None` for any other name."""
    if not any(path == name or path.startswith(f"{name}.") for path in _EARLIER_MODULES):
        return None
    return ModuleSpec(name, _Loader(), is_package=True)
