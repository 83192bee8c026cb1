"""Two optimizer steps of `DAPOTrainer` on the rollout of `tiny_rollout`; writes what it made of it.

Usage: trl_step.py FOLDER OPTIONS

Only generation is a stand-in: it returns the responses of the rollout.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tiny_rollout import CLIP, GROUP, LEARNING_RATE, LENGTH, SCORES, chats, picture, rollout, tiny_model
from transformers import TrainerCallback
from trl import GRPOTrainer

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.rewards import vgr_reward
from vgr_trl.trainer import DAPOTrainer


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.steps.append({name: each.grad.clone() for name, each in named if each.grad is not None})


def score(completions, scores, **kwargs):
    return [own[row % GROUP] for row, own in enumerate(scores)]


def run(folder: Path, options: dict) -> None:
    model, processor = tiny_model()
    prompts = len(SCORES) // GROUP
    tensors, _ = rollout(model, processor, prompts)
    responses = [row[mask.bool()].tolist() for row, mask in
                 zip(tensors["responses"], tensors["response_mask"], strict=True)]  # fmt: skip
    kept = {}

    class Trainer(DAPOTrainer):
        def _generate_and_score_completions(self, inputs):
            kept["batch"] = batch = super()._generate_and_score_completions(inputs)
            return dict(batch)

    GRPOTrainer._generate_single_turn = lambda *_, **__: (responses, None)
    weight = options.pop("vgr_reward_weight")
    config = DAPOConfig(
        str(folder / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, shuffle_dataset=False, per_device_train_batch_size=len(SCORES),
        num_generations=GROUP, num_iterations=2, max_steps=2, max_completion_length=LENGTH, optim="sgd",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=1e9,
        logging_steps=1, epsilon=CLIP[0], epsilon_high=CLIP[1], reward_weights=[1.0, weight],
        attention_reward_scale="none", **options,
    )  # fmt: skip
    rows = [
        {"prompt": chat, "images": [picture(number)], "scores": SCORES[GROUP * number :][:GROUP]}
        for number, chat in enumerate(chats(prompts))
    ]
    gradients = Gradients()
    trainer = Trainer(
        model, [score, vgr_reward], config, Dataset.from_list(rows), processing_class=processor, callbacks=[gradients]
    )
    trainer.train()
    batch = kept["batch"]
    for ours, theirs in (("prompt_ids", "prompts"), ("completion_mask", "response_mask")):
        assert batch[ours].tolist() == tensors[theirs].tolist(), theirs
    clipped = [each["clip_ratio/region_mean"] for each in trainer.state.log_history if "loss" in each]
    found = {"advantages": batch["advantages"], "old_log_probs": batch["old_per_token_logps"]}
    torch.save(found | {"gradients": gradients.steps, "clipped": clipped}, folder / "trl.pt")


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
