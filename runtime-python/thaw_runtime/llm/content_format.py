"""Whether a chat template wants the content of a message as text or as a list of parts, told from its source.

A template with a loop over the content of a message wants parts.  The rules are those of vLLM's
``--chat-template-content-format auto``, so that both give a template the same; the test of that is
tests/thaw_runtime/test_text_conformance.py.  Scopes are not followed: a name means the same everywhere in a template.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


class _Unnamed(Exception):
    """A part of the messages is given to something else than a variable, where vLLM gives up and takes text."""


def wants_parts(root: nodes.Template) -> bool:
    try:
        return any(_name_of(loop.target) for loop in _content_loops(root))
    except _Unnamed:
        return False


def _content_loops(root: nodes.Template) -> Iterator[nodes.For]:
    messages = _messages(root)
    bound, inside = _macro_loops(root, messages)
    for loop in root.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else ""
        is_content = name in bound.get(id(loop), ()) or (name == "content" and id(loop) not in inside)
        if is_content or any(_leads_to(loop.iter, message, "content") for message in messages):
            yield loop


def _name_of(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unnamed
    return target.name


def _leads_to(node: nodes.Node | None, name: str, key: str = "") -> bool:
    """Whether an expression is the variable, or its attribute ``key``, maybe behind filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key:
        if isinstance(node, nodes.Getattr) and node.attr != key:
            return False
        if isinstance(node, nodes.Getitem) and not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
            return False
        if not isinstance(node, nodes.Getattr | nodes.Getitem):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _messages(root: nodes.Template) -> list[str]:
    """The names of the variables of loops over the messages, or over a variable that was made of them."""
    lists = ["messages"]
    for name in lists:  # grows meanwhile
        for assign in root.find_all(nodes.Assign):
            if _leads_to(assign.node, name) and _name_of(assign.target) not in lists:
                lists.append(_name_of(assign.target))
    loops = [loop for loop in root.find_all(nodes.For) if any(_leads_to(loop.iter, name) for name in lists)]
    return [_name_of(loop.target) for loop in loops]


def _macro_loops(root: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """For the loops in macros: the parameters that some call gives the content of a message."""
    bound, inside = dict[int, set[str]](), set[int]()
    for macro in root.find_all(nodes.Macro):
        names = [arg.name for arg in macro.args]
        contents = {
            name
            for call in root.find_all(nodes.Call)
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name
            for name, value in _arguments(call, names)
            if any(_leads_to(value, message, "content") for message in messages)
        }
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if contents:
                bound[id(loop)] = contents
    return bound, inside


def _arguments(call: nodes.Call, names: list[str]) -> Iterator[tuple[str, nodes.Node]]:
    yield from zip(names, call.args, strict=False)
    yield from ((given.key, given.value) for given in call.kwargs if given.key in names)
