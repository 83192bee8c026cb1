"""A real vision-language model with its processor, small enough to train on a CPU core."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

EOS, PAD = "<|im_end|>", "<|endoftext|>"
_VISION = ("vision_start", "vision_end", "image_pad", "video_pad")
SPECIAL_TOKENS = (PAD, "<|im_start|>", EOS, *(f"<|{name}|>" for name in _VISION))
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # not special: they must survive skip_special_tokens
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.txt").read_text(encoding="utf-8").strip()


def build_processor(texts: Iterable[str]) -> PaddleOCRVLProcessor:
    """Return a processor with a token for every word of `texts`; other text falls back to bytes.

    Of the classes that transformers has for Qwen2-VL's image processor, PaddleOCR-VL's has no video processor, which
    needs torchvision; so `AutoProcessor` opens the saved one anywhere. Images become the same inputs.
    """
    words = ["user\n", "assistant\n", "system\n", *texts]
    training = {"vocab_size": 4096, "min_frequency": 1}  # an upper bound: merging stops when every word is one token
    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(words, **training, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (EOS, PAD)],
        model_specific_special_tokens={"image_token": "<|image_pad|>"},  # the processor asks for it
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(TAGS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return PaddleOCRVLProcessor(Qwen2VLImageProcessorPil(), tokenizer, chat_template=CHAT_TEMPLATE)


def build_tiny_vlm(
    texts: Iterable[str],
    *,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    vision_depth: int = 2,
    seed: int = 0,
) -> tuple[Qwen2_5_VLForConditionalGeneration, PaddleOCRVLProcessor]:
    """Return an untrained Qwen2.5-VL model and its processor.

    Args:
        texts: texts that the model will read and write; every word in them becomes a token.
        hidden_size: width of language model and vision tower, a multiple of 4 x `num_heads`.
        num_layers: layers of the language model; below 3 there is no late third of the layers.
    """
    processor = build_processor(texts)
    ids = processor.tokenizer.convert_tokens_to_ids
    both = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "initializer_range": 0.05}
    half_head = hidden_size // num_heads // 2
    time = half_head // 4
    height = (half_head - time) // 2
    rope = {
        "rope_type": "default", "rope_theta": 1e4,
        "mrope_section": [time, height, half_head - time - height],  # parts of half a head: time, height, width
    }  # fmt: skip
    text = {
        "vocab_size": len(processor.tokenizer), "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": ids(EOS), "pad_token_id": ids(PAD), "rope_parameters": rope,
    }  # fmt: skip
    vision = {
        "depth": vision_depth, "num_heads": num_heads, "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [vision_depth - 1],
    }  # fmt: skip
    tokens = {f"{name.removesuffix('_pad')}_token_id": ids(f"<|{name}|>") for name in _VISION}
    config = Qwen2_5_VLConfig(text_config=both | text, vision_config=both | vision, tie_word_embeddings=True, **tokens)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ids(EOS), ids(PAD)
    return model, processor
