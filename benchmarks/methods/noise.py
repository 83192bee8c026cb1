"""How much of a step's gradient is signal, by the tokens that get credit; at the start, so nothing is trained.

    PYTHONPATH=src:benchmarks python -m methods.noise --tasks style-0 style-8 style-32 --seeds 0 1 2

The policy gradient is a sum over tokens, so that of the words read off the image, of words of filler and of the rest
are measured apart, in many batches of the size of a step; credit for some of them is the sum of theirs. `signal`: the
mean product of the gradients of two batches over the mean square of one, at most 1, where batches agree; 0 where they
have nothing in common. Once as it is, and once divided, number by number, by the root of its mean square over batches,
as Adam does. Under each start: what its thoughts say.
"""

import argparse
import random

import torch
from demo_signals import conversations, tokenised

from methods.contenders import ids_of
from methods.controls import is_one_of
from methods.runs import Settings, Start
from methods.tasks import TASKS
from methods.thoughts import in_thoughts
from vgr_trl.demo.dataset import Rows
from vgr_trl.evaluation.writer import Writer
from vgr_trl.rewards import accuracy_reward, think_format_reward

CREDIT = {"all tokens": (0, 1, 2), "words read off": (0,), "filler": (1,), "all but filler": (0, 2)}


def main() -> None:
    """Print a row of a table for every task, seed and choice of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["style-0", "style-8", "style-32"], choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=24)
    flags = parser.parse_args()
    print("| task | seed | credit | norm | signal | signal, Adam |\n|---|" + "---:|" * 5)
    for task in flags.tasks:
        for seed in flags.seeds:
            start = Start(TASKS[task], seed, Settings())
            for name, numbers in measures(gradients_of(start, flags.batches)).items():
                print(f"| {task} | {seed} | {name} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
            rows = start.questions.test
            print(task, seed, in_thoughts(start.answers(rows, samples=4), rows, start.task), flush=True)


def gradients_of(start: Start, batches: int) -> torch.Tensor:
    """Return (B, 3, P): in B batches, the gradient through words that are read off, words of filler, and the rest."""
    torch.manual_seed(start.seed)
    draw, prompts = random.Random(start.seed), start.settings.prompts
    return torch.stack([by_tokens(start, draw.sample(start.questions.train, prompts)) for _ in range(batches)])


def by_tokens(start: Start, rows: Rows) -> torch.Tensor:
    """Return the gradients of one batch, (3, P)."""
    count, tokenizer = start.settings.generations, start.processor.tokenizer
    writer = Writer(start.model, start.processor, start.task.completion_length)
    start.model.eval()
    sampled = writer.sample(writer.prompt(conversations(rows, False)), count, 1.0)
    texts = [text for several in sampled for text in several]
    ids, mask = tokenised(texts, start.processor)  # (N, T)
    advantages = advantages_of(texts, [row["solution"] for row in rows for _ in range(count)], count)  # (N,)
    asked = writer.prompt(conversations([row for row in rows for _ in range(count)], False))
    asked |= {
        "input_ids": torch.cat([asked["input_ids"], ids], 1),
        "attention_mask": torch.cat([asked["attention_mask"], mask], 1),
    }
    asked.pop("mm_token_type_ids", None)
    logits = start.model(**asked, logits_to_keep=ids.shape[1] + 1).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)  # (N, T)
    valid = mask.bool()
    drawn = sorted(word for family in start.task.families.values() for word in family)
    read, filler = (is_one_of(ids_of(words, tokenizer), ids, valid) for words in (drawn, start.task.filler))
    gains = advantages.unsqueeze(1) * logps / valid.sum()
    parameters = list(start.model.parameters())
    parts = []
    for tokens in (read, filler, valid & ~read & ~filler):
        found = torch.autograd.grad((gains * tokens).sum(), parameters, retain_graph=True, materialize_grads=True)
        parts.append(torch.cat([each.flatten() for each in found]))
    return torch.stack(parts)


def advantages_of(texts: list[str], solutions: list[str], count: int) -> torch.Tensor:
    """Return what the bench's rewards give each of `count` completions of a prompt against the others, (N,)."""
    right, formed = accuracy_reward(texts, solutions), think_format_reward(texts)
    rewards = torch.tensor([float(one or 0) + 0.2 * other for one, other in zip(right, formed, strict=True)])
    groups = rewards.view(-1, count)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def measures(gradients: torch.Tensor) -> dict[str, list[float]]:
    """Return for every choice of tokens the mean norm, and the signal as it is and as Adam has it.

    Args:
        gradients: (B, 3, P) of B batches.
    """
    found = {}
    for name, parts in CREDIT.items():
        own = gradients[:, list(parts)].sum(1)  # (B, P)
        if own.any():
            scale = own.square().mean(0).sqrt().clamp(min=1e-12)
            found[name] = [own.norm(dim=1).mean().item(), signal(own), signal(own / scale)]
    return found


def signal(gradients: torch.Tensor) -> float:
    """Return the mean product of two batches' gradients (B, P) over the mean square of one."""
    products, count = gradients @ gradients.T, len(gradients)
    squares = products.trace()
    return float((products.sum() - squares) / (count - 1) / squares)


if __name__ == "__main__":
    main()
