"""Run Python on Kubernetes, or on a laptop without one: `import kubetorch as kt`.

Public names are resolved when they are first used, so that importing this package costs nothing:
it stands in every user module, and so in every worker.
"""

import sys

from kubetorch._version import __version__ as __version__

# Type checkers take this name for `typing.TYPE_CHECKING`, whose module costs more than this one.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kubetorch.config.settings import config as config
    from kubetorch.errors import EXCEPTION_REGISTRY as EXCEPTION_REGISTRY
    from kubetorch.errors import AdmissionError as AdmissionError
    from kubetorch.errors import AgentDiedError as AgentDiedError
    from kubetorch.errors import AutoScalingError as AutoScalingError
    from kubetorch.errors import BatchError as BatchError
    from kubetorch.errors import CallableNotFoundError as CallableNotFoundError
    from kubetorch.errors import CallCancelledError as CallCancelledError
    from kubetorch.errors import CallError as CallError
    from kubetorch.errors import CallLostError as CallLostError
    from kubetorch.errors import CallRefusedError as CallRefusedError
    from kubetorch.errors import CallTimeoutError as CallTimeoutError
    from kubetorch.errors import ConfigError as ConfigError
    from kubetorch.errors import ControllerError as ControllerError
    from kubetorch.errors import ControllerRequestError as ControllerRequestError
    from kubetorch.errors import ControllerUnavailableError as ControllerUnavailableError
    from kubetorch.errors import DataRefusedError as DataRefusedError
    from kubetorch.errors import DataStoreError as DataStoreError
    from kubetorch.errors import ForbiddenError as ForbiddenError
    from kubetorch.errors import ForeignOriginError as ForeignOriginError
    from kubetorch.errors import ImagePullError as ImagePullError
    from kubetorch.errors import ImageStepError as ImageStepError
    from kubetorch.errors import InstallError as InstallError
    from kubetorch.errors import InstanceReplacedError as InstanceReplacedError
    from kubetorch.errors import InstanceReplacedWarning as InstanceReplacedWarning
    from kubetorch.errors import KnativeServiceConflictError as KnativeServiceConflictError
    from kubetorch.errors import KubernetesConflictError as KubernetesConflictError
    from kubetorch.errors import KubernetesCredentialsError as KubernetesCredentialsError
    from kubetorch.errors import KubernetesError as KubernetesError
    from kubetorch.errors import KubernetesForbiddenError as KubernetesForbiddenError
    from kubetorch.errors import KubernetesNotFoundError as KubernetesNotFoundError
    from kubetorch.errors import KubernetesRequestError as KubernetesRequestError
    from kubetorch.errors import KubernetesUnavailableError as KubernetesUnavailableError
    from kubetorch.errors import KubetorchError as KubetorchError
    from kubetorch.errors import MissingObjectError as MissingObjectError
    from kubetorch.errors import NotebookError as NotebookError
    from kubetorch.errors import OperatorMissingError as OperatorMissingError
    from kubetorch.errors import OutOfMemoryError as OutOfMemoryError
    from kubetorch.errors import PodContainerError as PodContainerError
    from kubetorch.errors import PodTerminatedError as PodTerminatedError
    from kubetorch.errors import ProbeFailedError as ProbeFailedError
    from kubetorch.errors import ProjectTooLargeError as ProjectTooLargeError
    from kubetorch.errors import ProtocolError as ProtocolError
    from kubetorch.errors import QueueFullError as QueueFullError
    from kubetorch.errors import QueueUnschedulableError as QueueUnschedulableError
    from kubetorch.errors import QuorumError as QuorumError
    from kubetorch.errors import QuotaExceededError as QuotaExceededError
    from kubetorch.errors import ReferenceLostError as ReferenceLostError
    from kubetorch.errors import RemoteError as RemoteError
    from kubetorch.errors import RemoteTraceback as RemoteTraceback
    from kubetorch.errors import ResourceNotAvailableError as ResourceNotAvailableError
    from kubetorch.errors import ResultExpiredError as ResultExpiredError
    from kubetorch.errors import RsyncError as RsyncError
    from kubetorch.errors import SecretConflictError as SecretConflictError
    from kubetorch.errors import SecretNotFound as SecretNotFound
    from kubetorch.errors import SerializationError as SerializationError
    from kubetorch.errors import ServiceHealthError as ServiceHealthError
    from kubetorch.errors import ServiceNotFoundError as ServiceNotFoundError
    from kubetorch.errors import ServiceTakenError as ServiceTakenError
    from kubetorch.errors import ServiceTimeoutError as ServiceTimeoutError
    from kubetorch.errors import SpecError as SpecError
    from kubetorch.errors import StartupError as StartupError
    from kubetorch.errors import StorageFullError as StorageFullError
    from kubetorch.errors import StoreUnavailableError as StoreUnavailableError
    from kubetorch.errors import UnauthorizedError as UnauthorizedError
    from kubetorch.errors import UnknownParameterError as UnknownParameterError
    from kubetorch.errors import UnschedulableError as UnschedulableError
    from kubetorch.errors import VersionMismatchError as VersionMismatchError
    from kubetorch.errors import VolumeInUseError as VolumeInUseError
    from kubetorch.errors import VolumeNotFoundError as VolumeNotFoundError
    from kubetorch.errors import WorkerDiedError as WorkerDiedError
    from kubetorch.errors import WorkerMembershipChanged as WorkerMembershipChanged
    from kubetorch.errors import WorkerRecycledError as WorkerRecycledError
    from kubetorch.errors import WorkloadError as WorkloadError
    from kubetorch.sdk import backend as globals
    from kubetorch.sdk import distributed as distributed
    from kubetorch.sdk import images as images
    from kubetorch.sdk import known_calls as calls
    from kubetorch.sdk.app import App as App
    from kubetorch.sdk.app import app as app
    from kubetorch.sdk.batching import batched as batched
    from kubetorch.sdk.calls.handles import CallHandle as CallHandle
    from kubetorch.sdk.cls import Cls as Cls
    from kubetorch.sdk.cls import cls as cls
    from kubetorch.sdk.compute import Compute as Compute
    from kubetorch.sdk.current_call import on_preempt as on_preempt
    from kubetorch.sdk.current_call import progress as progress
    from kubetorch.sdk.data.declarations import Data as Data
    from kubetorch.sdk.data.store import get as get
    from kubetorch.sdk.data.store import get_async as get_async
    from kubetorch.sdk.data.store import ls as ls
    from kubetorch.sdk.data.store import ls_async as ls_async
    from kubetorch.sdk.data.store import put as put
    from kubetorch.sdk.data.store import put_async as put_async
    from kubetorch.sdk.data.store import rm as rm
    from kubetorch.sdk.data.store import rm_async as rm_async
    from kubetorch.sdk.data.windows import BroadcastWindow as BroadcastWindow
    from kubetorch.sdk.debugger.breakpoints import DebugConfig as DebugConfig
    from kubetorch.sdk.debugger.breakpoints import deep_breakpoint as deep_breakpoint
    from kubetorch.sdk.decorators import async_ as async_
    from kubetorch.sdk.decorators import autoscale as autoscale
    from kubetorch.sdk.decorators import compute as compute
    from kubetorch.sdk.decorators import distribute as distribute
    from kubetorch.sdk.fn import Fn as Fn
    from kubetorch.sdk.fn import fn as fn
    from kubetorch.sdk.handle_service import service as service
    from kubetorch.sdk.image import Image as Image
    from kubetorch.sdk.metric import metric as metric
    from kubetorch.sdk.module import Module as Module
    from kubetorch.sdk.refs import Ref as Ref
    from kubetorch.sdk.refs import ref as ref
    from kubetorch.sdk.scaling import ScalingStats as ScalingStats
    from kubetorch.sdk.secret import Secret as Secret
    from kubetorch.sdk.secret import secret as secret
    from kubetorch.sdk.volume import Volume as Volume
    from kubetorch.specs.endpoint import Endpoint as Endpoint
    from kubetorch.specs.logging import LoggingConfig as LoggingConfig
    from kubetorch.specs.metrics import MetricsConfig as MetricsConfig

