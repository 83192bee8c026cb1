"""Processors of families, with tokenizers of a few words; those that can be made without torchvision and num2words."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers as hf
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GEMMA, AUDIO, INTERN, IDEFICS = (TABLE["special"][name] for name in ("gemma", "audio", "intern", "idefics"))
FOUR_TOKENS = {"image_seq_length": 4}


def word_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Words are the line ends that Gemma 3 writes around an image, and the special tokens, which have these names."""
    texts = list(dict.fromkeys(special.values()))
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<unk>", "\n\n", *texts])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n\n", "isolated")
    names = dict.fromkeys(("unk_token", "pad_token", "bos_token", "eos_token"), "<unk>")
    more: dict[str, Any] = {"extra_special_tokens": texts, "model_specific_special_tokens": special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **more)


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """Any text, a token for each byte, with the marks of messages and of the end; special tokens have these names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<pad>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(special.values())]
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate([*marks, *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "bos_token": None, "unk_token": None}
    more: dict[str, Any] = {"extra_special_tokens": marks[1:], "model_specific_special_tokens": special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, **more)


def processor(
    kind: str, image_processor: Any, special: dict[str, str],
    tokenizer: Callable[..., PreTrainedTokenizerFast] = word_tokenizer, **options: Any,
) -> Any:  # fmt: skip
    takes_none = {"check_argument_for_proper_class": lambda self, name, argument: None}
    made: Any = type(kind, (getattr(hf, kind),), takes_none)
    return made(image_processor=image_processor, tokenizer=tokenizer(**special), **options)


def image_processor(module: str, **options: Any) -> Any:
    """Of a module of transformers, such as `qwen2_vl`."""
    found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, found.__all__[0])(**options)


def _from_table(kind: str, module: str, special: dict[str, str], images: Any = None, **options: Any) -> Any:
    made = image_processor(module, **images or {})
    if kind == "PaliGemmaProcessor":
        made.image_seq_length = 4
    return processor(kind, made, special, **options)


PROCESSORS: dict[str, Callable[[], Any]] = {
    name: partial(_from_table, **row) for name, row in TABLE["processors"].items()
}
