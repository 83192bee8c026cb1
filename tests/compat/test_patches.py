import pytest
import torch
from support.models.families import build
from transformers import Qwen3Config, Qwen3ForCausalLM

from vgr_trl.patches import trl
from vgr_trl.patches.transformers import disable_cudnn_attention, load_weights, without_input_gradients

HOSTILE = "a\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2066b\x00\x08\r\x0b</td><script>alert(1)</script>[link=x]"
SHOWN = "a\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\u202e\\u2066b\\x00\\x08\\x0d\\x0b</td><script>alert(1)</script>[link=x]"
NAN = float("nan")


def test_texts_of_a_table_have_no_characters_that_do_something():
    message = {"role": "user", "content": [{"type": "text", "text": HOSTILE}]}
    assert trl.conversation_text([{"role": "system", "content": "line\n\ttab"}]) == "line\n\ttab"
    columns = {"prompt": [[message]], "completion": [HOSTILE]}
    assert trl.flatten_conversations(columns) == {"prompt": [SHOWN], "completion": [SHOWN]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "completions").mkdir()
    return tmp_path / "completions"


def test_a_table_of_an_evaluation_replaces_none_of_training(folder):
    file, evaluated = folder / "completions_00002.parquet", folder / "completions_00002_eval.parquet"
    file.write_text("training")
    with trl.keep_training_table(str(folder.parent), 2, True):
        file.write_text("evaluation")
    assert evaluated.read_text() == "evaluation"
    assert file.read_text() == "training"


def test_beyond_the_bound_the_oldest_tables_but_the_first_go(folder):
    names = [f"completions_{step:05d}{kind}.parquet" for step in (0, 9, 10, 99_999, 100_000) for kind in ("", "_eval")]
    for name in names:
        (folder / name).write_bytes(b"x" * 100)
    (folder / "mine.parquet").write_bytes(b"x" * 10_000)
    trl.remove_oldest_tables(str(folder.parent), 450)
    assert {path.name for path in folder.iterdir()} == {names[0], *names[-3:], "mine.parquet"}
    trl.remove_oldest_tables(str(folder.parent), 1)
    assert {path.name for path in folder.iterdir()} == {names[0], names[-1], "mine.parquet"}


def test_rounds_become_one_entry():
    """A batch of 8 completions and rounds of 4 and 2, after an entry of an earlier rollout: (8 a + 4 b + 2 c) / 14."""
    metrics = {
        "reward": [9.0, 1.0, 2.0, 3.0], "rewards/of_one/mean": [9.0, NAN, 2.0, 8.0],
        "rewards/of_none/mean": [9.0, NAN, NAN, NAN], "completions/min_length": [1.0, 5.0, 3.0, 4.0],
        "completions/max_length": [99.0, 5.0, 3.0, 7.0], "sampling/importance_sampling_ratio/max": [9.0, 0.5, 1.5, 1.0],
        "num_tokens": [70.0],
    }  # fmt: skip
    logged = {name: values if name == "num_tokens" else values[:2] for name, values in metrics.items()}
    with trl.merge_round_metrics(logged, {}, completions=8, processes=1) as rounds:
        rounds += [4, 2]
        for name in metrics.keys() - {"num_tokens"}:
            logged[name] += metrics[name][2:]
    metrics = logged
    assert metrics.pop("rewards/of_none/mean") == pytest.approx([9.0, NAN], nan_ok=True)
    assert metrics == {
        "reward": [9.0, pytest.approx(22 / 14)], "rewards/of_one/mean": [9.0, 4.0],
        "completions/min_length": [1.0, 3.0], "completions/max_length": [99.0, 7.0],
        "sampling/importance_sampling_ratio/max": [9.0, 1.5], "num_tokens": [70.0],
    }  # fmt: skip


def test_image_tokens_are_suppressed_where_trl_does_not(vision_trainer):
    trainer = vision_trainer()
    token = trainer.model.config.image_token_id
    assert trainer.generation_config.suppress_tokens == [token], "by TRL, or by what is tested here"
    own = {name: value for name, value in trainer.generation_kwargs.items() if name != "suppress_tokens"}
    trainer.generation_kwargs, trainer.generation_config.suppress_tokens = own, None
    trl.suppress_image_tokens(trainer, installed="1.16.0")
    assert trainer.generation_config.suppress_tokens is None
    trl.suppress_image_tokens(trainer, installed="1.15.0")
    assert trainer.generation_config.suppress_tokens == trainer.generation_kwargs["suppress_tokens"] == [token]
    trainer.generation_kwargs = {**own, "suppress_tokens": [3]}
    trl.suppress_image_tokens(trainer, installed="1.15.0")
    assert trainer.generation_config.suppress_tokens == [3], "what the user says comes first"


@pytest.mark.parametrize(
    ("torch_version", "capability", "off"),
    [("2.11.0", 9, True), ("2.13.0+cu130", 10, True), ("2.10.0", 9, False), ("2.13.0", 8, False)],
)
def test_cudnn_is_off_where_torch_would_take_it_first(torch_version, capability, off, monkeypatch):
    switched = []
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: not switched)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    assert (disable_cudnn_attention() is not None) is off
    assert switched == [False] * off
    assert disable_cudnn_attention() is None


def test_a_head_in_float32_keeps_its_bits(tmp_path):
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1, head_dim=8, tie_word_embeddings=False))  # fmt: skip
    model.to(torch.bfloat16).lm_head.float().weight.data.normal_()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    load_weights(model, str(tmp_path))
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_embeddings_that_require_gradients_break_no_graph_while_generating():
    """Hooks for checkpointing with adapters: a compiled embedding is one graph in the block, and hooked after it."""
    model = build("qwen2_5_vl")
    model.enable_input_require_grads()
    embeddings, ids = model.get_input_embeddings(), torch.tensor([[1, 2]])
    with without_input_gradients(model), torch.no_grad():
        torch.compile(embeddings, backend="eager", fullgraph=True)(ids)
    with torch.no_grad():
        assert embeddings(ids).requires_grad
