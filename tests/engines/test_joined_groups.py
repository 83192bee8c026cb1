import json
from pathlib import Path

import engines
import pytest
import torch
from support.launching import launch
from support.trainers import train_file

WORKER = Path(__file__).with_name("join_worker.py")
TWO = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
FILE = json.loads(Path(__file__).with_name("offload.json").read_text()) | {"zero_optimization": {"stage": 2}}


@pytest.fixture(scope="module")
def run(model_folder, question_files, tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("joined"), set()

    def run(kind, name, environment=None, **options):
        name = f"{kind} {name}"
        if name not in done:
            processes, data = 1 if kind == "one" else 2, (model_folder, train_file(question_files))
            engine = engines.VARIABLES[kind] if environment is None else environment
            launch(WORKER, kind, *data, folder, name, json.dumps(options), processes=processes, engine=engine)
            done.add(name)
        return json.loads((folder / f"{name}.json").read_text()), torch.load(folder / f"{name}.pt")

    return run


def check(run, found, moved, lora):
    _, expected = run("one", f"lora {lora}", per_device_train_batch_size=8, gradient_accumulation_steps=1, lora=lora)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert max(float((expected[name] - moved[name]).abs().max()) for name in expected) < 1e-4 * largest
    assert found["joined"] == 4


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(each, marks=pytest.mark.minutes) for each in ("zero2", "fsdp2"))]
)
def test_whole_groups_and_their_parts(kind, lora, run):
    for name, budget in (("whole", None), ("cut", 1)):
        found, moved = run(kind, f"{name} {lora}", **TWO, lora=lora, max_tokens_per_micro_batch=budget)
        check(run, found, moved, lora)
        assert found["engine"] == kind
        if name == "whole":
            assert max(found["prompts_per_row"]) <= (1 / 4 if lora else 1 / 2), "trained towers even out images"


@pytest.mark.minutes
def test_a_configuration_of_deepspeed_as_a_file(run, tmp_path):
    """Its `auto` is filled with the numbers of the options when they are made."""
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    options = {**TWO, "lora": True, "deepspeed": str(tmp_path / "ds.json")}
    found, moved = run("zero2", "file", engines.VARIABLES["zero2 file"], **options)
    check(run, found, moved, lora=True)
    assert (found["engine"], found["micro_batch"]) == ("zero2", [4, 1])
