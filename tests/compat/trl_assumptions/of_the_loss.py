"""What `_compute_loss` does with a micro-batch."""

import ast

from trl_assumptions import TRAINER, Assumption, Source
from trl_assumptions.reading import calls, lines_reading, says

SCORING = "_get_per_token_logps_and_entropies"
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


def old_logps_after_the_pass(source: Source) -> bool:
    method = source.method("_compute_loss")
    reads, passes = lines_reading(method, "inputs", "old_per_token_logps"), calls(method, SCORING)
    return bool(reads and passes) and min(reads) > max(call.end_lineno or 0 for call in passes)


def one_pass_with_these_arguments(source: Source) -> bool:
    found = calls(source.method("_compute_loss"), SCORING)
    if len(found) != 1:
        return False
    given = [ast.unparse(value) for value in found[0].args]
    names = {keyword.arg for keyword in found[0].keywords}
    needed = {"compute_entropy", "pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids"}
    return given == ["model", "input_ids", "attention_mask", "logits_to_keep"] and needed <= names


def divisors(source: Source) -> bool:
    found = {}
    for node in ast.walk(source.method("_compute_loss")):
        if isinstance(node, ast.If) and says(node.test, "self.loss_type") and says(ast.Module(node.body, []), "mask"):
            types = sorted({each.value for each in ast.walk(node.test) if isinstance(each, ast.Constant)})
            found[tuple(types)] = ast.unparse(ast.Module(node.body, []))
    return all(types in found and all(text in found[types] for text in texts) for types, texts in DIVISORS.items())


def of_the_method(*texts: str):
    return lambda source: says(source.method("_compute_loss"), *texts)


ASSUMPTIONS = [
    Assumption(
        "_compute_loss reads old_per_token_logps only after its pass through the model",
        "forward_passes.py",  # complete_old_logps
        old_logps_after_the_pass,
        (
            TRAINER,
            'completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]',
            'completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]\n'
            '        old_per_token_logps = inputs.get("old_per_token_logps")',
        ),
    ),
    Assumption(
        "_compute_loss takes the log-probabilities of the pass for old ones that are missing",
        "metrics.py",
        of_the_method("per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps"),
        (TRAINER, "per_token_logps.detach() if old_per_token_logps is None", "None if old_per_token_logps is None"),
    ),
    Assumption(
        "_compute_loss makes one pass, by self._get_per_token_logps_and_entropies, with model, ids, mask and length "
        "first and the image inputs by name",
        "trainer.py, forward_passes.py",
        one_pass_with_these_arguments,
        (TRAINER, 'num_images=inputs.get("num_images"),', ""),
    ),
    Assumption(
        "a pass gives log-probabilities, entropies and a router's loss, in this order",
        "forward_passes.py, loss.py",
        of_the_method("per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies("),
        (
            TRAINER,
            "per_token_logps, entropies, aux_loss = self._get",
            "per_token_logps, aux_loss, entropies = self._get",
        ),
    ),
    Assumption(
        "advantages may be (N, T): those of one dimension get a second",
        "trainer.py",
        of_the_method("if advantages.dim() == 1:\n        advantages = advantages.unsqueeze(1)"),
        (TRAINER, "if advantages.dim() == 1:", "if True:"),
    ),
    Assumption(
        "a token with an advantage of 0 adds 0 to the loss, whatever its ratio is",
        "efficiency/loss_mask.py, forward_passes.py",
        of_the_method(
            "per_token_loss1 = coef_1 * advantages",
            "per_token_loss2 = coef_2 * advantages",
            "-clamped_ratios * advantages * per_token_logps",
            "-soft_coef_1 * advantages",
        ),
        (TRAINER, "per_token_loss1 = coef_1 * advantages", "per_token_loss1 = coef_1 * (advantages + 1)"),
    ),
    Assumption(
        "each loss type is divided by what average_as_loss divides by",
        "patches.py, forward_passes.py",
        divisors,
        (TRAINER, 'elif self.loss_type in ["cispo", "dapo", "vespo"]:', 'elif self.loss_type in ["cispo", "vespo"]:'),
    ),
    Assumption(
        "the mask of the loss is completion_mask, times tool_mask where there is one",
        "rollout.py",  # valid_tokens
        of_the_method("completion_mask if 'tool_mask' not in inputs else completion_mask * inputs['tool_mask']"),
        (TRAINER, 'mask = completion_mask if "tool_mask" not in inputs else', 'mask = prompt_mask if "x" else'),
    ),
    Assumption(
        "entropy and clip ratios are logged once per micro-batch, as means over all valid tokens",
        "metrics.py",
        of_the_method(
            "self._metrics[mode]['entropy'].append(global_masked_mean(entropies))",
            "self._metrics[mode]['clip_ratio/region_mean'].append(global_masked_mean(",
        ),
        (TRAINER, '["entropy"].append(global_masked_mean(', '["entropy"].append(masked_seq_mean('),
    ),
]
