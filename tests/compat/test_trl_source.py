"""What a release of TRL breaks: its sources are read, nothing of it is imported or installed.

`TRL_SOURCE=folder/trl pytest tests/compat/test_trl_source.py` reads another release than the installed one, such as a
wheel that was downloaded and unpacked. Each assumption is a sentence and its check.
"""

import ast
import inspect
import os
import re
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from transformers import Trainer

import vgr_trl
from vgr_trl.trainer import DAPOTrainer

OURS = Path(vgr_trl.__file__).parent
FOLDER = Path(os.environ.get("TRL_SOURCE") or Path(find_spec("trl").origin).parent)
INFO = sorted(FOLDER.parent.glob("trl-*.dist-info"))
VERSION = INFO[-1].name.removeprefix("trl-").removesuffix(".dist-info") if INFO else "unknown"

TRAINER, UTILS = "trainer/grpo_trainer.py", "trainer/utils.py"
MISSING = ast.parse("def missing(): pass").body[0]
REQUIRED = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
OPTIONAL = {
    "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps", "tool_mask",
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip
CASES = yaml.safe_load(Path(__file__).with_name("trl_source.yaml").read_text(encoding="utf-8"))


@cache
def tree(path: str) -> ast.Module:
    """A file of TRL, empty if there is none."""
    file = FOLDER / path
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def function(name, path=TRAINER, owner=None):
    """A function of a file, or a method of its class `owner`, wherever it stands within; `missing` if there is none."""
    classes = [node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == owner]
    nodes = [node for within in ([tree(path)] if owner is None else classes) for node in ast.walk(within)]
    return next((node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name), MISSING)


def method(name):
    return function(name, owner="GRPOTrainer")


def parameters(node):
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in given if each.arg != "self"]


def has_known_columns() -> bool:
    code = ast.unparse(method("_generate_and_score_completions"))
    made = " ".join(re.findall(r"output = \{.*\}", code))
    names = {*re.findall(r"'(\w+)':", made), *re.findall(r"output\['(\w+)'\] =", code)}
    return REQUIRED <= names <= REQUIRED | OPTIONAL


def looks_the_backbone_up() -> bool:
    code = ast.unparse(function("_fused_forward", UTILS))
    return "backbone_outputs = getattr(self, " in code or "backbone_outputs = self.base_model(" in code


def heads_at_the_temperature() -> bool:
    heads = re.findall(r"add_fused_lm_head\(.*", ast.unparse(method("__init__")))
    return ["temperature=self.temperature" in head for head in heads] == [True] * 2 and "'entropy'" in heads[0]


def holds(case) -> bool:
    """Whether TRL has the texts of a case, in their order if it asks for that, and takes these parameters first."""
    node = method(case["method"]) if "method" in case else function(case["function"], case.get("file", UTILS))
    places = [ast.unparse(node).find(text) for text in case.get("says") or case.get("in_order") or [""]]
    takes, in_order = case.get("takes", []), places == sorted(places) or "in_order" not in case
    return min(places) >= 0 and in_order and parameters(node)[: len(takes)] == takes


ASSUMPTIONS = [(case["sentence"], partial(holds, case)) for case in CASES]
ASSUMPTIONS += [
    ("a batch has the columns that rows are made of, and none that are not known", has_known_columns),
    ("the head looks its base model up at each call", looks_the_backbone_up),
    ("policy and reference get the head with the temperature of the run", heads_at_the_temperature),
]


@pytest.mark.parametrize(("sentence", "check"), ASSUMPTIONS, ids=[each[0] for each in ASSUMPTIONS])
def test_trl_does(sentence, check):
    assert check(), f"TRL {VERSION}: no longer seen: {sentence}."


def calls_of_super() -> list[str]:
    code = "".join((OURS / name).read_text(encoding="utf-8") for name in ("trainer.py", "checkpoints.py"))
    return sorted({*re.findall(r"super\(\)\.(\w+)", code)} - {"__init__"})


@pytest.mark.parametrize("name", calls_of_super())
def test_ours_takes_what_the_method_of_trl_takes(name):
    nodes = [method(name), function(name, "trainer/base_trainer.py", "_BaseTrainer")]
    known = next((parameters(each) for each in nodes if each is not MISSING), None)
    known = known or [each for each in inspect.signature(getattr(Trainer, name)).parameters if each != "self"]
    ours = list(inspect.signature(getattr(DAPOTrainer, name)).parameters.values())[1:]
    named = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    hands_on = ours and ours[-1].kind is ours[-1].VAR_KEYWORD
    fits = named == known[: len(named)] and (hands_on or len(named) == len(known))
    assert fits, f"TRL {VERSION}: {name} has {known}, ours {named}"
