import json

import pytest
from datasets import Dataset, load_dataset
from support.commands import finish, train_command
from support.trainers import train_file


@pytest.mark.minutes
def test_accelerate_launch_with_two_processes(model_folder, question_files, tmp_path, port):
    """Two processes train one multimodal run: a bad row and long prompts are left out alike, one process writes."""
    output = tmp_path / "run"
    questions = load_dataset("parquet", data_files=train_file(question_files), split="train")
    rows = [dict(row) for row in questions]
    rows[3]["solution"] = "J"
    for index in (5, 6):
        rows[index]["problem"] = "which colour is it? " * 30
    data = tmp_path / "rows.parquet"
    Dataset.from_list(rows, features=questions.features).to_parquet(data)
    flags = (
        "--per_device_train_batch_size 2 --max_steps 2 --disable_tqdm true --max_prompt_length 100 --use_peft "
        "--lora_target_modules q_proj v_proj"
    )
    launcher = f"-m accelerate.commands.launch --main_process_port {port} --config_file accelerate_configs/cpu.yaml"
    done = finish(train_command(model_folder, data, output, flags, launcher))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("13 rows to") == 1, "one process describes the run"
    assert done.stderr.count("left out 2 of 15 rows of the train data") == 1
    skipped = [json.loads(line) for line in (output / "skipped.jsonl").read_text().splitlines()]
    assert [row["row"] for row in skipped] == [3]
    assert "2 steps of 4 completions" in " ".join(done.stdout.split())
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 2
    assert (output / "adapter_config.json").exists()
