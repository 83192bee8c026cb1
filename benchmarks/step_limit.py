"""How many operations an update and a step need, on paper: what a perfect implementation would count.

Every token is computed once for all rows that begin with it; keys are counted that a query sees; nothing is computed
for padding, for dead rows, or (heads) for tokens without credit; a frozen matrix has no gradient of its own; a frozen
tower runs once per image. Attention goes back in five products for two, because no kernel keeps its scores. In the
last layer the tokens of a prompt give keys and values only; with adapters nothing goes back to the embeddings.
"""

import math
from dataclasses import dataclass

from sharing_models import ModelShape, Size
from sharing_operations import forward_of, layer_weights
from step_cases import Case

RANK = 16  # of adapters
ATTENTION = 3.5  # forward and back, in passes forward


@dataclass(frozen=True)
class Tokens:
    """What is computed of the rollouts of some prompts.

    Attributes:
        prompts: computed once each.
        lengths: of the completions behind them.
        heads: tokens whose log-probability is wanted.
    """

    prompts: int
    lengths: list[int]
    heads: int


def update_limit(case: Case) -> dict[str, int]:
    """Operations of all training passes over a rollout, by part."""
    group = case.size.generations
    live = [length for row, length in enumerate(case.lengths) if not case.is_dead(row // group)]
    heads = sum(math.ceil(case.scored_share * length) for length in live)
    tokens = Tokens(case.prompts - case.dead, live, heads)
    weights, attention = _layers(case.shape, case.size, tokens)
    head = _head(case.shape, tokens.heads)
    if not case.adapters:
        tower = _tower(case.shape, case.size)
        return {
            "layers": 3 * weights,
            "tower": tokens.prompts * (3 * tower["products"] + 2 * tower["embedding"]),
            "attention": int(ATTENTION * (attention + tokens.prompts * tower["attention"])),
            "head": 3 * head,
        }
    back = 2 * case.shape.hidden * _projected(case.shape, queries=True) * _count(case.size, tokens)
    return {
        "layers": 2 * weights - back,
        "adapters": 3 * _adapters(case.shape, case.size, tokens),
        "attention": int(ATTENTION * attention),
        "head": 2 * head,
    }


def step_limit(case: Case) -> int:
    """Operations of generation and update: prompts of all groups once, then every token once, each with its head."""
    heads = case.prompts + sum(length - 1 for length in case.lengths)
    tokens = Tokens(case.prompts, case.lengths, heads)
    tower = case.prompts * sum(_tower(case.shape, case.size).values())
    adapters = _adapters(case.shape, case.size, tokens) if case.adapters else 0
    generation = sum(_layers(case.shape, case.size, tokens)) + _head(case.shape, heads) + tower + adapters
    return generation + sum(update_limit(case).values())


def signals_limit(case: Case) -> int:
    """Operations of a step that also scores every completion given another image."""
    heads = sum(case.lengths)
    tokens = Tokens(case.prompts, case.lengths, heads)
    view = sum(_layers(case.shape, case.size, tokens)) + _head(case.shape, heads)
    view += _adapters(case.shape, case.size, tokens) if case.adapters else 0
    return step_limit(case) + view + case.prompts * sum(_tower(case.shape, case.size).values())


def _count(size: Size, tokens: Tokens) -> int:
    """Tokens that enter the language model: the last of a completion does not."""
    return tokens.prompts * size.prompt + sum(length - 1 for length in tokens.lengths)


def _emitting(tokens: Tokens) -> int:
    """Those that a token follows: the last of each prompt, and all of the completions."""
    return tokens.prompts + sum(length - 1 for length in tokens.lengths)


def _projected(shape: ModelShape, *, queries: bool) -> int:
    """Width of keys and values together, with the queries or without."""
    return shape.head_width * (2 * shape.key_heads + (shape.heads if queries else 0))


def _layers(shape: ModelShape, size: Size, tokens: Tokens) -> tuple[int, int]:
    """Of a forward pass: products with the matrices of the layers, and attention."""
    count, emitting = _count(size, tokens), _emitting(tokens)
    weights = (shape.layers - 1) * count * layer_weights(shape)
    weights += emitting * layer_weights(shape) + (count - emitting) * shape.hidden * _projected(shape, queries=False)
    behind = sum((length - 1) * size.prompt + length * (length - 1) // 2 for length in tokens.lengths)
    within = tokens.prompts * size.prompt * (size.prompt + 1) // 2
    seen = (shape.layers - 1) * (within + behind) + tokens.prompts * size.prompt + behind
    return 2 * weights, 4 * shape.heads * shape.head_width * seen


def _adapters(shape: ModelShape, size: Size, tokens: Tokens) -> int:
    """Of a forward pass through a pair of matrices beside each of the seven of a layer."""
    queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    of_keys = 2 * (shape.hidden + keys)
    count, emitting = _count(size, tokens), _emitting(tokens)
    return 2 * RANK * (((shape.layers - 1) * count + emitting) * sides + (count - emitting) * of_keys)


def _head(shape: ModelShape, tokens: int) -> int:
    return 2 * shape.hidden * shape.vocabulary * tokens


def _tower(shape: ModelShape, size: Size) -> dict[str, int]:
    """Of a forward pass over one image."""
    forward = forward_of(shape, Size(size.prompt, size.vision, 1, 1), shared=True)
    return {"embedding": forward.embedding, "products": forward.tower, "attention": forward.tower_attention}
