"""The words of each language, from `statements.toml`, and text without differences that do not count."""

import re
import tomllib
import unicodedata
from functools import lru_cache
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_name("statements.toml").read_text(encoding="utf-8"))
POLARITY = {word: name for table in TABLES.values() for name in ("yes", "no") for word in table.get(name, ())}


def compile_words(name: str, *languages: str) -> re.Pattern[str]:
    """Compile the entries of languages (all by default) under `name` into one pattern."""
    patterns = []
    for language in languages or TABLES:
        entry = TABLES[language].get(name, [])
        flag = "a" * (language == "en")  # an English word may stand right behind an ideograph
        patterns += [f"(?{flag}:{part})" for part in ([entry] if isinstance(entry, str) else entry)]
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


WORDS = {
    name: compile_words(name)
    for name in (
        "states confirms unless openers option reasons joins denies refuses bounds refers verbs leads starts places so "
        "points pronouns articles courtesies"
    ).split()
}
_ZERO_WIDTH = dict.fromkeys((0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))  # invisible spaces and joiners
OR = re.compile(r"\b(?:or|vs|either|alternatively|alias)\b|或|还是|也可能|要么|または", re.IGNORECASE)
_HALF_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20, 0xA0: 0x20} | _ZERO_WIDTH
_EXCLAMATION_AFTER_WORD = re.compile(r"(?<=[^\W\d_]{2})[!?]+$")
MARKS, STOPS = " \t\r\n*`_\"'“”‘’「」«»", ".。,;:"
_WRAPPED = re.compile(
    r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|fbox)\s?\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|\\\((.*)\\\)|\\\[(.*)\\\]|\$\$?([^$]*)\$\$?|【(.*)】",
    re.DOTALL,
)


def to_half_width(text: str) -> str:
    """Return `text` with full-width letters, digits, punctuation and spaces as ASCII, without zero-width characters."""
    return text if text.isascii() else text.translate(_HALF_WIDTH)


def fold(text: str) -> str:
    """Return `text` with normalised case, width, white space and accents, and without zero-width spaces."""
    return " ".join(to_half_width(unicodedata.normalize("NFC", text)).casefold().split())


def normalise(text: str) -> str:
    """Return `text` folded (`fold`) and without final punctuation.

    Exclamation and question marks are removed only after a word, so that 5! stays. Punctuation alone stays.
    """
    collapsed = fold(text)
    stripped = collapsed.rstrip(STOPS).rstrip()
    while match := _EXCLAMATION_AFTER_WORD.search(stripped):
        stripped = stripped[: match.start()].rstrip(STOPS).rstrip()
    return stripped or collapsed


def strip_wrapping(text: str) -> str:
    r"""Return `text` without quotes, emphasis, `\boxed{}`, `\text{}`, dollars and final punctuation around it."""
    before = None
    while text != before:
        before, text = text, text.strip(MARKS)
        text = text.rstrip(STOPS).strip(MARKS) or text
        text = text[:-1] if text.endswith("$") and text.count("$") == 1 else text
        if text.endswith("}") and text.count("}") > text.count("{"):  # of JSON
            text = text[:-1]
        if match := _WRAPPED.fullmatch(text):
            text = next(part for part in match.groups() if part is not None)
    return text


@lru_cache(4096)  # the options of a question are compared again for each part of each completion
def strip_article(text: str) -> str:
    """Return `text` normalised, without a leading article or a trailing 的."""
    text = normalise(strip_wrapping(text)).removesuffix("的")
    match = WORDS["articles"].match(text)
    return (text[match.end() :].strip() or text) if match else text