__all__ = [  # noqa: RUF022  # in plain order, which is easier to search
    "AdmissionError",
    "AgentDiedError",
    "App",
    "AutoScalingError",
    "BatchError",
    "BroadcastWindow",
    "CallCancelledError",
    "CallError",
    "CallHandle",
    "CallLostError",
    "CallRefusedError",
    "CallTimeoutError",
    "CallableNotFoundError",
    "Cls",
    "Compute",
    "ConfigError",
    "ControllerError",
    "ControllerRequestError",
    "ControllerUnavailableError",
    "Data",
    "DataRefusedError",
    "DataStoreError",
    "DebugConfig",
    "EXCEPTION_REGISTRY",
    "Endpoint",
    "Fn",
    "ForbiddenError",
    "ForeignOriginError",
    "Image",
    "ImagePullError",
    "ImageStepError",
    "InstallError",
    "InstanceReplacedError",
    "InstanceReplacedWarning",
    "KnativeServiceConflictError",
    "KubernetesConflictError",
    "KubernetesCredentialsError",
    "KubernetesError",
    "KubernetesForbiddenError",
    "KubernetesNotFoundError",
    "KubernetesRequestError",
    "KubernetesUnavailableError",
    "KubetorchError",
    "LoggingConfig",
    "MetricsConfig",
    "MissingObjectError",
    "Module",
    "NotebookError",
    "OperatorMissingError",
    "OutOfMemoryError",
    "PodContainerError",
    "PodTerminatedError",
    "ProbeFailedError",
    "ProjectTooLargeError",
    "ProtocolError",
    "QueueFullError",
    "QueueUnschedulableError",
    "QuorumError",
    "QuotaExceededError",
    "Ref",
    "ReferenceLostError",
    "RemoteError",
    "RemoteTraceback",
    "ResourceNotAvailableError",
    "ResultExpiredError",
    "RsyncError",
    "ScalingStats",
    "Secret",
    "SecretConflictError",
    "SecretNotFound",
    "SerializationError",
    "ServiceHealthError",
    "ServiceNotFoundError",
    "ServiceTakenError",
    "ServiceTimeoutError",
    "SpecError",
    "StartupError",
    "StorageFullError",
    "StoreUnavailableError",
    "UnauthorizedError",
    "UnknownParameterError",
    "UnschedulableError",
    "VersionMismatchError",
    "Volume",
    "VolumeInUseError",
    "VolumeNotFoundError",
    "WorkerDiedError",
    "WorkerMembershipChanged",
    "WorkerRecycledError",
    "WorkloadError",
    "__version__",
    "app",
    "async_",
    "autoscale",
    "batched",
    "calls",
    "cls",
    "compute",
    "config",
    "deep_breakpoint",
    "distribute",
    "distributed",
    "fn",
    "get",
    "get_async",
    "globals",
    "images",
    "ls",
    "ls_async",
    "metric",
    "on_preempt",
    "progress",
    "put",
    "put_async",
    "ref",
    "rm",
    "rm_async",
    "secret",
    "service",
]

