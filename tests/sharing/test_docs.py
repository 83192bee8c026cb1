"""docs/sharing.md: its examples run, and its table is what the script makes of the models."""

import copy
import importlib.util
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.models.families import build
from support.models.tiny_questions import WORDS
from support.steps import largest_relative_update, options, relative_difference, uneven_reward
from trl import GRPOConfig, RLOOConfig

from vgr_trl import sharing

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = re.findall(r"```python\n(.*?)```", (DOCS / "sharing.md").read_text(encoding="utf-8"), re.DOTALL)


def example(word):
    """The only example of the page that mentions a word."""
    (text,) = [text for text in EXAMPLES if word in text]
    return text


def run_both_ways(text, monkeypatch, make_names):
    """What the example leaves behind, with prompts shared and without; the same seed for both."""
    outcomes = []
    for share in (sharing.share_prompts, lambda *_: nullcontext(sharing.SharingReport())):
        monkeypatch.setattr(sharing, "share_prompts", share)
        outcomes.append(make_names())  # an example imports share_prompts from there
        torch.manual_seed(11)
        exec(text, outcomes[-1])
    return outcomes


@pytest.mark.parametrize(("word", "config"), [("GRPOTrainer(", GRPOConfig), ("RLOOTrainer(", RLOOConfig)])
def test_trainers_of_trl(word, config, vision, image_rows, tmp_path, monkeypatch, capsys):
    model, processor = vision
    allowed = {processor.tokenizer.eos_token_id, *processor.tokenizer(WORDS)["input_ids"][:6]}
    others = sorted(set(range(len(processor.tokenizer))) - allowed)
    settings = options(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    settings["generation_kwargs"] = {"suppress_tokens": others}

    def names():
        given = {"model": copy.deepcopy(model), "processor": processor, "rows": image_rows, "reward": uneven_reward}
        return {**given, "args": config(**settings)}

    shared, plain = run_both_ways(example(word), monkeypatch, names)
    assert list(shared["trainer"]._logs["completion"]) == list(plain["trainer"]._logs["completion"])
    assert largest_relative_update(model, shared["trainer"], plain["trainer"]) < 1e-5
    assert not shared["report"].plain
    assert shared["report"].prompts_per_row == 1 / 4
    assert "print" not in example(word) or "0.250 prompts per row" in capsys.readouterr().out


def test_a_loop_of_ones_own(monkeypatch):
    ids = torch.randint(8, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts["attention_mask"][1, :7] = 0

    def names():
        model = build("qwen3").train()
        given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
        return {**given, "prompts": prompts, "reward": lambda tokens: tokens.float().mean(1)}

    shared, plain = run_both_ways(example("optimizer.step()"), monkeypatch, names)
    assert torch.equal(shared["tokens"], plain["tokens"])
    start, mine, theirs = (dict(m.named_parameters()) for m in (build("qwen3"), shared["model"], plain["model"]))
    assert relative_difference(start, mine, theirs) < 1e-5


def test_the_table_is_what_the_script_makes():
    spec = importlib.util.spec_from_file_location("sharing_table", DOCS / "sharing_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TABLE.search(script.PAGE.read_text(encoding="utf-8")).group() == script.make_table()
    assert script.TITLES.keys() == {*script.FAMILIES, *script.OTHERS}
