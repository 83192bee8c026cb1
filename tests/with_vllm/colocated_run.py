"""Three training steps with a colocated vLLM on a CPU; writes what was logged to a file.

Usage: python colocated_run.py FOLDER {guarded,unguarded}
"""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
)

import functools
import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image
from transformers import Qwen2_5_VLProcessor, Qwen2VLVideoProcessor
from trl.generation import vllm_generation
from vllm.model_executor.layers import utils as vllm_layers

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.compat import vllm_images
from vgr_trl.demo.shapes import FAMILIES, draw_questions
from vgr_trl.demo.tiny_vlm import build_tiny_vlm
from vgr_trl.rewards import vgr_reward

STEPS = 3


def run(folder: Path, guarded: bool) -> None:
    torch.set_num_threads(1)
    make_vllm_exact_on_a_cpu()
    if not guarded:
        vllm_images.needs_collapsing = lambda *_: False
    model, processor = saved_model(folder)
    trainer = DAPOTrainer(
        str(model),
        [letter_reward, vgr_reward],
        DAPOConfig(
            output_dir=str(folder),
            use_vllm=True,
            vllm_mode="colocate",
            vllm_max_model_length=256,
            token_weights=True,
            num_generations=4,
            per_device_train_batch_size=12,
            max_completion_length=8,
            max_steps=STEPS,
            learning_rate=1e-3,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        questions(),
        processing_class=processor,
    )
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = max((value.detach() - before[name]).abs().max().item() for name, value in trainer.model.named_parameters())
    (folder / "log.json").write_text(json.dumps({"moved": moved, "steps": trainer.state.log_history[:-1]}))


def make_vllm_exact_on_a_cpu() -> None:
    """What TRL leaves to vLLM: float32; and weights that stay where TRL puts the new ones."""
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)

    def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    vllm_layers.dispatch_cpu_unquantized_gemm = keep_weights


def saved_model(folder: Path) -> tuple[Path, Qwen2_5_VLProcessor]:
    """A tiny model whose heads are as large as vLLM asks for, and transformers' own processor, which vLLM loads."""
    texts = [problem for problem, _ in FAMILIES.values()] + [word for _, words in FAMILIES.values() for word in words]
    model, tiny = build_tiny_vlm([*texts, "A. B. C. D."], hidden_size=64, num_heads=2, vision_depth=1)
    never_say(model, [tiny.image_token_id, tiny.video_token_id])
    processor = Qwen2_5_VLProcessor(
        tiny.image_processor, tiny.tokenizer, Qwen2VLVideoProcessor(), chat_template=tiny.chat_template
    )
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


def questions() -> Dataset:
    """Rows with one image, with two of different sizes, and with none."""
    rows = []
    for number, row in enumerate(draw_questions(9, seed=0, split="train")):
        images = [[row["image"]], [row["image"], Image.new("RGB", (84, 56), (number * 20, 90, 200))], []][number % 3]
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": row["problem"]}]
        rows.append({"images": images, "prompt": [{"role": "user", "content": content}]})
    return Dataset.from_list(rows)


def letter_reward(completions: list, **kwargs: object) -> list[float]:
    """A reward that a random model gets in different amounts."""
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


if __name__ == "__main__":
    run(Path(sys.argv[1]), guarded=sys.argv[2] == "guarded")
