"""TRL's real loss on log-probabilities given by a test, in place of those that a model would compute."""

import torch


def loss_of(trainer, advantages, logps, mask, old_logps=None) -> torch.Tensor:
    prompt = torch.zeros(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt),
        "completion_ids": torch.zeros_like(mask, dtype=torch.long), "completion_mask": mask.long(),
        "advantages": advantages, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if old_logps is not None:
        inputs["old_per_token_logps"] = old_logps
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps).detach(), None)
    return trainer._compute_loss(trainer.model, inputs)
