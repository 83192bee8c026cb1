import copy
import random
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from support.steps import DAPO, LOSSES, STOCK, assert_same_steps, build_trainer, options, trained, uneven_reward
from support.trainers import logged

from vgr_trl.batch import Batch
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.errors import ConfigError
from vgr_trl.passes.micro_batches import RowsPerPass, UpdateMemory, _accumulate, _split_rows
from vgr_trl.passes.run_pass import rows_within
from vgr_trl.pixels import RowImages
from vgr_trl.run import Features
from vgr_trl.sharing.model_support import Feature
from vgr_trl.signals.scoring import cut_rows
from vgr_trl.trainer import DAPOTrainer

TABLE = yaml.safe_load(Path(__file__).with_name("steps.yaml").read_text(encoding="utf-8"))
SMALL = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}


def passes_of(trainer, compute=lambda positions: None):
    rows, plain = [], trainer._loss_of_part

    def count(model, batch, weight=1.0):
        rows.append(len(batch))
        compute(batch.ids.numel())
        return plain(model, batch, weight)

    trainer._loss_of_part = count
    return rows


@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_trl_in_passes_of_whole_groups(loss, vision, image_rows, tmp_path):
    settings = options(tmp_path, **SMALL) | {"epsilon_high": 0.28, "num_iterations": 2} | LOSSES[loss]
    stock = trained(STOCK, *vision, image_rows, settings)
    ours = trained(DAPO, *vision, image_rows, settings)
    assert_same_steps(vision[0], ours, stock)
    assert ours.rows_per_pass.joined == (1 if loss == "bnpo" else 8)
    assert stock.args.gradient_accumulation_steps == ours.args.gradient_accumulation_steps * ours.rows_per_pass.joined
    for name in ("epoch", "num_tokens", "completions/mean_length", "kl") if loss == "grpo" else ("epoch", "num_tokens"):
        assert logged(ours, name) == pytest.approx(logged(stock, name))
    assert ours.state.global_step == stock.state.global_step == 3


@pytest.mark.parametrize(("changed", "joined", "rows"), TABLE["joined"], ids=str)
def test_what_is_joined_and_cut_moves_the_weights_alike(changed, joined, rows, vision, image_rows, tmp_path):
    settings = options(tmp_path, **SMALL | changed, epsilon_high=0.28, attention_rows="all", skip_zero_advantage="off")
    whole = {"rows_per_pass": "off", "max_tokens_per_micro_batch": None}
    expected = trained(DAPO, *vision, image_rows, settings | whole)
    trainer = build_trainer(DAPO, *vision, image_rows, settings)
    found = passes_of(trainer)
    trainer.train()
    assert trainer.rows_per_pass.joined == joined
    assert found == rows * 3
    assert_same_steps(vision[0], trainer, expected)
    if expected.critic is not None:
        for name, value in expected.critic.named.items():
            torch.testing.assert_close(trainer.critic.named[name], value, rtol=1e-4, atol=1e-7)


def test_parts_leave_fsdp2_as_the_window_has_it(monkeypatch):
    """A micro-batch that only accumulates is not exchanged between processes, although it is cut."""
    accelerator, exchanges = Accelerator(cpu=True), []
    model = SimpleNamespace(set_requires_gradient_sync=exchanges.append)
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    for is_last, expected in ((False, [False, True, False]), (True, [False, True])):
        accelerator.gradient_state._set_sync_gradients(is_last)
        with _accumulate(accelerator, model):
            pass
        assert exchanges == expected
        exchanges.clear()


def with_term(trainer_class, method):
    """A subclass whose method adds a term to the loss of each micro-batch."""

    def add_term(self, model, inputs, *args, **kwargs):
        loss = getattr(super(mine, self), method)(model, inputs, *args, **kwargs)
        return loss + 1e-3 * sum(weight.square().sum() for weight in model.parameters())

    mine = type("Mine", (trainer_class,), {method: add_term})
    return mine


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
def test_a_term_of_a_subclass_is_added_as_often_as_in_trl(method, vision, image_rows, tmp_path):
    settings = options(tmp_path, **SMALL, epsilon_high=0.28)
    stock, ours = (
        trained((with_term(trainer_class, method), config), *vision, image_rows, settings)
        for trainer_class, config in (STOCK, DAPO)
    )
    assert_same_steps(vision[0], ours, stock)
    asked = settings | {"rows_per_pass": 4}
    joined = build_trainer((with_term(DAPOTrainer, method), DAPOConfig), *vision, image_rows, asked)
    assert joined.rows_per_pass.joined == 4


def test_a_loss_that_is_replaced_after_micro_batches_were_joined_is_refused(vision, image_rows, tmp_path):
    trainer = build_trainer(DAPO, *vision, image_rows, options(tmp_path, **SMALL))
    plain = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: 2 * plain(model, inputs)
    with pytest.raises(ConfigError):
        trainer.train()


def test_the_options_of_the_user_stay_for_another_trainer(vision, image_rows, tmp_path):
    args, (model, processor) = DAPOConfig(**options(tmp_path, **SMALL)), vision
    for _ in range(2):
        trainer = DAPOTrainer(copy.deepcopy(model), uneven_reward, args, image_rows, processing_class=processor)
        assert (trainer.rows_per_pass.joined, trainer.args.gradient_accumulation_steps) == (8, 1)
        assert {name: getattr(args, name) for name in SMALL} == SMALL


