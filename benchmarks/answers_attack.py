"""Search for outputs that earn a reward without knowing the answer; print the worst by kind.

python benchmarks/answers_attack.py --sentences 20000

Sentences are drawn from answers, fillers, statement words, list marks, tags and boxes, in English and Chinese, and the
outputs of `tests/rewards/answers.jsonl` are changed. An output is found if it is right for several unequal references,
or if it earns at all though it denies, refuses, bounds, compares, or names two answers.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any

from vgr_trl.errors import RewardError
from vgr_trl.rewards import Solution, resolve_solution
from vgr_trl.rewards.answers import is_right
from vgr_trl.rewards.equality import is_same_open_answer

LINES = Path(__file__).parents[1] / "tests/rewards/answers.jsonl"
LETTERS = "ABCDEFGHIJ"

# The references: no two of one list are equal. A slash separates spellings of one answer.
WORDS = "red blue green yellow black white cat dog cow table Paris 7:30 circle".split()
HANZI = "红色 蓝色 绿色 黄色 猫 狗 牛 桌子 圆形 北京".split()
NUMBERS = "2/two/两 3/three/三 4/four/四 5/five/五 7/seven/七 10/ten/十 12 20 35 0.25 1,200".split()
FORMULAS = [r"\frac{3}{8}", r"2\sqrt{3}", r"\sqrt{2}", r"4\pi", r"x + 1", r"-6", r"\frac{\pi}{3}"]
POLARITY = ["yes/是", "no/否"]
NESTED = "one reference within the other"
PLANTED = {each.split("/")[0]: each for each in (*WORDS, *HANZI, *NUMBERS, *FORMULAS, *POLARITY)}

STATES = [
    "The answer is",
    "Answer:",
    "the correct option is",
    "So the final answer is",
    "I choose",
    "####",
    "**Answer**",
]
STATES_ZH = ["答案是", "答案:", "所以选", "正确选项是", "因此,"]
FILLERS = (
    "the a there are is it was has shows of the image in on at for with about total car person object ones units or "
    "and then maybe also , . ; : - / | = + ( ) because so I think we see by to from versus plus next"
).split()
FILLERS_ZH = "图中 有 个 是 的 在 和 或 或者 与 , 。 ; 、 : ( ) 因为 所以 我 看到 大约 一共 到 比 也".split()
MARKS = ["- ", "* ", "1. ", "2) ", "(A) ", "(B) ", "C. ", "D: ", "> ", "**", "| "]
WRAPS = [
    "<answer>{}</answer>", r"\boxed{{{}}}", "**{}**", "${}$", r"\({}\)", '"{}"', "<think>{}</think>", "({})", "[{}]",
    '{{"answer": "{}"}}', "<|begin_of_box|>{}<|end_of_box|>", "<CONCLUSION>{}</CONCLUSION>", r"\text{{{}}}",
]  # fmt: skip

# Nothing may be earned with any of these: {} and {1} are two answers of one kind.
EMPTY = {
    "denial": [
        "There is no {}.", "The answer cannot be {}.", "The answer is not {}.", "It isn't {}.",
        "I don't think it is {}.",
        "Neither {} nor {1}.", "The answer is anything but {}.", "It is certainly not the case that it is {}.",
        "{} is wrong.", "{} is not correct.", "Without {}", "no {}", "not {}", r"\boxed{{\text{{not }}{}}}",
        "<answer>not {}</answer>", "The correct answer is never {}.", "答案不是{}。", "没有{}。", "不可能是{}",
        "{}是错误的。",
        "The answer isn't {}", "It would be a mistake to answer {}.", "No {} can be seen in the image.",
    ],
    "refusal": [
        "It is unclear if the answer is {}.", "I cannot tell whether it is {}.", "I am not sure that it is {}.",
        "Please tell me if it is {}.", "Is it {}?", "The answer could be {} if the image were larger.",
        "The answer might be {} but I cannot see the image.", "I can't determine the answer from {}.",
        "If the answer is {}, we are done.", "Suppose the answer is {}.", "无法判断是否是{}。", "如果答案是{},",
        "请问是{}吗?",
        "Sorry, I am unable to say {}.", "The question asks whether the answer is {}.", "Insufficient data for {}",
    ],
    "bound": [
        "more than {}", "The answer is more than {}.", "at least {}", "There are at least {}.", "less than {}",
        "The answer is less than {}.", "up to {}", "fewer than {}", "over {}", "under {}", "no more than {}", "> {}",
        r"\boxed{{> {}}}", r"\boxed{{\leq {}}}", "{} or more", "{}+", "between {} and {1}", "from {} to {1}", "{}-{1}",
        "{} to {1}", "[{}, {1}]", "超过{}", "至少{}", "{}以上", "不到{}", "{}到{1}之间", "a minimum of {}",
        "greater than {}",
        "<answer>at most {}</answer>", "The answer is somewhere below {}.", "大于{}", "答案小于{}。",
        "x > {}", "x >= {}",
    ],
    "comparison": [
        "twice {}", "It is larger than {}.", "The answer is larger than {}.", "half of {}",
        "{} times as many", "half {}",
        "The answer is one more than {}.", "double {}", "similar to {}",
        "closer to {} than to {1}", "比{}大", "{}的两倍",
        "as many as {}", "The same as {} plus {1}.", "different from {}", "the opposite of {}", "next to {}",
    ],
    "part": [
        "{}:{1}", "{}({1})", "{}^{1}", "{}/{1}", "{}x{1}", "{}.{1}.1", "{} out of {1}", "{} + {1}", "{},{1}",
        r"{}\pi", "-{}", "x = -{}", r"\frac{{{}}}{{{1}}}", r"{}\sqrt{{{1}}}", "{} million", "{} hundred", "{},000",
        "{}e3", "{}^2", "{}:30", "10:{}", "{}/9", "{}x", "x^{}", "{}万", "√{}", "{}.5.2", r"\frac{{1}}{{{}}}",
    ],
    "two": [
        "{} or {1}", "{} and {1}", "{}, {1}", "{} / {1}", "{}\n{1}", "{} {1}", "{} ({1})",
        "{}; {1}", "{} | {1}", "{} vs {1}",
        "The answer is {} or {1}.", "The answer is {} and also {1}.", "Answer: {}, maybe {1}", "either {} or {1}",
        r"\boxed{{{}}} \boxed{{{1}}}", r"\boxed{{{}, {1}}}", r"\boxed{{{}}} or \boxed{{{1}}}",
        "<answer>{} {1}</answer>",
        "<answer>{}\n{1}</answer>", "<answer>{}; {1}</answer>", "{}或{1}", "{}和{1}", "答案是{}或者{1}。",
        "{} & {1}", "{} {1} {}",
        "- {}\n- {1}", "1. {}\n2. {1}",
        "If A, {}; else {1}", "{} alias {1}", "{} (or {1})", "{} (alternatively {1})",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """An output, the references to try, and how many unequal ones may earn."""

    kind: str
    text: str
    references: tuple[Solution, ...]
    allowed: int = 1


@dataclass(frozen=True)
class Found:
    """An output, the unequal references for which it earns, and how many of these are answers put in."""

    text: str
    earned: list[str]
    planted: int


@lru_cache(100_000)
def resolve(text: str, choices: tuple[str, ...] | None = None) -> Solution | None:
    """Return a reference answer, or None if `text` is none."""
    try:
        return resolve_solution(text, choices)
    except RewardError:
        return None


@lru_cache(100_000)
def are_equal(one: Solution, other: Solution) -> bool:
    """Whether one answer may be right for both references."""
    if None not in (one.index, other.index):
        return one.index == other.index
    return one.index == other.index and (
        is_same_open_answer(one.text, other.text) or is_same_open_answer(other.text, one.text)
    )


def unequal(references: Iterable[Solution]) -> list[Solution]:
    """Return references of which no two are equal."""
    kept: list[Solution] = []
    for each in references:
        if not any(are_equal(each, other) for other in kept):
            kept.append(each)
    return kept


def spans(text: str) -> list[str]:
    """Return numbers of a text, and one to three adjacent words with nothing but a space between them."""
    found = re.findall(r"\d+", text)
    for phrase in re.findall(r"(?:[\w.:%°'-]*\w ?)+", text):
        words = re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+\s?", phrase)[:24]
        ends = [(i, j) for i in range(len(words)) for j in range(i + 1, min(i + 4, len(words) + 1))]
        found += ["".join(words[i:j]).strip() for i, j in ends]
    return list(dict.fromkeys(found))


def open_references(answers: Sequence[str], text: str = "") -> tuple[Solution, ...]:
    """Return the open references among planted answers and the words of `text`."""
    found = filter(None, map(resolve, dict.fromkeys([*answers, *spans(text)])))
    return tuple(each for each in found if each.index is None)


def option_references(choices: Sequence[str]) -> tuple[Solution, ...]:
    """Return one reference for each option."""
    found = (resolve(LETTERS[index], tuple(choices)) for index in range(len(choices)))
    return tuple(filter(None, found))


def spell(answer: str, random: Random) -> str:
    """Return one spelling of an answer."""
    return random.choice(answer.split("/"))


def draw_sentence(random: Random) -> Attack:
    """Draw a random sentence or a few lines, for open references or for four options."""
    chinese = random.random() < 0.3
    pool = [*NUMBERS, *(random.choice((HANZI if chinese else WORDS, WORDS))), *FORMULAS, *POLARITY]
    answers = random.sample(pool, random.choice((2, 2, 3, 4)))
    choices = [each.split("/")[0] for each in random.sample([*WORDS, *NUMBERS, *FORMULAS], 4)]
    is_open = random.random() < 0.85
    named = answers if is_open else [random.choice((LETTERS[i], f"({LETTERS[i]})", c)) for i, c in enumerate(choices)]
    fillers, states = (FILLERS_ZH, STATES_ZH) if chinese else (FILLERS, STATES)
    pieces, kinds = [], set()
    for answer in random.sample(named, min(len(named), random.choice((2, 2, 3)))):
        pieces += random.choices(fillers, k=random.choice((0, 0, 1, 1, 2, 3)))
        if random.random() < 0.25:
            pieces.append(random.choice(states))
            kinds.add("statement")
        if random.random() < 0.15:
            pieces.append("\n" + random.choice(MARKS))
            kinds.add("lines")
        word = spell(answer, random)
        if random.random() < 0.25:
            word = random.choice(WRAPS).format(word)
            kinds.add("tag or box")
        pieces.append(word)
    pieces += random.choices(fillers, k=random.choice((0, 0, 1, 2))) + [random.choice(("", ".", "。", "!", "\n"))]
    text = re.sub(r" (?=[.,;:]( |$))", "", ("" if chinese else " ").join(pieces))
    if random.random() < 0.1:
        text = random.choice(WRAPS).format(text)
    kind = f"{'open' if is_open else 'options'}: {', '.join(sorted(kinds)) or 'plain sentence'}"
    planted = [each.split("/")[0] for each in answers]
    return Attack(kind, text, open_references(planted, text) if is_open else option_references(choices))


def draw_empty(random: Random) -> Attack:
    """Draw an output that states nothing though it holds one or two answers, letters or texts of options."""
    kind, way = random.choice(list(EMPTY)), random.choice(("open", "open", "texts of options", "letters"))
    if kind == "part":  # of the numbers that no sum, power or quotient of the others equals
        way, pool = random.choice(("open", "texts of options")), [each for each in NUMBERS[1:] if each != "0.25"]
    else:
        pool = NUMBERS if kind in ("bound", "comparison") else random.choice((NUMBERS, WORDS, HANZI, FORMULAS))
    answers = [each.split("/") for each in random.sample(pool, 4)]
    golds = [each[0] for each in answers]
    if way == "letters":
        shown = random.sample(["(A)", "B", "C", "(D)"], 2)
        references = option_references(["lion", "tiger", "bear", "wolf"])
    else:
        shown = [random.choice(each) if way == "open" and kind != "part" else each[0] for each in answers[:2]]
        references = open_references(golds[:2]) if way == "open" else option_references(golds)[:2]
    text = random.choice(EMPTY[kind]).replace("{}", "{0}").format(*shown)
    if "\n" not in text and random.random() < 0.2:
        text = random.choice(WRAPS[:4] + STATES_WRAPS).format(text)
    return Attack(f"{way}: {kind}", text, references, allowed=0)


STATES_WRAPS = ["The answer is {}", "Answer: {}", "答案是{}", "<think>Let me see.</think>\n{}", "#### {}"]


def change_golden(random: Random, lines: list[dict[str, Any]]) -> Attack:
    """Change right outputs: join two, replace the answer, put another answer or the options behind."""
    one, other = random.sample(lines, 2)
    if one["choices"]:
        return _change_options(random, one)
    gold, output = str(one["solution"]), one["output"].rstrip()
    new = random.choice([each.split("/")[0] for each in (*NUMBERS, *WORDS, *FORMULAS)])
    way = random.choice(("joined", "behind", "replaced"))
    if way == "joined" and not other["choices"]:
        references = open_references([gold, str(other["solution"])])
        return Attack("golden: two joined", f"{output}\n{other['output']}", references)
    if way == "replaced" and len(unequal(open_references([gold, new]))) == 2:
        word = rf"(?<![A-Za-z0-9]){re.escape(gold)}(?![A-Za-z0-9])"
        text = re.sub(word, lambda _: new, output, flags=re.IGNORECASE)
        if text.splitlines()[-1] != output.splitlines()[-1]:
            return Attack("golden: answer replaced", text, open_references([gold]), allowed=0)
    text = output + random.choice(BEHIND).format(new)
    return Attack("golden: another answer behind", text, open_references([gold, new]))


BEHIND = ["\n{}", "\n\nAlternatively, {}", " or {}", "\nThe answer is {}.", "\n\\boxed{{{}}}", ", maybe {}", "\n或者{}"]


def _change_options(random: Random, line: dict[str, Any]) -> Attack:
    choices, mark = line["choices"], random.choice(("({}) {}", "{}. {}", "{}) {}", "- {}: {}", "**{}** {}"))
    items = [mark.format(letter, choice) for letter, choice in zip(LETTERS, choices, strict=False)]
    joint, references = random.choice(("\n", ", ", " ", "; ")), option_references(choices)
    way = random.choice(("list", "list", "texts", "letters", "mismatch", "swapped"))
    if way == "list":
        return Attack("options: list repeated", joint.join(random.choice((items, items[::-1]))), references, allowed=0)
    if way == "texts":
        return Attack("options: all texts", joint.join(choices), references, allowed=0)
    if way == "letters":
        text = joint.join(LETTERS[: len(choices)])
        return Attack("options: all letters", random.choice(WRAPS[:4]).format(text), references, allowed=0)
    first, second = random.choice(list(permutations(range(len(choices)), 2)))
    if way == "mismatch":
        text = random.choice((*STATES_WRAPS, *WRAPS[:3], "{}")).format(mark.format(LETTERS[first], choices[second]))
        return Attack("options: letter with another's text", text, references, allowed=0)
    text = f"{line['output'].rstrip()}\n{joint.join(items)}"
    right = resolve(str(line["solution"]), tuple(choices))
    others = tuple(each for each in references if right is None or each.index != right.index)
    return Attack("golden: options behind, another earns", text, others, allowed=0)


def draw(seed: int, count: int) -> Iterator[Attack]:
    """Draw attacks, the same ones for the same seed."""
    random = Random(seed)
    lines = [
        line
        for line in map(json.loads, LINES.read_text("utf-8").splitlines())
        if line["right"] and not isinstance(line["solution"], list)
    ]
    for _ in range(count):
        part = random.random()
        yield (
            draw_sentence(random) if part < 0.6 else draw_empty(random) if part < 0.85 else change_golden(random, lines)
        )


def search(seed: int, count: int) -> tuple[Counter[str], dict[str, list[Found]]]:
    """Return how many outputs were drawn of each kind, and those that earn more than they may, the worst first.

    Those whose references are parts of each other, such as `table` and `table on the left`, are a kind of their own.
    """
    drawn, found = Counter[str](), dict[str, list[Found]]()
    for attack in draw(seed, count):
        drawn[attack.kind] += 1
        earned = [each.text for each in unequal(each for each in attack.references if is_right(attack.text, each))]
        if len(earned) > attack.allowed:
            planted = sum(text in PLANTED for text in earned)
            is_nested = planted < 2 and all(_is_within(*pair) for pair in pairwise(sorted(earned, key=len)))
            kind = NESTED if attack.allowed and is_nested else attack.kind
            found.setdefault(kind, []).append(Found(attack.text, earned, planted))
    for each in found.values():
        each.sort(key=lambda one: (-one.planted, -len(one.earned), len(one.text)))
    return drawn, found


def _is_within(one: str, other: str) -> bool:
    return any(spelling in other for spelling in PLANTED.get(one, one).split("/"))


def report(drawn: Counter[str], found: dict[str, list[Found]], examples: int) -> None:
    """Print the counts and the worst examples of each kind."""
    apart = [each for kind, outputs in found.items() if kind != NESTED for each in outputs]
    print(f"{len(apart)} of {drawn.total()} outputs earn more than they may.")
    print(f"Unequal references of one output: at most {max((len(each.earned) for each in apart), default=1)};")
    print(f"of the answers put in, at most {max((each.planted for each in apart), default=1)}.")
    for kind, count in [*sorted(drawn.items()), (NESTED, drawn.total())]:
        worst = found.get(kind, [])
        print(f"\n## {kind}: {len(worst)} of {count}")
        for each in worst[:examples]:
            print(f"- {each.text!r} earns for {each.earned}")


def main() -> None:
    """Draw outputs and print those that earn more than they may, by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=12)
    flags = parser.parse_args()
    report(*search(flags.seed, flags.sentences), flags.examples)


if __name__ == "__main__":
    main()
