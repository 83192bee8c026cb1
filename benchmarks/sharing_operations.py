"""How many operations a pass needs, by formula: for speeds on a GPU, where nothing counts those of fused kernels."""

from dataclasses import astuple, dataclass, replace

from sharing_models import MERGE, ModelShape, Size

WINDOW = 8 * 8  # patches that see each other in most layers of the vision tower
FACTORS = {"scoring": 1, "generation": 1, "training": 3, "step": 4}  # passes forward; a backward pass is worth two


def operations_of(shape: ModelShape, size: Size, place: str, *, prompts: int, shared: bool) -> int:
    """Multiplications and additions that the results of a pass need, without what checkpointing computes again.

    Attention is counted over the keys that a query sees. Every token of prompt and completion is computed once in
    generation too. A step is generation and training.
    """
    return FACTORS[place.split()[0]] * prompts * forward_of(shape, size, shared=shared).total


@dataclass(frozen=True)
class Forward:
    """Operations of one pass forward over the completions of one prompt, by where they are."""

    embedding: int  # of patches
    tower: int  # products with the matrices of the tower
    tower_attention: int
    weights: int  # products with the matrices of the language model
    attention: int  # scores and sums of values
    head: int

    @property
    def total(self) -> int:
        """Of everything."""
        return sum(astuple(self))


def forward_of(shape: ModelShape, size: Size, *, shared: bool) -> Forward:
    """The last token of a prompt is computed with the completions, and the last of a completion not at all."""
    copies = 1 if shared else size.generations
    patches, width = MERGE * MERGE * size.vision, shape.vision_hidden
    whole = len(shape.whole_image_layers)
    near = patches * (whole * patches + (shape.vision_layers - whole) * min(WINDOW, patches))
    before = size.prompt - 1
    tokens = copies * before + size.generations * size.completion
    seen = copies * before * (before + 1) // 2
    seen += size.generations * (size.completion * size.prompt + size.completion * (size.completion - 1) // 2)
    tower = shape.vision_layers * tower_layer_weights(shape) * patches + size.vision * merger_weights(shape)
    return Forward(
        embedding=copies * 2 * patches * 3 * 2 * shape.patch**2 * width,
        tower=copies * 2 * tower,
        tower_attention=copies * 4 * width * near,
        weights=2 * shape.layers * layer_weights(shape) * tokens,
        attention=4 * shape.layers * shape.heads * shape.head_width * seen,
        head=2 * shape.hidden * shape.vocabulary * size.generations * size.completion,
    )


@dataclass(frozen=True)
class Update:
    """What is trained, and whether layers are computed again in the backward pass."""

    adapters: bool = False  # on the language model only
    checkpointing: bool = True


def logical_update(shape: ModelShape, size: Size, update: Update) -> int:
    """Operations that the gradients of one prompt's completions stand for: plain passes, nothing computed twice."""
    once = replace(update, checkpointing=False)
    return operations_of_update(forward_of(shape, size, shared=False), once)


def executed_update(shape: ModelShape, size: Size, update: Update, *, shared: bool) -> int:
    """Operations that are run for them; attention backward counts twice, though kernels compute its scores again."""
    through_tower = update.adapters and update.checkpointing and shape.deepstack is None
    return operations_of_update(forward_of(shape, size, shared=shared), update, through_tower=through_tower)


def operations_of_update(forward: Forward, update: Update, *, through_tower: bool = False) -> int:
    """Of a pass forward and its gradients; a frozen matrix costs no gradient of its own.

    Args:
        forward: what one pass costs.
        update: what is trained.
        through_tower: whether gradients go back through a frozen tower, for nothing. They do in a Qwen2.5-VL with
            adapters and checkpointing, whose patch embeddings transformers marks as needing gradients.
    """
    tower, language = forward.tower + forward.tower_attention, forward.weights + forward.attention
    again = update.checkpointing * language
    if not update.adapters:
        again += update.checkpointing * tower
        return 2 * forward.embedding + 3 * (tower + language + forward.head) + again
    back = forward.tower + 2 * forward.tower_attention + tower if through_tower else 0
    return (
        forward.embedding + tower + back + language + forward.weights + 2 * (forward.attention + forward.head) + again
    )


def utilisation(operations: float, seconds: float, peak: float) -> float:
    """The share of the device's peak (operations per second) that `operations` in `seconds` are."""
    return operations / seconds / peak


def layer_weights(shape: ModelShape) -> int:
    """Entries of the matrices of one layer of the language model."""
    projections = shape.hidden * shape.head_width * (2 * shape.heads + 2 * shape.key_heads)
    return projections + 3 * shape.hidden * shape.intermediate


def tower_layer_weights(shape: ModelShape) -> int:
    """Entries of the matrices of one layer of the vision tower."""
    matrices = 3 if shape.deepstack is None else 2  # with a gate or without
    return 4 * shape.vision_hidden**2 + matrices * shape.vision_hidden * shape.vision_intermediate


def merger_weights(shape: ModelShape) -> int:
    """Entries of the matrices that turn patches into vision tokens."""
    width = shape.vision_hidden
    return (1 + len(shape.deepstack or ())) * (MERGE**4 * width**2 + MERGE**2 * width * shape.hidden)
