"""A processor for the tiny model: a byte-level tokenizer made on the spot and the Pillow image processor."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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
