"""What `make gpu` runs, on a CPU with tiny models; and the arithmetic of its results by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
SIZE = (48, 16, 8, 2)


@pytest.mark.parametrize(
    ("name", "whole", "tower"),
    [
        ("qwen2.5-vl-3b", 3_754_622_976, 668_684_288),
        ("qwen2.5-vl-7b", 8_292_166_656, 676_550_144),
        ("qwen2.5-vl-32b", 33_452_718_336, 688_841_984),
        ("qwen3-vl-4b", 4_437_815_808, 415_347_712),
        ("qwen3-vl-8b", 8_767_123_696, 576_388_336),
    ],
)
def test_shapes_have_the_published_numbers_of_parameters(name, whole, tower, module):
    models = module("sharing_models")
    tokenizer = models.make_processor().tokenizer
    shape = models.MODEL_SHAPES[name]
    model = models.build_model(shape, tokenizer, device="meta", dtype="bfloat16", attention="sdpa")
    assert sum(one.numel() for one in model.parameters()) == whole
    assert sum(one.numel() for one in model.model.visual.parameters()) == tower


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["tiny-qwen2.5-vl", "tiny-qwen3-vl"])
def test_matrix_products_of_an_update_are_those_counted(family, checkpointing, adapters, module, monkeypatch):
    """Without attention, of which PyTorch counts all keys, seen or not; adapters' own products are left out too."""
    bench, plan, models = module("gpu.bench"), module("gpu.plan"), module("sharing_models")
    operations = module("sharing_operations")
    monkeypatch.setattr(bench, "switch_checkpointing_on", bench.switch_checkpointing_on if checkpointing else id)
    one = plan.Measurement("update", family, models.Size(120, 64, 16, 4), adapters)
    shape, update = models.MODEL_SHAPES[family], operations.Update(adapters, checkpointing)
    through_tower = adapters and checkpointing and family == "tiny-qwen2.5-vl"
    for name, run in bench.updates(one, "cpu", "float32", "sdpa", rank=1).items():
        with FlopCounterMode(display=False) as counter:
            run()
        counts = counter.get_flop_counts()["Global"]
        counted = sum(count for operation, count in counts.items() if "attention" not in str(operation))
        forward = operations.forward_of(shape, one.size, shared=name == "shared")
        forward = replace(forward, attention=0, tower_attention=0)
        needed = operations.operations_of_update(forward, update, through_tower=through_tower)
        # PyTorch does not count `addmm_`, which sums the head's gradients up.
        needed -= 0 if adapters else forward.head
        if name == "plain":  # on a CPU the head of a plain pass scores the prompts too
            needed += 2 * 2 * shape.hidden * shape.vocabulary * 4 * (120 - 1)
        else:  # of the last layer, the tokens of the prompt need keys and values alone
            keys = 2 * shape.hidden * shape.head_width * shape.key_heads
            passes = (2 if adapters else 3) + checkpointing
            needed -= passes * 2 * (120 - 1) * (operations.layer_weights(shape) - keys)
        assert counted == pytest.approx(needed, rel=0.06)


def test_logical_operations_are_plain_and_computed_once(module):
    operations, models = module("sharing_operations"), module("sharing_models")
    shape, size = models.MODEL_SHAPES["qwen2.5-vl-7b"], models.Size(1536, 1280, 384, 8)
    forward = operations.forward_of(shape, size, shared=False)
    for update in (operations.Update(), operations.Update(checkpointing=False)):
        assert operations.logical_update(shape, size, update) == 3 * forward.total - forward.embedding
    tokens = 8 * (1535 + 384)
    assert forward.weights == 2 * tokens * 28 * (3584 * 128 * (56 + 8) + 3 * 3584 * 18944)
    ratio = operations.forward_of(shape, size, shared=True).total / forward.total
    assert ratio == pytest.approx(0.27, abs=0.005)  # the limit that shared/plain can reach, known before


