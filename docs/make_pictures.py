"""Draw the pictures of docs/idea.md, whose numbers are examples: `python docs/make_pictures.py`."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

FOLDER = Path(__file__).parent / "images"
IMAGE, QUESTION, ANSWER, GREY = "#4c78a8", "#f2a541", "#59a14f", "#9aa0a6"
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "vgr_trl", "font.size": 10, "font.family": "sans-serif"}


def box(axes: Axes, left: float, bottom: float, width: float, colour: str, text: str) -> None:
    """Draw a row of tokens."""
    axes.add_patch(Rectangle((left, bottom), width, 0.7, facecolor=colour, edgecolor="white"))
    axes.text(left + width / 2, bottom + 0.35, text, ha="center", va="center", color="white", fontsize=8)


def bare(axes: Axes, title: str, right: float, top: float) -> None:
    """Show neither axes nor ticks."""
    axes.set(xlim=(-0.2, right), ylim=(-0.3, top))
    axes.set_title(title, fontsize=10, loc="left")
    axes.axis("off")


def save(figure: Figure, name: str) -> None:
    """Write an SVG without a date, so that the same picture is the same file."""
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    plt.close(figure)


def sharing() -> None:
    """Draw four rows that repeat a prompt, beside a prompt with four completions."""
    figure, (plain, shared) = plt.subplots(1, 2, figsize=(9, 2.6))
    lengths = (3.0, 2.0, 2.6, 2.3)
    for row, length in enumerate(lengths):
        bottom = 3 - row
        box(plain, 0, bottom, 4, IMAGE, "image")
        box(plain, 4, bottom, 2, QUESTION, "question")
        box(plain, 6, bottom, length, ANSWER, f"answer {row + 1}")
        box(shared, 6.8, bottom, length, ANSWER, f"answer {row + 1}")
        shared.plot([6, 6.8], [1.85, bottom + 0.35], color=GREY, linewidth=1)
    box(shared, 0, 1.5, 4, IMAGE, "image")
    box(shared, 4, 1.5, 2, QUESTION, "question")
    bare(plain, "plain: the prompt is computed G = 4 times", 10, 4)
    bare(shared, "shared: once, and all answers attend to it", 10, 4)
    save(figure, "idea_sharing")


def attention() -> None:
    """Draw the attention of an emitting token to 16 image tokens and 4 instruction tokens: the worked case of VGR."""
    figure, (keys, words) = plt.subplots(1, 2, figsize=(9, 2.8), width_ratios=(1.1, 1))
    vision = [0.02, 0.01, 0.03, 0.02, 0.02, 0.05, 0.06, 0.02, 0.01, 0.03, 0.04, 0.02, 0.02, 0.01, 0.02, 0.02]
    instruction = [0.04, 0.07, 0.05, 0.04]
    keys.bar(range(16), vision, color=IMAGE, label="16 image tokens, together 0.40")
    keys.bar(range(17, 21), instruction, color=QUESTION, label="4 tokens of the question, together 0.20")
    keys.set(xticks=[], ylim=(0, 0.115), ylabel="attention")
    keys.spines[["top", "right"]].set_visible(False)
    keys.legend(frameon=False, fontsize=8, loc="upper left")
    keys.set_title("one token of a completion looks back", fontsize=10, loc="left")
    spoken = ("the", "triangle", "is", "red", "so", "the", "answer", "is", "B")
    ratios = (2.4, 0.5, 2.0, 0.4, 3.2, 2.6, 2.8, 2.2, 1.1)
    left, bottom = 0.0, 2.2
    for word, ratio in zip(spoken, ratios, strict=True):
        width = 0.5 + 0.17 * len(word)
        if left + width > 6:
            left, bottom = 0.0, bottom - 1.4
        words.add_patch(Rectangle((left, bottom), width, 0.6, facecolor=IMAGE, alpha=max(0.06, min(1, 0.55 / ratio))))
        words.text(left + width / 2, bottom + 0.3, word, ha="center", va="center")
        words.text(left + width / 2, bottom - 0.25, f"{ratio:g}", ha="center", va="center", fontsize=7, color=GREY)
        left += width + 0.1
    bare(words, "VGR per token: smaller, and darker, looks at the image more", 6.2, 3.2)
    keys.text(0.2, 0.08, "VGR = (0.20 / 4) / (0.40 / 16) = 2", fontsize=9)
    save(figure, "idea_attention")


def scene(axes: Axes, title: str, blackened: bool) -> None:
    """Draw a red triangle and a blue square; half of the patches may be black."""
    axes.add_patch(Rectangle((0, 0), 4, 4, facecolor="#f4f1ea", edgecolor=GREY))
    axes.add_patch(Polygon([(0.5, 0.6), (2.1, 0.6), (1.3, 2.2)], facecolor="#d1495b"))
    axes.add_patch(Rectangle((2.4, 2.3), 1.2, 1.2, facecolor="#3d6fb4"))
    if blackened:
        for column, row in ((0, 1), (1, 0), (1, 1), (2, 3), (3, 2), (0, 3), (3, 0), (2, 1)):
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor="black"))
    axes.set(xlim=(-0.1, 4.1), ylim=(-0.1, 4.1), aspect="equal")
    axes.set_title(title, fontsize=9)
    axes.axis("off")


def credit() -> None:
    """Perturb the image, compare log-probabilities, keep the tokens that depend on it."""
    figure, (clean, black, bars) = plt.subplots(1, 3, figsize=(9, 2.6), width_ratios=(1, 1, 3.6))
    scene(clean, "the image: log p", blackened=False)
    scene(black, "half of it black: log p'", blackened=True)
    words = ("the", "triangle", "is", "red", "so", "the", "answer", "is", "B")
    dependency = (0.02, 1.6, 0.01, 2.3, 0.03, 0.01, 0.02, 0.01, 0.5)
    kept = sorted(dependency)[-4]  # ceil(0.4 of 9)
    colours = [ANSWER if value >= kept else GREY for value in dependency]
    bars.bar(range(len(words)), dependency, color=colours)
    bars.set_xticks(range(len(words)), words)
    bars.set_ylabel("dependency")
    bars.spines[["top", "right"]].set_visible(False)
    bars.set_title("green: the 40 % that depend most get the advantage; grey: no credit", fontsize=10, loc="left")
    figure.tight_layout()
    save(figure, "idea_credit")


if __name__ == "__main__":
    for draw in (sharing, attention, credit):
        draw()
