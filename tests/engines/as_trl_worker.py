"""Run by test_as_trl.py in the processes of an engine: updates of TRL's trainer and of ours on the same completions.

as_trl_worker.py KIND MODEL OUTPUT
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import engines
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from support.dealt_completions import generate_by_prompt
from support.trainers import BIG_STEPS, OURS, STOCK, config, letters_reward, logged, whole_parameters
from transformers import AutoProcessor

P, T, G = 768, 128, 8
CUT = P + 3 * T  # tokens of a pass, by which a group is cut into passes of 3, 3 and 2 rows
DAPO = {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0}


def rows_of(processor) -> Dataset:
    """Prompts of P tokens, 144 of which are of an image."""
    image = Image.new("RGB", (336, 336))

    def prompt(number: int, words: int) -> list[dict]:
        return [{"role": "user", "content": f"{'ABCD'[number]}" + " shape" * words}]

    def length(words: int) -> int:
        content = [{"type": "image", "image": image}, {"type": "text", "text": prompt(0, words)[0]["content"]}]
        asked = [{"role": "user", "content": content}]
        template = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
        return len(processor.apply_chat_template(asked, **template)["input_ids"][0])

    words = P - length(0)
    assert length(words) == P
    return Dataset.from_list(
        [{"prompt": prompt(n, words), "image": Image.new("RGB", (336, 336), (60 * n, 99, 9))} for n in range(4)]
    )


def measure(kind: str, classes, batch: int, lora: bool, folder: Path, output: Path, watch, **more):
    """The trainer after two updates, and how far they moved all weights; `watch` gets it before. `more`: options."""
    AcceleratorState._reset_state()  # the configuration of DeepSpeed belongs to one run
    processor = AutoProcessor.from_pretrained(folder)
    options = {
        "max_steps": 2, "num_generations": G, "per_device_train_batch_size": batch, "max_completion_length": T,
        "gradient_accumulation_steps": G // batch, "gradient_checkpointing": True, **more,
    }  # fmt: skip
    trainer_class, config_class = classes
    options = config(output, config_class, **BIG_STEPS | DAPO | options | engines.options_of(kind))
    torch.manual_seed(0)  # an adapter is drawn
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
    trainer = trainer_class(
        str(folder), [letters_reward], options, rows_of(processor), processing_class=processor, peft_config=adapter
    )
    trainer.model.generate = generate_by_prompt(trainer, length=T)
    start = whole_parameters(trainer)
    watch(trainer)
    trainer.train()
    assert engines.found_engine(trainer) == kind.removesuffix(" file")
    end = whole_parameters(trainer)
    return trainer, {name: end[name] - start[name] for name in start}


def largest(tensors) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def compare(kind: str, folder: Path, output: Path, watch=lambda trainer: None) -> Iterator[dict]:
    """For micro-batches of one and two, all weights and LoRA: how far both trainers' updates are apart."""
    for lora in (False, True):
        for batch in (1, 2):
            given = batch, lora, folder
            _, of_trl = measure(kind, STOCK, *given, output / f"{kind} trl", watch)
            for budget in (None, CUT) if batch == 1 else (None,):
                options = {"max_tokens_per_micro_batch": budget}
                ours, moved = measure(kind, OURS, *given, output / f"{kind} ours", watch, **options)
                apart = largest(of_trl[name] - moved[name] for name in of_trl) / largest(of_trl.values())
                computed = max(logged(ours, "sharing/prompts_per_row"))
                engine = ours.model_wrapped if ours.is_deepspeed_enabled else None
                sizes = engine and [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()]
                case = {"lora": lora, "batch": batch, "budget": budget, "difference": apart, "sizes": sizes}
                yield case | {"prompts_per_row": computed}


if __name__ == "__main__":
    kind, folder, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    engines.prepare(kind)
    found = list(compare(kind, folder, output))
    if os.environ.get("RANK", "0") == "0":
        (output / f"{kind}.json").write_text(json.dumps(found))
