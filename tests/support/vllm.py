"""What is put in place of vLLM where it is not installed."""

from functools import partial
from types import SimpleNamespace

import torch
from trl.trainer import grpo_trainer


class NoVLLM:
    """TRL's `VLLMGeneration`, colocated, without weights; notes when it is told to forget images."""

    mode = "colocate"

    def __init__(self, *args, **kwargs):
        self.done = []
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(reset_encoder_cache=lambda: self.done.append("forget")))

    def sync_weights(self):
        self.done.append("sync")


class Sampler(NoVLLM):
    """Notes what it is given, and draws completions, with log-probabilities that are not quite the model's."""

    def __init__(self, calls, lengths, *args, **kwargs):
        super().__init__()
        self.calls, self.lengths = calls, lengths
        self.generator = torch.Generator().manual_seed(5)

    def generate(self, prompts, images, num_generations, profiler):
        self.calls.append((len(prompts), images, num_generations))
        lengths = torch.randint(*self.lengths, (len(prompts),), generator=self.generator).tolist()
        completions = [torch.randint(300, 310, (n,), generator=self.generator).tolist() for n in lengths]
        return prompts, completions, [[[-2.5]] * len(tokens) for tokens in completions], None


def in_place_of_vllm(monkeypatch, lengths=(4, 5)):
    """Let trainers with `use_vllm` sample so; the list of (rows, images, completions per prompt) of each call."""
    calls = []
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", partial(Sampler, calls, lengths))
    return calls
