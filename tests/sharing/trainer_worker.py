"""One of two processes over gloo: TRL's GRPOTrainer with shared prompts against the stock one."""

import sys
import tempfile

import torch
from datasets import Dataset
from families import EOS, PAD, TEXT, VOCABULARY, build
from sharing_trainer import SharingTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="w2", padding_side="left"
    )


def uneven_reward(completion_ids, **kwargs):
    return [sum(ids) % 17 / 17 for ids in completion_ids]


def trained(trainer_class: type[GRPOTrainer], **changed) -> GRPOTrainer:
    generator = torch.Generator().manual_seed(1)
    prompts = [
        " ".join(f"w{word}" for word in torch.randint(TEXT, VOCABULARY, (33 + row,), generator=generator).tolist())
        for row in range(12)
    ]
    few = [token for token in range(VOCABULARY) if token not in (EOS, *range(TEXT, TEXT + 6))]
    trainer = trainer_class(
        model=build("qwen3"),
        reward_funcs=uneven_reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            num_generations=4,
            max_completion_length=8,
            max_steps=3,
            learning_rate=1.0,
            max_grad_norm=1e9,
            optim="sgd",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=7,
            temperature=3.0,
            generation_kwargs={"suppress_tokens": few},
            **changed,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


def run(rank: int) -> None:
    torch.set_num_threads(1)
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    straddling = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}  # 6 rows here, 3 groups in all
    for changed, prompts_per_row in ((whole, 1 / 4), (straddling, None)):
        stock, ours = trained(GRPOTrainer, **changed), trained(SharingTrainer, **changed)
        assert stock.accelerator.num_processes == 2
        assert list(ours._logs["completion"]) == list(stock._logs["completion"])
        start = dict(build("qwen3").named_parameters())
        mine = dict(ours.accelerator.unwrap_model(ours.model).named_parameters())
        theirs = dict(stock.accelerator.unwrap_model(stock.model).named_parameters())
        update = max(float((theirs[name] - start[name]).detach().abs().max()) for name in start)
        difference = max(float((theirs[name] - mine[name]).detach().abs().max()) for name in start)
        assert difference < 1e-5 * update, (difference, update)
        shared = ours.training_report.prompts_per_row
        assert shared == prompts_per_row if prompts_per_row else 1 / 4 < shared < 1, shared
        print(f"difference {difference / update:.1e}")
    print(f"rank {rank} passed")


if __name__ == "__main__":
    run(int(sys.argv[1]))
