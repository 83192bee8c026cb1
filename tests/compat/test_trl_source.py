"""What a release of TRL breaks: its sources are read, nothing of it is imported or installed.

`TRL_SOURCE=folder/trl pytest tests/compat/test_trl_source.py` reads another release than the installed one, such as a
wheel that was downloaded and unpacked.
"""

import ast
import inspect
from pathlib import Path

import pytest
from transformers import Trainer
from trl_assumptions import TRAINER, Assumption, Source, of_the_head, of_the_loss, of_the_rollout, of_the_steps
from trl_assumptions.reading import installed, names_assigned, parameters

import vgr_trl
from vgr_trl import DAPOTrainer

OURS = Path(vgr_trl.__file__).parent
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


def calls_of_super() -> list[str]:
    """Methods of TRL's trainer that ours extends."""
    nodes = [
        node for name in ("trainer.py", "checkpoints.py") for node in ast.walk(ast.parse((OURS / name).read_text()))
    ]
    return sorted(
        {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") == "super" and node.attr != "__init__"
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", calls_of_super())
def test_the_method_that_ours_extends_is_there_with_its_parameters(name):
    method = SOURCE.method(name)
    if method.name == "missing":
        base = SOURCE.function(name, "trainer/base_trainer.py", "_BaseTrainer")
        known = parameters(base) if base.name == name else list(inspect.signature(getattr(Trainer, name)).parameters)
    else:
        known = parameters(method)
    ours = [each for each in inspect.signature(getattr(DAPOTrainer, name)).parameters.values() if each.name != "self"]
    named = {each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert named <= {*known, "options"}, f"TRL {SOURCE.version}: {name} has {known}"


def test_the_functions_that_ours_replaces_are_names_of_its_module():
    names = {alias.asname or alias.name for node in ast.walk(SOURCE.tree(TRAINER)) if isinstance(node, ast.ImportFrom)
             for alias in node.names}  # fmt: skip
    assert {"shuffle_sequence_dict", "unsplit_pixel_values_by_grid"} <= names


def test_every_private_attribute_of_a_trainer_that_ours_reads_is_there():
    read, assigned = set(), names_assigned(SOURCE.owner("GRPOTrainer"))
    for file in OURS.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        owners = {"trainer", "_trainer"} | ({"self"} if "class DAPOTrainer" in text else set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "attr", getattr(node.value, "id", "")) in owners:
                read.add(node.attr)
            if isinstance(node, ast.Assign) and "class DAPOTrainer" in text:
                assigned |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    private = {name for name in read if name.startswith("_") and not name.startswith("__")}
    unknown = {name for name in private - assigned if SOURCE.method(name).name == "missing"}
    unknown = {name for name in unknown if not hasattr(DAPOTrainer, name)}
    assert unknown <= {"_pass", "_rollouts", "_rewards_with_nan"}
    assert {"_metrics", "_logs", "_tokenizer"} <= private & assigned


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
