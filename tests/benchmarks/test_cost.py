"""The arithmetic of docs/cost.md, by hand and against what was measured elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "whole"),
    [("qwen2.5-vl-7b", 8_292_166_656), ("qwen2.5-vl-3b", 3_754_622_976), ("qwen3-vl-8b", 8_767_123_696)],
)
def test_parameters_are_the_published_ones_but_for_norms_and_biases(name, whole, module):
    cost, models = module("cost"), module("sharing_models")
    shape = models.MODEL_SHAPES[name]
    assert cost.language_parameters(shape) + cost.tower_parameters(shape) == pytest.approx(whole, rel=5e-4)


@pytest.mark.parametrize(
    ("size", "shared", "checkpointing", "megabytes"),
    [
        ("768,512,128,8", False, False, 6124),
        ("768,512,128,8", True, False, 1533),
        ("768,512,128,8", False, True, 1179),
        ("768,512,128,8", True, True, 323),
        ("32,0,256,8", True, False, 1034),
        ("32,0,256,8", True, True, 285),
    ],
)
def test_memory_is_that_measured(size, shared, checkpointing, megabytes, module):
    """The table of benchmarks/results/sharing.md: float32, hidden 512, 8 layers; peak above model and batch."""
    cost, models, operations = module("cost"), module("sharing_models"), module("sharing_operations")
    assert (
        f"{megabytes:,} MB" in (table := (ROOT / "benchmarks/results/sharing.md").read_text())
        or f"{megabytes:,} →" in table
    )
    shape, size = models.ModelShape.square(512, 8), models.Size.parse(size)
    trained = cost.language_parameters(shape) + bool(size.vision) * cost.tower_parameters(shape)
    kept = cost.activations(shape, size, operations.Update(checkpointing=checkpointing), shared=shared, width=4)
    assert kept + 4 * trained == pytest.approx(megabytes * 1e6, rel=0.15)


@pytest.mark.parametrize(
    ("place", "size", "measured", "bound"),
    [
        ("training", "768,512,128,8", 7.45, 0.02),
        ("training with checkpointing", "768,512,128,8", 8.60, 0.15),
        ("scoring", "32,0,256,8", 1.67, 0.06),
        ("training", "32,0,256,8", 4.81, 0.10),
        ("training with checkpointing", "32,0,256,8", 5.92, 0.19),
    ],
)
def test_seconds_are_those_measured(place, size, measured, bound, module):
    """Of shared passes, in the same table; only the first row's operations per second are fitted."""
    operations, models = module("sharing_operations"), module("sharing_models")
    table = (ROOT / "benchmarks/results/sharing.md").read_text()
    assert f"→ {measured:.2f} s" in table
    assert "→ 2.48 s" in table
    shape, fitted = models.ModelShape.square(512, 8), models.Size(768, 512, 128, 8)
    rate = operations.forward_of(shape, fitted, shared=True).total / 2.48
    size, update = models.Size.parse(size), operations.Update(checkpointing="checkpointing" in place)
    needed = operations.forward_of(shape, size, shared=True).total
    if place != "scoring":
        needed = operations.executed_update(shape, size, update, shared=True)
    assert needed / rate == pytest.approx(measured, rel=bound)


def test_communication_by_hand(module):
    cost, models = module("cost"), module("sharing_models")
    shape = replace(models.MODEL_SHAPES["qwen2.5-vl-3b"], tied=True)
    load = cost.Load(shape, models.Size(1536, 1280, 384, 8), gpus=8)
    weights = 2 * (cost.language_parameters(shape) + cost.tower_parameters(shape))
    assert cost.communicated(load) == 7 / 8 * 2 * weights  # gradients summed, new weights handed out
    # ZeRO-3, plain: generation, scoring, forward, backward gather the weights; gradients are summed.
    assert cost.communicated(replace(load, shard=3, shared=False)) == 7 / 8 * 5 * weights
    assert cost.communicated(replace(load, shard=3)) == 7 / 8 * 7 * weights  # two stages in scoring and forward
    assert cost.communicated(replace(load, gpus=1)) == 0


def test_seconds_by_hand(module):
    """A machine on which a pass takes as many seconds as it has operations, or bytes."""
    cost, models, operations = module("cost"), module("sharing_models"), module("sharing_operations")
    shape, size = models.MODEL_SHAPES["tiny-qwen3-vl"], models.Size(48, 16, 8, 2)
    machine = cost.Machine(1.0, 1.0, 1.0, efficiency=1.0, reach=1.0, launch=0.0)
    load = cost.Load(shape, size, prompts=3, perception=True)
    found = cost.seconds(load, machine)
    assert found["perception"] == 3 * operations.forward_of(shape, size, shared=True).total
    assert found["update"] == 3 * operations.executed_update(shape, size, load.update, shared=True)
    kept = 2 * 2 * 2 * 2 * 32  # keys and values, bfloat16, two layers, two heads of 32
    assert cost.kept_bytes(shape) == kept
    first = 3 * operations.forward_of(shape, models.Size(48, 16, 1, 2), shared=True).total
    assert found["generation"] == first + 8 * (2 * cost.language_parameters(shape) + 6 * 52 * kept)
    assert found["communication"] == 0
    assert cost.seconds(replace(load, perception=False, scored=False), machine)["scoring"] == 0


def test_gpu_hours_grow_with_questions_and_tests(module):
    cost = module("cost")
    load, machine = cost.experiment_load("experiment1.sh"), cost.Machine()
    hours = cost.gpu_hours(load, machine, questions=1000, epochs=3)
    assert hours == pytest.approx(8 * 375 * sum(cost.seconds(load, machine).values()) / 3600)
    assert cost.gpu_hours(load, machine, questions=1000, epochs=3, tested=100) > hours


def test_every_experiment_is_there(module):
    cost = module("cost")
    scripts = {path.name: path.read_text() for path in (ROOT / "experiments").glob("*.sh") if path.name != "common.sh"}
    assert scripts.keys() == cost.EXPERIMENTS.keys()
    for name, text in scripts.items():
        shape, adapters, _, shard, epochs = cost.EXPERIMENTS[name]
        assert ("3B" in text) == (shape == "qwen2.5-vl-3b")
        assert ("--use_peft" in text) == adapters
        assert ("zero3" in text) == (shard == 3)
        assert ("--num_train_epochs 1" in text) == (epochs == 1)


def test_the_text_shows_the_tables(module, capsys):
    module("cost").main()
    text = (ROOT / "docs/cost.md").read_text()
    for line in capsys.readouterr().out.splitlines():
        assert line in text


def test_the_table_of_long_prompts_is_that_of_its_script(module):
    text = (ROOT / "docs/long_prompts.md").read_text()
    prompts = module("long_prompts")
    rows = prompts.rows_of_table()
    assert len(rows) == 5
    assert all(row in text for row in rows)
    for shared, count in ((True, 8), (False, 8), (False, 1)):
        longest = prompts.longest(shared=shared, rows=count)
        assert f"{longest:,}" in text
        held = [sum(module("cost").memory(prompts.load(size, shared=shared, rows=count)).values())
                for size in (longest, longest + 1)]  # fmt: skip
        assert held[0] <= 80e9 < held[1]
