"""How many operations a pass needs, by formula: for speeds on a GPU, where nothing counts those of fused kernels."""

from sharing_models import MERGE, PATCH, ModelShape, Size

WINDOW = 8 * 8  # patches that see each other in most layers of the vision tower
FACTORS = {"scoring": 1, "generation": 1, "training": 3, "step": 4}  # passes forward; a backward pass is worth two


def operations_of(shape: ModelShape, size: Size, place: str, *, prompts: int, shared: bool) -> int:
    """Multiplications and additions that the results of a pass need, without what checkpointing computes again.

    Attention is counted over the keys that a query sees. Every token of prompt and completion is computed once in
    generation too. A step is generation and training.
    """
    return FACTORS[place.split()[0]] * prompts * _forward(shape, size, shared)


def _forward(shape: ModelShape, size: Size, shared: bool) -> int:
    """For the completions of one prompt."""
    copies = 1 if shared else size.generations
    head = 2 * shape.hidden * shape.vocabulary * size.generations * size.completion
    return copies * _vision_tower(shape, size.vision) + _language_model(shape, size, copies) + head


def _language_model(shape: ModelShape, size: Size, copies: int) -> int:
    """The last token of a prompt is computed with the completions, and the last of a completion not at all."""
    head = shape.hidden // shape.heads
    weights = shape.hidden * head * (2 * shape.heads + 2 * shape.key_heads) + 3 * shape.hidden * shape.intermediate
    before = size.prompt - 1
    tokens = copies * before + size.generations * size.completion
    seen = copies * before * (before + 1) // 2
    seen += size.generations * (size.completion * size.prompt + size.completion * (size.completion - 1) // 2)
    return shape.layers * (2 * weights * tokens + 4 * shape.hidden * seen)


def _vision_tower(shape: ModelShape, tokens: int) -> int:
    patches, width = MERGE * MERGE * tokens, shape.vision_hidden
    weights = 4 * width * width + 3 * width * shape.vision_intermediate
    whole = len(shape.whole_image_layers)
    seen = patches * (whole * patches + (shape.vision_layers - whole) * min(WINDOW, patches))
    embedding = 2 * patches * 3 * 2 * PATCH * PATCH * width
    merger = 2 * tokens * (MERGE**4 * width * width + MERGE * MERGE * width * shape.hidden)
    return embedding + shape.vision_layers * 2 * weights * patches + 4 * width * seen + merger
