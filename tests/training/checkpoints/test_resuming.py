import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig
from support.commands import complete_checkpoints
from support.trainers import weights
from torch.utils._pytree import tree_leaves

from vgr_trl import checkpoints
from vgr_trl.checkpoints import ResumableTrainer
from vgr_trl.errors import ConfigError
from vgr_trl.validate.features import announce

RESUMED = {"per_device_train_batch_size": 4, "max_completion_length": 4, "save_strategy": "steps", "save_steps": 1}


def checkpoint(folder: Path, step: int, processes: int = 1, shares: int = 0) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    states = [f"rng_state_{index}.pth" for index in range(processes)] if processes > 1 else ["rng_state.pth"]
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", *states):
        (path / name).write_bytes(name.encode() * step)
    for index in range(shares):
        checkpoints.save_share({"process": index}, path, index, shares, "replay")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    checkpoints.write_manifest(path, processes)
    return path


def test_latest_without_any_checkpoint_starts_at_the_beginning(tmp_path):
    assert checkpoints.resolve_checkpoint("latest", tmp_path) is None
    assert checkpoints.resolve_checkpoint(None, tmp_path) is None
    with pytest.raises(ConfigError, match=r"is nowhere, which is not complete \(it is not a folder\): give another"):
        checkpoints.resolve_checkpoint("nowhere", tmp_path)
    assert [checkpoints.resume_mode(value) for value in (None, False, "false", "none", "")] == [None] * 5
    assert [checkpoints.resume_mode(value) for value in (True, "true", "Latest")] == ["latest"] * 3


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda path: (path / "replay_0_of_2.pt").unlink(), "replay_0_of_2.pt is missing"),
        (lambda path: (path / "optimizer.pt").write_bytes(b"\0" * 25), "optimizer.pt has 25 bytes instead of 24"),
        (lambda path: (path / "optimizer.pt").write_bytes(b"\0" * 24), "optimizer.pt is damaged"),
        (lambda path: (path / checkpoints.MANIFEST).write_text("{"), "manifest.json.* is missing"),
        (lambda path: (path / checkpoints.MANIFEST).write_text("[1]"), "manifest.json.* is missing"),
        (lambda path: (path / checkpoints.MANIFEST).write_text('{"files": 3}'), "manifest.json.* is missing"),
        (lambda path: (path / checkpoints.MANIFEST).unlink(), "manifest.json.* is missing"),
    ],
)
def test_every_file_of_a_checkpoint_must_be_what_was_written(tmp_path, break_it, reason):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2, processes=2, shares=2)
    assert checkpoints.why_incomplete(newer) is None
    break_it(newer)
    (tmp_path / "checkpoint-best").mkdir()
    assert complete_checkpoints(tmp_path) == [older]
    for named in ("latest", str(older)):
        assert checkpoints.resolve_checkpoint(named, tmp_path) == str(older)
    with pytest.raises(ConfigError, match=f"is not complete \\({reason}"):
        checkpoints.resolve_checkpoint(str(newer), tmp_path)


@pytest.mark.parametrize(("size", "seen"), [(64, [0, 31, 63]), (65, [0, 7, 57, 64])])
def test_which_bytes_of_a_file_its_checksum_reads(size, seen, tmp_path, monkeypatch):
    """A file of up to 64 bytes is read whole here, a larger one for 8 bytes at each end."""
    monkeypatch.setattr("vgr_trl.checkpoints.READ_WHOLE", 64)
    monkeypatch.setattr("vgr_trl.checkpoints.READ_PART", 8)
    (file := tmp_path / "file").write_bytes(bytes(size))
    before = checkpoints.checksum(file)
    for place in seen:
        file.write_bytes(bytes(place) + b"\1" + bytes(size - place - 1))
        assert checkpoints.checksum(file) != before, place


@pytest.mark.parametrize(
    ("options", "differs"),
    [({}, "in checksum of prompts ("), ({"shuffle_dataset": False}, "in shuffle_dataset (True there, False here)")],
    ids=["reversed", "unshuffled"],
)
def test_what_differs_from_the_run_that_is_continued(text_trainer, text_rows, monkeypatch, options, differs):
    text_trainer(max_steps=1, **RESUMED).train()
    warned: list[str] = []
    monkeypatch.setattr("vgr_trl.checkpoints.logger.warning", warned.append)
    rows = text_rows if options else text_rows.select(range(11, -1, -1))
    text_trainer(rows=rows, max_steps=2, **RESUMED, **options).train(resume_from_checkpoint=True)
    (line,) = warned
    assert differs in line


def test_an_optimizer_of_other_weights_is_refused(text_trainer, tmp_path):
    """PyTorch's fused AdamW takes averages of other shapes, and writes past their end."""
    text_trainer(max_steps=1, **RESUMED).train()
    saved = tmp_path / "run" / "checkpoint-1"
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:1]
    torch.save(state, saved / "optimizer.pt")
    checkpoints.write_manifest(saved)
    with pytest.raises(ConfigError, match="checkpoint-1 does not fit the weights that this run trains"):
        text_trainer(max_steps=2, **RESUMED).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "rmsprop"])
def test_the_state_of_another_optimizer_is_refused(text_trainer, optim):
    """PyTorch loads it, and the first step fails with a `KeyError`."""
    text_trainer(max_steps=1, **RESUMED).train()
    with pytest.raises(ConfigError, match="checkpoint-1 does not fit .* needs .* continue with the model, adapter and"):
        text_trainer(max_steps=2, optim=optim, **RESUMED).train(resume_from_checkpoint=True)


