"""Draw the pictures of docs/idea.md and docs/sharing.md: `python docs/make_pictures.py`.

The numbers of docs/idea.md are examples; those of docs/sharing.md come from benchmarks/cost.py.
"""

import sys
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


def schedule() -> None:
    """Draw a group of three completions in three micro-batches: the prompt runs forward first and backward last."""
    figure, (plain, lent) = plt.subplots(2, 1, figsize=(9, 3.4), height_ratios=(1, 1))
    left = 0.0
    for row in range(1, 4):
        for text, colour, width in (("prompt", IMAGE, 1.5), (f"{row}", ANSWER, 0.5)):
            box(plain, left, 1, width, colour, text)
            left += width
        for text, colour, width in (("back", ANSWER, 0.9), ("prompt back", IMAGE, 2.6)):
            box(plain, left, 1, width, colour, text)
            left += width
        left += 0.25
    box(lent, 0, 1, 1.5, IMAGE, "prompt")
    left = 1.5
    for row in range(1, 4):
        box(lent, left, 1, 0.5, ANSWER, f"{row}")
        box(lent, left + 0.5, 1, 0.9, ANSWER, "back")
        lent.annotate("", (left + 0.25, 1), (0.75, 1), arrowprops={"arrowstyle": "->", "color": GREY,
                      "connectionstyle": "arc3,rad=0.35"})  # fmt: skip
        left += 1.65 if row < 3 else 1.4
    box(lent, left, 1, 2.6, IMAGE, "prompt back")
    lent.text(0.1, 0.15, "keys and values are read by every micro-batch; their gradients are collected", fontsize=8)
    bare(plain, "TRL, one completion in a micro-batch: the prompt runs G times, forward and backward", 17.5, 2)
    bare(lent, "here: once; the last micro-batch of the group runs the prompt backward", 17.5, 2)
    save(figure, "large_groups")


def memory() -> None:
    """Plot memory of an update against G by the model of costs, a 7B with LoRA."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from cost import WAYS, Load
    from cost import memory as bytes_of
    from sharing_models import MODEL_SHAPES, Size
    from sharing_operations import Update

    figure, plots = plt.subplots(1, 4, figsize=(11, 2.6), sharey=True)
    groups = [1, 2, 4, 8, 16, 32, 64]
    for axes, prompt in zip(plots, (512, 2048, 8192, 16384), strict=True):
        for (name, way), colour in zip(WAYS.items(), (GREY, QUESTION, IMAGE, ANSWER), strict=True):
            loads = [
                Load(MODEL_SHAPES["qwen2.5-vl-7b"], Size(prompt, prompt - 256, 512, group), 1, Update(True), 1, 2, *way)
                for group in groups
            ]
            axes.plot(groups, [sum(bytes_of(load).values()) / 1e9 for load in loads], color=colour, label=name)
        axes.axhline(80, color="black", linewidth=0.6, linestyle=":")
        axes.set(xscale="log", yscale="log", title=f"P {prompt:,}", xlabel="G", xticks=groups, xticklabels=groups)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    plots[0].set(ylabel="GB", yticks=(20, 40, 80, 160, 320, 640), yticklabels=(20, 40, 80, 160, 320, 640))
    plots[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    save(figure, "large_groups_memory")


if __name__ == "__main__":
    for draw in (sharing, attention, credit, schedule, memory):
        draw()
