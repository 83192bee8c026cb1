"""TRL's scripts grpo_vlm, gspo_vlm and rloo_vlm with the flags of their commands, under ZeRO-3 with an adapter.

`DAPOTrainer` takes the place of TRL's, or `share_prompts` is around it. Completions are short, in float32.
"""

import json
from functools import cache
from pathlib import Path

import engines
import pytest
import torch
import yaml
from support.launching import launch
from support.trainers import train_file

pytestmark = pytest.mark.minutes
WORKER = Path(__file__).with_name("trl_script_worker.py")
OURS = "--dtype float32 --max_completion_length 8 --optim sgd --max_grad_norm 0"
EVERY = f"--learning_rate 0.1 {OURS} --use_peft --lora_dropout 0 --lora_target_modules q_proj, v_proj --log_completions"
TABLE = yaml.safe_load(Path(__file__).with_name("trl_scripts.yaml").read_text(encoding="utf-8"))
FLAGS = {name: flags.replace("EVERY", EVERY).replace("OURS", OURS) for name, flags in TABLE["flags"].items()}
SHARED = TABLE["shared"]


@pytest.fixture(scope="module")
def train(model_folder, question_files, tmp_path_factory):
    @cache
    def train(kind: str, names: tuple[str, ...]) -> Path:
        folder, runs = tmp_path_factory.mktemp(kind), {}
        for name in names:
            trainer, flags = name.split()
            words = FLAGS[flags].split()
            runs[name] = trainer, True, words
            runs[f"{name} plain"] = trainer, False, [*words, *["--share_prompts", "off"] * (trainer == "DAPO")]
        as_in_trl = {"ACCELERATE_DEEPSPEED_ZERO3_INIT": str(kind == "zero3").lower()}  # its deepspeed_zero3.yaml
        engine = engines.VARIABLES[kind] | as_in_trl
        data = model_folder, train_file(question_files)
        launch(WORKER, kind, *data, folder, json.dumps(runs), processes=2, engine=engine)
        return folder

    return train


def check_equal(moved, expected) -> None:
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 1e-3
    assert max(float((moved[name] - value).abs().max()) for name, value in expected.items()) < 1e-4 * largest


@pytest.mark.parametrize("name", SHARED)
def test_scripts_of_trl(name, train):
    folder = train("zero3", tuple(SHARED))
    found, plain = (torch.load(folder / f"{each}.pt") for each in (name, f"{name} plain"))
    for kind, most in SHARED[name].items():
        assert found["counted"][kind] <= most, kind
    assert not plain["counted"]
    if name.startswith("DAPO"):
        adapted = {each.split(".")[-4] for each in found["moved"] if "lora_" in each}
        assert adapted == {"q_proj", "v_proj"}
    check_equal(found["moved"], plain["moved"])


def test_whole_groups_in_place_of_micro_batches_of_one(train):
    """What docs/sharing.md advises users of TRL's trainers leaves the update as it was."""
    folder = train("zero3", tuple(SHARED))
    check_equal(*(torch.load(folder / f"GRPO {each} plain.pt")["moved"] for each in ("whole", "smolvlm")))


@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2"])
def test_groups_that_are_shuffled_over_micro_batches(kind, train):
    """A process that has no prompt twice waits for no other, and nobody for it."""
    folder = train(kind, ("GRPO halves",))
    found, plain = (torch.load(folder / f"GRPO halves{each}.pt") for each in ("", " plain"))
    assert found["counted"]["generation"] == 1 / 4
    assert found["counted"]["training"] < 1
    check_equal(found["moved"], plain["moved"])
