"""Positions, passes and operators of `generate`, of shared `generate` and of continuous batching; no times.

python benchmarks/generation.py

A tiny Qwen2.5-VL completes four prompts with an image eight times each. Lengths are drawn as models write them,
log-normally, with a mean of 0.3 of the limit, and forced: a row ends where its length says.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestState

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from machine import describe_machine, read_commit  # noqa: E402
from support.models.batched import MARKS, as_trl_has_it, prompts_of  # noqa: E402
from support.models.families import EOS, PAD, build  # noqa: E402

from vgr_trl.batching import generate_batch, looking_up, make_requests  # noqa: E402
from vgr_trl.patching import patched_attribute  # noqa: E402
from vgr_trl.sharing import share_prompts  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "generation.md"
PROMPTS, GENERATIONS, LIMIT, MEAN, SPREAD = 4, 8, 128, 0.3, 0.8
TEXT = (180, 210, 240, 270)  # words of the prompts


class Counter(TorchDispatchMode):
    """Counts passes and positions of a decoder, and the operators of whole passes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.passes = self.positions = self.operators = 0
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return operator(*args, **(kwargs or {}))

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.passes += 1
        self.positions += kwargs["inputs_embeds"].shape[:2].numel()


class EndAt(LogitsProcessor):
    """Ends each row of `generate` at its length."""

    def __init__(self, lengths: list[int], prompt: int) -> None:
        self.lengths, self.prompt = torch.tensor(lengths), prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.size(1) - self.prompt + 1 >= self.lengths
        scores[:, [EOS, PAD]] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, EOS] = 0
        return scores


def draw_lengths() -> list[int]:
    """Return the length of each completion."""
    draw = random.Random(0)
    center = math.log(MEAN * LIMIT) - SPREAD**2 / 2
    return [min(max(round(draw.lognormvariate(center, SPREAD)), 1), LIMIT) for _ in range(PROMPTS * GENERATIONS)]


def by_generate(model: Any, prompts: dict[str, Any], lengths: list[int], counter: Counter) -> list[int]:
    """Generate by `generate`; return the number of tokens of each row up to its end."""
    width, plain = prompts["input_ids"].size(1), model.forward

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return plain(*args, **kwargs)

    with patched_attribute(model, "forward", forward), torch.no_grad():
        ends = LogitsProcessorList([EndAt(lengths, width)])
        ids = model.generate(**prompts, max_new_tokens=LIMIT, do_sample=True, top_k=0, logits_processor=ends)
    return [(row != PAD).sum().item() for row in ids[:, width:]]


@contextmanager
def ending_at(lengths: list[int], rows: dict[str, int]) -> Iterator[None]:
    """End each request of continuous batching at its length in this block."""
    plain = RequestState.update_and_check_completion

    def update(state: RequestState, token: int, logprob: float | None) -> bool:
        length = lengths[rows[state.request_id]]
        written = (
            state.generated_len()
            + len(state.initial_tokens)
            - (state._true_initial_tokens or len(state.initial_tokens))
        )
        return plain(state, EOS if written + 1 >= length else token, logprob)

    with patched_attribute(RequestState, "update_and_check_completion", update):
        yield


def by_batching(model: Any, prompts: dict[str, Any], lengths: list[int], counter: Counter, blocks: int) -> list[int]:
    """Generate by continuous batching; return the number of tokens of each row."""
    config = GenerationConfig(
        max_new_tokens=LIMIT,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
        suppress_tokens=[EOS, PAD, *MARKS],
    )
    pages = ContinuousBatchingConfig(page_size=16, num_blocks=blocks, max_batch_tokens=2048, return_logprobs=True)
    with torch.no_grad():
        requests = make_requests(model, *as_trl_has_it(prompts))
        names = {
            f"{name}__child#{place - 1}" if place else str(name): row
            for name, rows in enumerate(requests.rows)
            for place, row in enumerate(rows)
        }
        counter.passes = counter.positions = counter.operators = 0  # the pass up to the decoder is none
        with looking_up(model, requests, lambda: counter), ending_at(lengths, names):
            completions, _ = generate_batch(model, requests, config, pages)
    return [len(row) for row in completions]


def measure(way: Callable[..., list[int]], *options: Any) -> tuple[Counter, list[int]]:
    """Return the counts of a way to generate, and the lengths that it wrote."""
    torch.manual_seed(0)
    model = build("qwen2_5_vl")
    model.generation_config.suppress_tokens = MARKS
    counter = Counter(model)
    prompts = prompts_of("qwen2_5_vl", (1,) * PROMPTS, generations=GENERATIONS, text=TEXT)
    shares = share_prompts(model) if "shared" in options else nullcontext()
    with shares:
        return counter, way(model, prompts, draw_lengths(), counter, *(each for each in options if each != "shared"))


def make_page() -> str:
    """Return the page as Markdown."""
    lengths = draw_lengths()
    prompts = prompts_of("qwen2_5_vl", (1,) * PROMPTS, generations=GENERATIONS, text=TEXT)
    unique = int(prompts["attention_mask"][::GENERATIONS].sum())
    least = unique + sum(lengths)
    ways: dict[str, tuple[Any, ...]] = {
        "`generate`": (by_generate,),
        "`generate`, prompts shared": (by_generate, "shared"),
        "continuous batching": (by_batching, 500),
        "continuous batching, a quarter of the pages": (by_batching, 48),
    }
    lines = [
        "| | passes | positions | of prompts and kept tokens | operators a kept token |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (way, *options) in ways.items():
        counter, written = measure(way, *options)
        assert written == lengths, f"{name} wrote other lengths"
        ratio, operators = counter.positions / least, counter.operators / sum(lengths)
        lines.append(f"| {name} | {counter.passes} | {counter.positions:,} | {ratio:.2f} | {operators:.0f} |")
    about = (
        f"{PROMPTS} prompts with an image, {unique} tokens in all, {GENERATIONS} completions each of at most {LIMIT} "
        f"tokens: {sum(lengths)} in all, the longest {max(lengths)}, lengths log-normal with a mean of {MEAN} of the "
        "limit. Positions pass through the decoder; the goal is at most 1.05 of unique prompts and kept tokens. "
        "Operators are those of passes of a tiny Qwen2.5-VL (PyTorch's dispatcher)."
    )
    machine = ", ".join(f"{name} {value}" for name, value in describe_machine(torch.get_num_threads()).items())
    run = f"`python benchmarks/generation.py`, commit {read_commit()}; {machine}."
    return "\n".join(["# Generation by `generate` and by continuous batching", "", about, "", *lines, "", run, ""])


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
