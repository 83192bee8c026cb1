"""Values of `--config` that argparse passes on as YAML reads them: converted, or refused in a sentence."""

import pytest

from vgr_trl import DAPOConfig
from vgr_trl.cli.arguments import DataArguments, RewardArguments
from vgr_trl.cli.parsing import parse
from vgr_trl.utils import ConfigError


@pytest.fixture
def options_of(tmp_path):
    def options_of(text):
        file = tmp_path / "mine.yaml"
        file.write_text(text + "\n")
        flags = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "--config", str(file)]
        return parse((DataArguments, RewardArguments, DAPOConfig), "train", flags)

    return options_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: null", "learning_rate has no value in the file: give a number, or leave its line out for"),
        ("beta:", "beta has no value"),
        ("reward_funcs:", "reward_funcs has no value in the file: give a list, or leave its line out"),
        ("max_steps: 1.5", "max_steps is 1.5 in the file: give an integer"),
        ("num_generations: 8.0", "num_generations is 8.0 in the file: give an integer"),
        ("num_generations: true", "num_generations is True in the file: give an integer"),
        ("learning_rate: [1, 2]", r"learning_rate is \[1, 2\] in the file: give a number"),
        ("data_files: {train: a.jsonl}", r"data_files is {'train': 'a.jsonl'} in the file: give a text"),
        ("reward_funcs: {accuracy: 0.5}", r"reward_funcs is {'accuracy': 0.5} in the file: give a list"),
        ("vision_token_ids: [1, a]", "vision_token_ids has 'a' in the file: give a list, each an integer"),
        ("reward_weights: 1 1 1 1", "reward_weights has '1 1 1 1' in the file: give a list, each a number"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_a_sentence(options_of, text, message):
    with pytest.raises(ConfigError, match=message):
        options_of(text)


def test_a_value_alone_is_a_list_where_one_is_asked_for(options_of):
    text = "credit_rules: token_weights\nsignals: entropies\nreward_funcs: accuracy\nreward_weights: 2"
    _, rewards, config = options_of(text)
    assert (config.credit_rules, config.signals) == (["token_weights"], ["entropies"])
    assert (rewards.reward_funcs, config.reward_weights) == (["accuracy"], [2])
    assert config.token_weights


def test_values_of_their_own_kind_stay(options_of):
    text = (
        "beta: 1\nlearning_rate: 1e-4\nmax_prompt_length: null\nreport_to: none\nscale_rewards: false\nmax_steps: '3'\n"
        "data_files: [train=a.jsonl, test=b.jsonl]\ngeneration_kwargs: {num_beams: 1}\nreward_weights: [1, 0.5, 1, 1]"
    )
    data, _, config = options_of(text)
    assert (config.beta, config.learning_rate, config.max_prompt_length) == (1, 1e-4, None)
    assert (config.report_to, config.max_steps, config.scale_rewards) == ([], 3, "none")
    assert data.data_files == "train=a.jsonl,test=b.jsonl"
    assert config.generation_kwargs == {"num_beams": 1}
    assert config.reward_weights == [1, 0.5, 1, 1]
