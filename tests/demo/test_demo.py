import json

from datasets import load_dataset
from transformers import AutoProcessor

from vgr_trl.cli.evaluate import load_for_inference
from vgr_trl.demo import Options, demo
from vgr_trl.demo.demo import draw_questions, learn_answers, learn_captions, supervised_loss, warm_start, words_of
from vgr_trl.demo.tiny_model import build_tiny_vlm
from vgr_trl.demo.write_folder import write_folder
from vgr_trl.evaluation import evaluate
from vgr_trl.reporting.records import read_run

SPLITS = ("train", "validation", "test")


def test_a_short_run_leaves_model_metrics_and_rollouts(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "warm_up", lambda *arguments: None)
    monkeypatch.setattr(demo, "set_up_process", lambda options: None)  # changes the logging of the whole process
    rows = {split: draw_questions(8, seed=0, split=split, multiple_choice=False) for split in SPLITS}
    options = Options(steps=2, prompts_per_step=2, num_generations=2, num_samples=2, threads=1)
    rose = demo.run_demo(options, tmp_path, demo.Questions(**rows))
    assert AutoProcessor.from_pretrained(tmp_path).image_token_id is not None
    assert (tmp_path / "model.safetensors").is_file()
    assert len(list((tmp_path / "completions").iterdir())) == 3
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["options"]["steps"], metrics["before"]["k"]) == (2, 2)
    assert rose is metrics["rose"] is (metrics["after"]["mean_at_k"] > metrics["before"]["mean_at_k"])
    before, after = read_run(tmp_path).records("eval")
    assert (before.step, after.step) == (0, 2)
    asked = [{completion.question for completion in record.completions} for record in (before, after)]
    assert len(asked[0]) == 8
    assert asked[0] == asked[1]


def test_warm_start_lowers_the_loss_and_stops_at_the_target(capsys):
    demo_rows = draw_questions(64, seed=0, split="train")
    model, processor = build_tiny_vlm(words_of(demo_rows), seed=0)
    before = supervised_loss(model, processor, demo_rows[:16], images=True)[0].item()
    assert learn_answers(model, processor, demo_rows, max_steps=2, batch_size=8) == 2
    assert learn_captions(model, processor, demo_rows, max_steps=2, batch_size=8) == 2
    settings = {"measure_every": 4, "batch_size": 8}
    history = warm_start(model, processor, demo_rows, accuracy=lambda: 0.0, max_steps=10, **settings)
    assert [step for step, _ in history] == [4, 8, 10]
    assert supervised_loss(model, processor, demo_rows[:16], images=True)[0].item() < 0.8 * before
    assert warm_start(model, processor, demo_rows, accuracy=lambda: 0.9, target_accuracy=0.5, **settings) == [(4, 0.9)]
    assert "100%|" in capsys.readouterr().err.rpartition("\r")[2]  # a bar that ends early ends full


def test_a_seed_draws_the_same_questions_again_and_no_image_is_in_two_splits():
    first, second = (draw_questions(20, seed=3, split="train") for _ in range(2))
    assert first == second
    assert first != draw_questions(20, seed=4, split="train")
    images = [{row["image"].tobytes() for row in draw_questions(200, seed=0, split=split)} for split in SPLITS]
    assert len(set.union(*images)) == sum(map(len, images))


def test_the_embedded_model_writes_answers_and_some_are_right(tmp_path):
    folder = tmp_path / "some" / "embedded"
    write_folder(folder, train=64, test=8)
    model, processor = load_for_inference(str(folder / "model"))
    rows = list(load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train"))
    sampling = {"num_samples": 4, "max_completion_length": 16}
    found = evaluate(model, processor, rows, system_prompt=None, progress=False, **sampling)
    assert found.format_sampled > 0.3
    assert 0.02 < found.mean_at_k < 0.6
