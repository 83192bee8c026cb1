"""A real vision-language model with its processor, small enough to train on one CPU core."""

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

# ---------------------------------------------------------------------------------------------------------------------
# A processor for the tiny model: a byte-level tokenizer made on the spot and the Pillow image processor.


EOS, PAD = "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (
    PAD, "<|im_start|>", EOS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # not special: they must survive skip_special_tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_processor(texts: Iterable[str]) -> PaddleOCRVLProcessor:
    """Return a processor in which every word of `texts` is one token; other text falls back to bytes.

    Of the classes that transformers has for Qwen2-VL's image processor, PaddleOCR-VL's has no video processor, which
    needs torchvision; so `AutoProcessor` opens the saved one anywhere. Images become the same inputs.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # an upper bound: merging stops when every word is one token
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    backend.train_from_iterator(["user\n", "assistant\n", "system\n", *texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (EOS, PAD)],
        model_specific_special_tokens={"image_token": "<|image_pad|>"},  # which the processor asks for
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(TAGS))
    tokenizer.chat_template = CHAT_TEMPLATE
    return PaddleOCRVLProcessor(Qwen2VLImageProcessorPil(), tokenizer, chat_template=CHAT_TEMPLATE)


# ---------------------------------------------------------------------------------------------------------------------
# A real vision-language model, small enough to train on one CPU core.


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
        texts: what the model will read and write; every word in it becomes one token.
        hidden_size: of language model and vision tower, a multiple of 4 x `num_heads`.
        num_layers: of the language model; below 3 there is no late third of the layers.
    """
    processor = build_processor(texts)
    model_config = _config(processor, hidden_size, num_layers, num_heads, vision_depth)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(model_config)
    generation = model.generation_config
    generation.eos_token_id = processor.tokenizer.convert_tokens_to_ids(EOS)
    generation.pad_token_id = processor.tokenizer.convert_tokens_to_ids(PAD)
    return model, processor


def _config(
    processor: PaddleOCRVLProcessor, hidden_size: int, num_layers: int, num_heads: int, vision_depth: int
) -> Qwen2_5_VLConfig:
    ids = processor.tokenizer.convert_tokens_to_ids
    half_head = hidden_size // num_heads // 2
    time = half_head // 4
    height = (half_head - time) // 2
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(processor.tokenizer),
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "max_position_embeddings": 1024,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids(EOS),
            "pad_token_id": ids(PAD),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [time, height, half_head - time - height],  # of half a head: time, height, width
            },
        },
        vision_config={
            "depth": vision_depth,
            "hidden_size": hidden_size,
            "intermediate_size": 2 * hidden_size,
            "num_heads": num_heads,
            "out_hidden_size": hidden_size,
            "fullatt_block_indexes": [vision_depth - 1],
            "initializer_range": 0.05,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
