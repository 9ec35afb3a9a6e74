"""What the names of a Python script stand for, as far as that is certain without running it."""

import ast
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

_SYMBOLS = ("torch.float32", "torch.bfloat16", "torch.float16", "TaskType.CAUSAL_LM")
"""Attributes that a config names by a text."""


class Names(ast.NodeTransformer):
    """What the names of a script stand for; a name that is bound twice, anywhere, is not followed."""

    def __init__(self, module: ast.Module) -> None:
        self.nodes = list(ast.walk(module))
        branches = (ast.If, ast.For, ast.While, ast.Try)
        inside = [each for each in self.nodes if isinstance(each, branches) and not is_main(each)]
        uncertain = {node for each in inside for node in ast.walk(each)}
        self._values: dict[str, ast.expr] = {}
        self._imports: dict[str, str] = {}
        bound: Counter[str] = Counter()
        changed: set[str] = set()
        for node in self.nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if node not in uncertain:
                    self._values[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if (
                    node not in uncertain
                ):
                    self._values[name] = value
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                    self._imports |= {
                        each.asname or each.name: start + each.name for each in aliases
                    }
                    bound.update(each.asname or each.name for each in aliases)
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                    bound[name] += 1
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound[name] += 1
                case (
                    ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                    | ast.Call(func=ast.Attribute(value=ast.Name(id=name)))
                ):
                    changed.add(name)
        for name, value in [*self._values.items()]:
            if bound[name] != 1 or (isinstance(value, ast.List | ast.Dict) and name in changed):
                del self._values[name]

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a function, by its own name."""
        return [each for each in self.nodes if isinstance(each, ast.Call) and callee(each) == name]

    def follow(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name stands for, or the last one that is certain."""
        while isinstance(node, ast.Name) and node.id in self._values:
            node = self._values[node.id]
        return node

    def imported(self, node: ast.expr) -> str:
        """Return the dotted name of an import, or empty text: `trl.rewards.accuracy_reward`."""
        if isinstance(node, ast.Attribute):
            parent = self.imported(node.value)
            return f"{parent}.{node.attr}" if parent else ""
        return self._imports.get(node.id, "") if isinstance(node, ast.Name) else ""

    def bind(self, call: ast.Call, parameters: Sequence[str] = ()) -> dict[str, ast.expr]:
        """Return the arguments of a call by name; `**` is a mapping of more that is not certain."""
        arguments = dict(zip(parameters, call.args, strict=False))
        for each in call.keywords:
            match self.follow(each.value):
                case ast.Dict(keys=keys, values=values) if each.arg is None and None not in keys:
                    names = [str(self.literal(key)) for key in keys]
                    arguments |= zip(names, values, strict=True)
                case _:
                    arguments[each.arg or "**"] = each.value
        return arguments

    def literal(self, node: ast.expr | None) -> Any:
        """Return the value of a literal, with what its names stand for; the expression if it is none."""
        try:
            return ast.literal_eval(self.visit(deepcopy(node))) if node is not None else None
        except ValueError:
            return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name with what it stands for."""
        value = self.follow(node)
        return value if isinstance(value, ast.Name) else self.visit(deepcopy(value))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace a symbol with its name."""
        return ast.Constant(node.attr) if ast.unparse(node) in _SYMBOLS else node


def is_main(node: ast.AST) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def callee(node: ast.expr) -> str:
    """Return the name of what is called, without its module or object; empty if nothing is."""
    function = node.func if isinstance(node, ast.Call) else None
    return str(getattr(function, "attr", None) or getattr(function, "id", ""))


def code_of(node: ast.AST) -> str:
    """Return code on one line, cut if it is long."""
    code = " ".join(ast.unparse(node).split())
    return code if len(code) <= 60 else f"{code[:57]}…"


def line_of(node: ast.AST) -> int:
    """Return the line of an expression; of a call, that of the function's own name, as in a chain."""
    if isinstance(node, ast.Call):
        return node.func.end_lineno or node.lineno
    return int(getattr(node, "lineno", 1))
