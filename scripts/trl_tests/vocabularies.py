"""Byte-level tokenizers with few words, some of them Qwen's, whose ids TRL's tests script."""

import random
import string
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils

FIRST_SPECIAL = 1200  # of the small vocabularies
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PLAIN_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_VISION = ("<|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
           "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> <tool_call> </tool_call> "
           "<|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>").split()  # fmt: skip
_QWEN = [END, START, STOP, *_VISION, *PLAIN_TAGS[2:]]
CHAT = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}IMAGE{%- elif 'text' in part %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """Texts by their ids: special tokens, whose ids are consecutive, and words."""

    specials: dict[int, str]
    words: dict[int, str]

    def shrink(self):
        """Return the same texts with small ids: bytes, words from 256 on, specials from FIRST_SPECIAL on."""
        words = [word for number, word in sorted(self.words.items()) if number > 255]
        return Vocabulary(dict(enumerate(self.specials.values(), FIRST_SPECIAL)), dict(enumerate(words, 256)))

    def translate(self, ids):
        """Return the small ids of nested lists of ids."""
        if isinstance(ids, (list, tuple)):
            return [self.translate(each) for each in ids]
        small = self.shrink()
        numbers = {text: number for number, text in (small.words | small.specials).items()}
        return ids if ids < 256 else numbers[(self.words | self.specials)[ids]]


QWEN3 = Vocabulary(dict(enumerate(_QWEN, 151643)), {
    198: "\n", 220: " ", 293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "de", 497: '",', 522: "</",
    606: "name", 788: '":', 894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won",
    4913: '{"', 5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n",
    13477: "crement", 14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool",
    35744: "increment", 64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
})  # fmt: skip
QWEN3_5 = Vocabulary(dict(enumerate(_QWEN, 248044)), {
    198: "\n", 510: "</", 866: " any", 914: "'t", 1366: " know", 1459: " don", 1628: "function", 5224: " tool",
    13744: "=s", 16936: "Done", 22076: "_tool", 30091: "creenshot",
})  # fmt: skip


def find_template(*names, image=""):
    """Return a chat template of the installed TRL, which recognises its own by equality, or a plain one."""
    found = (getattr(chat_template_utils, f"{name}_chat_template", None) for name in names)
    return next(filter(None, found), CHAT.replace("IMAGE", image))


def spell_bytes():
    """Return the printable character of each byte in byte-level vocabularies, in the order of their ids."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


def make_tokenizer(vocabulary, template=None, eos=STOP, pad=END, **options):
    """Return a tokenizer with these specials and words; made-up words of random length fill the ids between."""
    symbols = spell_bytes()
    ids = {symbol: number for number, symbol in enumerate(symbols.values())}
    ids |= {"".join(symbols[byte] for byte in word.encode()): number for number, word in vocabulary.words.items()}
    free = sorted(set(range(min(vocabulary.specials))) - set(ids.values()))
    generator, space = random.Random(7), symbols[ord(" ")]
    while free:
        letters = "".join(generator.choices(string.ascii_lowercase, k=generator.randint(3, 9)))
        if (word := generator.choice(("", space)) + letters) not in ids:
            ids[word] = free.pop()
    made = Tokenizer(BPE(vocab=ids, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    for number, text in vocabulary.specials.items():
        is_special = text not in PLAIN_TAGS  # tags are kept by skip_special_tokens
        (made.add_special_tokens if is_special else made.add_tokens)(
            [AddedToken(text, special=is_special, normalized=False)]
        )
        assert made.token_to_id(text) == number
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, pad_token=pad, padding_side="left", model_max_length=32768,
        clean_up_tokenization_spaces=False, **options,
    )  # fmt: skip
    wrapped.chat_template = template or find_template()
    return wrapped


def make_small(*more, **options):
    """Return a tokenizer with few special tokens: those of plain chats, and `more`."""
    return make_tokenizer(Vocabulary(dict(enumerate((END, START, STOP, *more), FIRST_SPECIAL)), {}), **options)
