"""A tiny Qwen2.5-VL that can call `zoom`, and the supervised start from which it learns where and when to."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from trl.chat_template_utils import qwen3_template
from trl.data_utils import prepare_multimodal_messages

from mosaics.task import GRIDS, ORDINALS, SHOWN, SINGLE, Box, Row, block_box, blocks
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.tools import Zoom

KNOWN = 0.3  # share of the calls to learn from that look where the question asks to
PATCH = 2  # pixels; four patches make a token
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPEN, CLOSE = '<tool_call>{"name": "zoom", "arguments": {"box": [', "]}}</tool_call>"
BOXES = {  # all blocks of up to 2 x 2 cells, as the model writes them: a token each
    ", ".join(map(str, block_box(grid, *block))): block_box(grid, *block)
    for grid in (1, *GRIDS)
    for block in blocks(grid)
}


def build_model(seed: int, texts: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return an untrained model and its processor, in which a call takes four tokens, and a word of `texts` one."""
    words = [
        *texts,
        "tool\n",
        SINGLE,
        *(f"which digit is {word} in the {word} row" for word in ORDINALS),
        *map(str, range(10)),
    ]
    untrained: Any
    untrained, processor = build_tiny_vlm(words)
    tokenizer, config = processor.tokenizer, untrained.config
    tokenizer.add_tokens([OPEN, CLOSE, *BOXES])
    tokenizer.chat_template = processor.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SHOWN**2}
    processor.image_processor.patch_size, processor.image_processor.size = PATCH, size
    config.vision_config.patch_size, config.text_config.vocab_size = PATCH, len(tokenizer)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = type(untrained)(config)
    model.generation_config = untrained.generation_config
    return model, processor


def zoom_call(box: Sequence[float]) -> dict[str, Any]:
    """Return the message that calls `zoom` with a box."""
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [*box]}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answer(digit: int | str) -> dict[str, Any]:
    """Return the message that answers."""
    return {"role": "assistant", "content": f"<answer>{digit}</answer>"}


Example = tuple[list[dict[str, Any]], list[Any]]  # a conversation and its images


def draw_reading(row: Row, rng: random.Random) -> Example:
    """Return the question for a single digit about one cell of a mosaic, as the tool shows it, and the answer."""
    _, seen, digit = look_at_cell(row, rng, known=0, loose=0)
    return [{"role": "user", "content": SINGLE}, answer(digit)], [seen[0]["image"]]


def draw_call(row: Row, rng: random.Random) -> Example:
    """Return a question and a call, without images."""
    return [*row["prompt"], zoom_call(look_at_cell(row, rng)[0])], []


def draw_example(row: Row, rng: random.Random) -> Example:
    """Return an example of answers, half of them with a call.

    A call looks at the cell that is asked for or, mostly, at any cell, sometimes with its neighbours, and then
    names the digit that stands there: so the start knows how to call the tool and to read, and hardly where to look.
    """
    if rng.random() < 0.5:
        return [*row["prompt"], answer(row["solution"])], [row["image"]]
    box, seen, digit = look_at_cell(row, rng)
    reply = {"role": "tool", "name": "zoom", "content": seen}
    return [*row["prompt"], zoom_call(box), reply, answer(digit)], [row["image"], seen[0]["image"]]


def look_at_cell(row: Row, rng: random.Random, known: float = KNOWN, loose: float = 0.2) -> tuple[Box, Any, int]:
    """Return the box of a cell, what the tool shows of it, and its digit.

    Args:
        row: as `draw_rows` makes it.
        rng: draws the cell.
        known: share of calls that look where the question asks to; the others look at any cell.
        loose: share of boxes that hold further cells beside it.
    """
    grid, environment = row["grid"], Zoom()
    line, column = row["place"] if rng.random() < known else (rng.randrange(grid), rng.randrange(grid))
    around = [
        (top, left, height, width)
        for top, left, height, width in blocks(grid)
        if top <= line < top + height and left <= column < left + width and height * width > 1
    ]
    block = rng.choice(around) if around and rng.random() < loose else (line, column, 1, 1)
    box = block_box(grid, *block)
    environment.reset(image=row["image"])
    return box, environment.zoom([*box]), row["digits"][line * grid + column]


def teach(
    model: Any,
    processor: Any,
    rows: Sequence[Row],
    draw: Callable[[Row, random.Random], Example],
    *,
    steps: int,
    seed: int,
    rate: float,
    batch: int = 64,
) -> list[float]:
    """Teach examples that `draw` makes of random rows; return the loss of every step."""
    rng, losses = random.Random(seed), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / (steps + 1)))
    model.train()
    for _ in range(steps):
        loss = supervised_loss(model, processor, [draw(row, rng) for row in rng.sample(rows, batch)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def supervised_loss(model: Any, processor: Any, examples: Sequence[Example]) -> torch.Tensor:
    """Return the mean loss over digits of answers and boxes of calls, and half of that over all else in the turns."""
    pictures = [images for _, images in examples]
    asked = [prepare_multimodal_messages([talk[0]], images=images[:1]) + talk[1:] for talk, images in examples]
    texts = [processor.apply_chat_template(talk, tokenize=False).removesuffix("\n") for talk in asked]
    inputs = processor(text=texts, images=pictures if pictures[0] else None, padding=True, return_tensors="pt")
    ids, token = inputs["input_ids"], processor.tokenizer.convert_tokens_to_ids
    opened = (ids[:, :-2] == token("<|im_start|>")) & (ids[:, 1:-1] == token("assistant"))
    written, speaking = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(len(ids), dtype=torch.bool)
    for place in range(3, ids.size(1)):  # a turn begins behind "<|im_start|>assistant\n"
        speaking |= opened[:, place - 3]
        written[:, place] = speaking
        speaking &= ids[:, place] != token("<|im_end|>")
    logits = model(**inputs.to(model.device)).logits[:, :-1].float()
    losses = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    decides = torch.isin(ids[:, :-1], torch.tensor(token(["<answer>", OPEN])))
    return losses[decides].mean() + 0.5 * losses[written[:, 1:] & ~decides].mean()
