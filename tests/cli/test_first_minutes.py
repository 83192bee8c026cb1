"""What a user meets before anything is trained: flags, help, configuration files, versions, lines of steps."""

import subprocess
import sys

import pytest
from transformers import TrainerState
from trl import ModelConfig, TrlParser

from vgr_trl import DAPOConfig
from vgr_trl.cli.__main__ import COMMANDS, main
from vgr_trl.cli.arguments import DataArguments, RewardArguments, RunArguments
from vgr_trl.cli.completion import script
from vgr_trl.cli.flags import EvaluationArguments, check_flags, flag_names
from vgr_trl.cli.parsing import parse
from vgr_trl.cli.train import StepLines
from vgr_trl.reporting.markdown import duration, step_line
from vgr_trl.utils import ConfigError

GROUPS = {
    "train": (RunArguments, DataArguments, RewardArguments, DAPOConfig, ModelConfig),
    "evaluate": (DataArguments, EvaluationArguments),
}


@pytest.mark.parametrize("command", GROUPS)
def test_every_flag_of_the_parser_is_known_beforehand(command):
    actions = TrlParser(GROUPS[command])._option_string_actions
    check_flags(command, [flag for flag in actions if flag.startswith("--")])
    assert len(flag_names(command)) > 20
    others = [flag for name in flag_names(command) if (flag := f"--no_{name}") not in actions]
    assert "--no_seed" in others
    for flag in others:
        with pytest.raises(ConfigError, match=f"there is no flag {flag}"):
            check_flags(command, [flag])


@pytest.mark.parametrize("name", ["compute_attention_metrics", "greater_is_better", "token_weights", "shuffle_dataset"])
@pytest.mark.parametrize(("values", "expected"), [([], True), (["true"], True), (["false"], False)])
def test_boolean_options_stand_alone_or_with_a_value(tmp_path, name, values, expected):
    flags = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", f"--{name}", *values]
    (config,) = parse((DAPOConfig,), "train", flags)
    assert getattr(config, name) is expected


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("train", "--lerning_rate", "Did you mean --learning_rate?"),
        ("train", "--token-wieghts=1", "Did you mean --token_weights?"),
        ("train", "--no_learning_rate", "Did you mean --learning_rate?"),
        ("train", "--no-gradient-chekpointing", "Did you mean --no_gradient_checkpointing?"),
        ("train", "--qqqqqqqqqq", "--help lists them"),
        ("evaluate", "--num_sample", "Did you mean --num_samples?"),
    ],
)
def test_misspelt_flags_are_told_with_the_nearest(command, flag, meant):
    with pytest.raises(ConfigError, match="there is no flag") as error:
        check_flags(command, [flag])
    assert meant in str(error.value)


