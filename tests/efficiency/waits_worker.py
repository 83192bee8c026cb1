"""Prints how often the host waits for a pretended GPU in the third step of a trainer: `trl 3`, `ours 5`."""

import sys
import tempfile
import warnings

import pretend_device  # before torch
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.demo.demo import draw_questions, to_dataset, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm

STEPS = 3


class Last(TrainerCallback):
    def __init__(self, device):
        self.device = device

    def on_step_begin(self, args, state, control, **kwargs):
        self.device.reset()  # so that the last step is left


def run(whose: str, layers: int) -> int:
    rows = draw_questions(8, seed=0, split="train", multiple_choice=False)
    pretend_device.pretend_accelerate()
    with pretend_device.PretendDevice(root="vgr_trl", forgiving=True) as device:
        model, processor = build_tiny_vlm(words_of(rows), hidden_size=32, num_layers=layers, vision_depth=1)
        trainer_class, config = (GRPOTrainer, GRPOConfig) if whose == "trl" else (DAPOTrainer, DAPOConfig)
        trainer = trainer_class(
            model=model.to("cuda:0"),
            reward_funcs=lambda completions, **columns: [float(len(str(one)) % 7) for one in completions],
            args=config(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=16,
                generation_kwargs={"min_new_tokens": 16},
                max_steps=STEPS,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=to_dataset(rows),
            processing_class=processor,
            callbacks=[Last(device)],
        )
        trainer.train()
        return sum(device.totals().values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(run(sys.argv[1], int(sys.argv[2])))
