"""Training for a few optimizer steps, and what two trainings have in common."""

import copy
from contextlib import contextmanager

import torch
from support import trainers
from support.models.tiny_questions import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vgr_trl.passes import run_pass
from vgr_trl.patching import patched_attribute
from vgr_trl.sharing import SharingReport, share_prompts
from vgr_trl.sharing import row as row_module

# Of the largest update, in float32: additions in another order, by kernels that differ from CPU to CPU, change it by up
# to 2e-5; a token or a row too many changes it by 1e-2.
ROUNDING = 3e-5
PLACES = ("generation", "scoring", "training")
DAPO, STOCK = trainers.OURS, trainers.STOCK
LOSSES = {
    "dapo": {}, "grpo": {"loss_type": "grpo"}, "dr_grpo": {"loss_type": "dr_grpo"}, "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0}, "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"}, "vespo": {"loss_type": "vespo"},
}  # fmt: skip
STEPS = trainers.BIG_STEPS | {
    "max_completion_length": 8, "max_steps": 3, "learning_rate": 0.2, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "seed": 7, "temperature": 3.0,
}  # fmt: skip


def uneven_reward(completion_ids, **kwargs):
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def options(folder, **changed):
    return trainers.OPTIONS | {"output_dir": str(folder), **STEPS, **changed}


def numbered_tokenizer(size):
    """Of the words w2, w3, …, which stand for their numbers; 0 pads and 1 ends."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, size)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="w2", padding_side="left"
    )


def build_trainer(classes, model, processor, rows, settings, **more):
    """A trainer, of classes (trainer, config), with few tokens to choose from: completions end at different lengths."""
    trainer_class, config_class = classes
    tokenizer = getattr(processor, "tokenizer", processor)
    allowed = {tokenizer.eos_token_id, *tokenizer(WORDS)["input_ids"][:6]}
    others = sorted(set(range(len(tokenizer))) - allowed)
    # Tests count passes: those of the check of the pixels are its own, and a sample would make smaller ones.
    ours = {"check_pixels": False, "attention_rows": "all"} if classes == DAPO else {}
    if ours and "use_vllm" in settings:
        ours["engine_distance_limit"] = None  # what stands in for vLLM returns any log-probabilities
    return trainer_class(
        model=copy.deepcopy(model), reward_funcs=uneven_reward,
        args=config_class(**ours | settings, generation_kwargs={"suppress_tokens": others}), train_dataset=rows,
        processing_class=processor, **more,
    )  # fmt: skip


def trained(classes, model, processor, rows, settings, **more):
    trainer = build_trainer(classes, model, processor, rows, settings, **more)
    with reports_by_place() as trainer.places:
        trainer.train()
    return trainer


@contextmanager
def reports_by_place():
    """What `DAPOTrainer` shares meanwhile, in generation, scoring and training."""
    found = {place: SharingReport() for place in PLACES}

    @contextmanager
    def generate(model, completion_length, **more):
        with share_prompts(model, completion_length, **more) as report:
            yield report
        found["generation"].add(report.rows, report.prompts, report.plain)

    def lay_out(*args):
        row, call = row_module.lay_out(*args)
        found["training" if torch.is_grad_enabled() else "scoring"].add(len(row.batch_rows), len(row.prompts))
        return row, call

    with patched_attribute(run_pass, "share_prompts", generate), patched_attribute(run_pass, "lay_out", lay_out):
        yield found


def texts_of(trainer):
    return [item if isinstance(item, str) else item[0]["content"] for item in trainer._logs["completion"]]


def largest_relative_update(start, ours, theirs):
    return relative_difference(*(dict(model.named_parameters()) for model in (start, ours.model, theirs.model)))


def assert_same_steps(start, ours, theirs, most=ROUNDING):
    assert texts_of(ours) == texts_of(theirs)
    assert largest_relative_update(start, ours, theirs) < most


def relative_difference(start, mine, theirs):
    """Largest difference of any two weights by name, relative to the largest update of any weight."""
    update, difference = 0.0, 0.0
    for name, other in theirs.items():
        before = start.get(name, start.get(name.replace("base_model.model.", "").replace(".base_layer", ""), other))
        if "lora_B" in name:
            before = torch.zeros_like(other)
        update = max(update, float((other - before).detach().abs().max()))
        difference = max(difference, float((mine[name] - other).detach().abs().max()))
    assert update > 0
    return difference / update
