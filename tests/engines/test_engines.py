"""Two processes under each engine train as one process does on the same batches: every feature on, uneven images."""

import json
import math
import shutil
from pathlib import Path

import engines
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.launching import launch
from support.trainers import train_file
from transformers import Qwen2_5_VLForConditionalGeneration

WORKER = Path(__file__).with_name("engine_worker.py")
OF_ENGINES = (  # what may differ: rates, and what is computed once
    "perf/", "timing/", "step_time", "sharing/", "vision/", "skipped/", "replay/megabytes", "grad_norm", "loss",
    "epoch", "clip_ratio", "pixels/",  # of the first group of each process
)  # fmt: skip
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
SAVED = [(kind, case) for kind in (*ENGINES, "offload") for case in ("mixed", "lora")]


@pytest.fixture(scope="module")
def train(model_folder, question_files, tmp_path_factory):
    return _trains(model_folder, train_file(question_files), tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def train_untied(model_folder, question_files, tmp_path_factory):
    """As `train`, a model whose head is no embedding, with engines that keep no parameter whole."""
    folder = tmp_path_factory.mktemp("untied")
    model = Path(shutil.copytree(model_folder, folder / "model"))
    config, weights = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
    for each in (config, config["text_config"]):
        each["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config))
    (embedding,) = (weight for name, weight in weights.items() if name.endswith("embed_tokens.weight"))
    weights["lm_head.weight"] = embedding * 0.9
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return _trains(model, train_file(question_files), folder, lambda kind: engines.as_if_large(kind, folder))


def _trains(model: object, questions: object, folder: Path, variables=engines.VARIABLES.get):
    done = set()

    def train(kind: str, *what: str, processes: int | None = None) -> Path:
        if missing := [each for each in what if (kind, each) not in done]:
            number = (1 if kind == "one" else 2) if processes is None else processes
            launch(WORKER, kind, model, questions, folder, *missing, processes=number, engine=variables(kind))
            done.update((kind, each) for each in missing)
        return folder

    return train


def outcome(folder: Path, kind: str, what: str, part: str = "moved"):
    return json.loads((folder / f"{kind} {what}.json").read_text()), torch.load(folder / f"{kind} {what} {part}.pt")


def largest(tensors) -> float:
    return max(float(tensor.detach().abs().max()) for tensor in tensors)


def check_equal(folder: Path, kind: str, what: str) -> None:
    (expected, moves), (found, others) = (outcome(folder, each, what) for each in ("one", kind))
    assert largest(moves.values()) > 1e-3
    assert largest(moves[name] - others[name] for name in moves) < 1e-4 * largest(moves.values())  # AdamW's rounding
    assert found["rewards"].keys() == expected["rewards"].keys()
    for name, values in expected["rewards"].items():
        assert found["rewards"][name] == pytest.approx(values, abs=1e-4, nan_ok=True), name
    assert found["advantages"] == pytest.approx(expected["advantages"], abs=1e-3)
    for theirs, ours in zip(expected["history"], found["history"], strict=True):
        for name, value in theirs.items():
            if not name.startswith(OF_ENGINES) and isinstance(value, float) and not math.isnan(value):
                assert ours[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.minutes) for kind in ENGINES[1:])])
def test_every_feature_trains_as_in_one_process(kind, train):
    train("one", "mixed")
    folder = train(kind, "mixed")
    check_equal(folder, kind, "mixed")
    history = outcome(folder, kind, "mixed")[0]["history"]
    assert [entry.get("pixels/change", 0) > 1e-5 for entry in history] == [True, False, False]
    assert [entry["replay/replaced_fraction"] for entry in history] == [0, 0, 0.5]
    assert [entry["reward_weights/vgr_hard_negative_reward"] for entry in history] == [0.5, 1, 1]
    assert all(entry["sharing/prompts_per_row"] < 1 for entry in history), "prompts are shared by default"
    assert list((folder / f"{kind} mixed" / "rollouts").glob("records-*.jsonl"))


