"""What is measured on a GPU, in which order: the report shows a row for each, run or not."""

from dataclasses import dataclass

from sharing_models import Size

PROMPT, VISION, GENERATIONS = 1536, 1280, 8
COMPLETIONS = (384, 1024, 2048)
SHAPES = ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen3-vl-4b", "qwen3-vl-8b")
TINY = ("tiny-qwen2.5-vl", "tiny-qwen3-vl")
# One trainer per name; AdamW's state of two of them beside the larger models does not fit.
OPTIMIZERS = {"qwen2.5-vl-7b": "adafactor", "qwen3-vl-8b": "adafactor"}
COMPARED = {
    "update": ("plain", "shared"),
    "scoring": ("trl", "shared", "shared + probe"),
    "generation": ("plain", "shared"),
    "step": ("trl", "ours", "vgr", "perception"),
    "kernels": ("plain", "shared"),
}


@dataclass(frozen=True)
class Measurement:
    """One row of the results.

    Attributes:
        kind: a key of `COMPARED`.
        shape: a key of `MODEL_SHAPES`.
        size: P, V, T, G.
        adapters: LoRA on every matrix of the language model's layers instead of all weights.
    """

    kind: str
    shape: str
    size: Size
    adapters: bool = False

    @property
    def name(self) -> str:
        """In the results."""
        return f"{self.shape} {self.kind}{' lora' if self.adapters else ''} {self.size}"

    @property
    def optimizer(self) -> str:
        """Of whole steps."""
        return OPTIMIZERS.get(self.shape, "adamw_torch") if not self.adapters else "adamw_torch"


def passes(shape: str) -> list[Measurement]:
    """Updates, scoring and generation of one model, the short ones first."""
    return [
        *(Measurement("update", shape, size) for size in sizes(shape)),
        *(Measurement("update", shape, size, adapters=True) for size in sizes(shape)),
        *(Measurement("scoring", shape, size) for size in sizes(shape)),
        Measurement("kernels", shape, sizes(shape)[0]),
        Measurement("generation", shape, sizes(shape)[0]),
    ]


def steps(shape: str) -> list[Measurement]:
    """Whole optimizer steps of one model, and long generations."""
    return [
        Measurement("step", shape, sizes(shape)[0]),
        Measurement("step", shape, sizes(shape)[0], adapters=True),
        *(Measurement("generation", shape, size) for size in sizes(shape)[1:]),
        *(Measurement("step", shape, size) for size in sizes(shape)[1:]),
    ]


def sizes(shape: str) -> list[Size]:
    """One per length of the completions; a few tokens for the tiny models of a dry run."""
    if shape in TINY:
        return [Size(48, 16, 8, 2)]
    return [Size(PROMPT, VISION, completion, GENERATIONS) for completion in COMPLETIONS]
