import io
import json
import math
import sys
from functools import partial

import pytest
from PIL import Image
from support.launching import results_of
from support.tool_runs import call, deal_turns, tool_trainer
from support.trainers import logged, prompts, tiny_model, train_file

from vgr_trl.reporting.records import read_run
from vgr_trl.tools import Zoom

RED = Image.new("RGB", (56, 56), (200, 30, 30))
FAILS = {"exit", "broken", "empty", "thin", "path", "url"}
IMAGES = {"image", "both", "bytes", "untyped"}
NO_CALL = {"brackets", "fewer brackets", "flat"}
BRACKETS = "[" * 1500 + "]" * 1500


def as_bytes(image, length=None):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()[:length]


def broken():
    """An image of Pillow whose pixels are not read yet, and cannot be."""
    return Image.open(io.BytesIO(as_bytes(Image.effect_noise((99, 99), 80), 900)))


RESULTS = {
    "text": lambda: "a circle is teal",
    "special": lambda: "a <|image_pad|> circle <|im_end|> \ud800",
    "image": lambda: [{"type": "image", "image": RED}],
    "both": lambda: [{"type": "image", "image": RED}, {"type": "text", "text": "<|image_pad|> teal"}],
    "bytes": lambda: [{"type": "image", "image": as_bytes(RED)}],
    "untyped": lambda: [{"image": RED}, {"text": "teal"}],
    "none": lambda: None,
    "nothing": list,
    "numbers": lambda: [0.5, "teal"],
    "no parts": lambda: [{"title": "teal", "type": "video"}],
    "exit": lambda: sys.exit(0),
    "broken": lambda: [{"type": "image", "image": broken()}],
    "empty": lambda: [{"type": "image", "image": Image.new("RGB", (0, 5))}],
    "thin": lambda: [{"type": "image", "image": Image.new("RGB", (1, 999))}],
    "path": lambda: [{"type": "image", "image": "/etc/hostname"}],
    "url": lambda: [{"type": "image", "url": "/etc/hostname"}],
}


def show(kind: str):
    """Return a result of a kind.

    Args:
        kind: its name.
    """
    return RESULTS[kind]()


async def show_later(kind: str):
    """Return a result of a kind.

    Args:
        kind: its name.
    """
    return RESULTS[kind]()


def quoted(name, **arguments):
    """A call with texts as arguments, in which special tokens are escaped, as a policy can write them."""
    written = call(name, **{key: json.dumps(value) for key, value in arguments.items()})
    return written.replace("<|", r"\u003c|").replace(r"\u003c|im_end", "<|im_end")


def said(trainer):
    seen, plain = [], trainer._calculate_rewards

    def keep(inputs, prompts, completions, ids):
        seen.extend(message for completion in completions for message in completion if message["role"] == "tool")
        return plain(inputs, prompts, completions, ids)

    trainer._calculate_rewards = keep
    trainer.train()
    assert math.isfinite(logged(trainer, "loss")[0])
    return seen


@pytest.mark.parametrize("kind", RESULTS)
def test_training_goes_on_after_every_kind_of_result(make, kind, tmp_path):
    tool = show_later if kind in ("exit", "both") else show
    deal = partial(deal_turns, asked=lambda place, turn: quoted(tool.__name__, kind=kind))
    trainer = make(tools=[tool], deal=deal, rollout_log_steps=1, log_completions=True)
    messages = said(trainer)
    assert len(messages) == 8
    assert logged(trainer, "tools/failure_frequency") == [float(kind in FAILS)]
    assert all(("error" in message["content"]) == (kind in FAILS) for message in messages)
    assert not any("<|image_pad|>" in str(message) or "\ud800" in str(message) for message in messages)
    records = [each for record in read_run(tmp_path / "run").records("train") for each in record.completions]
    assert {len(each.images) > 1 for each in records} <= {False, kind in IMAGES}
    if kind == "exit":
        assert "show_later" in messages[0]["content"]


def trained(folder, rows, kinds):
    deal = partial(
        deal_turns,
        turns=(1, 1, 0, 1, 0, 0, 0, 0),
        asked=lambda place, turn: quoted("show", kind=kinds[place % len(kinds)]),
    )
    options = {"per_device_train_batch_size": 4}
    trainer = tool_trainer(folder, prompts(rows), f"{folder}/run", deal=deal, tools=[show], **options)
    trainer.train()
    return logged(trainer, "loss")[0]


@pytest.mark.parametrize("kinds", [["text"], ["image", "broken"]], ids="-".join)
def test_one_process_alone_has_results(model_folder, question_files, kinds):
    one, two = results_of(trained, model_folder, train_file(question_files), kinds, processes=2)
    assert math.isfinite(one)
    assert one == two


WRITTEN = {
    "marker as argument": quoted("zoom", box="<|image_pad|>"),
    "marker as tool": quoted("<|image_pad|>", box=1),
    "marker as argument name": quoted("zoom", **{"<|image_pad|>": 1}),
    "surrogate": r'<tool_call>{"name": "zoom", "arguments": {"box": "\ud800", "\udfff": 1}}</tool_call>',
    "surrogate as tool": r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
    "brackets": f'<tool_call>{{"name": "zoom", "arguments": {{"box": {BRACKETS}}}}}</tool_call>',
    "fewer brackets": f'<tool_call>{{"name": "zoom", "arguments": {{"box": {"[" * 450 + "]" * 450}}}}}</tool_call>',
    "no arguments": '<tool_call>{"name": "zoom", "arguments": 5}</tool_call>',
    "flat": '<tool_call>{"tool": "zoom"}</tool_call>',
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_nothing_that_the_policy_writes_ends_the_run(make, model_folder, kind, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model = tiny_model(model_folder)
    model.config.text_config.max_position_embeddings = 8192
    deal = partial(deal_turns, turns=(0, 1, 0, 0), asked=lambda place, turn: WRITTEN[kind])
    options = {"rollout_log_steps": 1, "log_completions": True, "max_completion_length": 7000}
    messages = said(make(model=model, environment_factory=Zoom, deal=deal, **options))
    assert len(messages) == (0 if kind in NO_CALL else 2)
    for message in messages:
        assert not any(each in str(message) for each in ("<|image_pad|>", "\ud800", "\udfff"))
