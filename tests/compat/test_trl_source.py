"""What a release of TRL breaks: its sources are read, nothing of it is imported or installed.

`TRL_SOURCE=folder/trl pytest tests/compat/test_trl_source.py` reads another release than the installed one, such as a
wheel that was downloaded and unpacked. Each assumption is a sentence, the files of ours that rely on it, and its check.
"""

import ast
import inspect
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import Trainer

import vgr_trl
from vgr_trl import DAPOTrainer

OURS = Path(vgr_trl.__file__).parent
FOLDER = Path(os.environ.get("TRL_SOURCE") or Path(find_spec("trl").origin).parent)
INFO = sorted(FOLDER.parent.glob("trl-*.dist-info"))
VERSION = INFO[-1].name.removeprefix("trl-").removesuffix(".dist-info") if INFO else "unknown"

TRAINER, UTILS = "trainer/grpo_trainer.py", "trainer/utils.py"
ROLLOUT, SCORING = "_generate_and_score_completions", "_get_per_token_logps_and_entropies"
HEADS = "efficiency/loss_mask.py, sharing/sharing.py"
MISSING = ast.parse("def missing(): pass").body[0]


@cache
def tree(path: str) -> ast.Module:
    """A file of TRL, empty if there is none."""
    file = FOLDER / path
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def class_of(name, path=TRAINER):
    found = (node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(found, ast.Module([], []))


def function(name, path=TRAINER, owner=None):
    """A function of a file, or a method of its class `owner`, wherever it stands within; `missing` if there is none."""
    within = tree(path) if owner is None else class_of(owner, path)
    found = (node for node in ast.walk(within) if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, MISSING)


def method(name):
    return function(name, owner="GRPOTrainer")


def says(node, *texts):
    """Whether the code of a node has all these texts, as `ast.unparse` writes them: one space, single quotes."""
    code = ast.unparse(node)
    return all(text in code for text in texts)


def texts(name, *found):
    return lambda: says(method(name), *found)


def texts_of_head(*found):
    return lambda: says(function("_fused_forward", UTILS), *found)


def calls(node, name):
    """The calls of a function or method of this name, in order."""
    found = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    found = [call for call in found if getattr(call.func, "attr", getattr(call.func, "id", None)) == name]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def lines_reading(node, mapping, key):
    """The lines in which `mapping[key]` or `mapping.get(key, …)` is read."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.Subscript) and ast.unparse(each.value) == mapping and isinstance(each.ctx, ast.Load):
            found.append((each.lineno, getattr(each.slice, "value", None)))
        elif isinstance(each, ast.Call) and ast.unparse(each.func) == f"{mapping}.get" and each.args:
            found.append((each.lineno, getattr(each.args[0], "value", None)))
    return sorted(line for line, name in found if name == key)


def keys_written(node, mapping):
    """The keys that a function gives a dictionary, when it makes it and afterwards."""
    found = set()
    for each in ast.walk(node):
        target = each.targets[0] if isinstance(each, ast.Assign) else None
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == mapping:
            found.add(str(getattr(target.slice, "value", "")))
        elif target is not None and ast.unparse(target) == mapping and isinstance(each.value, ast.Dict):
            found |= {str(getattr(key, "value", "")) for key in each.value.keys}
    return found


def parameters(node):
    arguments = node.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    return [name for name in names if name != "self"]


def values_returned(node):
    """How many values its returns have; those of functions within are not counted."""
    inner = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.Lambda) and each is not node]
    skipped = {id(each) for child in inner for each in ast.walk(child)}
    found = [each for each in ast.walk(node) if isinstance(each, ast.Return) and id(each) not in skipped]
    return {len(each.value.elts) if isinstance(each.value, ast.Tuple) else 1 for each in found if each.value}


REQUIRED = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}


OPTIONAL = {
    "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps", "tool_mask",
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip


TABLES = {"images", "prompt", "completion", "rewards", "advantages", "extra"}


def in_this_order() -> bool:
    stages = ("_generate", "_get_per_token_logps_and_entropies", "_calculate_rewards", "nan_to_num")
    lines = [[call.lineno for call in calls(method(ROLLOUT), name)] for name in stages]
    if not all(lines):
        return False
    generated, scored, rewarded, advantages = lines
    return generated[0] < min(scored) and max(scored) < rewarded[0] and rewarded[0] < max(advantages)


def completions_of_generate() -> bool:
    returned = [node.value for node in ast.walk(method("_generate")) if isinstance(node, ast.Return)]
    names = [[ast.unparse(each) for each in value.elts] for value in returned if isinstance(value, ast.Tuple)]
    return bool(names) and all(each[1] == "completion_ids" and each[3] == "completions" for each in names)


def tables() -> bool:
    for node in ast.walk(method("__init__")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._logs":
            keys = {getattr(key, "value", "") for key in getattr(node.value, "keys", ())}
            return keys == TABLES and ast.unparse(node.value).count("maxlen=args.generation_batch_size") == len(TABLES)
    return False


SPLITTING = (
    "_generate_and_score_completions", "split_pixel_values_by_grid", "shuffle_sequence_dict", "split_tensor_dict",
)  # fmt: skip


def split_in_this_order() -> bool:
    found = [calls(method("_prepare_inputs"), name) for name in SPLITTING]
    lines = [each[0].lineno for each in found if each]
    return len(lines) == len(SPLITTING) and lines == sorted(lines)


def sampler() -> bool:
    made, drawn = (function(name, UTILS, "RepeatSampler") for name in ("__init__", "__iter__"))
    return (
        parameters(made)[:5] == ["data_source", "mini_repeat_count", "batch_size", "repeat_count", "shuffle"]
        and says(made, "self.generator.manual_seed(seed)")
        and says(drawn, "torch.randperm(self.num_samples, generator=self.generator)")
        and says(drawn, "if len(chunk) == self.batch_size]")
        and len(calls(class_of("RepeatSampler", UTILS), "randperm")) == 1
    )


def looks_the_backbone_up() -> bool:
    """Within the forward pass, not before it."""
    forward = function("_fused_forward", UTILS)
    return says(forward, "backbone_outputs = getattr(self, ") or says(forward, "backbone_outputs = self.base_model(")


def output_of_two_fields() -> bool:
    fields = list(getattr(class_of("FusedCausalLMOutput", UTILS), "body", []))
    optional = {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and node.value is not None}
    return {"log_probs", "entropy"} <= optional and len(optional) == sum(isinstance(n, ast.AnnAssign) for n in fields)


def heads_at_the_temperature_of_the_run() -> bool:
    given = [ast.unparse(call) for call in calls(method("__init__"), "add_fused_lm_head")]
    at_temperature = [call for call in given if "temperature=self.temperature" in call]
    return len(given) == len(at_temperature) == 2 and "outputs=('log_probs', 'entropy')" in given[0]


DIVISORS = {
    ("grpo", "sapo"): ("/ mask.sum(-1).clamp(min=1.0)).mean()", "loss / normalizer"),
    ("bnpo",): ("(per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)", "loss / normalizer"),
    ("dr_grpo",): ("/ (per_token_loss.size(0) * self.max_completion_length)", "loss / normalizer"),
    ("cispo", "dapo", "vespo"): (
        "inputs['num_items_in_batch'].clamp(min=1.0) / self.accelerator.num_processes",
        "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
        "(per_token_loss * mask).sum() / normalizer",
    ),
    ("luspo",): ("(per_token_loss * mask).sum(-1).mean()", "loss / normalizer"),
}


def old_logps_after_the_pass() -> bool:
    loss = method("_compute_loss")
    reads, passes = lines_reading(loss, "inputs", "old_per_token_logps"), calls(loss, SCORING)
    return bool(reads and passes) and min(reads) > max(call.end_lineno or 0 for call in passes)


def one_pass_with_these_arguments() -> bool:
    found = calls(method("_compute_loss"), SCORING)
    if len(found) != 1:
        return False
    given = [ast.unparse(value) for value in found[0].args]
    names = {keyword.arg for keyword in found[0].keywords}
    needed = {"compute_entropy", "pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids"}
    return given == ["model", "input_ids", "attention_mask", "logits_to_keep"] and needed <= names


def divisors() -> bool:
    found = {}
    for node in ast.walk(method("_compute_loss")):
        if isinstance(node, ast.If) and says(node.test, "self.loss_type") and says(ast.Module(node.body, []), "mask"):
            types = sorted({each.value for each in ast.walk(node.test) if isinstance(each, ast.Constant)})
            found[tuple(types)] = ast.unparse(ast.Module(node.body, []))
    return all(types in found and all(text in found[types] for text in texts) for types, texts in DIVISORS.items())


# fmt: off
ASSUMPTIONS = [
    ("a rollout is generated, scored by the policy, rewarded and given advantages, in this order",
     "trainer.py, measure.py, forward_passes.py",
     in_this_order),
    ("old log-probabilities are scored where the policy changes within a rollout or vLLM's are corrected, and else "
         "left out of the batch", "validate.py, sampling.py",
     texts(ROLLOUT, "if self.args.gradient_accumulation_steps % generate_every != 0 or (self.use_vllm and "
         "self.vllm_importance_sampling_correction):", "if old_per_token_logps is not None:")),
    ("a batch has the columns that rows are made of, and none that are not known", "batch.py, efficiency/loss_mask.py",
     lambda: (keys_written(method(ROLLOUT), "output") >= REQUIRED and keys_written(method(ROLLOUT), "output"
         ) <= REQUIRED | OPTIONAL)),
    ("num_items_in_batch counts the tokens of the loss of the whole rollout, over all processes",
     "sampling.py, patches.py",
     texts(ROLLOUT, "loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask",
         "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()")),
    ("advantages are weighted sums of rewards, less the group's mean, by its deviation + 1e-4, and 0 if unscored",
     "advantages.py, sampling.py",
     texts(ROLLOUT, "rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)",
         "advantages = rewards - mean_grouped_rewards", "advantages = advantages / (std_rewards + 0.0001)",
         "torch.nan_to_num(advantages, nan=0.0)")),
    ("rewards are asked of self.reward_funcs in the order of their names and gathered from all processes",
     "trainer.py, rewards/groups.py",
     texts("_calculate_rewards", "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, "
         "strict=True)", "rewards_per_func = gather(rewards_per_func)")),
    ("generation returns the tokens of completions second and completions fourth", "rollout.py",
     completions_of_generate),
    ("generation tokenizes with self._tokenize_prompts, whose three values and num_generations "
         "self._generate_single_turn takes", "trainer.py, generation.py",
     texts("_generate", "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)",
         "self._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)")),
    ("prompts become tokens, images and fields", "rollout.py, batch.py",
     lambda: values_returned(method("_tokenize_prompts")) == {3}),
    ("each generation reads self.generation_config and self.generation_kwargs again", "rollout.py",
     texts("_generate_single_turn", "generation_config=self.generation_config",
         "generation_kwargs=self.generation_kwargs")),
    ("a reference is built, and scores rollouts, where beta is not 0 at that time", "loss.py",
     lambda: (says(method("__init__"), "if self.beta == 0.0:") and says(method(ROLLOUT), "if self.beta != 0.0:",
         "output['ref_per_token_logps'] = ref_per_token_logps"))),
    ("the table of completions has columns of the last rollout batch", "patches.py, rollout.py", tables),
    ("what rewards log waits in _pending_extra_logs and _pending_metrics until the rollout is judged", "patches.py",
     texts(ROLLOUT, "self._pending_extra_logs.clear()", "self._pending_metrics.clear()")),
    ("images go to the table where log_multimodal is on, and for nothing else", "patches.py",
     lambda: (says(method(ROLLOUT), "if images is not None and self.log_multimodal:") and ast.unparse(method(
         ROLLOUT)).count("self.log_multimodal") == 1)),
    ("token types of completions are 0", "patches.py",
     texts(ROLLOUT, "token_type_ids.new_zeros(completion_ids.shape)")),
    ("metrics wait in _metrics by mode, are averaged when they are logged, and begin again", "rollout.py, metrics.py",
     texts("log", "self._metrics[mode].items()", "self._metrics[mode].clear()")),
    ("images of messages come as lists per prompt, None for a prompt without", "trainer.py",
     texts("_tokenize_prompts", "images.append(prompt_images if prompt_images else None)")),
    ("a rollout is cut into pixels by row, shuffled by shuffle_sequence_dict and split, in this order",
     "trainer.py, sharing/sharing.py, forward_passes.py",
     split_in_this_order),
    ("a rollout is kept in _buffered_inputs, in lists of micro-batches, until _step calls for another",
     "checkpoints.py",
     texts("_prepare_inputs", "generate_every = self.args.steps_per_generation * self.num_iterations", "if self._step "
         "% generate_every == 0 or self._buffered_inputs is None:", "self._buffered_inputs[self._step % "
         "self.args.steps_per_generation]")),
    ("_step counts micro-batches", "checkpoints.py", texts("training_step", "self._step += 1")),
    ("prompts are drawn by a RepeatSampler with the seed of the run, shuffled if shuffle_dataset", "checkpoints.py",
     texts("_get_train_sampler", "return RepeatSampler(", "batch_size=self.args.generation_batch_size // "
         "self.num_generations", "shuffle=self.shuffle_dataset", "seed=self.args.seed")),
    ("a RepeatSampler draws one permutation per epoch from its generator and drops what fills no batch",
     "checkpoints.py, sampling.py",
     sampler),
    ("a stream is shuffled with the seed of the run", "sampling.py",
     texts("get_train_dataloader", "dataset = dataset.shuffle(seed=self.args.seed)")),
    ("in evaluation each batch is generated by itself", "rollout.py, reporting/recorder.py",
     texts("_prepare_inputs", "inputs = self._generate_and_score_completions(generation_batch)")),
    ("the mode is that of self.model.training", "rollout.py, trainer.py",
     lambda: all(says(method(name), "mode = 'train' if self.model.training else 'eval'") for name in ("_generate",
         "_generate_and_score_completions", "_prepare_inputs", "_compute_loss", "log"))),
    ("a checkpoint gets its card from create_model_card, then what transformers saves", "checkpoints.py, trainer.py",
     texts("_save_checkpoint", "self.create_model_card(", "super()._save_checkpoint(model, trial)")),
    ("the card names the trainer by _name, _paper and _tag_names", "trainer.py, reporting/model_card.py",
     lambda: says(function("create_model_card", "trainer/base_trainer.py"), "tags.update(self._tag_names)",
         "self._name", "self._paper")),
    ("disable_gradient_checkpointing takes a model and the options of checkpointing", "rollout.py",
     lambda: (parameters(function("disable_gradient_checkpointing", "models/utils.py")) == ["model",
         "gradient_checkpointing_kwargs"])),
    ("pixels are cut by row before rows change their order, lists and None included", "batch.py, sharing/sharing.py",
     lambda: (says(function("shuffle_sequence_dict", UTILS), "torch.randperm(batch_size)", "v.ndim == 0") and says(
         function("split_tensor_dict", UTILS), "isinstance(tensor, list) or tensor.ndim > 0"))),
    ("scoring returns three values and takes model, input_ids, attention_mask, logits_to_keep and batch_size",
     "trainer.py, rollout.py, forward_passes.py",
     lambda: (values_returned(method(SCORING)) == {3} and parameters(method(SCORING))[:5] == ["model", "input_ids",
         "attention_mask", "logits_to_keep", "batch_size"])),
    ("labels are -100 in padding and in front of the completion", HEADS,
     texts(SCORING, ".masked_fill(attention_mask_batch == 0, -100)", "labels[:, :-logits_to_keep] = -100")),
    ("scoring calls the model with labels and fused_lm_head=True by name", f"{HEADS}, signals/scoring.py, critic.py",
     texts(SCORING, "model(**model_inputs, labels=labels, fused_lm_head=True)")),
    ("scoring takes the last columns of log_probs and entropy, as many as the completion has", f"{HEADS}, critic.py",
     texts(SCORING, "outputs.log_probs[:, -logits_to_keep:]", "outputs.entropy[:, -logits_to_keep:]")),
    ("the head gives 0 where the label is -100", HEADS, texts_of_head("mask = labels != -100")),
    ("the head shifts labels and hidden states by one, or takes shift_labels as they are", HEADS,
     texts_of_head("if shift_labels is None:", "backbone_outputs.last_hidden_state[:, :-1]", "labels = labels[:, 1:]",
         "labels = shift_labels")),
    ("the head looks its base model up at each call", f"{HEADS}, signals/scoring.py, loss.py", looks_the_backbone_up),
    ("the head is a forward method of the model object itself", f"{HEADS}, signals/scoring.py, utils.py",
     lambda: says(function("add_fused_lm_head", UTILS), "model.forward = types.MethodType(")),
    ("the head returns a FusedCausalLMOutput, whose log_probs and entropy may be left out as all other fields",
     "signals/scoring.py, critic.py",
     output_of_two_fields),
    ("policy and reference get the head with the temperature of the run, the policy also entropies",
     "loss.py, rollout.py",
     heads_at_the_temperature_of_the_run),
    ("_compute_loss reads old_per_token_logps only after its pass through the model", "forward_passes.py",
     old_logps_after_the_pass),
    ("_compute_loss takes the log-probabilities of the pass for old ones that are missing", "metrics.py",
     texts("_compute_loss", "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps")),
    ("_compute_loss makes one pass, by self._get_per_token_logps_and_entropies, with model, ids, mask and length "
         "first and the image inputs by name", "trainer.py, forward_passes.py", one_pass_with_these_arguments),
    ("a pass gives log-probabilities, entropies and a router's loss, in this order", "forward_passes.py, loss.py",
     texts("_compute_loss", "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(")),
    ("advantages may be (N, T): those of one dimension get a second", "trainer.py",
     texts("_compute_loss", "if advantages.dim() == 1:\n        advantages = advantages.unsqueeze(1)")),
    ("a token with an advantage of 0 adds 0 to the loss, whatever its ratio is",
     "efficiency/loss_mask.py, forward_passes.py",
     texts("_compute_loss", "per_token_loss1 = coef_1 * advantages", "per_token_loss2 = coef_2 * advantages",
         "-clamped_ratios * advantages * per_token_logps", "-soft_coef_1 * advantages")),
    ("each loss type is divided by what average_as_loss divides by", "patches.py, forward_passes.py", divisors),
    ("the mask of the loss is completion_mask, times tool_mask where there is one", "rollout.py",
     texts("_compute_loss", "completion_mask if 'tool_mask' not in inputs else completion_mask * inputs['tool_mask']")),
    ("entropy and clip ratios are logged once per micro-batch, as means over all valid tokens", "metrics.py",
     texts("_compute_loss", "self._metrics[mode]['entropy'].append(global_masked_mean(entropies))",
         "self._metrics[mode]['clip_ratio/region_mean'].append(global_masked_mean(")),
]
# fmt: on


@pytest.mark.parametrize(("sentence", "ours", "holds"), ASSUMPTIONS, ids=[each[0] for each in ASSUMPTIONS])
def test_trl_does(sentence, ours, holds):
    assert holds(), f"TRL {VERSION}: no longer seen: {sentence}. In src/vgr_trl, {ours} relies on it."


def names_assigned(node):
    """The attributes that code gives `self`, in methods or in a class."""
    attributes = (
        each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    )
    stored = [each for each in attributes if isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"]
    return {each.attr for each in stored} | {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}


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
    theirs = method(name)
    if theirs is MISSING:
        base = function(name, "trainer/base_trainer.py", "_BaseTrainer")
        known = parameters(base) if base.name == name else list(inspect.signature(getattr(Trainer, name)).parameters)
    else:
        known = parameters(theirs)
    ours = [each for each in inspect.signature(getattr(DAPOTrainer, name)).parameters.values() if each.name != "self"]
    named = {each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert named <= {*known, "options"}, f"TRL {VERSION}: {name} has {known}"


def test_every_private_attribute_of_a_trainer_that_ours_reads_is_there():
    read, assigned = set(), names_assigned(class_of("GRPOTrainer"))
    for file in OURS.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        owners = {"trainer", "_trainer"} | ({"self"} if "class DAPOTrainer" in text else set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "attr", getattr(node.value, "id", "")) in owners:
                read.add(node.attr)
            if isinstance(node, ast.Assign) and "class DAPOTrainer" in text:
                assigned |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    private = {name for name in read if name.startswith("_") and not name.startswith("__")}
    unknown = {name for name in private - assigned if method(name) is MISSING}
    unknown = {name for name in unknown if not hasattr(DAPOTrainer, name)}
    assert unknown <= {"_pass", "_rollouts", "_rewards_with_nan"}
    assert {"_metrics", "_logs", "_tokenizer"} <= private & assigned