@pytest.mark.parametrize(("before", "after"), [("off", "auto"), ("auto", "off")])
def test_a_run_is_continued_within_a_rollout(before, after, vision, image_rows, tmp_path):
    """Four optimizer steps use a rollout: two before the checkpoint, two after it."""
    sizes = {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_iterations": 2, "max_steps": 5}
    settings = options(tmp_path, **SMALL | sizes, save_strategy="steps", save_steps=2, rows_per_pass=before)
    whole = trained(DAPO, *vision, image_rows, settings)
    rest = build_trainer(DAPO, *vision, image_rows, settings | {"rows_per_pass": after})
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {whole.rows_per_pass.joined, rest.rows_per_pass.joined} == {1, 4}
    assert logged(rest, "num_tokens") == logged(whole, "num_tokens")
    assert_same_steps(vision[0], rest, whole)


def simulated_device(monkeypatch, total, fixed, update, per_position):
    """A GPU on which an update takes a fixed part and a part per position that its largest pass computes."""
    device = SimpleNamespace(peak=0, allocated=fixed)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - device.allocated, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: device.allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: device.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: device.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: setattr(device, "peak", device.allocated))
    device.compute = lambda positions: setattr(
        device, "peak", max(device.peak, device.allocated + update + positions * per_position)
    )
    return device


@pytest.mark.parametrize("seed", range(20))
def test_no_pass_needs_more_than_the_device_has(seed, monkeypatch):
    draw = random.Random(seed)
    group, update, per_position = 16, draw.choice([0, 20_000]), draw.choice([1, 3, 9])
    prompt, longest = draw.choice([100, 1000]), draw.choice([50, 500])
    user = update + per_position * (prompt + longest)
    total = int((10_000 + 2 * update + user) * draw.choice([1.2, 2, 10]))
    device = simulated_device(monkeypatch, total, 10_000, update, per_position)
    limits = RowsPerPass(1, group, None, UpdateMemory(torch.device("cpu"), lambda each: each), None)
    largest = []
    for step in range(12):
        completion = draw.randint(longest // 2, longest)
        limits.memory.begin_pass()
        passes, row = [], 0
        while row < group:
            rows = 1
            while row + rows < group and limits.load(
                rows + 1, prompt + (rows + 1) * completion, (rows + 1) * (prompt + completion)
            ) <= 1:  # fmt: skip
                rows += 1
            passes.append((prompt + rows * completion, rows * (prompt + completion)))
            largest.append(rows)
            row += rows
        if len(passes) > 1:
            limits.memory.measure(passes)
        for computed, _ in passes:
            device.compute(computed)
        assert device.peak <= total, step
        limits.memory.end_update()
        device.allocated = 10_000 + update  # the averages of the optimizer
    assert largest[0] == 1
    if total > 2 * (10_000 + 2 * update + per_position * (prompt + group * longest)):
        assert largest[-1] == group


def test_passes_of_a_trainer_grow_to_whole_groups(vision, image_rows, tmp_path, monkeypatch):
    settings = options(tmp_path, **SMALL, max_steps=6, skip_zero_advantage="off")
    expected = trained(DAPO, *vision, image_rows, settings | {"rows_per_pass": "off"})
    trainer = build_trainer(DAPO, *vision, image_rows, settings)
    trainer.rows_per_pass.memory = UpdateMemory(trainer.accelerator.device, trainer.accelerator.gather)
    found = passes_of(trainer, simulated_device(monkeypatch, 10**9, 1000, 0, 1).compute)
    trainer.train()
    assert found[:8] == [1] * 8
    assert found[-1] == 8
    assert_same_steps(vision[0], trainer, expected)


def test_prompts_of_equal_text_with_other_images_are_counted_apart():
    """Two prompts of 4 tokens, each with two completions of 2 tokens: 8 positions a prompt, 12 if they were one."""
    ones, accelerator = torch.ones(4, 4, dtype=torch.int64), Accelerator(cpu=True)
    images = RowImages({"pixel_values": torch.tensor([1.0, 1.0, 2.0, 2.0]).view(4, 1, 1, 1)}, [1] * 4)
    batch = Batch(ones, ones, ones[:, :2], ones[:, :2], images, advantages=torch.ones(4))
    features = Features(**{field.name: Feature() for field in fields(Features)})
    run = SimpleNamespace(
        accelerator=accelerator, features=features, args=SimpleNamespace(max_tokens_per_micro_batch=12)
    )
    assert _split_rows(run, RowsPerPass(4, 1, None, None, None), batch) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("budget", "group", "sizes"),
    [(28, 4, [3, 1, 3, 1]), (15, 4, [1] * 8), (34, 4, [4, 4]), (68, 4, [8]), (28, 8, [3, 3, 2])],
)
def test_scoring_chunks_under_a_budget_end_with_their_group(budget, group, sizes):
    """P 10, T 6: three rows fit into 28 tokens, and a chunk with the last row of a group and two more has 38."""
    assert [*map(len, cut_rows(8, rows_within(budget, group, 16, 6), group))] == sizes
