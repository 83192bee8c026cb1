"""Continuous batching with images: completions, log-probabilities, pages, sampling and training."""

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support.models.batched import MARKS, as_trl_has_it, batched, greedy_equals, largest_distance, prompts_of
from support.models.families import FAMILIES, OTHERS, VOCABULARY, build
from support.tool_runs import deal_turns, tool_trainer
from support.trainers import begin, logged
from transformers import GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from vgr_trl import batching
from vgr_trl.batch import Batch, pad_rows
from vgr_trl.batching import BatchingError, ContinuousBatching, make_requests, why_not_batched
from vgr_trl.errors import ConfigError, EngineError
from vgr_trl.passes import run_pass
from vgr_trl.signals.scoring import Purpose

FAST = {"max_steps": 1, "compute_attention_metrics": False, "use_transformers_continuous_batching": True}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_next", "internvl", "idefics3"])
def test_completions_and_their_log_probabilities_are_those_of_plain_passes(name):
    family, model = FAMILIES[name], build(name)
    prompts = prompts_of(name, images=(2, 0))
    assert greedy_equals(model, prompts)
    requests, completions, logps = batched(model, *as_trl_has_it(prompts))
    assert [len(rows) for rows in requests.rows] == [3, 3]
    assert largest_distance(model, family, prompts, completions, logps) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "paligemma", "lfm2_vl", "ovis2"])
def test_models_that_pages_would_compute_otherwise_are_refused(name):
    assert why_not_batched(build({**FAMILIES, **OTHERS}[name])) is not None


def test_images_of_one_size_share_pages_only_if_they_are_equal():
    model, prompts = build("qwen2_5_vl"), prompts_of("qwen2_5_vl", images=(1, 1), generations=1, text=(40, 40))
    patches = int(prompts["image_grid_thw"][0].prod())
    picture = prompts["pixel_values"][:patches]
    row = {name: prompts[name][:1].repeat(2, 1) for name in prompts if name != "pixel_values"}
    for other, requests in ((picture, 1), (picture.flip(0), 2)):
        given = row | {"pixel_values": torch.cat([picture, other])}
        made, completions, logps = batched(model, *as_trl_has_it(given))
        assert len(made.ids) == requests
        assert largest_distance(model, FAMILIES["qwen2_5_vl"], given, completions, logps) < 1e-5
    ids, fields = as_trl_has_it(row | {"pixel_values": torch.cat([picture, picture])})
    ids[1][-3:] = [20, 21, 22]  # another question about the same image: the same ids up to there
    made = make_requests(model, ids, fields)
    assert len(made.ids) == 2
    assert made.ids[0][:-3] == made.ids[1][:-3]
    assert max(made.ids[0]) >= VOCABULARY


def test_few_pages_change_no_completion():
    model, prompts = build("qwen2_vl"), prompts_of("qwen2_vl", images=(2, 1))
    ids, fields = as_trl_has_it(prompts)
    greedy = {"do_sample": False, "top_k": None, "temperature": None}
    _, many, logps = batched(model, ids, fields, **greedy)
    _, few, again = batched(model, ids, fields, pages={"num_blocks": 14, "max_batch_tokens": 24}, **greedy)
    assert many == few
    logps, again = (torch.tensor([value for row in rows for value in row]) for rows in (logps, again))
    assert torch.allclose(logps, again, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 7, "min_p": 0.05}])
