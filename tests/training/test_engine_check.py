"""An engine that computes something else than the trainer ends the run in the rollout in which it does."""

import copy
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from support.launching import results_of
from support.models.tiny_questions import made_vision
from support.trainers import begin, config, letters_reward, logged, prompts, train_file, vision_trainer
from support.vllm import Engine, engine_in_place_of_vllm

from vgr_trl.batch import pad_rows
from vgr_trl.errors import EngineError
from vgr_trl.passes import run_pass
from vgr_trl.patching import patched_attribute, patched_attributes
from vgr_trl.rollout_checks import EngineCheck, engine_distance
from vgr_trl.trainer import DAPOTrainer

OPTIONS = {
    "use_vllm": True, "vllm_mode": "colocate", "engine_distance_limit": 0.1, "compute_attention_metrics": False,
    "rollout_log_steps": 0, "max_steps": 1, "learning_rate": 0.003, "temperature": 1.3, "shuffle_dataset": False,
}  # fmt: skip


COLOURS = (("red", "white"), ("black", "blue"), ("lime", "black"), ("white", "black"))
WORDS = "what colour is this red green blue yellow"


def rows():
    """Short questions, of which an image is a large part; the first one is padded."""
    texts = [" ".join(WORDS.split()[:count]) for count in (3, 6, 4, 7)]
    prompts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": prompts, "images": [[two_colours(*pair)] for pair in COLOURS]})


def two_colours(left, right):
    image = Image.new("RGB", (112, 56), left)
    image.paste(right, (56, 0, 112, 56))
    return image