def test_a_misspelt_flag_is_told_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom vgr_trl.cli.__main__ import main\n"
        "status = main(['train', '--lerning_rate', '1e-4'])\nassert status == 1\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Did you mean --learning_rate?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("data convert --help", 0),
        ("data merge --help", 0),
        ("data inspect --help", 0),
        ("data inspect rows.jsonl --modle x", 2),
        ("demo --help", 0),
        ("demo --stesp 3", 2),
    ],
)
def test_commands_with_few_flags_answer_without_importing_torch(tmp_path, arguments, status):
    code = (
        "import sys\nfrom vgr_trl.cli.__main__ import main\n"
        f"try:\n    main({arguments.split()})\nexcept SystemExit as end:\n    assert end.code == {status}, end.code\n"
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout + done.stderr


def help_of(capsys, command, *flags):
    with pytest.raises(SystemExit):
        main([command, *flags])
    return capsys.readouterr().out


def test_help_lists_every_flag_once_and_ours_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    everything = help_of(capsys, "train", "--help-all").splitlines()
    listed = [line.split()[0] for line in everything if line.startswith("  --")]
    known = {f"--{name}" for name in flag_names("train")} - {"--config", "--help", "--help_all", "--env"}
    parser = TrlParser(GROUPS["train"])
    assert sorted(listed) == sorted(known & set(parser._option_string_actions))
    short = help_of(capsys, "train", "--help")
    assert len(short.splitlines()) < 240
    for part in ("Data:", "Credit per token:", "--token_weights", "--learning_rate", "--lora_target_modules"):
        assert part in short
    assert "--push_to_hub" not in short


def test_help_has_the_stages_in_their_order_and_details_of_the_rare_ones_on_request(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    short = help_of(capsys, "train", "--help")
    titles = [
        "Data:",
        "Model:",
        "Training:",
        "Measuring what",
        "Dependence on",
        "Credit per",
        "Which groups",
        "Records",
    ]
    places = [short.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    assert "--kl_horizon" not in short
    assert "KL to the reference (described by --help kl):\n  kl_coef, kl_penalty" in short
    stage = help_of(capsys, "train", "--help", "kl")
    assert "--kl_horizon " in stage
    assert "--token_weights" not in stage
    assert main(["train", "--help", "credits"]) == 1
    assert "there is no stage credits in the help. Did you mean credit?" in capsys.readouterr().err
    assert "This command:\n  --reward_type" in help_of(capsys, "evaluate", "--help")


def test_values_that_no_flag_takes_are_told_in_a_sentence(capsys):
    for flags, said in (
        ("--num_generations four", "--num_generations: invalid int value: 'four'"),
        ("--model_name_or_path", "--model_name_or_path: expected one argument"),
        ("--bnb_4bit_quant_type nf5", "--bnb_4bit_quant_type: invalid choice: 'nf5'"),
    ):
        assert main(["train", *flags.split()]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert "usage" not in error
        assert len(error.splitlines()) < 4


def test_a_misspelt_command_is_told_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_every_step_has_a_line_unless_it_is_asked_for_otherwise(tmp_path):
    flags = f"--output_dir {tmp_path} --use_cpu true --bf16 false".split()
    (config,) = parse((DAPOConfig,), "train", flags)
    assert config.logging_steps == 1
    (config,) = parse((DAPOConfig,), "train", [*flags, "--logging_steps", "5"])
    assert config.logging_steps == 5
    file = tmp_path / "settings.yaml"
    file.write_text("logging_steps: 7\n")
    (config,) = parse((DAPOConfig,), "train", [*flags, "--config", str(file)])
    assert config.logging_steps == 7


def test_warnings_come_once_and_those_on_renamed_options_not_at_all():
    code = (
        "import warnings\nfrom vgr_trl.cli.__main__ import warnings_once\n"
        "def warn(text):\n    warnings.warn(text, FutureWarning)\n"
        "with warnings_once():\n"
        "    for _ in range(3):\n"
        "        warn('beware')\n"
        "        warn('`is_gradient_checkpointing` is deprecated and will be removed in v6. Use another.')\n"
        "        with warnings.catch_warnings():\n            warnings.simplefilter('ignore')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("beware") == 1
    assert "deprecated" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1\n", "has lerning_rate, which is no option. Did you mean learning_rate?"),
        ("- a\n", "holds no options"),
        ("a: [1\n", "is no YAML"),
        ("learning_rate: 1e-4\nseed: 1\nlearning_rate: 1e-5\n", "the key learning_rate is given twice"),
        ("max_steps: 010\n", "YAML reads 010 as 8: write that"),
        ("max_steps: 1:30\n", "YAML reads 1:30 as 90: write that"),
        ("eval_strategy: no\n", 'eval_strategy: no, which YAML reads as false: write "no" in quotes'),
    ],
)
def test_a_configuration_file_is_checked_by_name_and_key(tmp_path, capsys, text, message):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    for arguments in (["--config", str(file)], [f"--config={file}"]):
        assert main(["train", *arguments]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert str(file) in error
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "which is no file" in capsys.readouterr().err
    assert main(["train", "--config"]) == 1
    assert "without a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--per_device_train_batch_size 6 --num_generations 4", "A rollout is no whole number of groups: change"),
        ("--eval_strategy steps --per_device_eval_batch_size 3", "or give --num_generations_eval"),
    ],
)
def test_batches_of_broken_groups_are_told_with_the_flags_to_change(tmp_path, flags, told):
    with pytest.raises(ConfigError, match=told):
        parse((DAPOConfig,), "train", f"--output_dir {tmp_path} --bf16 false --use_cpu {flags}".split())


def test_two_recipes_are_refused(capsys):
    assert main(["train", "--recipe", "dapo", "--recipe=grpo"]) == 1
    assert "--recipe is given twice: give one, and the options of the other as flags" in capsys.readouterr().err


def test_a_recipe_of_ones_own_with_a_key_given_twice_is_refused(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("beta: 0.1\nbeta: 0.2\n")
    assert main(["train", "--recipe", str(file)]) == 1
    assert "the key beta is given twice" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--laptop"]])
def test_init_writes_options_that_exist_and_keeps_what_is_there(tmp_path, capsys, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vgr_trl.demo.write_folder.write_warm_folder", lambda *arguments: None)
    assert main(["init", *more]) == 0
    text = (tmp_path / "train.yaml").read_text()
    keys = [line.split(":")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert set(keys) <= flag_names("train")
    assert "learning_rate" in keys
    assert len(text.splitlines()) < 45
    assert main(["init", *more]) == 1
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "train.yaml").read_text() == text


def test_version_environment_and_completion(capsys):
    assert main(["--version"]) == 0
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    for name in ("vgr_trl", "torch", "trl", "transformers", "CUDA", "GPU"):
        assert f"\n{name} " in f"\n{printed}"
    assert main(["env", "more"]) == 1
    for shell in ("bash", "zsh"):
        written = script(shell)
        assert "--learning_rate" in written
        assert all(name in written for name in COMMANDS)
    checked = subprocess.run(["bash", "-n"], input=script("bash"), text=True)
    assert checked.returncode == 0


def test_bash_completes_commands_and_flags():
    asked = script("bash") + (
        'COMP_WORDS=(vgr-trl train --learning_r); COMP_CWORD=2; _vgr_trl; echo "${COMPREPLY[@]}"\n'
        'COMP_WORDS=(vgr-trl ev); COMP_CWORD=1; _vgr_trl; echo "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash"], input=asked, capture_output=True, text=True)
    assert done.stdout.split() == ["--learning_rate", "evaluate"]


def test_a_step_is_one_line():
    logs = {
        "reward": 1.5, "rewards/accuracy_reward/mean": 0.625, "completions/mean_length": 118.4, "loss": 0.01234,
        "attention/late/vgr": 0.71, "frac_reward_zero_std": 0.25,
    }  # fmt: skip
    line = step_line(7, 120, logs, 12.34)
    assert line == (
        "step   7/120  reward 1.500  accuracy 0.625  length 118  VGR 0.710  live 75%  loss 0.0123  12.3 s/step  "
        "23 min left"
    )
    assert step_line(1, 2, {}, None) == "step 1/2"


def test_a_step_without_a_rollout_of_its_own_has_a_line_too(capsys):
    lines, state = StepLines(), TrainerState(global_step=2, max_steps=4, is_world_process_zero=True)
    lines.on_log(None, state, None, {"loss": 0.5})
    lines.on_log(None, state, None, {"train_loss": 0.5, "train_runtime": 1.0})
    assert capsys.readouterr().out == "step 2/4  loss 0.5000\n"


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (90, "2 min"), (720, "12 min"), (11_100, "3 h 05")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_first_line_comes_before_the_libraries(tmp_path):
    command = [sys.executable, "-m", "vgr_trl.cli", "train", "--output_dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        first = process.stderr.readline()
        assert "loading torch" in first
        rest = process.stderr.read()
    assert "give --bf16 false, and --use_cpu" in rest or "model_name_or_path is missing" in rest  # with a GPU


def test_a_stray_word_is_told_before_the_words_of_the_parser(capsys):
    assert main("train stray --use_cpu true --bf16 false".split()) == 1
    error = capsys.readouterr().err
    assert "A word stands among the flags that belongs to none" in error
    assert "stray" in error
