"""What a release of TRL breaks: its sources are read, nothing of it is imported or installed.

`TRL_SOURCE=folder/trl pytest tests/compat/test_trl_source.py` reads another release than the installed one, such as a
wheel that was downloaded and unpacked.
"""

import ast
import inspect
import os
from pathlib import Path

import pytest
from transformers import Trainer
from trl_assumptions import TRAINER, Assumption, Source, of_the_head, of_the_loss, of_the_rollout, of_the_steps
from trl_assumptions.reading import installed, names_assigned, parameters

import vgr_trl
from vgr_trl.validate import ATTRIBUTES, MODULE_SEAMS, SEAMS

OURS = Path(vgr_trl.__file__).parent
OF_A_BACKEND = {"generation_config", "generation_kwargs", "vllm_generation"}  # of generation; not there with the other
SOURCE = installed()
ASSUMPTIONS = [
    assumption for group in (of_the_rollout, of_the_steps, of_the_head, of_the_loss) for assumption in group.ASSUMPTIONS
]
every_assumption = pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda assumption: assumption.says)


def check(assumption: Assumption, source: Source) -> None:
    if not assumption.holds(source):
        pytest.fail(
            f"TRL {source.version}: no longer seen: {assumption.says}. In src/vgr_trl, {assumption.ours} relies on it.",
            pytrace=False,
        )


@every_assumption
def test_trl_does(assumption):
    check(assumption, SOURCE)


@every_assumption
def test_it_would_be_seen_that_trl_no_longer_does(assumption):
    path, old, new = assumption.broken
    if old not in SOURCE.text(path) and "TRL_SOURCE" in os.environ:
        pytest.skip(f"TRL {SOURCE.version} words it in another way")
    assert old in SOURCE.text(path)
    with pytest.raises(pytest.fail.Exception, match="relies on it") as caught:
        check(assumption, SOURCE.but(path, old, new))
    assert assumption.ours.split(", ")[0] in str(caught.value)


@every_assumption
def test_the_file_that_relies_on_it_is_there(assumption):
    assert [name for name in assumption.ours.split(", ") if not (OURS / name).is_file()] == []


@pytest.mark.parametrize("name", SEAMS)
def test_the_method_is_there_with_its_parameters(name):
    method = SOURCE.method(name)
    if method.name == "missing":
        base = SOURCE.function(name, "trainer/base_trainer.py", "_BaseTrainer")
        known = parameters(base) if base.name == name else list(inspect.signature(getattr(Trainer, name)).parameters)
    else:
        known = parameters(method)
    missing = [parameter for parameter in SEAMS[name] if parameter not in known]
    assert not missing, f"TRL {SOURCE.version}: {name} has no {missing[0]}; see SEAMS in validate.py"


def test_the_functions_that_ours_replaces_are_names_of_its_module():
    names = {alias.asname or alias.name for node in ast.walk(SOURCE.tree(TRAINER)) if isinstance(node, ast.ImportFrom)
             for alias in node.names}  # fmt: skip
    assert set(MODULE_SEAMS) <= names, "see MODULE_SEAMS in validate.py"


@pytest.mark.parametrize("name", [*ATTRIBUTES, *sorted(OF_A_BACKEND)])
def test_the_attribute_is_set(name):
    assert name in names_assigned(SOURCE.owner("GRPOTrainer")), (
        f"TRL {SOURCE.version}: GRPOTrainer sets no {name}; see ATTRIBUTES in validate.py"
    )


def attributes_read() -> set[str]:
    """What ours reads of anything called a trainer, and of itself in the classes that extend TRL's."""
    read = set()
    for file in OURS.rglob("*.py"):
        owners = {"trainer", "_trainer"} | ({"self"} if file.name in ("trainer.py", "resumable.py") else set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "attr", getattr(node.value, "id", "")) in owners:
                read.add(node.attr)
    return read


def test_every_attribute_that_trl_sets_and_ours_reads_is_checked():
    read = attributes_read() & names_assigned(SOURCE.method("__init__"))
    assert read <= {*ATTRIBUTES, *OF_A_BACKEND}
    assert {"temperature", "_logs", "reward_weights"} <= read


def imports_of_trl() -> list[tuple[str, str, str]]:
    """File of ours, module of TRL, name."""
    found = []
    for file in sorted(OURS.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                found += [(str(file.relative_to(OURS)), str(node.module), alias.name) for alias in node.names]
    return found


def names_of_module(module: str) -> set[str]:
    """Everything that a module of TRL defines, imports or, where it imports lazily, lists as a text."""
    path = "/".join(module.split(".")[1:])
    file = next(name for name in (f"{path}.py", f"{path}/__init__.py", "__init__.py") if SOURCE.text(name))
    names = {part.stem for part in (SOURCE.folder / file).parent.iterdir()} if file.endswith("__init__.py") else set()
    for node in ast.walk(SOURCE.tree(file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.add(node.targets[0].id)
    return names


@pytest.mark.parametrize(("file", "module", "name"), imports_of_trl())
def test_what_ours_imports_is_there(file, module, name):
    assert name in names_of_module(module), f"TRL {SOURCE.version}: {module} has no {name}; {file} imports it"
