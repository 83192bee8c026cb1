"""What is put in place of vLLM where it is not installed."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
from peft import PeftModel
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


class Engine(NoVLLM):
    """Generates with a copy of the trainer's model, which `sync_weights` renews; its methods are places for faults.

    Attributes:
        dtype: precision of the copy.
        model: the copy, in the precision `dtype`.
        faults: place of a fault -> what it makes of the value there.
    """

    dtype = torch.float32

    def __init__(self, model, accelerator, *args, processing_class, temperature, max_completion_length, **kwargs):
        super().__init__()
        self.policy, self.accelerator, self.processor = model, accelerator, processing_class
        self.temperature, self.length, self.faults, self.model = temperature, max_completion_length, {}, None
        self.generator = torch.Generator().manual_seed(5 + accelerator.process_index)

    def do(self, name, value):
        """Return a value of the generation, through the fault of this name, if there is one."""
        return self.faults[name](self, value) if name in self.faults else value

    def sync_weights(self):
        super().sync_weights()
        policy = copy.deepcopy(self.accelerator.unwrap_model(self.policy))
        policy = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
        model = type(policy)(policy.config).to(self.dtype)  # a copy of the policy would call the methods of the policy
        model.load_state_dict(policy.state_dict())
        self.model = self.do("model", model.eval())  # `self.model` is still the last one

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler):
        """Sample each row by whole passes; rows are as many as completions, in the order of TRL."""
        self.asked, read = (prompts, images), expanded(self.processor, prompts, images)
        pixels = self.do("pixels", self.processor.image_processor([i for of_row in images for i in of_row]))
        ids = self.do("ids", expanded(self.processor, prompts, images))
        width, pad = max(map(len, ids)), self.processor.tokenizer.pad_token_id
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        rows = torch.tensor([[pad] * (width - len(row)) + row for row in ids])
        mask, drawn = self.do("mask", mask), []
        unsampled = torch.tensor([self.processor.image_token_id])
        for _ in range(self.length):
            types = (rows == self.processor.image_token_id).int()
            given = {"input_ids": rows, "attention_mask": mask, "mm_token_type_ids": types}
            given |= {name: torch.as_tensor(value) for name, value in pixels.items()}
            logits = self.model(**self.do("inputs", given)).logits[:, -1].float()
            logps = (self.do("logits", logits) / self.temperature).log_softmax(-1)
            likely = logps.exp().nan_to_num(1).index_fill(1, unsampled, 0)  # an image token would have no image
            chosen = torch.multinomial(likely, 1, generator=self.generator)
            drawn.append(logps.gather(1, chosen))
            rows, mask = torch.cat([rows, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
        logps = self.do("drawn", torch.cat(drawn, 1))
        return read, rows[:, width:].tolist(), logps.unsqueeze(-1).tolist(), None


def engine_in_place_of_vllm(monkeypatch, **attributes):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", type("Made", (Engine,), attributes))
