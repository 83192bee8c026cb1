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

    def _iter_named_params(self):
        return iter(())

    def sync_weights(self):
        self.done.append("sync")


class Sampler(NoVLLM):
    """Notes what it is given, and draws completions, with log-probabilities that are not quite the model's."""

    def __init__(self, calls, lengths, stock, *args, processing_class, **kwargs):
        super().__init__()
        self.calls, self.lengths, self.stock, self.processor = calls, lengths, stock, processing_class
        self.generator = torch.Generator().manual_seed(5)

    def generate(self, prompts, images, num_generations, profiler):
        self.calls.append((len(prompts), images, num_generations))
        lengths = torch.randint(*self.lengths, (len(prompts),), generator=self.generator).tolist()
        completions = [torch.randint(300, 310, (n,), generator=self.generator).tolist() for n in lengths]
        read = prompts if images is None else expanded(self.processor, prompts, images, self.stock)
        return read, completions, [[[-2.5]] * len(tokens) for tokens in completions], None


def expanded(processor, prompts, images, stock=False):
    """Return what vLLM reads: a placeholder becomes its image; with `stock`, TRL may have expanded prompts already."""
    read = []
    for ids, of_row in zip(prompts, images, strict=True):
        shown, token = iter(of_row or ()), processor.image_token_id
        if stock and ids.count(token) > len(of_row or ()):
            read.append(ids)
            continue
        written = [
            processor(text=[processor.image_token], images=[[next(shown)]])["input_ids"][0] if each == token else [each]
            for each in ids
        ]
        read.append([each for part in written for each in part])
        assert next(shown, None) is None, "an image without a placeholder"
    return read


def in_place_of_vllm(monkeypatch, lengths=(4, 5), stock=False):
    calls = []
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", partial(Sampler, calls, lengths, stock))
    return calls
