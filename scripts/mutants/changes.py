"""Small changes of a source file, one at a time, each of which a test should notice."""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.MatMult: ast.Add,
}  # fmt: skip
# What only words a message, draws no line between right and wrong, or is checked by tools.
LEFT_ALONE = (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Assert)


Path = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Mutant:
    """A change of a file.

    Attributes:
        line: of the change.
        function: first line of the function that holds it, its decorators included; 0 outside of functions.
        before, after: the statement or expression that is changed, as code.
        path: of the changed node, from the root of the file's syntax tree.
        number: of the change, among those of this node.
    """

    line: int
    function: int
    before: str
    after: str
    path: Path
    number: int

    def applied_to(self, source: str) -> str:
        """The changed file."""
        tree = ast.parse(source)
        node = _at(tree, self.path)
        _replace(tree, self.path, list(_changes(node, _modules(tree)))[self.number](node))
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def mutants_of(source: str) -> list[Mutant]:
    """Return every change of a file: comparisons, constants, boolean and arithmetic operators, calls, returns."""
    tree = ast.parse(source)
    modules = _modules(tree)
    found = []
    for path, function in _places(tree):
        node = _at(tree, path)
        changes = list(_changes(node, modules))
        before = ast.unparse(node) if changes else ""
        for number, change in enumerate(changes):
            after = ast.unparse(ast.fix_missing_locations(change(copy.deepcopy(node))))
            if after != before:
                found.append(Mutant(getattr(node, "lineno", 0), function, before, after, path, number))
    return found


def _modules(tree: ast.AST) -> set[str]:
    """Names of modules, whose functions are no methods."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {(one.asname or one.name).split(".")[0] for node in imports for one in node.names}


def _places(tree: ast.AST) -> Iterator[tuple[Path, int]]:
    """Paths from the root to the nodes that may change, with the first line of their function."""
    todo: list[tuple[ast.AST, Path, int]] = [(tree, (), 0)]
    while todo:
        node, path, function = todo.pop()
        yield path, function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "type_comment"):
                continue
            children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, child in children:
                if isinstance(child, ast.AST) and not isinstance(child, LEFT_ALONE) and not _is_documentation(child):
                    todo.append((child, (*path, (name, index)), function))


def _is_documentation(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _at(tree: ast.AST, path: Path) -> ast.AST:
    for name, index in path:
        value = getattr(tree, name)
        tree = value if index is None else value[index]
    return tree


def _replace(tree: ast.AST, path: Path, node: ast.AST) -> None:
    parent, (name, index) = _at(tree, path[:-1]), path[-1]
    if index is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[index] = node


def _changes(node: ast.AST, modules: set[str]) -> Iterator[Callable[..., ast.AST]]:
    """Functions that change a copy of the node, or return another in its place."""
    match node:
        case ast.Compare():
            for index in range(len(node.ops)):
                yield lambda one, i=index: _set_item(one, "ops", i, COMPARISONS[type(one.ops[i])]())
        case ast.BoolOp():
            other = ast.And if isinstance(node.op, ast.Or) else ast.Or
            yield lambda one: _set(one, "op", other())
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield lambda one: _set(one, "op", ARITHMETIC[type(one.op)]())
        case ast.UnaryOp():
            yield lambda one: one.operand
        case ast.Constant(value=bool()):
            yield lambda one: _set(one, "value", not one.value)
        case ast.Constant(value=int() | float()):
            yield lambda one: _set(one, "value", one.value + 1)
            if node.value not in (0, 1):
                yield lambda one: _set(one, "value", type(one.value)(0))
        case ast.Constant(value=str()) if node.value:
            yield lambda one: _set(one, "value", "")
        case ast.Return(value=ast.AST()):
            yield lambda one: _set(one, "value", ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield lambda one: ast.copy_location(ast.Pass(), one)
        case ast.If() | ast.IfExp() | ast.While():
            yield lambda one: _set(one, "test", ast.UnaryOp(ast.Not(), one.test))
        case ast.Call():
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).split(".")[0] not in modules:
                yield lambda one: one.func.value
            elif len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
                yield lambda one: one.args[0]
            for index in range(len(node.keywords)):
                yield lambda one, i=index: _without(one, "keywords", i)
            if len(node.args) > 1:
                yield lambda one: _without(one, "args", len(one.args) - 1)


def _set(node: ast.AST, name: str, value: object) -> ast.AST:
    setattr(node, name, value)
    return node


def _set_item(node: ast.AST, name: str, index: int, value: object) -> ast.AST:
    getattr(node, name)[index] = value
    return node


def _without(node: ast.AST, name: str, index: int) -> ast.AST:
    del getattr(node, name)[index]
    return node