def build(folder, monkeypatch, adapter=None, dtype=torch.float32, **changed):
    """A trainer whose biases are not 0, and whose engine has had one honest rollout."""
    engine_in_place_of_vllm(monkeypatch, dtype=dtype)
    model, processor = made_vision(folder)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    options = config(folder / "run", **OPTIONS | changed)
    return DAPOTrainer(model, letters_reward, options, rows(), processing_class=processor, peft_config=adapter)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """With full weights, and with an adapter."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        lora = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
        made = [build(tmp_path_factory.mktemp("engine"), monkeypatch, each) for each in (None, lora)]
        for trainer in made:
            trainer.train()
        yield made


def stale_tower(engine, model):
    model.model.visual.load_state_dict(engine.model.model.visual.state_dict())
    return model


def without_adapter(engine, model):
    base = copy.deepcopy(engine.accelerator.unwrap_model(engine.policy)).unload().state_dict()
    model.load_state_dict(base)
    return model


def not_a_number(engine, model):
    for weight in model.parameters():
        weight.data *= torch.nan
    return model


def rope_offset(engine, inputs):
    """Positions that ignore the grid of the image, and begin later at its tokens."""
    counted = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) + 7 * (inputs["mm_token_type_ids"] > 0)
    return {**inputs, "position_ids": counted.expand(3, -1, -1)}


def not_normalised(engine, pixels):
    return {**pixels, "pixel_values": torch.as_tensor(pixels["pixel_values"]) * 0.27 + 0.45}


FAULTS = {  # the nearest of each place, of 26 that were tried: 0.11 to 6 nats a token from the trainer
    "stale vision cache": ("model", stale_tower),
    "adapter unmerged": ("model", without_adapter),
    "weights not a number": ("model", not_a_number),
    "prompts of other rows": ("ids", lambda engine, ids: [*ids[4:], *ids[:4]]),
    "pixels not normalised": ("pixels", not_normalised),
    "padding is read": ("mask", lambda engine, mask: torch.ones_like(mask)),
    "rope offset": ("inputs", rope_offset),
    "temperature forgotten": ("logits", lambda engine, logits: logits * engine.temperature),
    "logps of the token before": ("drawn", lambda engine, drawn: drawn.roll(1, 1)),
}


@pytest.fixture
def roll(trainers):
    """Generates the next rollout, after a sync; with a fault, of its place and function."""

    def generate(number=0, **faults):
        trainer = trainers[number]
        engine, before = trainer.vllm_generation, trainer.vllm_generation.model
        engine.faults, trainer._last_loaded_step = faults, None
        trainer.model.train()
        try:
            with trainer.new_rollout(begin(trainer)) as rollout:
                trainer.generate_and_score(rollout)
        finally:
            engine.faults, engine.model = {}, before
        return trainer._metrics["train"]["engine/distance"][-1]

    return generate


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_ends_the_run_in_its_rollout(roll, name):
    place, fault = FAULTS[name]
    number = int(name == "adapter unmerged")
    assert roll(number) < 1e-5
    with pytest.raises(EngineError):
        roll(number, **{place: fault})


@pytest.mark.parametrize(("first", "later", "ends"), [
    (0.001, (0.099,), False), (0.001, (0.101,), True),
    (0.02, (0.19,), False), (0.02, (0.21,), True),
    (0.5, (0.99,), False), (0.5, (1.01,), True),
    (0.99, (), False), (1.01, (), True), (torch.inf, (), True),
])  # fmt: skip
def test_a_distance_is_judged_by_the_first_one_and_by_the_limit(first, later, ends):
    """Also a first one, which is wrong above ten times the limit, and after a resume."""
    check, resumed = EngineCheck(0.1), EngineCheck(0.1)
    with pytest.raises(EngineError) if ends else nullcontext():
        check.judge(first, 1)
        resumed.load_states([check.state_dict()])
        for each in later:
            resumed.judge(each, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_hundred_honest_rollouts_give_no_alarm(trainers, roll, dtype):
    """An engine in `dtype` samples 200 groups of two, which the policy scores in float32; also heavy-tailed noise."""
    engine, check, noisy = trainers[0].vllm_generation, EngineCheck(0.1), EngineCheck(0.1)
    roll()
    prompts, images = (200 * [*each[::4]] for each in engine.asked)
    with patched_attributes(engine, dtype=dtype, model=None, generator=torch.Generator().manual_seed(0)):
        engine.sync_weights()
        read, completions, logps, _ = Engine.generate(engine, prompts, images, 1, None)
    engine_logps = torch.tensor(logps).squeeze(-1)  # (400, T)
    ids, mask = pad_rows([[*row, *new] for row, new in zip(read, completions, strict=True)], 1, "left", None)
    pixels = engine.processor.image_processor([image for of_row in images for image in of_row])
    with patched_attribute(engine, "model", None), torch.no_grad():
        engine.sync_weights()
        logits = engine.model(
            input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == engine.processor.image_token_id).int(),
            **{name: torch.as_tensor(value) for name, value in pixels.items()},
        ).logits[:, -engine.length - 1 : -1]  # fmt: skip
    scored = (logits / engine.temperature).log_softmax(-1).gather(-1, ids[:, -engine.length :, None]).squeeze(-1)
    tails = torch.distributions.StudentT(torch.tensor(3.0), 0.0, 0.02)
    for step, (group, own) in enumerate(zip(engine_logps.split(2), scored.split(2), strict=True)):
        check.judge(engine_distance(group, own, torch.ones_like(own).bool()), step)
        noisy.judge(engine_distance(own + tails.sample(own.shape), own, torch.ones_like(own).bool()), step)
    assert (check.first > 1e-4) == (dtype is torch.bfloat16)


def test_every_engine_that_returns_log_probabilities_is_compared(model_folder, question_files, tmp_path, monkeypatch):
    """Without a scoring pass one group is scored for it; a static cache gives log-probabilities of the same model."""
    options = {"engine_distance_limit": 0.1, "max_steps": 2, "compute_attention_metrics": False, "temperature": 0.7}

    def make(**changed):
        made = config(tmp_path, **options | changed)
        return vision_trainer(model_folder, letters_reward, made, prompts(train_file(question_files)))

    static = make(cache_implementation="static")
    static.generation_config.disable_compile = True
    static.train()
    engine_in_place_of_vllm(monkeypatch)
    unscored = make(use_vllm=True, vllm_importance_sampling_correction=False, **options)
    with patch("vgr_trl.rollout_checks.score", wraps=run_pass.score) as score:
        unscored.train()
    for trainer in (static, unscored):
        distances = logged(trainer, "engine/distance")
        assert len(distances) == 2
        assert max(distances) < 1e-5
    assert [len(call.args[1]) for call in score.call_args_list] == [4, 4]


def wrong_in_the_second_process(model_folder, rows):
    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory() as folder:
        engine_in_place_of_vllm(monkeypatch)
        options = config(folder, **OPTIONS | {"max_steps": 2, "per_device_train_batch_size": 4})
        trainer = vision_trainer(model_folder, letters_reward, options, prompts(rows))
        if trainer.accelerator.process_index:
            trainer.vllm_generation.faults["drawn"] = lambda engine, drawn: drawn - 2 * trainer.state.global_step
        with pytest.raises(EngineError):
            trainer.train()
        return trainer.state.global_step, logged(trainer, "engine/distance")


def test_two_processes_end_together(model_folder, question_files):
    one, two = results_of(wrong_in_the_second_process, model_folder, train_file(question_files), processes=2)
    assert one == two
    assert one[0] == 1
