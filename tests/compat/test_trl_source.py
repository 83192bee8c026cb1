"""What a release of TRL breaks: its sources are read, nothing of it is imported or installed.

`TRL_SOURCE=folder/trl pytest tests/compat/test_trl_source.py` reads another release than the installed one, such as a
wheel that was downloaded and unpacked. Each assumption is a sentence and its check.
"""

import ast
import inspect
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
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


def texts(name, *found):
    return lambda: says(method(name), *found)


def in_order(name, *found):
    """The first places of these texts in a method come one behind the other."""
    places = [ast.unparse(method(name)).find(text) for text in found]
    return lambda: places[0] >= 0 and places == sorted(places)


def texts_of_head(*found):
    return lambda: says(function("_fused_forward", UTILS), *found)


def parameters(node):
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [each.arg for each in given if each.arg != "self"]


REQUIRED = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
OPTIONAL = {
    "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps", "tool_mask",
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip


def has_known_columns() -> bool:
    code = ast.unparse(method(ROLLOUT))
    made = " ".join(re.findall(r"output = \{.*\}", code))
    names = {*re.findall(r"'(\w+)':", made), *re.findall(r"output\['(\w+)'\] =", code)}
    return REQUIRED <= names <= REQUIRED | OPTIONAL


def looks_the_backbone_up() -> bool:
    """Within the forward pass, not before it."""
    forward = function("_fused_forward", UTILS)
    return says(forward, "backbone_outputs = getattr(self, ") or says(forward, "backbone_outputs = self.base_model(")


def heads_at_the_temperature_of_the_run() -> bool:
    heads = re.findall(r"add_fused_lm_head\(.*", ast.unparse(method("__init__")))
    return ["temperature=self.temperature" in head for head in heads] == [True] * 2 and "'entropy'" in heads[0]


# fmt: off
ASSUMPTIONS = [
    ("a rollout is generated, scored by the policy, rewarded and given advantages, in this order",
     in_order(ROLLOUT, "self._generate(", f"self.{SCORING}(", "self._calculate_rewards(", "nan_to_num(advantages")),
    ("old log-probabilities are scored where the policy changes within a rollout or vLLM's are corrected, and "
     "else left out of the batch",
     texts(ROLLOUT, "if self.args.gradient_accumulation_steps % generate_every != 0 or (self.use_vllm and "
         "self.vllm_importance_sampling_correction):", "if old_per_token_logps is not None:")),
    ("a batch has the columns that rows are made of, and none that are not known",
     has_known_columns),
    ("advantages are weighted sums of rewards, less the group's mean, by its deviation + 1e-4, and 0 if unscored",
     texts(ROLLOUT, "rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)",
         "advantages = rewards - mean_grouped_rewards", "advantages = advantages / (std_rewards + 0.0001)",
         "torch.nan_to_num(advantages, nan=0.0)")),
    ("rewards are asked of self.reward_funcs in the order of their names and gathered from all processes",
     texts("_calculate_rewards", "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, "
         "strict=True)", "rewards_per_func = gather(rewards_per_func)")),
    ("generation returns tokens second, which are the policy's third, completions fourth, images of tools last",
     texts("_generate", "return (prompt_ids, completion_ids, tool_mask, completions,", ", images, tool_images)")),
    ("where tools returned images, pixels are those of the image processor over all images in order, and token types "
     "are made of the image and video tokens of whole rows",
     texts(ROLLOUT, "self.processing_class.image_processor(images=flat_images, return_tensors='pt')",
         "mm_ids[prompt_completion_ids == self._image_pad_token_id] = 1",
         "mm_ids[prompt_completion_ids == self._video_pad_token_id] = 2")),
    ("generation tokenizes with self._tokenize_prompts, whose three values and num_generations "
     "self._generate_single_turn takes",
     texts("_generate", "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)",
         "self._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)")),
    ("each generation reads self.generation_config and self.generation_kwargs again",
     texts("_generate_single_turn", "generation_config=self.generation_config",
         "generation_kwargs=self.generation_kwargs")),
    ("a reference is built, and scores rollouts, where beta is not 0 at that time",
     lambda: (says(method("__init__"), "if self.beta == 0.0:") and says(method(ROLLOUT), "if self.beta != 0.0:",
         "output['ref_per_token_logps'] = ref_per_token_logps"))),
    ("what rewards log waits in _pending_extra_logs and _pending_metrics until the rollout is judged",
     texts(ROLLOUT, "self._pending_extra_logs.clear()", "self._pending_metrics.clear()")),
    ("metrics wait in _metrics by mode, are averaged when they are logged, and begin again",
     texts("log", "self._metrics[mode].items()", "self._metrics[mode].clear()")),
    ("prompts become tokens, images and fields; images come as lists per prompt, None for a prompt without",
     texts("_tokenize_prompts", "images.append(prompt_images if prompt_images else None)",
         "return (prompt_ids, images, multimodal_fields)")),
    ("a rollout is kept in _buffered_inputs, in lists of micro-batches, until _step calls for another",
     texts("_prepare_inputs", "generate_every = self.args.steps_per_generation * self.num_iterations", "if self._step "
         "% generate_every == 0 or self._buffered_inputs is None:", "self._buffered_inputs[self._step % "
         "self.args.steps_per_generation]")),
    ("_step counts micro-batches", texts("training_step", "self._step += 1")),
    ("prompts are drawn by a RepeatSampler with the seed of the run, shuffled if shuffle_dataset",
     texts("_get_train_sampler", "return RepeatSampler(", "batch_size=self.args.generation_batch_size // "
         "self.num_generations", "shuffle=self.shuffle_dataset", "seed=self.args.seed")),
    ("in evaluation each batch is generated by itself",
     texts("_prepare_inputs", "inputs = self._generate_and_score_completions(generation_batch)")),
    ("a checkpoint gets its card from create_model_card, then what transformers saves",
     texts("_save_checkpoint", "self.create_model_card(", "super()._save_checkpoint(model, trial)")),
    ("disable_gradient_checkpointing takes a model and the options of checkpointing",
     lambda: (parameters(function("disable_gradient_checkpointing", "models/utils.py")) == ["model",
         "gradient_checkpointing_kwargs"])),
    ("pixels are cut by row before rows change their order, lists and None included",
     lambda: (says(function("shuffle_sequence_dict", UTILS), "torch.randperm(batch_size)", "v.ndim == 0") and says(
         function("split_tensor_dict", UTILS), "isinstance(tensor, list) or tensor.ndim > 0"))),
    ("scoring returns three values and takes model, input_ids, attention_mask, logits_to_keep and batch_size",
     lambda: (says(method(SCORING), "return (logps, entropies, aux_loss)") and parameters(method(SCORING))[:5] == [
         "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"])),
    ("labels are -100 in padding and in front of the completion",
     texts(SCORING, ".masked_fill(attention_mask_batch == 0, -100)", "labels[:, :-logits_to_keep] = -100")),
    ("scoring calls the model with labels and fused_lm_head=True by name",
     texts(SCORING, "model(**model_inputs, labels=labels, fused_lm_head=True)")),
    ("scoring takes the last columns of log_probs and entropy, as many as the completion has",
     texts(SCORING, "outputs.log_probs[:, -logits_to_keep:]", "outputs.entropy[:, -logits_to_keep:]")),
    ("the head gives 0 where the label is -100", texts_of_head("mask = labels != -100")),
    ("the head shifts labels and hidden states by one, or takes shift_labels as they are",
     texts_of_head("if shift_labels is None:", "backbone_outputs.last_hidden_state[:, :-1]", "labels = labels[:, 1:]",
         "labels = shift_labels")),
    ("the head looks its base model up at each call", looks_the_backbone_up),
    ("the head is a forward method of the model object itself",
     lambda: says(function("add_fused_lm_head", UTILS), "model.forward = types.MethodType(")),
    ("policy and reference get the head with the temperature of the run, the policy also entropies",
     heads_at_the_temperature_of_the_run),
    ("_compute_loss reads old_per_token_logps only after its pass through the model",
     in_order("_compute_loss", SCORING, "old_per_token_logps")),
    ("_compute_loss takes the log-probabilities of the pass for old ones that are missing",
     texts("_compute_loss", "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps")),
    ("advantages may be (N, T): those of one dimension get a second",
     texts("_compute_loss", "if advantages.dim() == 1:\n        advantages = advantages.unsqueeze(1)")),
    ("the mask of the loss is completion_mask, times tool_mask where there is one",
     texts("_compute_loss", "completion_mask if 'tool_mask' not in inputs else completion_mask * inputs['tool_mask']")),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "holds"), ASSUMPTIONS, ids=[each[0] for each in ASSUMPTIONS])
def test_trl_does(sentence, holds):
    assert holds(), f"TRL {VERSION}: no longer seen: {sentence}."


def calls_of_super() -> list[str]:
    """Methods of TRL's trainer that ours extends."""
    code = "".join((OURS / name).read_text(encoding="utf-8") for name in ("trainer.py", "resuming.py"))
    return sorted({*re.findall(r"super\(\)\.(\w+)", code)} - {"__init__"})


@pytest.mark.parametrize("name", calls_of_super())
def test_the_method_that_ours_extends_is_there_with_its_parameters(name):
    theirs = [method(name), function(name, "trainer/base_trainer.py", "_BaseTrainer")]
    known = next((parameters(each) for each in theirs if each is not MISSING), None)
    known = known or list(inspect.signature(getattr(Trainer, name)).parameters)
    ours = [each for each in inspect.signature(getattr(DAPOTrainer, name)).parameters.values() if each.name != "self"]
    named = {each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert named <= {*known, "options"}, f"TRL {VERSION}: {name} has {known}"
