"""What the runs of this folder share: a trainer of a tiny model that vLLM loads, and questions.

Usage: python tiny_run.py FOLDER     saves the model
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.demo.demo import FAMILIES, draw_questions
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.rewards import vgr_reward
from vgr_trl.trainer import DAPOTrainer

GROUP = 4  # completions of a prompt


def trainer_of(folder: Path, **changed: object) -> DAPOTrainer:
    torch.set_num_threads(1)
    model, processor = saved_model(folder)
    given = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256, "num_generations": GROUP,
        "per_device_train_batch_size": 3 * GROUP, "max_completion_length": 8, "max_steps": 3, "learning_rate": 1e-3,
        "model_init_kwargs": {"dtype": "float32"}, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    options = DAPOConfig(str(folder), **{**given, **changed})
    return DAPOTrainer(str(model), [letter_reward, vgr_reward], options, questions(), processing_class=processor)


def saved_model(folder: Path) -> tuple[Path, Qwen2_5_VLProcessor]:
    """A tiny model whose heads are as large as vLLM asks for, and transformers' own processor, which vLLM loads."""
    texts = [problem for problem, _ in FAMILIES.values()] + [word for _, words in FAMILIES.values() for word in words]
    model, tiny = build_tiny_vlm([*texts, "A. B. C. D."], hidden_size=64, num_heads=2, vision_depth=1)
    never_say(model, [model.config.image_token_id, model.config.video_token_id])
    processor = Qwen2_5_VLProcessor(
        tiny.image_processor, tiny.tokenizer, Qwen2VLVideoProcessor(), chat_template=tiny.chat_template
    )
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
    return folder / "model", processor


def never_say(model: torch.nn.Module, tokens: list[int]) -> None:
    """Make placeholders too unlikely to be drawn: TRL takes one in a completion for an image, and fails.

    The first coordinate is the same in the embedding of every other token, so in every last state it is positive.
    """
    embeddings = model.get_input_embeddings().weight.data  # (V, hidden), also those of the output
    embeddings[:, 0] = 1.0
    embeddings[tokens, 0] = -1.0


def questions(count: int = 9) -> Dataset:
    rows = []
    for number, row in enumerate(draw_questions(count, seed=0, split="train")):
        images = [[row["image"]], [row["image"], Image.new("RGB", (84, 56), (number * 20, 90, 200))], []][number % 3]
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": row["problem"]}]
        answer = {name: row[name] for name in ("problem", "choices", "solution")}
        prompt = [{"role": "user", "content": content}]
        rows.append({"images": images, "prompt": prompt, **answer})
    return Dataset.from_list(rows)


def letter_reward(completions: list, **kwargs: object) -> list[float]:
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


if __name__ == "__main__":
    saved_model(Path(sys.argv[1]))