def test_tokens_are_drawn_from_the_distribution_of_generate(options):
    model, prompts = build("qwen2_5_vl"), prompts_of("qwen2_5_vl", images=(1, 1), generations=1)
    one = {name: value[:1] for name, value in prompts.items() if name != "pixel_values"}
    one["pixel_values"] = prompts["pixel_values"][: int(one["image_grid_thw"].prod())]
    given = {"do_sample": True, "top_k": 0, "suppress_tokens": MARKS, **options}
    with torch.no_grad():
        scores = model.generate(**one, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **given)
    expected = scores.scores[0][0].softmax(-1) * 4000
    many = {name: value.repeat(1000, *[1] * (value.ndim - 1)) for name, value in one.items()}
    sizes = {"num_blocks": 1200, "max_batch_tokens": 1024}
    torch.manual_seed(0)
    drawn = Counter()
    for _ in range(4):
        _, tokens, _ = batched(model, *as_trl_has_it(many), length=1, pages=sizes, **options)
        drawn.update(row[0] for row in tokens)
    assert not set(drawn) - {*expected.nonzero().flatten().tolist()}
    often = expected >= 5
    counts = torch.tensor([drawn[token] for token in range(VOCABULARY)], dtype=torch.float)
    chi = ((counts - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = int(often.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # about one in 10,000


def test_any_end_token_ends_a_completion_and_a_seed_repeats_it():
    model, prompts = build("llava"), prompts_of("llava")
    ids, fields = as_trl_has_it(prompts)
    ends = [*range(8, 40)]
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(batched(model, ids, fields, eos_token_id=ends)[1])
    assert runs[0] == runs[1] != runs[2]
    assert all(token not in ends for row in runs[0] for token in row[:-1])
    assert any(len(row) < 12 for row in runs[0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_behind_where_generation_ends_early(monkeypatch, error):
    model, prompts = build("qwen2_5_vl"), prompts_of("qwen2_5_vl")
    threads, forward, calls = threading.active_count(), model.forward, []

    def fail(*args, **kwargs):
        calls.append(args)
        if error is KeyboardInterrupt or len(calls) == 5:
            raise error("stopped")
        return "states"

    if error is KeyboardInterrupt:
        monkeypatch.setattr(ContinuousBatchingManager, "get_result", fail)
    else:
        monkeypatch.setattr(model.model.language_model.norm, "forward", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else BatchingError):
        batched(model, *as_trl_has_it(prompts))
    assert threading.active_count() == threads
    assert model.forward == forward
    monkeypatch.undo()
    assert greedy_equals(model, prompts)


def test_training_reads_the_engines_log_probabilities_as_old_ones(vision_trainer, monkeypatch):
    options = {"steps_per_generation": 2, "generation_kwargs": {"suppress_tokens": None}, "max_steps": 4}
    trainer = vision_trainer(**{**FAST, **options})
    purposes, plain = [], run_pass.run_pass
    monkeypatch.setattr(
        run_pass, "run_pass", lambda *args, **given: purposes.append(given["purpose"]) or plain(*args, **given)
    )
    trainer.train()
    assert purposes.count(Purpose.ROLLOUT) == 1  # of the first rollout alone, whose distance is measured
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-5
    assert trainer.batching.is_exact


def test_a_rollout_without_tokens_to_compare_decides_nothing(vision_trainer):
    trainer, ids = vision_trainer(**FAST), torch.zeros(2, 3, dtype=torch.long)
    for mask, expected in ((0, None), (1, False)):
        batch = Batch(ids, ids + 1, ids, ids + mask, columns={"engine_logps": torch.full((2, 3), -9.0)})
        trainer.batching.compare(batch, torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool))
        assert trainer.batching.is_exact is expected


def test_other_probabilities_than_the_trainers_are_no_old_ones(vision_trainer):
    trainer = vision_trainer(**{**FAST, "steps_per_generation": 2, "top_p": 0.5, "max_steps": 4})
    trainer.train()
    assert not trainer.batching.is_exact
    assert len(logged(trainer, "sampling/sampling_logp_difference/max")) == 2


def test_a_run_with_an_adapter_mixed_rows_and_a_greedy_evaluation(vision_trainer):
    rows = [dict(row) for row in vision_trainer.rows]
    rows = Dataset.from_list([row | {"image": row["image"] if number % 2 else None} for number, row in enumerate(rows)])
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = vision_trainer(
        rows=rows, eval_rows=rows.select(range(4)), peft_config=adapter, num_generations_eval=1, eval_temperature=0,
        eval_strategy="steps", eval_steps=1, batching_cache_megabytes=1, **FAST,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 5e-3  # its image tokens are not sampled
    assert logged(trainer, "eval_reward")


STOPPED, SEARCHED = ({"generation_kwargs": given} for given in ({"stop_strings": ["x"]}, {"num_beams": 2}))


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.2}, STOPPED, SEARCHED])
def test_options_that_it_would_ignore_are_refused(vision_trainer, options):
    with pytest.raises(ConfigError, match="continuous_batching"):
        vision_trainer(**FAST, **options)


def test_a_turn_behind_images_of_tools_is_a_batch_of_its_own(monkeypatch, model_folder, vision_trainer, tmp_path):
    # The dealt texts have no log-probabilities, so the engine is not compared.
    trainer = tool_trainer(model_folder, vision_trainer.rows, tmp_path / "run", engine_distance_limit=0, **FAST)
    deal, plain, tokenizer = deal_turns(trainer), batching.generate_batch, trainer._tokenizer
    shown = []

    def dealt(causal, requests, config, pages):
        plain(causal, requests, GenerationConfig(max_new_tokens=2, do_sample=True), pages)
        order = {row: ids for ids, rows in zip(requests.ids, requests.rows, strict=True) for row in rows}
        rows = [[min(token, len(tokenizer) - 1) for token in order[row]] for row in range(len(order))]
        shown.append(sum(token >= requests.vocabulary for ids in order.values() for token in ids))
        ids, _ = pad_rows(rows, tokenizer.pad_token_id, "left")
        texts = deal(ids)[:, ids.size(1) :].tolist()
        end = tokenizer.eos_token_id
        return [row[: row.index(end) + 1] for row in texts], [[0.0] * (row.index(end) + 1) for row in texts]

    monkeypatch.setattr(batching, "generate_batch", dealt)
    with trainer.new_rollout(begin(trainer)) as rollout:
        trainer.generate_and_score(rollout)
    assert len(shown) == 3
    assert [len(images) for images in rollout.turns.returned] == [0, 1, 2, 1] * 2
    columns = rollout.batch.completion_ids.size(1)
    assert rollout.batch.columns["engine_logps"].size(1) == columns


def test_an_engine_whose_log_probabilities_serve_as_old_ones_is_compared_in_the_next_update(
    vision_trainer, monkeypatch
):
    """Without a scoring pass, a later rollout has nothing to be compared with before its first training pass."""
    generated, plain = [], batching.generate_batch

    def generate(*args):
        completion_ids, logps = plain(*args)
        generated.append(len(logps))
        shift = 0.5 * (len(generated) == 3)
        return completion_ids, [[value - shift for value in row] for row in logps]

    monkeypatch.setattr(batching, "generate_batch", generate)
    options = {"steps_per_generation": 2, "generation_kwargs": {"suppress_tokens": None}, "max_steps": 8}
    trainer = vision_trainer(**{**FAST, **options})
    with pytest.raises(EngineError):
        trainer.train()
    assert (len(generated), trainer.state.global_step) == (3, 4)
    assert logged(trainer, "engine/distance")[-1] < 1e-5


def test_a_text_model_generates_by_trls_own_path(text_trainer, text_rows):
    pages = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 256}
    trainer = text_trainer(rows=text_rows, transformers_continuous_batching_config=pages, **FAST)
    assert trainer.batching is None
    trainer.train()
    assert logged(trainer, "reward")
    assert not logged(trainer, "sampling/sampling_logp_difference/max")


def test_pages_that_hold_no_request_end_the_run():
    ids, fields = as_trl_has_it(prompts_of("qwen2_vl"))
    with pytest.raises(BatchingError, match="batching_cache_megabytes"):
        batched(build("qwen2_vl"), ids, fields, pages={"num_blocks": 1})


def test_sharded_parameters_are_refused(vision_trainer):
    trainer = vision_trainer(**FAST)
    run = replace(trainer.run, facts=replace(trainer.run.facts, zero_stage=3))
    with pytest.raises(ConfigError, match="sharded"):
        ContinuousBatching(run, trainer.generation_config, trainer.continuous_batching_config)
