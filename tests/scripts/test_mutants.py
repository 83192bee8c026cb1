"""The changes that `make mutants` tries, on sources of a few lines."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "mutants" / "changes.py"


@pytest.fixture(scope="module")
def changes():
    spec = importlib.util.spec_from_file_location("changes_of_code", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a not in b", {"a in b"}),
        ("a and b", {"a or b"}),
        ("a + b", {"a - b"}),
        ("-a", {"a"}),
        ("x = True", {"x = False"}),
        ("x = 3", {"x = 4", "x = 0"}),
        ("x = 'word'", {"x = ''"}),
        ("f(a)", {"pass", "a"}),
        ("x = f(a, key=b)", {"x = a", "x = f(a)"}),
        ("x = a.f(b, c)", {"x = a", "x = a.f(b)"}),
        ("import m\nx = m.f(b, c)", {"import m\nx = m.f(b)"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("'''Words.'''\n__all__ = ['a']\nraise ValueError(f'{1}')", set()),
    ],
)
def test_changes(changes, source, expected):
    assert {mutant.applied_to(source).strip() for mutant in changes.mutants_of(source)} == expected


def test_where_a_change_is(changes):
    """The function is known by its first line, decorators included, as it is of its code object."""
    source = "x = 1\n\n\n@cached\ndef f(a):\n    if a:\n        return 0\n"
    found = {(one.before, one.after): (one.line, one.function) for one in changes.mutants_of(source)}
    assert found["1", "2"] == (1, 0)
    assert found["return 0", "return None"] == (7, 4)
