"""Mutations of what a program does after an error, and of what it gives back: mutmut has none of these kinds.

::

    drop a statement of ``finally`` or ``except``      what was taken is not given back, an error is not told
    drop a call that gives back or wakes               ``release``, ``notify_all``, ``discard``, ``close`` …
    drop a conjunct                                     ``a and b`` → ``a``, and → ``b``
    drop a part of a key                                ``seen[a, b]`` → ``seen[a]``
    swap two neighbouring statements                    what must come first comes second
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import libcst as cst

GIVES_BACK: Final = frozenset(
    {
        "abort",
        "cancel",
        "clear",
        "close",
        "discard",
        "end",
        "fail",
        "forget",
        "give_back",
        "give_up",
        "leave",
        "notify",
        "notify_all",
        "pop",
        "release",
        "remove",
        "set",
        "unpin",
        "wake",
    }
)

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "fetchd/allowed_addresses.py": ("tests/security/test_fetch_addresses.py",),
    "fetchd/fetch_table.py": ("tests/fetchd/test_parts.py", "tests/fetchd/test_deadlines.py"),
    "fetchd/fetch.py": ("tests/fetchd/test_parts.py", "tests/fetchd/test_deadlines.py"),
    "gateway/serving/routing/throttle.py": ("tests/gateway/test_throttle.py",),
    "invoker/containers/adapter_slots.py": (
        "tests/invoker/test_adapter_slots.py",
        "tests/invoker/test_adapter_slot_histories.py",
    ),
    "invoker/containers/adapters.py": ("tests/invoker/test_adapters.py",),
    "invoker/containers/spare_cells.py": ("tests/invoker/test_preflight.py",),
    "runtime-python/thaw_runtime/pipeline/consolidation.py": ("tests/thaw_runtime/test_consolidation.py",),
    "runtime-python/thaw_runtime/pipeline/staying.py": ("tests/thaw_runtime/test_staying.py",),
    "runtime-python/thaw_runtime/pipeline/block_copies.py": ("tests/thaw_runtime/test_block_copies.py",),
}
"""Modules that take and give back, and whose errors others wait for, with the tests of each."""


def of(node: cst.CSTNode) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    """Yield (a node inside of ``node``, its substitute)."""
    if isinstance(node, cst.Finally | cst.ExceptHandler):
        yield from _without_one(node.body)
    elif isinstance(node, cst.SimpleStatementLine) and _gives_back(node):
        yield node, _pass(node)
    elif isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And):
        yield node, node.left.with_changes(lpar=node.lpar, rpar=node.rpar)
        yield node, node.right.with_changes(lpar=node.lpar, rpar=node.rpar)
    elif isinstance(node, cst.Subscript):
        yield from _shorter_keys(node)
    elif isinstance(node, cst.IndentedBlock):
        yield from _swapped(node)


def _without_one(block: cst.BaseSuite) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    if isinstance(block, cst.IndentedBlock):
        for statement in block.body:
            if isinstance(statement, cst.SimpleStatementLine):
                yield statement, _pass(statement)


def _pass(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    return line.with_changes(body=[cst.Pass()])


def _gives_back(line: cst.SimpleStatementLine) -> bool:
    if len(line.body) != 1 or not isinstance(line.body[0], cst.Expr):
        return False
    call = line.body[0].value
    return isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value in GIVES_BACK


def _shorter_keys(node: cst.Subscript) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    for i in range(len(node.slice) if len(node.slice) > 1 else 0):
        left = [element for k, element in enumerate(node.slice) if k != i]
        last = left[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        yield node, node.with_changes(slice=[*left[:-1], last])


def _swapped(block: cst.IndentedBlock) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    body: Sequence[cst.BaseStatement] = block.body
    for i, (one, other) in enumerate(pairwise(body)):
        if _may_move(one) and _may_move(other) and _names(one) & _names(other):
            yield block, block.with_changes(body=[*body[:i], other, one, *body[i + 2 :]])


def _may_move(statement: cst.BaseStatement) -> bool:
    """A docstring, an import and what ends a block stay where they are."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    fixed = (cst.Return, cst.Raise, cst.Import, cst.ImportFrom, cst.Pass, cst.Break, cst.Continue)
    first = statement.body[0]
    is_text = isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)
    return not isinstance(first, fixed) and not is_text


class _Names(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)


def _names(statement: cst.BaseStatement) -> set[str]:
    """The names in a statement, without ``self``: two that share none depend on no order, nearly always."""
    visitor = _Names()
    statement.visit(visitor)
    return visitor.found - {"self"}
