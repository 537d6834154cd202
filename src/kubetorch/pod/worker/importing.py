"""Where the import of the deployed file ends: at its first deploying statement.

A program may deploy at module level, without a `__main__` guard. When a pod imports that file, what
follows the first `.to()`, `kt.app` or call of a handle is the deploying program, not the deployed
code. So the SDK asks here, before it does any of these:

    importing = sys.modules.get("kubetorch.pod.worker.importing")
    if importing is not None and importing.is_deploying():
        return self  # this statement has no effect

`is_deploying` is false when no import of the deployed file is under way in this process: then user
code that runs in a pod deploys and calls as everywhere. While it is under way, it returns true if
the statement belongs to another module, and ends the import by raising `EndOfImport` if it belongs
to the deployed file and the callable is defined by then. If it is not defined yet, a `.to()` leaves
its handle as it is, which the callable may want to call later; a call, which has no result to go
on with, ends the import, and `definitions` looks for the callable in the rest of the file.

A process serves calls only once its import is over, and never imports the file a second time. So
what other threads do meanwhile, which the file began and may wait for, is module level too: there
it returns true. A thread that outlives the import goes on deploying nothing, else each pod would
deploy the next one; it may call.

A process that user code starts and that imports the deployed file again (a spawned
`multiprocessing` child) has no loader of ours. The variable `FILE_VARIABLE` names the file to it:
the SDK may call `is_deploying` there too, which is then true while any thread runs the file's own
module level.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from types import FrameType, ModuleType

#: Environment variable with the path of the deployed file.
FILE_VARIABLE = "KT_DEPLOYED_FILE"


class EndOfImport(BaseException):
    """Ends the import of the deployed file. The loader catches it; the module stays."""


class Import:
    """An import of the deployed file, under way in the thread that made this."""

    def __init__(self, module: ModuleType, qualname: str) -> None:
        self._module = module
        self._qualname = qualname
        self._thread = threading.get_ident()
        self._before = set(threading.enumerate())

    def __enter__(self) -> Import:
        _under_way.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _left_behind.update(set(threading.enumerate()) - self._before)
        _under_way.remove(self)

    @property
    def is_here(self) -> bool:
        """Whether this thread runs it."""
        return self._thread == threading.get_ident()

    def has_body(self, frame: FrameType | None) -> bool:
        """Whether the frame is the body of the file."""
        return frame is not None and frame.f_globals is self._module.__dict__

    @property
    def is_defined(self) -> bool:
        """Whether the callable exists by now."""
        found: object = self._module
        for part in self._qualname.split("."):
            found = getattr(found, part, None)
        return found is not None

    def wants(self, definition: object) -> bool:
        """Whether this function or class is the callable."""
        name = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
        return name == (self._module.__name__, self._qualname)


#: The import of the deployed file; at most one.
_under_way: list[Import] = []
#: Threads that it began, and that go on.
_left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def is_deploying(*, is_call: bool = False) -> bool:
    """Whether the statement that asks is to have no effect.

    Args:
        is_call: It calls a handle.

    Raises:
        EndOfImport: It ends the import of the deployed file.
    """
    if not _under_way:
        is_left_behind = not is_call and threading.current_thread() in _left_behind
        return is_left_behind or _is_imported_again()
    under_way = _under_way[0]
    ends = under_way.is_here and under_way.has_body(_body(sys._getframe(1)))
    if ends and (is_call or under_way.is_defined):
        raise EndOfImport
    return True


def is_under_way() -> bool:
    """Whether this process is importing the deployed file."""
    return bool(_under_way)


def is_wanted(definition: object) -> bool:
    """Whether the import that is under way is that of this function or class."""
    return any(each.wants(definition) for each in _under_way)


def _is_imported_again() -> bool:
    """Whether a thread of a process that user code started is importing the deployed file."""
    deployed = os.environ.get(FILE_VARIABLE)
    if deployed is None:
        return False
    for frame in sys._current_frames().values():
        body = _body(frame)
        while body is not None:
            if body.f_code.co_filename == deployed:
                return True
            body = _body(body.f_back)
    return False


def _body(frame: FrameType | None) -> FrameType | None:
    """The innermost module body among the callers of `frame`."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame
