import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from support.models.families import build
from support.steps import STOCK, assert_same_steps, build_trainer, options, uneven_reward
from trl import RLOOConfig, RLOOTrainer

DOCS = Path(__file__).resolve().parents[2] / "docs"


EXAMPLES = re.findall(r"```python\n(.*?)```", (DOCS / "sharing.md").read_text(encoding="utf-8"), re.DOTALL)


def run(word, trainer="GRPOTrainer", **names):
    """Run the only example of the page that mentions a word, with a trainer of TRL, and return its names."""
    (text,) = [text for text in EXAMPLES if word in text]
    torch.manual_seed(11)
    exec(text.replace("GRPOTrainer", trainer), names)
    return names


@pytest.mark.parametrize(
    ("classes", "loss"), [(STOCK, {}), (STOCK, {"loss_type": "grpo"}), ((RLOOTrainer, RLOOConfig), {})]
)
def test_trainers_of_trl(classes, loss, vision, image_rows, tmp_path):
    """Micro-batches of two rows become whole groups; with one group in an optimizer step each prompt runs once."""
    model, processor = vision
    settings = options(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **loss)
    plain = build_trainer(classes, model, processor, image_rows, settings)
    given = {"model": copy.deepcopy(model), "processor": processor, "rows": image_rows, "reward": uneven_reward}
    given["args"] = copy.deepcopy(plain.args)
    plain.train()
    found = run("GRPOTrainer(", classes[0].__name__, **given)
    assert_same_steps(model, found["trainer"], plain)
    assert not found["report"].plain
    assert found["report"].prompts_per_row == 1 / 4
    assert found["report"].rows >= 3 * (4 + 4)


def test_a_loop_of_ones_own():
    ids = torch.randint(8, 96, (2, 40), generator=torch.Generator().manual_seed(0))
    model = build("qwen3").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prompts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    run(
        "optimizer.step()", model=model, optimizer=optimizer, prompts=prompts,
        reward=lambda tokens: tokens.float().mean(1),
    )  # fmt: skip
    start = dict(build("qwen3").named_parameters())
    assert any(not torch.equal(start[name], after) for name, after in model.named_parameters())


def test_the_table_is_what_the_script_makes():
    spec = importlib.util.spec_from_file_location("sharing_table", DOCS / "sharing_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.TABLE.search(script.PAGE.read_text(encoding="utf-8")).group() == script.make_table()
    assert script.TITLES.keys() == {*script.FAMILIES, *script.OTHERS}
