"""The demo: drawn questions, the warm start, and what a short run leaves."""

import json
from collections import Counter

from transformers import AutoProcessor

from vgr_trl.data.prompts import LETTERS
from vgr_trl.demo import Options, demo
from vgr_trl.demo.demo import FAMILIES, draw_questions, learn_answers, learn_captions, supervised_loss, warm_start
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


def test_warm_start_lowers_the_loss_and_stops_at_the_target(tiny, demo_rows):
    model, processor = tiny
    before = supervised_loss(model, processor, demo_rows[:16], images=True)[0].item()
    assert learn_answers(model, processor, demo_rows, max_steps=2, batch_size=8) == 2
    assert learn_captions(model, processor, demo_rows, max_steps=2, batch_size=8) == 2
    settings = {"measure_every": 4, "batch_size": 8}
    history = warm_start(model, processor, demo_rows, accuracy=lambda: 0.0, max_steps=10, **settings)
    assert [step for step, _ in history] == [4, 8, 10]
    assert supervised_loss(model, processor, demo_rows[:16], images=True)[0].item() < 0.8 * before
    assert warm_start(model, processor, demo_rows, accuracy=lambda: 0.9, target_accuracy=0.5, **settings) == [(4, 0.9)]


def test_a_seed_draws_the_same_questions_again_and_no_image_is_in_two_splits():
    first, second = (draw_questions(20, seed=3, split="train") for _ in range(2))
    assert first == second
    assert first != draw_questions(20, seed=4, split="train")
    for seed in (0, 1):
        images = [{row["image"].tobytes() for row in draw_questions(400, seed=seed, split=split)} for split in SPLITS]
        assert len(set.union(*images)) == sum(map(len, images))


def test_solution_is_in_the_thought_and_its_letter_says_nothing_about_it():
    rows = draw_questions(2000, seed=0, split="train")
    pairs = Counter()
    for row in rows:
        word = row["choices"][LETTERS.index(row["solution"])]
        assert word in row["thought"].split()
        assert sorted(row["choices"]) == sorted(FAMILIES[row["family"]][1])
        pairs[word, row["solution"]] += 1
    assert len(pairs) == 12 * 4
    # 2000 rows over 48 pairs: 42 on average; five standard deviations of a Poisson count are 32.
    assert all(10 < count < 74 for count in pairs.values())
