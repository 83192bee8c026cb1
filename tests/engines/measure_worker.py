"""Run by the tests of this folder in the processes of an engine: an update of TRL's trainer and of ours, counted.

measure_worker.py KIND MODEL OUTPUT     for micro-batches of one and two, all weights and LoRA, with checkpointing
"""

import json
import os
import sys
from pathlib import Path

import engines
import torch
from counting import CollectiveCounter
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from support.trainers import BIG_STEPS, OURS, STOCK, config, letters_reward
from transformers import AutoProcessor, TrainerCallback

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


def generate_whole(trainer):
    """Stands for the model's `generate`: T tokens, which depend on the prompt, the step and the place in the group."""
    tokenizer = trainer.processing_class.tokenizer
    words = torch.tensor(tokenizer("the circle is blue red teal A B C D").input_ids)

    def generate(input_ids, **kwargs):
        first, found = trainer.accelerator.process_index * len(input_ids), []
        for row, ids in enumerate(input_ids):
            seed = int(ids.sum()) * 31 + trainer.state.global_step * 977 + (first + row) % G
            drawn = torch.randint(len(words), (T,), generator=torch.Generator().manual_seed(seed))
            found.append(words[drawn])
        completions = torch.stack(found)
        completions[:, -1] = tokenizer.eos_token_id
        return torch.cat([input_ids, completions], dim=1)

    return generate


class UpdatePhase(TrainerCallback):
    """Names the phase of each step: `update 1`, `update 2`."""

    def __init__(self, counter: CollectiveCounter) -> None:
        self.counter = counter

    def on_step_begin(self, args, state, control, **kwargs):
        self.counter.phase = f"update {state.global_step + 1}"

    def on_step_end(self, args, state, control, **kwargs):
        self.counter.phase = "between"


def measure(kind: str, classes, batch: int, lora: bool, folder: Path, output: Path, counter, **more):
    """Two updates; the changes of all weights, and what the counter has found.

    Args:
        more: further options of the trainer.
    """
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
    trainer.model.generate = generate_whole(trainer)
    prepare = trainer._prepare_inputs

    def prepare_in_phase(inputs):
        with counter.in_phase("rollout"):
            return prepare(inputs)

    trainer._prepare_inputs = prepare_in_phase
    trainer.add_callback(UpdatePhase(counter))
    text_model = next(m for m in trainer.model.modules() if type(m).__name__.endswith("TextModel"))
    counter.count_positions(text_model)
    start = engines.whole_parameters(trainer)
    counter.found.clear()
    trainer.train()
    found = dict(counter.found)
    assert engines.found_engine(trainer) == kind
    end = engines.whole_parameters(trainer)
    return {name: end[name] - start[name] for name in start}, found


def largest(tensors) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


if __name__ == "__main__":
    kind, folder, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    counter = CollectiveCounter()
    engines.prepare(kind)
    measured = []
    for lora in (False, True):
        for batch in (2, 1):
            of_trl, theirs = measure(kind, STOCK, batch, lora, folder, output / f"{kind} trl", counter)
            for budget in (None, CUT) if batch == 1 else (None,):
                options = {"max_tokens_per_micro_batch": budget}
                of_ours, ours = measure(kind, OURS, batch, lora, folder, output / f"{kind} ours", counter, **options)
                difference = largest(of_trl[name] - of_ours[name] for name in of_trl) / largest(of_trl.values())
                case = {"lora": lora, "batch": batch, "budget": budget, "difference": difference}
                measured.append(case | {"trl": theirs, "ours": ours})
    if os.environ.get("RANK", "0") == "0":
        (output / f"{kind} measured.json").write_text(json.dumps(measured, indent=1))
