"""What a model card says of a model's origin, and how to use it."""

import re
from dataclasses import dataclass
from pathlib import Path

_ORIGIN = re.compile(r"^This model is a fine-tuned version of .*$", re.MULTILINE)
_USE = re.compile(r"(?<=^## Quick start\n\n)```python\n.*?\n```", re.MULTILINE | re.DOTALL)
_VISION = """\
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{where}", device_map="auto")
processor = AutoProcessor.from_pretrained("{where}")
question = "What is in the picture?\\nA. a cat\\nB. a dog"
messages = [
{system}    {{
        "role": "user",
        "content": [{{"type": "image", "image": "picture.jpg"}}, {{"type": "text", "text": question}}],
    }},
]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens={length})
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
_TEXT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{where}", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("{where}")
messages = [
{system}    {{"role": "user", "content": "What is 7 times 8?"}},
]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens={length})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


@dataclass(frozen=True)
class About:
    """A trained model.

    Attributes:
        name: of the model.
        where: a hub name or folder, from which it is loaded.
        base: what it was trained from; None: its own weights, of no name.
        data: what it was trained on; None: not known.
        rows: of that; None: a stream.
        system: the system prompt of training; None: none.
        reads_images: whether it is a vision-language model.
        length: longest completion of training, in tokens.
    """

    name: str
    where: str
    base: str | None
    data: str | None
    rows: int | None
    system: str | None
    reads_images: bool
    length: int


def introduced(card: str, about: About) -> str:
    """Return TRL's card with its sentence on origin and its example replaced by those of the model."""
    source = f"trained from {_linked(about.base)}" if about.base else "trained"
    rows = f"{about.rows:,} rows" if about.rows is not None else "a stream"
    on = f" on {rows} of {code(about.data)}" if about.data else f" on {rows}"
    origin = (
        f"This {'vision-language ' if about.reads_images else ''}model was {source}{on}, by reinforcement learning."
    )
    system = f'    {{"role": "system", "content": {about.system!r}}},\n' if about.system else ""
    example = (_VISION if about.reads_images else _TEXT).format(where=about.where, system=system, length=about.length)
    card = _ORIGIN.sub(lambda _: origin, card, count=1)
    card = _USE.sub(lambda _: f"```python\n{example}\n```", card, count=1)
    return re.sub(
        r"^# Model Card for .*$", lambda _: f"# Model Card for {about.name}", card, count=1, flags=re.MULTILINE
    )


def _linked(name: str) -> str:
    return code(name) if Path(name).exists() else f"[{name}](https://huggingface.co/{name})"


def code(text: str) -> str:
    """Return `text` as code whose span it cannot end."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"
