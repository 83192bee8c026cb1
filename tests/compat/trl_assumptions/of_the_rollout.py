"""How TRL generates, scores and judges a rollout batch."""

import ast

from trl_assumptions import TRAINER, Assumption, Source
from trl_assumptions.reading import Function, calls, keys_written, says, values_returned

REQUIRED = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch"}
OPTIONAL = {
    "old_per_token_logps", "importance_sampling_ratio", "sampling_per_token_logps", "ref_per_token_logps", "tool_mask",
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip
TABLES = {"images", "prompt", "completion", "rewards", "advantages", "extra"}


def rollout(source: Source) -> Function:
    return source.method("_generate_and_score_completions")


def of_the_rollout(*texts: str):
    return lambda source: says(rollout(source), *texts)


def of_method(name: str, *texts: str):
    return lambda source: says(source.method(name), *texts)


def in_this_order(source: Source) -> bool:
    stages = ("_generate", "_get_per_token_logps_and_entropies", "_calculate_rewards", "nan_to_num")
    lines = [[call.lineno for call in calls(rollout(source), name)] for name in stages]
    if not all(lines):
        return False
    generated, scored, rewarded, advantages = lines
    return generated[0] < min(scored) and max(scored) < rewarded[0] and rewarded[0] < max(advantages)


def completions_of_generate(source: Source) -> bool:
    returned = [node.value for node in ast.walk(source.method("_generate")) if isinstance(node, ast.Return)]
    names = [[ast.unparse(each) for each in value.elts] for value in returned if isinstance(value, ast.Tuple)]
    return bool(names) and all(each[1] == "completion_ids" and each[3] == "completions" for each in names)


def tables(source: Source) -> bool:
    for node in ast.walk(source.method("__init__")):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._logs":
            keys = {getattr(key, "value", "") for key in getattr(node.value, "keys", ())}
            return keys == TABLES and ast.unparse(node.value).count("maxlen=args.generation_batch_size") == len(TABLES)
    return False


ASSUMPTIONS = [
    Assumption(
        "a rollout is generated, scored by the policy, rewarded and given advantages, in this order",
        "trainer.py, measure.py, forward_passes.py",
        in_this_order,
        (
            TRAINER,
            "        device = self.accelerator.device\n        mode = ",
            "        self._calculate_rewards(inputs, None, None, None)\n        device = None\n        mode = ",
        ),
    ),
    Assumption(
        "old log-probabilities are scored where the policy changes within a rollout or vLLM's are corrected, and else "
        "left out of the batch",
        "validate.py, sampling.py",
        of_the_rollout(
            "if self.args.gradient_accumulation_steps % generate_every != 0 or "
            "(self.use_vllm and self.vllm_importance_sampling_correction):",
            "if old_per_token_logps is not None:",
        ),
        (TRAINER, "if self.args.gradient_accumulation_steps % generate_every != 0 or (", "if True or ("),
    ),
    Assumption(
        "a batch has the columns that rows are made of, and none that are not known",
        "batch.py, batch.py, batch.py, efficiency/loss_mask.py",
        lambda source: (
            keys_written(rollout(source), "output") >= REQUIRED
            and keys_written(rollout(source), "output") <= REQUIRED | OPTIONAL
        ),
        (TRAINER, 'output["tool_mask"] = tool_mask', 'output["tool_masks"] = tool_mask'),
    ),
    Assumption(
        "num_items_in_batch counts the tokens of the loss of the whole rollout, over all processes",
        "sampling.py, patches.py",
        of_the_rollout(
            "loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask",
            "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()",
        ),
        (TRAINER, "self.accelerator.gather(loss_mask.sum()).sum()", "loss_mask.sum()"),
    ),
    Assumption(
        "advantages are weighted sums of rewards, less the group's mean, by its deviation + 1e-4, and 0 if unscored",
        "advantages.py, sampling.py, sampling.py",
        of_the_rollout(
            "rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)",
            "advantages = rewards - mean_grouped_rewards",
            "advantages = advantages / (std_rewards + 0.0001)",
            "torch.nan_to_num(advantages, nan=0.0)",
        ),
        (TRAINER, "(std_rewards + 1e-4)", "(std_rewards + 1e-6)"),
    ),
    Assumption(
        "rewards are asked of self.reward_funcs in the order of their names and gathered from all processes",
        "trainer.py, rewards/groups.py",
        of_method(
            "_calculate_rewards",
            "zip(self.reward_funcs, self.reward_processing_classes, self.reward_func_names, strict=True)",
            "rewards_per_func = gather(rewards_per_func)",
        ),
        (TRAINER, "rewards_per_func = gather(rewards_per_func)", "pass"),
    ),
    Assumption(
        "generation returns the tokens of completions second and completions fourth",
        "rollout.py",
        completions_of_generate,
        (TRAINER, "return prompt_ids, completion_ids, tool_mask, completions,", "return prompt_ids, tool_mask, 0, 0,"),
    ),
    Assumption(
        "generation tokenizes with self._tokenize_prompts, whose three values and num_generations "
        "self._generate_single_turn takes",
        "trainer.py, generation.py",
        of_method(
            "_generate",
            "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)",
            "self._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)",
        ),
        (TRAINER, "prompt_ids, images, multimodal_fields, num_generations\n", "prompt_ids, images, num_generations\n"),
    ),
    Assumption(
        "prompts become tokens, images and fields",
        "rollout.py, batch.py",
        lambda source: values_returned(source.method("_tokenize_prompts")) == {3},
        (TRAINER, "return prompt_ids, images, multimodal_fields", "return prompt_ids, images"),
    ),
    Assumption(
        "each generation reads self.generation_config and self.generation_kwargs anew",
        "rollout.py, rollout.py",
        of_method(
            "_generate_single_turn",
            "generation_config=self.generation_config",
            "generation_kwargs=self.generation_kwargs",
        ),
        (TRAINER, "generation_kwargs=self.generation_kwargs", "generation_kwargs=self.kwargs"),
    ),
    Assumption(
        "a reference is built, and scores rollouts, where beta is not 0 at that time",
        "loss.py",
        lambda source: (
            says(source.method("__init__"), "if self.beta == 0.0:")
            and says(rollout(source), "if self.beta != 0.0:", "output['ref_per_token_logps'] = ref_per_token_logps")
        ),
        (TRAINER, "        if self.beta == 0.0:", "        if args.kl == 0.0:"),
    ),
    Assumption(
        "the table of completions has columns of the last rollout batch",
        "patches.py, patches.py, rollout.py",
        tables,
        (TRAINER, '"advantages": deque(maxlen=args.generation_batch_size)', '"advantages": []'),
    ),
    Assumption(
        "what rewards log waits in _pending_extra_logs and _pending_metrics until the rollout is judged",
        "patches.py",
        of_the_rollout("self._pending_extra_logs.clear()", "self._pending_metrics.clear()"),
        (TRAINER, "self._pending_metrics.clear()", "pass"),
    ),
    Assumption(
        "images go to the table where log_multimodal is on, and for nothing else",
        "patches.py",
        lambda source: (
            says(rollout(source), "if images is not None and self.log_multimodal:")
            and ast.unparse(rollout(source)).count("self.log_multimodal") == 1
        ),
        (TRAINER, "if images is not None and self.log_multimodal:", "if images is not None:"),
    ),
    Assumption(
        "token types of completions are 0",
        "patches.py",
        of_the_rollout("token_type_ids.new_zeros(completion_ids.shape)"),
        (TRAINER, "token_type_ids.new_zeros(completion_ids.shape)", "token_type_ids.new_ones(completion_ids.shape)"),
    ),
    Assumption(
        "metrics wait in _metrics by mode, are averaged when they are logged, and begin anew",
        "rollout.py, metrics.py",
        of_method("log", "self._metrics[mode].items()", "self._metrics[mode].clear()"),
        (TRAINER, "self._metrics[mode].clear()", "pass"),
    ),
    Assumption(
        "images of messages come as lists per prompt, None for a prompt without",
        "trainer.py",
        of_method("_tokenize_prompts", "images.append(prompt_images if prompt_images else None)"),
        (TRAINER, "images.append(prompt_images if prompt_images else None)", "images.extend(prompt_images)"),
    ),
]