def test_utilisation_by_hand(module):
    assert module("sharing_operations").utilisation(5e12, 2.0, 10e12) == 0.25


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:flex_attention called without:UserWarning")
def test_benchmarks_continue_and_report(module, tmp_path, capsys):
    bench, kernels, report = module("gpu.bench"), module("gpu.kernels"), module("gpu.report")
    results, output = module("gpu.results"), tmp_path / "gpu.jsonl"
    flags = ["--device", "cpu", "--dtype", "float32", "--repeats", "1", "--output", str(output)]
    bench.main(["--shape", "tiny-qwen3-vl", "--parts", "passes", *flags])
    kernels.main(["--shapes", "tiny-qwen2.5-vl", *flags])
    lines = results.read(output)
    kinds = ("update", "update lora", "scoring", "kernels", "generation")
    names = {f"tiny-qwen3-vl {kind} 48,16,8,2" for kind in kinds}
    assert set(lines) == {"device", "tiny-qwen2.5-vl attention 48,16,8,2", *names}
    assert not any("error" in line.found for line in lines.values())
    assert "transformers" in lines["device"].machine
    for strategy in lines["tiny-qwen2.5-vl attention 48,16,8,2"].found.values():
        assert len(strategy["seconds"]) == 1
        assert max(strategy["errors"].values()) < 1e-6
    before = output.read_text()
    bench.main(["--shape", "tiny-qwen3-vl", *flags])
    assert output.read_text() == before
    bench.main(["--shape", "tiny-qwen2.5-vl", "--minutes", "-1", *flags])
    assert output.read_text() == before
    assert "the same command continues" in capsys.readouterr().out
    report.main(["--lines", str(output), "--output", str(tmp_path / "gpu.md")])
    page = (tmp_path / "gpu.md").read_text()
    assert "| update | 1536,1280,384,8 | shared | not run |" in page
    assert "| qwen2.5-vl-7b | 1536,1280,2048,8 | not run |" in page


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:flex_attention called without:UserWarning")
def test_steps_and_what_fails(module, tmp_path, monkeypatch):
    bench, results, output = module("gpu.bench"), module("gpu.results"), tmp_path / "gpu.jsonl"

    def generations(*arguments):
        raise torch.OutOfMemoryError("too much\nof everything")

    plan, models = module("gpu.plan"), module("sharing_models")
    kinds = [("step", True), ("generation", False)]
    wanted = [plan.Measurement(kind, "tiny-qwen2.5-vl", models.Size(*SIZE), adapters) for kind, adapters in kinds]
    monkeypatch.setattr(bench, "generations", generations)
    monkeypatch.setattr(bench, "steps", lambda shape: wanted)
    flags = ["--device", "cpu", "--dtype", "float32", "--repeats", "1", "--output", str(output)]
    bench.main(["--shape", "tiny-qwen2.5-vl", "--parts", "steps", *flags])
    step, failed = (results.read(output)[one.name].found for one in wanted)
    assert list(step) == ["trl", "ours", "vgr", "perception"]
    assert all(run["seconds"][0] > 0 for run in step.values())
    assert failed == {"error": "OutOfMemoryError: too much"}


def test_the_page_shows_ratios_goals_and_failures(module):
    """Made-up measurements whose ratios are known."""
    report, results = module("gpu.report"), module("gpu.results")
    operations, models = module("sharing_operations"), module("sharing_models")
    card = {"device": "NVIDIA H200", "torch": "2.11"}
    shape, size = models.MODEL_SHAPES["qwen2.5-vl-7b"], models.Size(1536, 1280, 384, 8)
    seconds = operations.executed_update(shape, size, operations.Update(), shared=True) / 989e12 / 0.5
    runs = {
        "plain": {"seconds": [5 * seconds, 4 * seconds, 4 * seconds], "peak": 40_000_000_000},
        "shared": {"seconds": [seconds] * 3, "peak": 10_000_000_000},
    }
    attention = {
        "two stages": {"seconds": [seconds / 28]},
        "packed": {"seconds": [0.75 * seconds / 28], "first": 14.0},
        "paths": {"error": "RuntimeError: a | b"},
    }
    lines = [
        results.Line("qwen2.5-vl-7b update 1536,1280,384,8", card, "", runs),
        results.Line("qwen2.5-vl-7b attention 1536,1280,384,8", card, "", attention),
        results.Line("qwen2.5-vl-7b scoring 1536,1280,384,8", card, "", {"error": "OutOfMemoryError: x"}),
        results.Line("tests/gpu/test_x.py::test_y", card, "", {"outcome": "passed", "apart": 1.234e-5}),
    ]
    page = report.page({line.name: line for line in lines})
    assert "| update, T 384, against TRL's | qwen2.5-vl-7b update 1536,1280,384,8 | ≤ 0.30 | **0.250** |" in page
    assert f"| update | 1536,1280,384,8 | shared | {seconds:.3f} | **0.250** | 10.0 | **0.250** | 0.500 |" in page
    assert "| scoring | 1536,1280,384,8 | trl | OutOfMemoryError: x |" in page
    assert "| RuntimeError: a / b | 14.0 | **0.250** |" in page
    assert "| `test_x.py::test_y` | passed | apart 1.2e-05 |" in page


def test_the_committed_page_is_made_of_the_committed_lines(module):
    report, results = module("gpu.report"), module("gpu.results")
    assert (ROOT / "benchmarks/results/gpu.md").read_text() == report.page(results.read(results.FILE))


def test_every_target_of_the_page_exists(module):
    """Nothing is run: make says what it would run."""
    for target in module("gpu.report").TARGETS:
        command = ["make", "--dry-run", target, f"GPU_PYTHON={sys.executable}"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert "gpu.bench --device cuda" in said or "gpu.kernels" in said or "pytest" in said
    shapes = module("gpu.plan").SHAPES
    said = {json.dumps(shape) for shape in shapes if shape in (ROOT / "Makefile").read_text()}
    assert len(said) == len(shapes)
