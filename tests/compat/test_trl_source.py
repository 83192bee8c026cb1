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
ROLLOUT, SCORING = "_generate_and_score_completions", "_get_per_token_logps_and_entropies"
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


def says(node, *texts):
    """Whether the code of a node has all these texts, as `ast.unparse` writes them: one space, single quotes."""
    code = ast.unparse(node)
    return all(text in code for text in texts)


def parameters(node):
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in given if each.arg != "self"]


def has_known_columns() -> bool:
    code = ast.unparse(method(ROLLOUT))
    made = " ".join(re.findall(r"output = \{.*\}", code))
    names = {*re.findall(r"'(\w+)':", made), *re.findall(r"output\['(\w+)'\] =", code)}
    return REQUIRED <= names <= REQUIRED | OPTIONAL


def looks_the_backbone_up() -> bool:
    forward = function("_fused_forward", UTILS)
    return says(forward, "backbone_outputs = getattr(self, ") or says(forward, "backbone_outputs = self.base_model(")


def heads_at_the_temperature_of_the_run() -> bool:
    heads = re.findall(r"add_fused_lm_head\(.*", ast.unparse(method("__init__")))
    return ["temperature=self.temperature" in head for head in heads] == [True] * 2 and "'entropy'" in heads[0]


def holds(case) -> bool:
    """Whether TRL has the texts of a case, in their order if it asks for that."""
    node = method(case["method"]) if "method" in case else function(case["function"], UTILS)
    places = [ast.unparse(node).find(text) for text in case.get("says") or case["in_order"]]
    return min(places) >= 0 and ("says" in case or places == sorted(places))


ASSUMPTIONS = [(case["sentence"], partial(holds, case)) for case in CASES]
# fmt: off
ASSUMPTIONS += [
    ("a batch has the columns that rows are made of, and none that are not known", has_known_columns),
    ("a reference is built, and scores rollouts, where beta is not 0 at that time",
     lambda: (says(method("__init__"), "if self.beta == 0.0:") and says(method(ROLLOUT), "if self.beta != 0.0:",
         "output['ref_per_token_logps'] = ref_per_token_logps"))),
    ("disable_gradient_checkpointing takes a model and the options of checkpointing",
     lambda: (parameters(function("disable_gradient_checkpointing", "models/utils.py")) == ["model",
         "gradient_checkpointing_kwargs"])),
    ("pixels are cut by row before rows change their order, lists and None included",
     lambda: (says(function("shuffle_sequence_dict", UTILS), "torch.randperm(batch_size)", "v.ndim == 0") and says(
         function("split_tensor_dict", UTILS), "isinstance(tensor, list) or tensor.ndim > 0"))),
    ("scoring returns three values and takes model, input_ids, attention_mask, logits_to_keep and batch_size",
     lambda: (says(method(SCORING), "return (logps, entropies, aux_loss)") and parameters(method(SCORING))[:5] == [
         "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"])),
    ("the head looks its base model up at each call", looks_the_backbone_up),
    ("the head is a forward method of the model object itself",
     lambda: says(function("add_fused_lm_head", UTILS), "model.forward = types.MethodType(")),
    ("policy and reference get the head with the temperature of the run, the policy also entropies",
     heads_at_the_temperature_of_the_run),
]
# fmt: on


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
