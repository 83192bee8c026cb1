"""Three optimizer steps of a tiny text model, by TRL's trainer and by ours, in one process or in one of several."""

import tempfile
from contextlib import contextmanager
from functools import wraps

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from trl import GRPOConfig, GRPOTrainer

from vgr_trl import DAPOConfig, DAPOTrainer
from vgr_trl.replacing import replaced

PAD, EOS, TEXT, VOCABULARY = 0, 1, 4, 40
LOSSES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
}


def build_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def build_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="w2", padding_side="left"
    )


def build_prompts() -> Dataset:
    """Of 6 to 22 tokens; the first word is w4 or w5."""
    draw = torch.Generator().manual_seed(1)
    words = [torch.randint(6, VOCABULARY, (4 + row,), generator=draw).tolist() for row in range(12)]
    return Dataset.from_dict({"prompt": [" ".join(f"w{w}" for w in [4 + row % 2, *words[row]]) for row in range(12)]})


def half_dead_reward(prompts, completion_ids, **kwargs):
    """Equal for all completions of every other prompt; elsewhere every other completion earns the mean of its group."""
    patterns = {0: (0.0, 1.0, 0.5, 0.5), 1: (0.3, 0.3, 0.3, 0.3)}
    words = [int(prompt.split()[0][1:]) for prompt in prompts]
    return [patterns[word % 2][row % 4] for row, word in enumerate(words)]


def lively_reward(completion_ids, **kwargs):
    """Another value for nearly every completion."""
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def dead_reward(completion_ids, **kwargs):
    return [0.5] * len(completion_ids)


def third_of_the_tokens(completion_ids):
    """(N, T), the tokens that get credit in the runs with credit per token; of some completions there is none."""
    return completion_ids % 3 == 0


class WithCredit:
    """An advantage for some tokens only, in whichever trainer this stands before."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        credited = third_of_the_tokens(batch["completion_ids"])
        return {**batch, "advantages": batch["advantages"].unsqueeze(1) * credited}


class StockWithCredit(WithCredit, GRPOTrainer):
    """TRL's loss takes advantages (N, T)."""


class OursWithCredit(WithCredit, DAPOTrainer):
    """Ours with the same advantages."""


FOLDER = tempfile.mkdtemp()  # TRL loads its reference model from where the policy comes from
build_model().save_pretrained(FOLDER)
START = {name: parameter.detach().clone() for name, parameter in build_model().named_parameters()}


def build(stock, *, credit=False, reward=half_dead_reward, peft=None, **changed):
    """A trainer of three steps of SGD in float32 over rollouts of two prompts with four completions each."""
    options = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
        "temperature": 2.0,
        "epsilon_high": 0.28,
        "generation_kwargs": {"suppress_tokens": [t for t in range(VOCABULARY) if t not in (EOS, *range(6, 12))]},
    }
    trainers = {(True, False): GRPOTrainer, (True, True): StockWithCredit}
    trainers |= {(False, False): DAPOTrainer, (False, True): OursWithCredit}
    return trainers[stock, credit](
        model=Qwen3ForCausalLM.from_pretrained(FOLDER),
        reward_funcs=reward,
        args=(GRPOConfig if stock else DAPOConfig)(**{**options, **changed}),
        train_dataset=build_prompts(),
        processing_class=build_tokenizer(),
        **({} if peft is None else {"peft_config": peft}),
    )


def train(stock, **options):
    """The trainer after its steps."""
    trainer = build(stock, **options)
    trainer.train()
    return trainer


@contextmanager
def computed_tokens(gradients):
    """Tokens that each pass with or without gradients computes in this block; generation does not count."""
    passes, forward = [], Qwen3Model.forward

    @wraps(forward)
    def counted(model, *args, **kwargs):
        cache = kwargs.get("past_key_values")
        if torch.is_grad_enabled() == gradients and not kwargs.get("use_cache"):
            if cache is None or cache.get_seq_length() == 0:
                passes.append(0)
            passes[-1] += kwargs["input_ids"].numel()
        return forward(model, *args, **kwargs)

    with replaced(Qwen3Model, "forward", counted):
        yield passes


@contextmanager
def micro_batches():
    """What TRL computes losses of in this block."""
    found, compute = [], GRPOTrainer._compute_loss

    def recorded(trainer, model, inputs):
        found.append(inputs)
        return compute(trainer, model, inputs)

    with replaced(GRPOTrainer, "_compute_loss", recorded):
        yield found


def weights_of(trainer):
    """By name, whole."""
    return dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())


def relative_difference(mine, theirs):
    """Largest difference of any two weights, relative to the largest update of any weight."""
    update = difference = 0.0
    for name, other in theirs.items():
        before = START.get(name.replace("base_model.model.", "").replace(".base_layer", ""), other)
        before = torch.zeros_like(other) if "lora_B" in name else before
        update = max(update, float((other - before).detach().abs().max()))
        difference = max(difference, float((mine[name] - other).detach().abs().max()))
    return difference / update if update else difference
