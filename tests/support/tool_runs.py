"""Trainers whose completions call tools: dealt turns, so that every token is known, in a template that has tools."""

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from support.trainers import config, letters_reward, tiny_model
from transformers import AutoProcessor
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from vgr_trl.trainer import DAPOTrainer

TEMPLATE = Path(__file__).with_name("tools.jinja").read_text(encoding="utf-8")
STOCK, DAPO = (GRPOTrainer, GRPOConfig), {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0}  # of TRL
TURNS = (0, 1, 2, 1)  # calls of the completions of a prompt


def call(name: str, **arguments) -> str:
    given = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{given}}}}}</tool_call>'


def look(wide: int) -> list[dict]:
    """Return an image.

    Args:
        wide: its width.
    """
    image = Image.new("RGB", (wide, 56), (200, 30, 30))
    ImageDraw.Draw(image).line((0, 0, wide, 56), (0, 0, 255), 8)
    return [{"type": "image", "image": image}, {"type": "text", "text": "a circle is teal"}]


def deal_turns(trainer, turns=TURNS, asked=lambda place, turn: call("look", wide=56 * (turn + 1))):
    """Stands for the model's `generate`: completion `place` of a group calls `turns[place]` tools, then answers.

    The first word of a completion says its place, by which later turns know it.
    """
    tokenizer, words = trainer._tokenizer, "red blue green teal circle square left right".split()
    size = len(turns)

    def generate(input_ids, **kwargs):
        completions = []
        for row, ids in enumerate(input_ids):
            text = tokenizer.decode(ids)
            said = text.split("assistant\n")[1:]
            done = len(said) - 1  # turns before this one
            first = trainer.accelerator.process_index * len(input_ids)
            place = (first + row) % size if not done else words.index(said[0].split()[0])
            asks = done < turns[place]
            written = asked(place, done) if asks else f"<answer>{'ABCDABCD'[place]}</answer>"
            start = f"{words[place]} " if not done else "the circle is "
            completions.append([*tokenizer(start + written).input_ids, tokenizer.eos_token_id])
        length = max(map(len, completions))
        padded = [ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids in completions]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    return generate


def tool_processor(folder):
    processor = AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template = TEMPLATE
    processor.tokenizer.response_template = qwen3_template
    return processor


def tool_trainer(
    folder, rows, output, reward=letters_reward, *, kind=(DAPOTrainer, None), model=None, deal=None, **more
):
    """A trainer of the tiny model with tools, whose completions are dealt; options and arguments by name."""
    given = {name: more.pop(name) for name in ("tools", "environment_factory", "rollout_func") if name in more}
    if not given:
        given = {"tools": [look]}
    processor = tool_processor(folder)
    trainer, options = kind
    sizes = {"max_completion_length": 400, "learning_rate": 1e-2, "max_steps": 1, **more}
    options = config(output, **sizes) if options is None else config(output, options, **sizes)
    model = tiny_model(folder) if model is None else model
    made = trainer(model, reward, options, rows, processing_class=processor, **given)
    made.model.generate = (deal or deal_turns)(made)
    return made


def first_tokens(advantages, signals, mask, options):
    kept = mask.clone()
    kept[:, 2:] = False
    return kept, {}
