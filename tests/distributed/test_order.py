import os
from pathlib import Path

import pytest
import yaml
from accelerate.utils import gather_object
from datasets import load_dataset
from support.launching import results_of
from support.trainers import config, letters_reward, prompts, train_file, vision_trainer

from vgr_trl.errors import ConfigError, DataError
from vgr_trl.patches.transformers import close_group_at_exit
from vgr_trl.validate.options import refuse_differing_options

CASES = yaml.safe_load(Path(__file__).with_name("order.yaml").read_text(encoding="utf-8"))


def train(data, name: str, folder: Path, checkpoint: str | None = None) -> dict[str, list]:
    """Prompts in order, losses, and sums of the weights at the end; `data`: the model's folder, the questions' file."""
    options, count, _ = CASES[name]
    seen: list[list[int]] = []

    def coarse_reward(completions, row, **kwargs):
        seen.append(gather_object(row))
        return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]

    rows = prompts(data[1]).select(range(count)).add_column("row", list(range(count)))
    options = options | {
        "per_device_train_batch_size": options["per_device_train_batch_size"] // int(os.environ.get("WORLD_SIZE", 1)),
        "max_completion_length": 4, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1,
        "compute_attention_metrics": False,
    }  # fmt: skip
    trainer = vision_trainer(data[0], coarse_reward, config(folder, **options), rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    learned = [] if trainer.critic is None else [*trainer.critic.named.values()]
    return {
        "prompts": seen, "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": [value.double().sum().item() for value in [*trainer.model.parameters(), *learned]],
        "coefficient": trainer.kl.controller.coefficient,
    }  # fmt: skip


def train_all(data, output: Path) -> dict[str, dict]:
    results = {}
    for name, (_, _, steps) in CASES.items():
        folder = output / name.replace(" ", "_")
        results[name] = {"whole": train(data, name, folder / "whole")}
        for step in steps:
            checkpoint = folder / "whole" / f"checkpoint-{step}"
            results[name][str(step)] = train(data, name, folder / f"from-{step}", str(checkpoint))
    return results


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.minutes)], ids=["one process", "two processes"]
)
def results(request, model_folder, question_files, tmp_path_factory):
    data = str(model_folder), train_file(question_files)
    return results_of(train_all, data, tmp_path_factory.mktemp("order"), processes=request.param)[0]


@pytest.mark.parametrize(("case", "step"), [(case, step) for case, (_, _, steps) in CASES.items() for step in steps])
def test_a_continued_run_is_the_undisturbed_one(case, step, results):
    whole, rest = results[case]["whole"], results[case][str(step)]
    begun = len(whole["prompts"]) - len(rest["prompts"])
    assert len({tuple(batch) for batch in whole["prompts"]}) > len(whole["prompts"]) // 2, "epochs have other orders"
    assert rest["prompts"] == whole["prompts"][begun:]
    assert rest["losses"] == pytest.approx(whole["losses"], abs=1e-7)
    assert rest["weights"] == pytest.approx(whole["weights"], abs=1e-5)
    assert rest["coefficient"] == whole["coefficient"]


def start(folder, file, output, change) -> str:
    rows = load_dataset("parquet", data_files=file, split="train")
    rows = rows.map(lambda row: {"problem": "which?", "solution": "red", "choices": None})
    if os.environ["RANK"] == "1":
        rows = rows.select(range(12)) if change == "fewer" else rows.shuffle(seed=3)
    with pytest.raises(DataError) as refused:
        vision_trainer(folder, letters_reward, config(output), rows)
    return str(refused.value)


@pytest.mark.parametrize("change", ["fewer", "shuffled"])
def test_processes_with_different_data_are_refused(model_folder, question_files, tmp_path, change):
    file = train_file(question_files)
    for message in results_of(start, model_folder, file, tmp_path, change, processes=2):
        assert message.startswith("The train data of process 1 are not those of process 0")


def differ(folder):
    rank = int(os.environ["RANK"])
    close_group_at_exit()
    refuse_differing_options(config(folder / str(rank), run_name=str(rank)))
    with pytest.raises(ConfigError):
        refuse_differing_options(config(folder, num_generations=[4, 2][rank]))


def test_options_that_differ_are_named_by_all_processes(tmp_path):
    results_of(differ, tmp_path, processes=2)
