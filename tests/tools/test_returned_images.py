import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from support.launching import results_of
from support.tool_runs import call, deal_turns, look, tool_trainer
from support.trainers import BIG_STEPS, begin, emitted, prompts, train_file, weights
from support.vllm import expanded, in_place_of_vllm
from test_turns import rollout_of

from vgr_trl.batch import pad_rows
from vgr_trl.patches.vllm import plan_unexpanded_prompts
from vgr_trl.reporting.records import read_run


@pytest.mark.parametrize("which", ["all", "prompt", "tools"])
def test_dependency_on_some_of_the_images(make, which):
    trainer = make(
        enable_perception_filtering=True, perturb_images=which, perturbation="mask_image", rollout_log_steps=1
    )
    rollout = rollout_of(trainer)
    batch, dependency, mask = rollout.batch, rollout.signals.dependency, rollout.signals.mask
    own = [[image.tobytes() for image in of_row] for of_row in rollout.turns.images]
    shown = [[image.tobytes() for image in of_row] for _, of_row in sorted(rollout.perturbed_images.items())]
    changed = [[one != two for one, two in zip(*both, strict=True)] for both in zip(own, shown, strict=True)]
    expected = {"all": (True, True), "prompt": (True, False), "tools": (False, True)}[which]
    assert changed == [[expected[0], *[expected[1]] * calls] for calls in (0, 1, 2, 1) * 2]
    flat = [image for _, of_row in sorted(rollout.perturbed_images.items()) for image in of_row]
    pixels = trainer.processing_class.image_processor(images=flat, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits = emitted(trainer.model, replace(batch, images=batch.images.with_pixels(pixels)))
        logps = logits.log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    change = logps - rollout.signals.logps
    assert torch.allclose(rollout.changes[mask], change[mask], atol=1e-5)
    if which == "tools":
        assert dependency[0].isnan().all(), "no tool was called"
        first = int((batch.by_policy[2] == 0).nonzero()[0])
        assert dependency[2, :first].abs().max() < 1e-9 < dependency[2][mask[2]].max()
    else:
        assert not dependency[mask].isnan().any()


@pytest.fixture
def play(model_folder, tmp_path, monkeypatch):
    """Builds a trainer of prompts without images, whose images an environment shows."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": word}]} for word in ("red", "blue")])

    def build(environment, calls, **options):
        deal = partial(deal_turns, turns=(calls,) * 4)
        return tool_trainer(model_folder, rows, tmp_path / "run", environment_factory=environment, deal=deal, **options)

    return build


class Scene:
    """Shows an image of its own before the first turn, and one for each call."""

    def reset(self, **row):
        return look(112)

    def look(self, wide: int) -> list[dict]:
        """Return an image.

        Args:
            wide: its width.
        """
        return look(wide)


def test_completions_of_a_prompt_may_be_shown_images_of_their_own(play, monkeypatch):
    widths = itertools.cycle((56, 112))
    monkeypatch.setattr(Scene, "reset", lambda self, **row: look(next(widths)))
    rollout = rollout_of(play(Scene, 1, rollout_log_steps=1, enable_perception_filtering=True))
    sizes = [[image.size for image in rollout.perturbed_images[row]] for row in range(8)]
    assert sizes == [[image.size for image in of_row] for of_row in rollout.turns.images]


class Picture:
    """An environment without tools."""

    def reset(self, **row):
        return look(112)


def test_environments_without_tools_render_prompts_of_views(play):
    rollout = rollout_of(play(Picture, 0, check_pixels=True, enable_perception_filtering=True))
    assert not rollout.signals.dependency[rollout.signals.mask].isnan().any()


def test_recorded_images_have_their_own_grids_behind_those_of_an_environment(play, tmp_path):
    play(Scene, 1, rollout_log_steps=1).train()
    for completion in next(read_run(tmp_path / "run").records()).completions:
        shown, returned = completion.images
        assert [(shown.width, shown.height), (returned.width, returned.height)] == [(112, 56), (56, 56)]
        assert [shown.grid, returned.grid] == [[2, 4], [2, 2]]


def updated(folder, rows, rank_rows, calls):
    """Weights after a step on eight completions, on one process or two, and what the attention signals were.

    `calls`: of the eight completions of two prompts.
    """
    options = BIG_STEPS | {"max_completion_length": 400, "per_device_train_batch_size": rank_rows}
    deal = partial(deal_turns, turns=calls, asked=lambda place, turn: call("look", wide=56 * (turn + 1)))
    seen = []

    def reward(completions, vgr, attention_per_image, **kwargs):
        seen.extend(zip(vgr, attention_per_image, strict=True))
        return [sum(map(ord, completion[-1]["content"])) % 7 / 7 for completion in completions]

    trainer = tool_trainer(folder, prompts(rows), f"{folder}/run", reward, deal=deal, token_weights=True,
                           enable_perception_filtering=True, **options)  # fmt: skip
    trainer.train()
    metrics = {name: value for name, value in trainer.state.log_history[0].items() if name.startswith("attention/")}
    return weights(trainer), seen, metrics


@pytest.mark.parametrize("calls", [(0, 0, 1, 0, 2, 1, 2, 0), (2, 0, 1, 0, 0, 0, 0, 0)], ids=["both", "one alone"])
def test_two_processes_with_different_numbers_of_turns(model_folder, question_files, calls):
    rows = train_file(question_files)
    expected, seen, metrics = updated(model_folder, rows, 8, calls)
    (one, first, logged), (two, second, also) = results_of(updated, model_folder, rows, 4, calls, processes=2)
    assert torch.equal(one, two)
    assert (one - expected).abs().max() < 1e-4
    assert [len(images) for _, images in seen] == [1 + count for count in calls]
    for (vgr, images), (other, others) in zip([*first, *second], seen, strict=True):
        assert vgr == pytest.approx(other, rel=1e-4)
        assert images == pytest.approx(others, rel=1e-4)
    assert logged == also == pytest.approx(metrics, rel=1e-4)


def test_vllm_reads_returned_images(make, monkeypatch):
    """Three turns, rows with one to three images: vLLM expands what training uses, and the check blanks all of them."""
    in_place_of_vllm(monkeypatch)
    trainer, plain = make(use_vllm=True, check_pixels=True), make()
    vllm, dealt, seen = trainer.vllm_generation, trainer.model.generate, []

    def generate(prompts, images, *options):
        seen.append([len(row or ()) for row in images])
        read = expanded(trainer.processing_class, prompts, images)
        ids, _ = pad_rows(read, trainer._tokenizer.pad_token_id, "left", None)
        completions = dealt(ids)[:, ids.size(1) :].tolist()
        end = trainer._tokenizer.eos_token_id
        completions = [tokens[: tokens.index(end) + 1] for tokens in completions]
        return read, completions, [[[-2.5]] * len(tokens) for tokens in completions], None

    vllm.llm.llm_engine.model_config = SimpleNamespace(max_model_len=4096)
    monkeypatch.setattr(vllm, "generate", generate)
    trainer.unexpanded = plan_unexpanded_prompts(vllm, trainer.processing_class)
    batch, other = (each._generate_and_score_completions(begin(each)) for each in (trainer, plain))
    assert seen == [[1] * 8, [2, 2, 2] * 2, [3] * 2]
    for name in ("prompt_ids", "completion_ids", "tool_mask", "pixel_values"):
        assert torch.equal(batch[name], other[name]), name
    assert trainer._metrics["train"]["pixels/change"][0] > 0
