"""Three optimizer steps of a tiny text model, by TRL's trainer and by ours, in one process or in one of several."""

import atexit
import shutil
import tempfile
from contextlib import contextmanager
from functools import wraps

import torch
from datasets import Dataset
from support.steps import numbered_tokenizer, options
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from trl import GRPOConfig, GRPOTrainer

from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing import exactness
from vgr_trl.trainer import DAPOTrainer

PAD, EOS, VOCABULARY = 0, 1, 40
FOLDER = tempfile.mkdtemp()  # TRL loads its reference model from where the policy comes from


def build_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    config = Qwen3Config(**sizes, **heads, **tokens)
    return Qwen3ForCausalLM(config)


def build_prompts() -> Dataset:
    draw = torch.Generator().manual_seed(1)
    words = [torch.randint(6, VOCABULARY, (4 + row,), generator=draw).tolist() for row in range(12)]
    return Dataset.from_dict({"prompt": [" ".join(f"w{w}" for w in [4 + row % 2, *words[row]]) for row in range(12)]})


def reward_of_every_other_group(prompts, completion_ids, **kwargs):
    """Equal for all completions of every other prompt; elsewhere every other completion earns the mean of its group."""
    patterns = {0: (0.0, 1.0, 0.5, 0.5), 1: (0.3, 0.3, 0.3, 0.3)}
    words = [int(prompt.split()[0][1:]) for prompt in prompts]
    return [patterns[word % 2][row % 4] for row, word in enumerate(words)]


def equal_rewards(completion_ids, **kwargs):
    return [0.5] * len(completion_ids)


class WithCredit:
    """An advantage (N, T) for some tokens only, in whichever trainer this stands before; TRL's loss takes it too."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "advantages": batch["advantages"].unsqueeze(1) * (batch["completion_ids"] % 3 == 0)}


atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
build_model().save_pretrained(FOLDER)
START = {name: parameter.detach().clone() for name, parameter in build_model().named_parameters()}


def build(stock, *, credit=False, reward=reward_of_every_other_group, peft=None, **changed):
    """A trainer of three steps of SGD in float32 over rollouts of two prompts with four completions each."""
    few = (EOS, *range(6, 12))
    settings = options(
        tempfile.mkdtemp(dir=FOLDER), max_completion_length=6, learning_rate=0.3, temperature=2.0, epsilon_high=0.28,
        generation_kwargs={"suppress_tokens": [token for token in range(VOCABULARY) if token not in few]},
    )  # fmt: skip
    kind = GRPOTrainer if stock else DAPOTrainer
    return (type("Credited", (WithCredit, kind), {}) if credit else kind)(
        model=Qwen3ForCausalLM.from_pretrained(FOLDER), reward_funcs=reward,
        args=(GRPOConfig if stock else DAPOConfig)(**settings | changed), train_dataset=build_prompts(),
        processing_class=numbered_tokenizer(VOCABULARY), peft_config=peft,
    )  # fmt: skip


def train(stock, **changed):
    trainer = build(stock, **changed)
    trainer.train()
    return trainer


@contextmanager
def computed_tokens(gradients):
    """Tokens of each pass with or without gradients in this block, but for generation and what is run at the start."""
    passes, call, forward = [], Qwen3ForCausalLM.__call__, Qwen3Model.forward

    def called(model, *args, **kwargs):
        passes.append(0)
        return call(model, *args, **kwargs)

    @wraps(forward)
    def counted(model, *args, **kwargs):
        if torch.is_grad_enabled() == gradients and not kwargs.get("use_cache"):
            passes[-1] += kwargs["input_ids"].numel()
        return forward(model, *args, **kwargs)

    with (
        patched_attribute(exactness, "_difference", lambda *args: None),
        patched_attribute(Qwen3ForCausalLM, "__call__", called),
        patched_attribute(Qwen3Model, "forward", counted),
    ):
        yield passes
    passes[:] = filter(None, passes)