#: Where each name is defined, but for the errors.
_MODULES = {
    "App": "kubetorch.sdk.app",
    "BroadcastWindow": "kubetorch.sdk.data.windows",
    "CallHandle": "kubetorch.sdk.calls.handles",
    "Cls": "kubetorch.sdk.cls",
    "Compute": "kubetorch.sdk.compute",
    "Data": "kubetorch.sdk.data.declarations",
    "DebugConfig": "kubetorch.sdk.debugger.breakpoints",
    "Endpoint": "kubetorch.specs.endpoint",
    "Fn": "kubetorch.sdk.fn",
    "Image": "kubetorch.sdk.image",
    "LoggingConfig": "kubetorch.specs.logging",
    "MetricsConfig": "kubetorch.specs.metrics",
    "Module": "kubetorch.sdk.module",
    "Ref": "kubetorch.sdk.refs",
    "ScalingStats": "kubetorch.sdk.scaling",
    "Secret": "kubetorch.sdk.secret",
    "Volume": "kubetorch.sdk.volume",
    "app": "kubetorch.sdk.app",
    "async_": "kubetorch.sdk.decorators",
    "autoscale": "kubetorch.sdk.decorators",
    "batched": "kubetorch.sdk.batching",
    "calls": "kubetorch.sdk.known_calls",
    "cls": "kubetorch.sdk.cls",
    "compute": "kubetorch.sdk.decorators",
    "config": "kubetorch.config.settings",
    "deep_breakpoint": "kubetorch.sdk.debugger.breakpoints",
    "distribute": "kubetorch.sdk.decorators",
    "distributed": "kubetorch.sdk.distributed",
    "fn": "kubetorch.sdk.fn",
    "get": "kubetorch.sdk.data.store",
    "get_async": "kubetorch.sdk.data.store",
    "globals": "kubetorch.sdk.backend",
    "images": "kubetorch.sdk.images",
    "ls": "kubetorch.sdk.data.store",
    "ls_async": "kubetorch.sdk.data.store",
    "metric": "kubetorch.sdk.metric",
    "on_preempt": "kubetorch.sdk.current_call",
    "progress": "kubetorch.sdk.current_call",
    "put": "kubetorch.sdk.data.store",
    "put_async": "kubetorch.sdk.data.store",
    "ref": "kubetorch.sdk.refs",
    "rm": "kubetorch.sdk.data.store",
    "rm_async": "kubetorch.sdk.data.store",
    "secret": "kubetorch.sdk.secret",
    "service": "kubetorch.sdk.handle_service",
}

