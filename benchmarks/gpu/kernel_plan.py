"""Which attention strategies are compared, in which shapes."""

from collections.abc import Iterable
from dataclasses import dataclass

from sharing_models import MODEL_SHAPES, ModelShape, Size

from gpu.plan import sizes

STRATEGIES = ("two stages", "two stages, no mask", "packed", "paths")


@dataclass(frozen=True)
class Attention:
    """The attention of one layer over the completions of one prompt, forward and backward."""

    shape: str
    size: Size

    @property
    def name(self) -> str:
        """In the results."""
        return f"{self.shape} attention {self.size}"

    @property
    def model_shape(self) -> ModelShape:
        """Heads and their width."""
        return MODEL_SHAPES[self.shape]


def attentions(shapes: Iterable[str]) -> list[Attention]:
    """One per shape and length of completions."""
    return [Attention(shape, size) for shape in shapes for size in sizes(shape)]
