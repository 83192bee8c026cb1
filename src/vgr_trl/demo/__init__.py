"""Demo without a download: a real vision-language model of a third of a million parameters, and drawn questions.

Read `demo.py`, the whole demo on one page, then `tiny_model.py`. `write_folder.py` leaves model and questions as files
for other commands.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings of one run; the seed drives questions, weights, order and sampling."""

    seed: int = 0
    steps: int = 100
    learning_rate: float = 3e-4
    lr_scheduler_type: str = "constant_with_warmup"
    temperature: float = 1.0
    prompts_per_step: int = 24
    num_generations: int = 8
    text_learning_rate: float = 1e-3
    text_batch_size: int = 32
    text_steps: int = 1500
    text_loss: float = 0.08
    caption_loss: float = 0.52
    warm_start_accuracy: float = 0.55
    num_samples: int = 8
    threads: int = 1
    device: str = "cpu"
