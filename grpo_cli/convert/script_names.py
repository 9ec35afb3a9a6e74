"""What the names of a Python script stand for, as far as that is certain without running it.

A name is followed to its value if its scope binds it once, outright: not in a branch, a loop or a `try`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_cli.errors import Location
from grpo_cli.recipe.yaml_tree import Node

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)
_NAMED = {"torch": ("float32", "bfloat16", "float16"), "TaskType": ("CAUSAL_LM",)}
"""Attributes that stand for their own name, in `torch.bfloat16` and peft's `TaskType.CAUSAL_LM`."""
_MAX_STEPS = 20


@dataclass(frozen=True)
class Imported:
    """A name that an import binds."""

    path: str
    """Dotted: `trl.rewards.accuracy_reward`, or a module."""


Binding = ast.expr | ast.FunctionDef | ast.AsyncFunctionDef | Imported | None
"""What a name is bound to; None for anything that is not followed."""


class ScriptNames:
    """The scopes of a script, and what each binds."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        """Read every binding.

        Args:
            tree: The script.
            source: Its file, for locations.
        """
        self._source = source
        self._module = tree
        self._bound: dict[ast.AST, dict[str, list[Binding]]] = {}
        self._scopes: dict[ast.AST, tuple[ast.AST, ...]] = {}
        self._unguarded: set[ast.Call] = set()
        self._unknown: set[str] = set()
        """Names that `global` or `nonlocal` lets another scope bind."""
        self._changed: set[str] = set()
        """Names whose lists or mappings may be changed after they are bound."""
        self._visit_scope(tree, (), tree.body, reaped=False)

    def locate(self, node: ast.AST) -> Location:
        """Return where a node was written."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        return Location(self._source, line, column + 1)

    def runs_on_import(self, call: ast.Call) -> bool:
        """Return whether importing the script reaches a call, or calls the function that holds it."""
        holder = self._scopes[call][-1]
        called = {
            self.binding(each.func) for each in self._unguarded if isinstance(each.func, ast.Name)
        }
        return call in self._unguarded or holder in called

    def is_top_level(self, function: Binding) -> bool:
        """Return whether what a name is bound to is a function that can be imported from the script."""
        return function in self._module.body

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Return everything that the name's scope binds it to; empty if no scope does."""
        if name.id in self._unknown:
            return [None]
        scopes = self._scopes.get(name, ())
        for scope in reversed(scopes):
            if isinstance(scope, ast.ClassDef) and scope is not scopes[-1]:
                continue
            if bound := self._bound[scope].get(name.id):
                return bound
        return []

    def binding(self, name: ast.Name) -> Binding:
        """Return what a name is certainly bound to; None if that is not certain."""
        bound = self.bindings(name)
        return bound[0] if len(bound) == 1 else None

    def follow(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for, or the last one that is certain."""
        for _ in range(_MAX_STEPS):
            bound = self.binding(node) if isinstance(node, ast.Name) else None
            if not isinstance(bound, ast.expr):
                break
            if isinstance(bound, ast.List | ast.Dict | ast.Set) and node.id in self._changed:  # type: ignore[attr-defined]
                break
            node = bound
        return node

    def dotted_name(self, node: ast.expr) -> str | None:
        """Return the imported path that a name or an attribute stands for: `trl.rewards.accuracy_reward`."""
        if isinstance(node, ast.Attribute):
            parent = self.dotted_name(node.value)
            return None if parent is None else f"{parent}.{node.attr}"
        bound = self.binding(node) if isinstance(node, ast.Name) else None
        return bound.path if isinstance(bound, Imported) else None

    def read_literal(self, node: ast.expr) -> Node | None:
        """Return the value of a literal, or of a name that stands for one, with its place; None for others."""
        node = self.follow(node)
        where = self.locate(node)
        match node:
            case ast.Constant(value=None | str() | int() | float()):
                return Node(node.value, where)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return Node(-number, where)
            case ast.List() | ast.Tuple() | ast.Set():
                items = [self.read_literal(item) for item in node.elts]
                known = [item for item in items if item is not None]
                return Node(known, where) if len(known) == len(items) else None
            case ast.Dict():
                return self._read_mapping(node, where)
            case ast.Attribute(value=ast.Name(id=owner)) if node.attr in _NAMED.get(owner, ()):
                return Node(node.attr, where)
        return None

    def _read_mapping(self, node: ast.Dict, where: Location) -> Node | None:
        values: dict[str, Node] = {}
        places: dict[str, Location] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.read_literal(item)
            if value is None or not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return None
            values[key.value], places[key.value] = value, self.locate(key)
        return Node(values, where, places)

    def _visit_scope(
        self, scope: ast.AST, outer: tuple[ast.AST, ...], body: Any, *, reaped: bool
    ) -> None:
        self._bound[scope] = {}
        for node in body:
            self._visit(node, (*outer, scope), certain=True, reaped=reaped)

    def _visit(
        self, node: ast.AST, scopes: tuple[ast.AST, ...], *, certain: bool, reaped: bool
    ) -> None:
        self._scopes[node] = scopes
        if isinstance(node, ast.Call) and not reaped:
            self._unguarded.add(node)
        if isinstance(node, _SCOPES):
            self._visit_function(node, scopes, certain=certain, reaped=reaped)
            return
        bound = dict(_read_bindings(node))
        for name, value in bound.items():
            self._bind(scopes[-1], name, value if certain else None)
        self._note_changes(node)
        main = isinstance(node, ast.If) and _is_main_guard(node.test)
        certain = certain and (main or not isinstance(node, _BRANCHES))
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.Name) and child.id in bound
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store) and not named:
                self._bind(scopes[-1], child.id, None)
            self._visit(child, scopes, certain=certain, reaped=reaped or main)

    def _visit_function(
        self, node: Any, scopes: tuple[ast.AST, ...], *, certain: bool, reaped: bool
    ) -> None:
        if not isinstance(node, ast.Lambda):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            self._bind(scopes[-1], node.name, node if function and certain else None)
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        is_class = isinstance(node, ast.ClassDef)
        self._visit_scope(node, scopes, body, reaped=reaped or not is_class)
        arguments = () if is_class else ast.walk(node.args)
        for argument in arguments:
            if isinstance(argument, ast.arg):
                self._bind(node, argument.arg, None)

    def _bind(self, scope: ast.AST, name: str, value: Binding) -> None:
        self._bound[scope].setdefault(name, []).append(value)

    def _note_changes(self, node: ast.AST) -> None:
        match node:
            case ast.Global() | ast.Nonlocal():
                self._unknown.update(node.names)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                self._changed.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
                self._changed.add(name)
            case ast.AugAssign(target=ast.Name(id=name)):
                self._changed.add(name)


def _read_bindings(node: ast.AST) -> Iterator[tuple[str, Binding]]:
    """The names that a statement binds to something that can be followed."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.Import():
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, Imported(whole)
        case ast.ImportFrom():
            for alias in node.names:
                path = f"{node.module}.{alias.name}" if node.module else alias.name
                yield alias.asname or alias.name, Imported(path)


def _is_main_guard(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
