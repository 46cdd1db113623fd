# SPDX-License-Identifier: Apache-2.0
"""Mutants of Python source, each a change of one line. Nothing here runs anything: source in, edits out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import attrs

__all__ = ["Edit", "Mutant", "apply", "covering_tests", "mutants"]

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "*"),
}
BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}

UNSTEADY = frozenset(
    {"random", "randrange", "seed", "shuffle", "sleep", "gc", "weakref", "platform", "patch", "DocTestSuite"}
)
"""Names in a test that make its outcome depend on more than the source."""


@attrs.frozen
class Edit:
    """One line that becomes another."""

    path: str
    """The file, relative to the project."""
    line: int
    """Its number, from 1."""
    old: str
    """What it is."""
    new: str
    """What it becomes."""


@attrs.frozen
class Mutant:
    """A small fault in one function."""

    function: str
    """The public function or class that it is in."""
    kind: str
    """``comparison``, ``arithmetic``, ``boolean``, ``constant`` or ``return``."""
    edit: Edit
    """The change."""


def apply(source: str, edit: Edit) -> str:
    """
    Make the change.

    Raises:
        ValueError: If the line is not what the edit expects.

    """
    lines = source.split("\n")
    if not 1 <= edit.line <= len(lines) or lines[edit.line - 1] != edit.old:
        raise ValueError(f"{edit.path}:{edit.line} is not {edit.old!r}")
    lines[edit.line - 1] = edit.new
    return "\n".join(lines)


def mutants(source: str, path: str) -> list[Mutant]:
    """List every mutant of the public functions and classes of a module, in order of the source."""
    lines = [line.encode() for line in source.split("\n")]
    found: list[Mutant] = []
    for top in ast.parse(source).body:
        if not isinstance(top, ast.FunctionDef | ast.ClassDef) or top.name.startswith("_"):
            continue
        for kind, line, start, end, text in _sites(top, lines):
            old = lines[line - 1]
            new = old[:start] + text.encode() + old[end:]
            body = [*lines[top.lineno - 1 : line - 1], new, *lines[line : top.end_lineno]]
            if new != old and _parses(b"\n".join(body)):
                found.append(Mutant(top.name, kind, Edit(path, line, old.decode(), new.decode())))
    return found


def covering_tests(source: str, module: str) -> dict[str, list[str]]:
    """
    Map each function of the project to the test classes that call it, the most specific first.

    Args:
        source: Source of a test module that calls the project as ``mi.<function>``.
        module: Its dotted name.

    """
    by_function: dict[str, list[tuple[int, str]]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or not any(
            isinstance(item, ast.FunctionDef) and item.name.startswith("test") for item in node.body
        ):
            continue
        names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        attributes = {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
        if (names | attributes) & UNSTEADY:
            continue
        called = {
            item.attr
            for item in ast.walk(node)
            if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "mi"
        }
        for function in called:
            by_function.setdefault(function, []).append((len(called), f"{module}.{node.name}"))
    return {function: [name for _, name in sorted(classes)] for function, classes in by_function.items()}


def _sites(top: ast.AST, lines: list[bytes]) -> Iterator[tuple[str, int, int, int, str]]:
    """Yield what can be changed: kind, line, first and last byte in it, and the new text."""
    for node in ast.walk(top):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from _operator("comparison", left, right, COMPARISONS.get(type(operator)), lines)
        elif isinstance(node, ast.BinOp):
            yield from _operator("arithmetic", node.left, node.right, ARITHMETIC.get(type(node.op)), lines)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _operator("boolean", left, right, BOOLEAN[type(node.op)], lines)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            yield "boolean", node.lineno, node.col_offset, node.operand.col_offset, ""
        elif isinstance(node, ast.Constant) and node.end_lineno == node.lineno:
            text = _other_constant(node.value)
            if text is not None:
                yield "constant", node.lineno, node.col_offset, node.end_col_offset or 0, text
        elif isinstance(node, ast.Return) and node.value and node.end_lineno == node.lineno:
            yield "return", node.lineno, node.value.col_offset, node.end_col_offset or 0, "None"


def _operator(
    kind: str, left: ast.expr, right: ast.expr, texts: tuple[str, str] | None, lines: list[bytes]
) -> Iterator[tuple[str, int, int, int, str]]:
    if texts is None or left.end_lineno != right.lineno:
        return
    start, end = left.end_col_offset or 0, right.col_offset
    gap = lines[right.lineno - 1][start:end].decode()
    if gap.strip("() ") != texts[0]:  # a comment or a line break is in between
        return
    at = start + gap.index(texts[0])
    yield kind, right.lineno, at, at + len(texts[0]), texts[1]


def _other_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1) if isinstance(value, int) else None


def _parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
