"""A demo without downloads: a vision-language model with a third of a million parameters, and drawn questions.

Start with `demo.py`, then `tiny_model.py`. `write_folder.py` saves model and questions as files for other commands.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of the demo; the seed determines questions, weights, order and sampling."""

    seed: int = 0
    steps: int = 100
    learning_rate: float = 3e-4
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