if __path__[0].endswith("/kubetorch/site/kubetorch"):  # a pod's runtime; see its docs
    from kubetorch.lib import runtime as _runtime

    _runtime.add_dependencies()

# A type checker would take a module with `__getattr__` for one that has every name.
if not TYPE_CHECKING:

    def _load(name):
        module = __import__(_MODULES.get(name, "kubetorch.errors"), fromlist=[name])
        is_module = name in ("calls", "distributed", "globals", "images")
        return module if is_module else getattr(module, name)

    class _Package(type(sys)):
        """This package: its `config` is the settings, not the subpackage of that name."""

        @property
        def config(self):
            return _load("config")

        @config.setter
        def config(self, value):
            # The import of the subpackage binds its name here.
            if not isinstance(value, type(sys)):
                raise AttributeError("kt.config cannot be replaced; set its attributes")

    sys.modules[__name__].__class__ = _Package

    class _EarlierModules:
        """Finds the modules of 0.5; see `kubetorch._moved`."""

        @staticmethod
        def find_spec(name, _path=None, _target=None):
            if not name.startswith("kubetorch."):
                return None
            from kubetorch import _moved  # noqa: PLC0415  # for such a name alone

            return _moved.find_spec(name)

    sys.meta_path.append(_EarlierModules)

    def __getattr__(name):
        if name not in __all__:
            text = f"module {__name__!r} has no attribute {name!r}"
            if not name.startswith("_"):
                hints = __import__("kubetorch.specs.hints", fromlist=["hint"])
                meant = hints.hint("kubetorch", name)
                if meant:  # behind which Python itself would suggest a name of this module
                    raise AttributeError(f"{text}\nhint: {meant}", name=name, obj=None)
            raise AttributeError(text)
        value = _load(name)
        if name in _MODULES:
            # What a mistake in the user's very next line shows is for the user.
            __import__("kubetorch.sdk.tracebacks", fromlist=["install"]).install()
        # Not into globals(), which is a name of this package once it was used.
        setattr(sys.modules[__name__], name, value)
        return value

    def load_ipython_extension(shell):
        """Add the magic `%%kt` to IPython: `%load_ext kubetorch`."""
        __import__("kubetorch.sdk.cell_magic", fromlist=["register"]).register(shell)

    def __dir__():
        return __all__