def test_an_optimizer_whose_groups_lack_a_default_of_pytorch_resumes(text_trainer):
    """PyTorch adds `differentiable` to the defaults of every optimizer whose state it loads."""
    text_trainer(max_steps=1, optim="adafactor", **RESUMED).train()
    resumed = text_trainer(max_steps=2, optim="adafactor", **RESUMED)
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert "differentiable" in resumed.optimizer.optimizer.defaults


def test_true_from_python_is_latest_of_the_command_line(text_trainer, tmp_path, monkeypatch):
    """The newest checkpoint was being written anew when the run ended, so it mixes two saves."""
    warned: list[str] = []
    monkeypatch.setattr("vgr_trl.checkpoints.logger.warning", warned.append)
    steps: list[int] = []

    def reward(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    build = partial(text_trainer, reward, output_dir=tmp_path, **RESUMED | {"save_steps": 2})
    build(max_steps=4).train()
    (tmp_path / "checkpoint-4" / checkpoints.MANIFEST).unlink()
    steps.clear()
    trainer = build(max_steps=6)
    trainer.train(resume_from_checkpoint=True)
    assert steps == [2, 3, 4, 5]
    assert len(warned) == 1
    assert re.search("skips .*checkpoint-4, which is not complete", warned[0])
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    with pytest.raises(ConfigError, match="^The run is finished: .*checkpoint-6.* has the model after all 6 steps"):
        build(max_steps=6).train(resume_from_checkpoint="latest")


def test_the_option_resumes_unless_train_is_told_otherwise(text_trainer, tmp_path):
    text_trainer(max_steps=1, **RESUMED).train()
    for named in ("latest", str(tmp_path / "run" / "checkpoint-1")):
        resumed = text_trainer(max_steps=2, resume_from_checkpoint=named, **RESUMED | {"save_strategy": "no"})
        resumed.train()
        assert [entry["step"] for entry in resumed.state.log_history if "reward" in entry] == [1, 2]
        assert (
            resumed.state.log_history[0]
            == json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_text())["log_history"][0]
        )
    anew = text_trainer(max_steps=1, resume_from_checkpoint="latest", **RESUMED)
    anew.train(resume_from_checkpoint=False)  # resumed, it would be refused as finished


def test_a_stream_that_begins_anew_is_not_resumed():
    """At the end of its first epoch it has, before it has not."""
    args = SimpleNamespace(gradient_accumulation_steps=1, steps_per_generation=1, ignore_data_skip=False)
    trainer = SimpleNamespace(
        args=args, num_iterations=1, state=SimpleNamespace(global_step=3, epoch=1.0),
        train_dataset=IterableDataset.from_generator(lambda: iter(())),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"saved in a later epoch of the stream \(1.00\)"):
        ResumableTrainer._position_in_data(trainer, "checkpoint-3")
    trainer.state.epoch = 0.99
    assert ResumableTrainer._position_in_data(trainer, "checkpoint-3") == (0, 3)


def test_all_tensors_of_a_rollout_go_back_to_the_device(tmp_path):
    """Those of the perception loss are cut by row, in a list."""
    args = SimpleNamespace(steps_per_generation=2, gradient_accumulation_steps=1)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("meta"))
    trainer = SimpleNamespace(args=args, accelerator=accelerator, _micro_batches_per_generation=lambda: 2)
    inputs = [{"prompt_ids": torch.ones(2, 3), "perturbed_pixel_values": [torch.ones(4)] * 2, "num_images": [1, 1]}]
    share = {"micro_batch": 1, "of": 2, "inputs": inputs, "waiting": False}
    checkpoints.save_share(share, tmp_path, 0, 1, checkpoints.GENERATION)
    ResumableTrainer._continue_generation(trainer, tmp_path, 1)
    (found,) = trainer._buffered_inputs
    assert {value.device.type for value in tree_leaves(found) if torch.is_tensor(value)} == {"meta"}
    assert found["num_images"] == [1, 1]


@pytest.mark.parametrize(
    "passes",
    [
        {"check_pixels": True, "compute_attention_metrics": False}, {"attention_rows": "auto"},
        {"attention_source": "generate"},
    ],
    ids=str,
)  # fmt: skip
def test_dropout_draws_the_same_after_passes_that_a_run_made_at_its_start_only(vision_trainer, tmp_path, passes):
    """The check of the pixels, and the attention of recorded rows: a resumed run makes these passes again."""

    def trained(checkpoint=None):
        lora = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"])
        sizes = {"gradient_accumulation_steps": 1, "max_steps": 2, "rollout_log_samples": 3, "rollout_log_steps": 10}
        trainer = vision_trainer(**sizes, save_strategy="steps", save_steps=1, peft_config=lora, **passes)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(trainer)

    assert torch.equal(trained(), trained(str(tmp_path / "run" / "checkpoint-1")))


def test_a_reference_that_follows_the_policy_is_saved(vision_trainer, tmp_path):
    def trained(checkpoint=None):
        follows = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.9}
        sizes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "learning_rate": 0.1, "optim": "sgd"}
        trainer = vision_trainer(**follows, **sizes)
        trainer.train(resume_from_checkpoint=checkpoint)
        return weights(trainer)

    whole, saved = trained(), tmp_path / "run" / "checkpoint-3"
    assert torch.equal(trained(str(saved)), whole)
    (reference,) = saved.glob("reference_*")
    reference.unlink()  # as in a checkpoint of TRL
    checkpoints.write_manifest(saved)
    with pytest.raises(ConfigError):
        trained(str(saved))


def test_a_reference_in_parts_is_announced_as_not_saved(vision_trainer, caplog):
    trainer = vision_trainer(beta=0.5, sync_ref_model=True)
    for stage in (2, 3):
        caplog.clear()
        announce(replace(trainer.run, facts=replace(trainer.run.facts, zero_stage=stage)), trainer.rows_per_pass, {})
        assert ("sync_ref_model" in caplog.text) == (stage == 3)
