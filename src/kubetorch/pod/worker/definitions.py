"""What a deployed file defines below a deploying statement.

A program may deploy one callable at module level and define the next one further down:

    f = kt.fn(train).to(compute)
    print(f(1))
    def evaluate(): ...
    kt.fn(evaluate).to(compute)

A pod that is to load `evaluate` meets the first `.to()` before the callable exists. From there on
the file is two things at once: a program that deploys, which is none of the pod's business, and
definitions that the callable needs. So the rest of the file runs statement by statement, and only
those statements that define something: imports, functions, classes, assignments, and conditions
around them. One that fails, since it needs what a deploy would have returned, is passed over.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType, TracebackType

_DEFINING = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.If,
    ast.Try,
)
_FUTURES = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]


def run_rest(
    module: ModuleType,
    path: str,
    source: bytes,
    ended: BaseException,
    is_complete: Callable[[], bool],
) -> None:
    """Run the defining statements of `module` below the one that ended its import.

    Args:
        module: The module, its body run up to that statement.
        path: Its file.
        source: What is in the file.
        ended: What ended the import; its traceback says where.
        is_complete: Whether everything that is needed is defined.

    Raises:
        BaseException: A statement failed, and in the end something is missing: the first failure.
    """
    failure: BaseException | None = None
    for code in _codes(path, source, after=_line(ended.__traceback__, module)):
        if is_complete():
            return
        try:
            exec(code, module.__dict__)
        except (Exception, type(ended)) as error:  # noqa: BLE001  # user code
            if failure is None and not isinstance(error, type(ended)):
                failure = error
    if failure is not None and not is_complete():
        raise failure


def _line(trace: TracebackType | None, module: ModuleType) -> int:
    """The line of the module's body that was running."""
    while trace is not None:
        if trace.tb_frame.f_globals is module.__dict__:
            return trace.tb_lineno
        trace = trace.tb_next
    return 0


def _codes(path: str, source: bytes, *, after: int) -> Iterator[CodeType]:
    tree = ast.parse(source, path)
    whole = compile(tree, path, "exec", dont_inherit=True)
    flags = sum(flag for flag in _FUTURES if whole.co_flags & flag)
    for statement in tree.body:
        decorators = getattr(statement, "decorator_list", ())
        first = min([statement.lineno, *(each.lineno for each in decorators)])
        if first > after and isinstance(statement, _DEFINING):
            alone = ast.Module([statement], [])
            yield compile(alone, path, "exec", flags=flags, dont_inherit=True)
