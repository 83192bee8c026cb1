"""Completions of a model for a batch of conversations, prompted as TRL prompts it during training."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import GenerationConfig
from trl.data_utils import prepare_multimodal_messages

from vgr_trl.replacing import replaced


class Writer:
    """Writes completions with a model and its processor (or tokenizer).

    Args:
        processor: its processor, or its tokenizer for a text-only model.
        max_completion_length: in tokens, at least 1.
    """

    def __init__(self, model: Any, processor: Any, max_completion_length: int) -> None:
        self.model, self.processor = model, processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.max_completion_length = max_completion_length

    def prompt(self, conversations: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the model's inputs for conversations (or texts), padded on the left, on the model's device."""
        if isinstance(conversations[0], str):
            fields = dict(self.processor(text=list(conversations)))
        else:
            if self.tokenizer is not self.processor:
                conversations = [prepare_multimodal_messages(conversation) for conversation in conversations]
            fields = dict(
                self.processor.apply_chat_template(
                    list(conversations), add_generation_prompt=True, tokenize=True, return_dict=True
                )
            )
        ids = fields.pop("input_ids")
        fields.pop("attention_mask", None)
        inputs = {
            "input_ids": _left_padded(ids, self._pad_id()),
            "attention_mask": _left_padded([[1] * len(row) for row in ids], 0),
        }
        for name, value in fields.items():
            if isinstance(value, list) and value and isinstance(value[0], list):
                inputs[name] = _left_padded(value, 0)  # one value per token
            else:
                inputs[name] = torch.as_tensor(value)
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def greedy(self, inputs: dict[str, torch.Tensor]) -> list[str]:
        """Return the most likely completion, token by token, of each prompt."""
        return self._write(inputs, do_sample=False)

    def sample(self, inputs: dict[str, torch.Tensor], count: int, temperature: float) -> list[list[str]]:
        """Return `count` completions of each prompt, drawn from the whole distribution at `temperature`."""
        if count == 0:
            return [[] for _ in inputs["input_ids"]]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "num_return_sequences": count}
        texts = self._write(inputs, **sampling)
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def _write(self, inputs: dict[str, torch.Tensor], **sampling: Any) -> list[str]:
        settings = GenerationConfig(
            max_new_tokens=self.max_completion_length,
            eos_token_id=self._stop_ids(),
            pad_token_id=self._pad_id(),
            suppress_tokens=self._image_ids(),
            **sampling,
        )
        with _only_these_settings(self.model, settings):
            ids = self.model.generate(**inputs, generation_config=settings)
        return list(self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def _pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)

    def _stop_ids(self) -> list[int]:
        declared = self.model.generation_config.eos_token_id
        declared = [declared] if isinstance(declared, int) else list(declared or [])
        return sorted({*declared, self.tokenizer.eos_token_id})

    def _image_ids(self) -> list[int] | None:
        """TRL suppresses the image token while it samples, so it is suppressed here too."""
        image_id = getattr(getattr(self.model, "config", None), "image_token_id", None)
        return [image_id] if isinstance(image_id, int) and self.tokenizer is not self.processor else None


def _only_these_settings(model: Any, settings: GenerationConfig) -> AbstractContextManager[None]:
    """Keep what the checkpoint prefers (beams, a smaller top_k, …) from filling in what `settings` leaves open."""
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return replaced(owner, "generation_config", settings)


def _left_padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[value] * (longest - len(row)) + list(row) for row in rows])
