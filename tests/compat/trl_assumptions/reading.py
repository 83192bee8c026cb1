"""TRL's sources, read and not imported."""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

TRAINER = "trainer/grpo_trainer.py"
UTILS = "trainer/utils.py"
Function = ast.FunctionDef


@dataclass(frozen=True)
class Source:
    """The package in a folder.

    Attributes:
        folder: that holds its `__init__.py`.
        changed: path -> text in place of a file's.
    """

    folder: Path
    changed: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """As the folder of its metadata, beside it, says."""
        found = sorted(self.folder.parent.glob("trl-*.dist-info"))
        return found[-1].name.removeprefix("trl-").removesuffix(".dist-info") if found else "unknown"

    def text(self, path: str) -> str:
        """Return a file's, empty if there is none."""
        file = self.folder / path
        if path in self.changed:
            return self.changed[path]
        return file.read_text(encoding="utf-8") if file.is_file() else ""

    def tree(self, path: str) -> ast.Module:
        """Return what a file says."""
        return _parsed(self.text(path))

    def function(self, name: str, path: str = TRAINER, owner: str | None = None) -> Function:
        """Return a function of a file or a method of its class `owner`, wherever it stands within; empty if missing."""
        within = self.tree(path) if owner is None else self.owner(owner, path)
        found = (node for node in ast.walk(within) if isinstance(node, ast.FunctionDef) and node.name == name)
        return next(found, ast.parse("def missing(): pass").body[0])  # type: ignore[return-value]

    def method(self, name: str) -> Function:
        """Return a method of `GRPOTrainer`."""
        return self.function(name, owner="GRPOTrainer")

    def owner(self, name: str, path: str = TRAINER) -> ast.AST:
        """Return a class; empty if missing."""
        found = (node for node in self.tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)
        return next(found, ast.Module([], []))

    def but(self, path: str, old: str, new: str) -> "Source":
        """Return the sources with a text of one file replaced, everywhere in it."""
        return Source(self.folder, {**self.changed, path: self.text(path).replace(old, new)})


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def installed() -> Source:
    """Return the sources to look at: of the folder `TRL_SOURCE`, else of the installed package."""
    if folder := os.environ.get("TRL_SOURCE"):
        return Source(Path(folder))
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Source(Path(spec.origin).parent)


def says(node: ast.AST, *texts: str) -> bool:
    """Return whether the code of a node has all these texts, as `ast.unparse` writes them: one space, single quotes."""
    code = ast.unparse(node)
    return all(text in code for text in texts)


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a function or method of this name, in order."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call) and _last(each.func) == name]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def lines_reading(node: ast.AST, mapping: str, key: str) -> list[int]:
    """Return the lines in which `mapping[key]` or `mapping.get(key, …)` is read."""
    return sorted(line for line, name in _keys(node, mapping) if name == key)


def _keys(node: ast.AST, mapping: str) -> Iterator[tuple[int, object]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and ast.unparse(each.value) == mapping and isinstance(each.ctx, ast.Load):
            yield each.lineno, getattr(each.slice, "value", None)
        elif isinstance(each, ast.Call) and ast.unparse(each.func) == f"{mapping}.get" and each.args:
            yield each.lineno, getattr(each.args[0], "value", None)


def keys_written(node: ast.AST, mapping: str) -> set[str]:
    """Return the keys that a function gives a dictionary, when it makes it and afterwards."""
    found: set[str] = set()
    for each in ast.walk(node):
        if not isinstance(each, ast.Assign):
            continue
        (target, *_) = each.targets
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == mapping:
            found.add(str(getattr(target.slice, "value", "")))
        elif ast.unparse(target) == mapping and isinstance(each.value, ast.Dict):
            found |= {str(getattr(key, "value", "")) for key in each.value.keys}
    return found


def names_assigned(node: ast.AST) -> set[str]:
    """Return the attributes that code gives `self`, in methods or in a class."""
    found = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return found | {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}


def parameters(function: Function) -> list[str]:
    """Return the names of its parameters, without `self`."""
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return [name for name in names if name != "self"]


def values_returned(function: Function) -> set[int]:
    """Return how many values its returns have; those of functions within are not counted."""
    inner = {id(each) for child in ast.walk(function) if isinstance(child, ast.FunctionDef | ast.Lambda) and
             child is not function for each in ast.walk(child)}  # fmt: skip
    found = [each for each in ast.walk(function) if isinstance(each, ast.Return) and id(each) not in inner]
    return {len(each.value.elts) if isinstance(each.value, ast.Tuple) else 1 for each in found if each.value}