@pytest.mark.minutes
@pytest.mark.parametrize("kind", [*ENGINES, "offload"])
def test_full_and_adapted_models_and_critics_train_as_in_one_process(kind, train):
    what = ["everything", "lora", "mixed lora", "remax", "critic head"]
    what += ["critic model"] if kind not in engines.SHARDED else []
    train("one", *what)
    folder = train(kind, *what)
    for each in what:
        check_equal(folder, kind, each)
    values = [entry["critic/value_mean"] for entry in outcome(folder, kind, "critic head")[0]["history"]]
    assert values[0] == 0
    assert values[-1] != 0


@pytest.mark.minutes
@pytest.mark.parametrize("kind", [*ENGINES, "offload"])
def test_a_head_that_no_process_has_whole(kind, train_untied):
    """Its own gradient, and distributions that are compared: with a teacher's, the reference's, and under noise."""
    what = ["teacher", "teacher lora", "full kl", "vepo"]
    train_untied("one", *what)
    folder = train_untied(kind, *what)
    for each in what:
        check_equal(folder, kind, each)
    for each in ("teacher", "full kl"):
        assert largest([outcome(folder, kind, each)[1]["lm_head.weight"]]) > 1e-3


def checkpoint_of(folder: Path, kind: str, case: str) -> Path:
    return folder / f"{kind} saved {case}" / "checkpoint-2"


@pytest.mark.minutes
@pytest.mark.parametrize(("kind", "case"), SAVED)
def test_a_checkpoint_is_continued_and_the_model_loads(kind, case, train, model_folder):
    folder = train(kind, f"saved {case}")
    train(kind, f"{case} from {checkpoint_of(folder, kind, case)}")
    (whole, end), (rest, resumed_end) = (
        outcome(folder, kind, f"{what} {case}", "end") for what in ("saved", "resumed")
    )
    assert [entry["reward"] for entry in rest["history"]] == [entry["reward"] for entry in whole["history"]]
    assert largest(end[name] - resumed_end[name] for name in end) < 1e-6
    written = folder / f"{kind} saved {case}" / "model"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_folder if case == "lora" else written)
    model = PeftModel.from_pretrained(model, written) if case == "lora" else model
    loaded = dict(model.named_parameters())
    assert largest(end[name] - loaded[name] for name in end) == 0


@pytest.mark.minutes
@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2"])
def test_another_number_of_processes(kind, train):
    """One process goes on where two have saved: with FSDP2, which saves the optimizer whole; ZeRO refuses."""
    folder = train(kind, "saved everything")
    checkpoint = checkpoint_of(folder, kind, "everything")
    train(kind, f"everything from {checkpoint}", processes=1)
    found = json.loads((folder / f"{kind} resumed everything.json").read_text())
    if kind != "fsdp2":
        assert "DP world size of 2 but the current world size is 1" in found["refused"]
        return
    whole, end = outcome(folder, kind, "saved everything", "end")
    _, resumed_end = outcome(folder, kind, "resumed everything", "end")
    assert [entry["reward"] for entry in found["history"]] == [entry["reward"] for entry in whole["history"]]
    assert largest(end[name] - resumed_end[name] for name in end) < 1e-5


@pytest.mark.minutes
@pytest.mark.parametrize("kind", ENGINES)
def test_no_process_waits_for_another_that_has_ended(kind, train):
    found = json.loads((train(kind, "generation") / f"{kind} generation.json").read_text())
    assert [found[name]["steps"] for name in ("free", "one silent", "all silent")] == [2, 2, 2]
    assert found["one silent"]["lengths"] == [[1, 1], [8, 8]]
    assert found["all silent"]["lengths"] == [[1, 1], [1, 1]]


@pytest.mark.minutes
@pytest.mark.parametrize("kind", ENGINES)
def test_an_update_that_one_process_has_made_nan_is_left_out_by_all(kind, train):
    found = json.loads((train(kind, "nan") / f"{kind} nan.json").read_text())
    assert found == {"has_moved": [True, False, True], "left_out": [0, 1, 0]}
