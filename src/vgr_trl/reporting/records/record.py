"""What a record of a rollout holds; a value that is not finite is None."""

from dataclasses import dataclass, field

MODES = ("train", "eval")
Numbers = list[float | None]


@dataclass
class RecordedImage:
    """An image of a prompt.

    Attributes:
        file: of its thumbnail, relative to the folder of the records; None if there is none.
        width, height: of the image itself, in pixels.
        grid: rows and columns of its vision tokens; None if they are not known.
        regions: left, top, width and height in pixels of what the question is about; None if the data do not say it.
        perturbed: file of a thumbnail of the image as it was perturbed for the dependency; None if it was not.
    """

    file: str | None
    width: int
    height: int
    grid: tuple[int, int] | None = None
    regions: list[tuple[float, float, float, float]] | None = None
    perturbed: str | None = None


@dataclass
class AttentionMap:
    """Attention of T tokens over V vision tokens, those of all images of the prompt in order, one byte each.

    Attributes:
        scale: T numbers; the attention of token t on vision token v is scale[t] · byte / 255.
        values: T · V bytes, token by token.
    """

    scale: list[float]
    values: bytes

    def row(self, token: int) -> list[float]:
        """Return the attention of one token, V numbers in [0, 1]; they sum to its mass on the images."""
        width = len(self.values) // len(self.scale)
        return [self.scale[token] * byte / 255 for byte in self.values[token * width : (token + 1) * width]]


@dataclass
class Completion:
    """A completion of T tokens with what was measured and earned; lists of tokens are of length T, or None.

    Attributes:
        question: the same for the same prompt with the same images, at every step.
        group: number of the prompt within its rollout batch.
        prompt: as the model saw it, with one `<image>` for the tokens of an image.
        text: without special tokens.
        tokens: T pieces of text, special tokens included.
        solution: as text, if the data have one.
        weights: of the tokens' credit.
        dependency: on the image, in nats.
        vgr: vision gain ratio, over the layers that rewards read.
        advantages: what the loss reads; None if it was not trained on.
        entropies, logps: under the policy that generated, in nats.
        changes: of the log-probability when the image is perturbed, in nats.
        rewards: by name, unweighted.
        reward: their weighted sum.
        advantage: of the whole completion.
        correct: whether the accuracy reward is 1; None without one.
        metrics: by segment of layers, then by quantity.
        images: of the prompt, in order.
        attention: over the vision tokens of all images, the mean over heads and over the layers that rewards read.
        replaced: whether another group took the place of its group, so that it was not trained on.
    """

    question: str
    group: int
    prompt: str
    text: str
    tokens: list[str]
    solution: str | None = None
    weights: Numbers | None = None
    dependency: Numbers | None = None
    vgr: Numbers | None = None
    advantages: Numbers | None = None
    entropies: Numbers | None = None
    logps: Numbers | None = None
    changes: Numbers | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float | None = None
    correct: bool | None = None
    metrics: dict[str, dict[str, float | None]] | None = None
    images: list[RecordedImage] = field(default_factory=list)
    attention: AttentionMap | None = None
    replaced: bool = False


@dataclass
class Record:
    """Completions of one rollout batch.

    Attributes:
        step: optimizer steps that the policy had behind it when it generated them.
        mode: `train` or `eval`.
        time: in seconds since 1970.
    """

    step: int
    mode: str
    time: float
    completions: list[Completion]


@dataclass
class LogEntry:
    """Values that the trainer logged at a step; None where a value is not finite."""

    step: int
    mode: str
    time: float
    values: dict[str, float | None]
