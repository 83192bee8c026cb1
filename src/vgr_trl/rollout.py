"""Per-rollout and per-micro-batch state, which the trainer's hooks fill in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl import GRPOTrainer

from vgr_trl.data.images import IMAGE_COLUMNS, images_of, refuse_named_files
from vgr_trl.data.prompts import texts_of
from vgr_trl.registries import BLIND_ANSWERS
from vgr_trl.rows import Placement, Prompts, Turns
from vgr_trl.signals.named import SIGNAL_COLUMNS, NamedSignal, RolloutSignals
from vgr_trl.signals.scoring import Scores
from vgr_trl.utils import DataError


@dataclass(frozen=True)
class Measurement:
    """Measurements of every rollout batch.

    Attributes:
        needed: name of a measurement -> the first option, reward or rule that needs it. `shift` is how distributions
            differ under the perturbation, `views` log-probabilities under perturbations, `regions` attention on what
            the question is about, `per_image` attention on each image, `values` those of a critic's head, `blind`
            answers without the image, `perception` perturbed images for the loss.
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        views: perturbations under which completions are scored.
        named: signals that are asked for by name, or read by plug-ins.
        layers: of the model, those that have attention; 0 where attention is not measured.
        samples_curves: whether attention that only metrics read is measured for a sample.
    """

    needed: Mapping[str, str]
    vision_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    views: tuple[str, ...] = ()
    named: tuple[NamedSignal, ...] = ()
    layers: int = 0
    samples_curves: bool = False

    def needs(self, *names: str) -> bool:
        """Whether any of these is needed."""
        return not self.needed.keys().isdisjoint(names)

    @property
    def head(self) -> bool:
        """Whether a pass through the model's head is needed, for log-probabilities or entropies."""
        return self.needs("entropies", "dependency", "shift", "logps")

    @property
    def scoring(self) -> bool:
        """Whether a pass over the rollout batch is needed."""
        return self.head or self.needs("attention", "similarity", "values")

    @property
    def samples(self) -> bool:
        """Whether training rollouts are scored for the attention metrics alone, so that a sample is enough."""
        only_curves = self.needed.get("attention") == "compute_attention_metrics" and not self.named
        return self.samples_curves and only_curves and not (self.head or self.needs("similarity", "values"))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that rewards get beside those of the data."""
        of_attention = (*SIGNAL_COLUMNS, "mdi_balance_ratio") if "attention" in self.needed else ()
        answers = (BLIND_ANSWERS,) if "blind" in self.needed else ()
        return (*of_attention, *answers, *(signal.name for signal in self.named if not signal.is_late))


if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer as ConstructedTrainer  # in annotations of the layers below it
else:
    ConstructedTrainer = GRPOTrainer


@dataclass
class GroupSelection:
    """Groups of a rollout batch that have a gradient; the same on all processes.

    Attributes:
        placement: of the batch.
        rewards: weighted sums, (N of all,), NaN where no function applied.
        task_rewards: likewise, without what the KL adds; they decide which groups have zero variance.
        advantages: (N of all,).
        dropped: numbers of the zero-variance groups, and of those that online filtering leaves out.
        filtered: the latter without the former.
        bounds: mean rewards between which online filtering keeps groups.
    """

    placement: Placement
    rewards: torch.Tensor
    task_rewards: torch.Tensor
    advantages: torch.Tensor
    dropped: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    bounds: tuple[float, float] | None = None

    @property
    def kept(self) -> list[int]:
        """Numbers of the groups with a gradient."""
        return [group for group in range(self.placement.num_groups) if group not in self.dropped]

    @property
    def local_advantages(self) -> torch.Tensor:
        """Advantages of this process, (N,)."""
        first = self.placement.process_index * self.placement.rows
        return self.advantages[first : first + self.placement.rows]

    def rows_with_gradient(self, replaced: Iterable[int] = ()) -> torch.Tensor:
        """Return the rows of this process with a gradient, (N,) bool, once the groups `replaced` have been replaced."""
        found = torch.ones(self.placement.rows, dtype=torch.bool)
        for group in set(self.dropped).difference(replaced):
            found[[row for row, _ in self.placement.here(group)]] = False
        return found


@dataclass
class Noise:
    """Completions of a rollout that were sampled from perturbed images.

    Attributes:
        rows: of this process, whether each was.
        generations: completions of each prompt that were.
        strength: of the perturbation, in [0, 1].
        prompts: as they were given to generation, perturbed ones among them; None if there were none.
    """

    rows: list[bool]
    generations: int
    strength: float
    prompts: Prompts | None = None


@dataclass(repr=False)
class Rollout:
    """One rollout batch of this process, in stages; the attributes of a stage are set once, when it is reached.

    Attributes:
        rows: of the data, one per completion.
        recorded: rows that are recorded, whose attention over the image is kept token by token; None if nothing of the
            batch is recorded in any process.
        greedy: whether there is one greedy completion per row, of which nothing is logged (ReMax).
        blind: whether questions are answered without their images, for rewards of another rollout.

        Generated:
        messages: the prompts as conversations with their images.
        prompts: of the first generation of the batch, with their own images.
        noise: how some were perturbed for generation; None: they were not.
        generated: signals of the tokens as they were generated, (N, T'); None: they were not measured then.
        turns: of completions that may call tools; None without tools.

        Scored:
        scores: of the completions under the policy; None: nothing needs them.
        reference: likewise under the reference model.
        signals: of the completions; later those of the groups that are trained on.

        Rewarded:
        rewards: unweighted, of all processes, (N of all, number of functions).
        token_weights: that reward files have returned, by completion of this process; None without such a file.
        kl_penalty: (N, T), at most 0 for most kinds: the KL in the reward of each token.
        batch: TRL's training batch.
        perturbed_images: row -> its images as they were perturbed for the dependency.
        changes: of the log-probabilities when images are perturbed, (N, T).

        Selected:
        selection: which groups have a gradient.
        replaced: numbers of the groups whose place others have taken.
        with_gradient: rows with a gradient, (N,) bool.
        metrics: of the perturbed views.
        credit: name of a credit rule -> its weights, (N, T).
    """

    rows: list[dict[str, Any]]
    recorded: tuple[int, ...] | None = None
    greedy: bool = False
    blind: bool = False
    messages: list[Any] = field(init=False)
    prompts: Prompts = field(init=False)
    noise: Noise | None = None
    generated: RolloutSignals | None = None
    turns: Turns | None = None
    scores: Scores | None = None
    reference: Scores | None = None
    signals: RolloutSignals | None = None
    rewards: torch.Tensor = field(init=False)
    token_weights: list[Any] | None = None
    kl_penalty: torch.Tensor | None = None
    batch: dict[str, Any] = field(default_factory=dict)
    perturbed_images: dict[int, list[Any]] = field(default_factory=dict)
    changes: torch.Tensor | None = None
    selection: GroupSelection = field(init=False)
    replaced: list[int] = field(default_factory=list)
    with_gradient: torch.Tensor = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict)
    credit: dict[str, torch.Tensor] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_ONCE and vars(self).get(name) is not None:
            raise AttributeError(f"Rollout.{name} is set already: a stage of a rollout is reached once.")
        super().__setattr__(name, value)


_SET_ONCE = {"messages", "prompts", "scores", "reference", "rewards", "kl_penalty", "selection", "with_gradient"}


@dataclass(frozen=True)
class TrainingPass:
    """Micro-batch whose training pass has run, with what the pass gave.

    Attributes:
        inputs: of TRL's `_compute_loss`.
        model: likewise.
        logps: (N, T) with gradients; tokens without loss have a constant.
        loss_mask: (N, T) bool, the tokens whose log-probabilities the loss reads; None: all valid tokens.
        hidden: (N, T', D) with gradients, of the positions that emit; T' is T without the last columns without loss.
        values: (N, T) with gradients, that a critic's head has read off the pass.
        rows_run: number of rows that ran.
    """

    inputs: dict[str, Any]
    model: nn.Module
    logps: torch.Tensor
    loss_mask: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    values: torch.Tensor | None = None
    rows_run: int = 0


def normalise_image_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of which those with a null image have an empty list of images, which TRL knows; null fails there."""
    columns = [name for name in IMAGE_COLUMNS if name in rows[0]]
    if columns and not all(any(row.get(name) for name in columns) for row in rows):
        return [{**row, "images": images_of(row)} for row in rows]
    return rows


def refuse_files_in_prompts(prompts: list[Any]) -> None:
    """Raise `DataError` if a conversation names files or addresses, which its processor would read or fetch."""
    try:
        for prompt in prompts:
            if isinstance(prompt, list):
                refuse_named_files(prompt)
    except DataError as error:
        raise DataError(f"A row of the data cannot be used: {error}.") from None


def describe_row(row: Mapping[str, Any]) -> str:
    """Return "row with …", by the row's `id`, if it has one, or the end of its prompt."""
    if row.get("id") is not None:
        return f"row with the id {row['id']!r}"
    prompt = row.get("prompt") or ""
    text = prompt if isinstance(prompt, str) else " ".join(texts_of(prompt[-1:]))
    return f"row whose prompt ends with {text.strip()[-80:]!r}"


def weighted_sums(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums of rewards (N, F), (N,); NaN for a completion that none applies to."""
    sums = (rewards * weights.to(rewards)).nansum(dim=1)
    return sums.masked_fill(rewards.isnan().all(dim=1), torch.nan)


def find_completion_maker(trainer: ConstructedTrainer) -> str | None:
    """Return the option by which completions are more than the policy's answer to its prompt, if one is on."""
    makers = {
        "rollout_func": trainer.rollout_func,
        "environment_factory": trainer.environment_factories,
        "tools": trainer.tools,
    }
    return next((option for option, maker in makers.items() if maker), None)
