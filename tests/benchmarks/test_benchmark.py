"""The benchmark's own arithmetic, and one small run of it as on a GPU."""

import json
import sys

import pytest


@pytest.mark.parametrize("largest", [0, 1, 2, 5, 8, 11, 20])
def test_the_largest_number_that_fits(largest, module):
    search = module("sharing_measure").largest_fitting
    tried = []
    assert search(lambda number: tried.append(number) or number <= largest, 11) == min(largest, 11)
    assert max(tried) <= 11
    assert len(tried) == len(set(tried)) <= 7


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("place", ["scoring", "generation"])
def test_operations_by_formula_are_those_counted(place, shared, module):
    """PyTorch counts attention over all keys, seen or not; the head of a plain pass scores all positions on a CPU.

    A shared pass leaves out, of the 59 tokens in front of the last one, what follows the keys of the second layer.
    """
    models, passes = module("sharing_models"), module("sharing_passes")
    setting, size = passes.Setting(hidden=256, layers=2), models.Size(60, 16, 8, 3)
    needed = module("sharing_operations").operations_of(setting.model_shape, size, place, prompts=1, shared=shared)
    counted = module("sharing_measure").count_operations(setting, size, place)["shared" if shared else "plain"]
    if place == "scoring" and not shared:
        counted -= 2 * 256 * setting.model_shape.vocabulary * 3 * (67 - 8)
    if place == "scoring" and shared:
        rest = 256 * 256 + 3 * 256 * setting.model_shape.intermediate  # the output of attention, and the MLP
        counted += 59 * 2 * rest + 4 * 256 * 59 * 59
    assert needed == pytest.approx(counted, rel=0.04)


def test_a_training_pass_is_worth_three_and_a_step_one_more(module):
    models = module("sharing_models")
    operations, shape = module("sharing_operations").operations_of, models.ModelShape.square(64, 2)
    size = models.Size(60, 16, 8, 3)
    once, thrice, step = (
        operations(shape, size, place, prompts=2, shared=True)
        for place in ("scoring", "training with checkpointing", "step")
    )
    assert (thrice, step) == (3 * once, 4 * once)


def test_a_question_has_the_tokens_asked_for(module):
    models = module("sharing_models")
    processor = models.make_processor()
    for size in (models.Size(90, 60, 8, 2), models.Size(32, 0, 8, 2)):
        row = models.make_question(size, processor)
        assert ("image" in row) == bool(size.vision)
        assert models._tokens(row, processor) == size.prompt
    assert models.Size(768, 512, 1, 1).grid == (32, 64)
    with pytest.raises(ValueError, match="too short"):
        models.make_question(models.Size(20, 16, 8, 2), processor)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning")
def test_a_run_as_on_a_gpu(tmp_path, module, monkeypatch, capsys):
    output = tmp_path / "sharing.json"
    flags = ["--peak", "1e12", "--hidden", "64", "--layers", "2", "--sizes", "40,4,8,2", "--repeats", "1"]
    flags += ["--places", "training with checkpointing", "step", "--only", "seconds"]
    flags += ["--attention", "sdpa", "flash_attention_2", "--largest", "3", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["sharing.py", *flags])
    module("sharing").main()
    assert capsys.readouterr().err.count("flash_attention_2: no") == 3
    rows = json.loads(output.read_text())["rows"]
    assert [row["place"] for row in rows] == ["training with checkpointing", "step"]
    assert rows[0]["largest"] == {"plain": 3, "shared": 3}
    for row in rows:
        for kind in ("plain", "shared"):
            assert row["speed"][kind]["tokens per second"] == pytest.approx(96 / row["seconds"][kind][0])
            assert 0 < row["speed"][kind]["fraction of peak"] < 1
    assert "| 40, 4, 8, 2 | step |" in output.with_suffix(".md").read_text()
