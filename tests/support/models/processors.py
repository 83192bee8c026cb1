"""Processors of families, with tokenizers of a few words; those that can be made without torchvision and num2words."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

SQUARE = {"height": 28, "width": 28}
QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
QWEN |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
GEMMA = {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
AUDIO = {"audio_token": "<sound>", "boa_token": "<boa>", "eoa_token": "<eoa>", "video_token": "<video>"}
INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
IDEFICS = {"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"}
IDEFICS |= {"global_token": "<global-img>", "end_token": "<end_of_utterance>"}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
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


def _paligemma() -> Any:
    images = SiglipImageProcessorPil(size=SQUARE)
    images.image_seq_length = 4
    return processor("PaliGemmaProcessor", images, {"image_token": "<image>"})


def _gemma4() -> Any:
    absent = {"feature_extractor": None, "video_processor": None}
    return processor("Gemma4Processor", Gemma4ImageProcessorPil(), GEMMA | AUDIO, **absent)


def _internvl() -> Any:
    images = GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True)
    return processor("InternVLProcessor", images, INTERN | {"video_token": "<video>"}, **FOUR_TOKENS)


def _qwen(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: processor(kind, Qwen2VLImageProcessorPil(**options), QWEN)


def _llava(kind: str, images: Any) -> Callable[[], Any]:
    return lambda: processor(kind, images(), {"image_token": "<image>"}, **LLAVA)


PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": _qwen("Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("Qwen3VLProcessor", patch_size=16),
    "qwen3_vl_moe": _qwen("Qwen3VLProcessor", patch_size=16),
    "qwen3_5": _qwen("Qwen3VLProcessor", patch_size=16),
    "glm4v": lambda: processor("Glm4vProcessor", Glm4vImageProcessorPil(), GLM),
    "gemma3": lambda: processor("Gemma3Processor", Gemma3ImageProcessorPil(size=SQUARE), GEMMA, **FOUR_TOKENS),
    "gemma4": _gemma4,
    "gemma4_published": _gemma4,
    "llava": _llava("LlavaProcessor", LlavaImageProcessorPil),
    "llava_next": _llava("LlavaNextProcessor", LlavaNextImageProcessorPil),
    "internvl": _internvl,
    "idefics2": lambda: processor("Idefics2Processor", Idefics2ImageProcessorPil(), IDEFICS, image_seq_len=4),
    "idefics3": lambda: processor("Idefics3Processor", Idefics3ImageProcessorPil(), IDEFICS, image_seq_len=4),
    "paligemma": _paligemma,
}
