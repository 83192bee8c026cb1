"""One of two processes over gloo: three steps of `DAPOTrainer` with shared prompts against those of TRL's trainer."""

import atexit
import gc
import shutil
import sys
import tempfile

import torch
from datasets import Dataset
from support.models.families import EOS, TEXT, VOCABULARY, build
from support.steps import (
    DAPO,
    STOCK,
    numbered_tokenizer,
    options,
    relative_difference,
    reports_by_place,
    texts_of,
    uneven_reward,
)
from transformers import Qwen3ForCausalLM

KIND = sys.argv[1]  # ddp, or zero2 and zero3 in the environment of accelerate launch
WHOLE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
STRADDLING = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}  # 6 rows here, 3 groups in all
CASES = [
    ({"loss_type": "dapo"}, WHOLE),
    ({"loss_type": "dapo", "beta": 0.1, "num_iterations": 2}, STRADDLING),
    ({"loss_type": "grpo", "gradient_checkpointing": True}, WHOLE),
    ({"loss_type": "dr_grpo"}, STRADDLING),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, STRADDLING),
    ({"loss_type": "sapo"}, WHOLE),
    ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, WHOLE),
    ({"loss_type": "vespo"}, STRADDLING),
    ({"loss_type": "bnpo"}, WHOLE),
]
FOLDER = tempfile.mkdtemp()  # TRL loads its reference model from where the policy comes from
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
build("qwen3").save_pretrained(FOLDER)
START = dict(build("qwen3").named_parameters())


def trained(classes, changed):
    generator = torch.Generator().manual_seed(1)
    prompts = [
        " ".join(f"w{word}" for word in torch.randint(TEXT, VOCABULARY, (33 + row,), generator=generator).tolist())
        for row in range(12)
    ]
    few = [token for token in range(VOCABULARY) if token not in (EOS, *range(TEXT, TEXT + 6))]
    settings = options(tempfile.mkdtemp(dir=FOLDER), learning_rate=1.0, epsilon_high=0.28)
    settings["generation_kwargs"] = {"suppress_tokens": few}
    if KIND != "ddp":
        settings |= {"use_cpu": False, "ddp_backend": "gloo"}  # DeepSpeed chooses the device itself
    trainer = classes[0](
        model=Qwen3ForCausalLM.from_pretrained(FOLDER),
        reward_funcs=uneven_reward,
        args=classes[1](**{**settings, **changed}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=numbered_tokenizer(VOCABULARY),
    )
    with reports_by_place() as trainer.places:
        trainer.train()
    return trainer


def weights_of(trainer):
    parameters = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    if KIND != "zero3":
        return parameters
    from deepspeed import zero

    with zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def run() -> None:
    torch.set_num_threads(1)
    gc.freeze()
    cases = CASES if KIND == "ddp" else CASES[:3]
    for loss, batches in cases:
        stock = trained(STOCK, {**loss, **batches})
        shares = {"skip_zero_advantage": "off"}  # all rows are counted
        ours = trained(DAPO, {**loss, **batches, **shares})
        assert stock.accelerator.num_processes == 2
        assert ours.accelerator.distributed_type == ("MULTI_CPU" if KIND == "ddp" else "DEEPSPEED")
        assert texts_of(ours) == texts_of(stock)
        difference = relative_difference(START, weights_of(ours), weights_of(stock))
        assert difference < 1e-5, (loss, difference)
        assert ours.places["generation"].prompts_per_row == (1 / 4 if batches is WHOLE else 1 / 3)
        shared = ours.places["training"].prompts_per_row
        if loss["loss_type"] != "bnpo":
            assert shared == 1 / 4 if batches is WHOLE else 1 / 4 < shared < 1, (loss, shared)


if __name__ == "__main__":
    run()
