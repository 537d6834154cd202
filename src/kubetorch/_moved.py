"""Modules of earlier versions: of their names, those that there still are lie elsewhere.

The import system asks `find_spec` for modules of `kubetorch` that no file has. A pickle names a
class by the module and the name that it had when the pickle was made: `_MOVED` says where those
classes are. Programs for 0.5 import from modules of 0.5: `_EARLIER` says where their names are,
and importing such a module warns that it is deprecated. `tests/contract/test_earlier.py` loads all.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The path in a pickle, and the path of the same class now.
_MOVED = {
    "kubetorch.sdk.apps.app.App": "kubetorch.sdk.app.App",
    "kubetorch.sdk.calls.handles_broadcast.BroadcastHandle": (
        "kubetorch.sdk.calls.handles.BroadcastHandle"
    ),
    "kubetorch.sdk.secrets.credentials.Credentials": "kubetorch.sdk.credentials.Credentials",
    "kubetorch.sdk.secrets.secret.Secret": "kubetorch.sdk.secret.Secret",
    "kubetorch.specs.app.AppSpec": "kubetorch.specs.callable.AppSpec",
    "kubetorch.wire.failures.Failure": "kubetorch.wire.exceptions.Failure",
    "kubetorch.wire.raw.RawBytes": "kubetorch.wire.codecs.RawBytes",
    "kubetorch.wire.raw.RawText": "kubetorch.wire.codecs.RawText",
    "kubetorch.wire.rebuilding.StandIn": "kubetorch.wire.exceptions.StandIn",
    "kubetorch.wire.rebuilding.make_telling": "kubetorch.wire.exceptions.with_text",
}
PATHS = tuple(_MOVED)


def _all(names: str) -> dict[str, str]:
    """Names that the package itself has."""
    return {name: f"kubetorch.{name}" for name in names.split()}


_LABELS = "kubetorch.manifests.labels"
_ERRORS_OF_COMPUTE = (
    "ControllerRequestError ImagePullError KnativeServiceConflictError PodContainerError "
    "ResourceNotAvailableError RsyncError SecretNotFound ServiceHealthError ServiceTimeoutError "
    "VersionMismatchError"
)
#: The modules of 0.5 that programs import, and where their names are; `*` is where all others are.
_EARLIER = {
    "kubetorch.data_store": _all("BroadcastWindow DataStoreError get ls put rm"),
    "kubetorch.data_store.types": _all("BroadcastWindow"),
    "kubetorch.distributed": {"*": "kubetorch.sdk.distributed"},
    "kubetorch.globals": {
        **_all("DebugConfig LoggingConfig MetricsConfig config"),
        "ControllerClient": "kubetorch.sdk.controller.Controller",
        "*": "kubetorch.sdk.backend",
    },
    "kubetorch.provisioning.autoscaling": {
        **_all("AutoScalingError"),
        "AutoscalingConfig": "kubetorch.sdk.autoscaling.AutoscalingConfig",
    },
    "kubetorch.provisioning.constants": {
        "ALLOWED_SERIALIZATION_ANNOTATION": f"{_LABELS}.ALLOWED_SERIALIZATION",
        "DEFAULT_DEBUG_PORT": "kubetorch.sdk.debugger.DebugConfig.port",
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
    "kubetorch.provisioning.utils": _all("KubernetesCredentialsError"),
    "kubetorch.resources.callables.cls.cls": _all("Cls cls"),
    "kubetorch.resources.callables.fn.fn": _all("Fn fn"),
    "kubetorch.resources.callables.module": _all("Module"),
    "kubetorch.resources.callables.utils": _all("NotebookError"),
    "kubetorch.resources.compute.app": _all("App app"),
    "kubetorch.resources.compute.compute": _all("Compute"),
    "kubetorch.resources.compute.decorators": _all("async_ autoscale compute distribute"),
    "kubetorch.resources.compute.endpoint": _all("Endpoint"),
    "kubetorch.resources.compute.utils": _all(_ERRORS_OF_COMPUTE),
    "kubetorch.resources.images": {"*": "kubetorch.sdk.images"},
    "kubetorch.resources.images.image": _all("Image"),
    "kubetorch.resources.images.images": {"*": "kubetorch.sdk.images"},
    "kubetorch.resources.secrets": _all("Secret secret"),
    "kubetorch.resources.secrets.secret": _all("Secret"),
    "kubetorch.resources.secrets.secret_factory": _all("secret"),
    "kubetorch.resources.volumes.volume": _all("Volume"),
    "kubetorch.serving.utils": _all(
        "PodTerminatedError StartupError WorkerMembershipChanged deep_breakpoint"
    ),
    "kubetorch.utils": {"validate_username": "kubetorch.config.values.clean_username"},
}


class _Module(ModuleType):
    """A module of 0.5: its names are those of elsewhere, also when they are set."""

    def __getattr__(self, name: str) -> object:
        there = _EARLIER[self.__name__]
        if name in there:
            return _find(there[name])
        if name.startswith("__") or "*" not in there:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found: object = getattr(import_module(there["*"]), name)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        place = sys.modules.get(_EARLIER[self.__name__].get("*", ""))
        if not name.startswith("__") and hasattr(place, name):
            setattr(place, name, value)
        else:
            super().__setattr__(name, value)


def _find(path: str) -> object:
    """Find the object at a path: in a module, or within something of a module."""
    place, _, name = path.rpartition(".")
    try:
        found: object = import_module(place)
    except ModuleNotFoundError:
        found = _find(place)
    return getattr(found, name)


class _Loader(Loader):
    """Makes a module with the names that were there."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Module(spec.name) if spec.name in _EARLIER else None

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _Module):
            warnings.warn(
                f"{module.__name__} is a module of kubetorch 0.5, kept for programs that import "
                "it; the public names are those of `import kubetorch as kt`",
                DeprecationWarning,
                stacklevel=2,
            )
            return

        def get(name: str) -> object:
            now = _MOVED.get(f"{module.__name__}.{name}")
            if now is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return _find(now)

        vars(module)["__getattr__"] = get


def find_spec(name: str) -> ModuleSpec | None:
    """The module or package of an earlier version, if names of it are elsewhere now."""
    if name not in _EARLIER and not any(
        path.startswith(f"{name}.") for path in (*PATHS, *_EARLIER)
    ):
        return None
    return ModuleSpec(name, _Loader(), is_package=True)
