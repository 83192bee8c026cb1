"""State of a rollout, which the trainer's hooks fill in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vgr_trl.batch import Batch, Placement, Prompts, Turns
from vgr_trl.data.images import IMAGE_COLUMNS, images_of, refuse_named_files
from vgr_trl.data.prompts import texts_of
from vgr_trl.errors import DataError, RewardError
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.scoring import Scores


@dataclass
class GroupSelection:
    """Groups of a rollout batch that have a gradient; the same on all processes.

    Attributes:
        placement: which process holds which rows.
        rewards: weighted sums, (N of all processes,), NaN where no function applied.
        task_rewards: likewise, without the penalty of the KL; they decide which groups have zero variance.
        advantages: (N of all,).
        dropped: numbers of the zero-variance groups and of the groups that online filtering drops.
        filtered: numbers of the groups that online filtering alone drops.
        bounds: mean rewards between which online filtering keeps groups.
        trained: number of generated groups with a gradient, including groups of further prompts.
    """

    placement: Placement
    rewards: torch.Tensor
    task_rewards: torch.Tensor
    advantages: torch.Tensor
    dropped: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)
    bounds: tuple[float, float] | None = None
    trained: int = 0

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
        """Return the rows of this process with a gradient, (N,) bool.

        Args:
            replaced: numbers of the groups that were replaced by groups of other prompts.
        """
        has_gradient = torch.ones(self.placement.rows, dtype=torch.bool)
        for group in set(self.dropped).difference(replaced):
            has_gradient[[row for row, _ in self.placement.here(group)]] = False
        return has_gradient


@dataclass
class Noise:
    """Perturbation under which some completions of a rollout were sampled.

    Attributes:
        rows: (N,), whether each completion of this process is noisy.
        generations: noisy completions of each prompt.
        strength: strength of the perturbation, in [0, 1].
        prompts: prompts sampled from, noisy rows with perturbed images; None: no noisy row has an image.
    """

    rows: list[bool]
    generations: int
    strength: float
    prompts: Prompts | None = None


@dataclass(repr=False)
class Rollout:
    """One rollout batch of this process, which its stages fill in.

    A stage sets its values once; `rows`, `batch`, `signals` and `metrics` are completed by later ones.

    Attributes:
        rows: rows of the data, one per completion.
        first: number of the first row over all processes.
        recorded: numbers of the recorded rows, whose attention to the image is kept token by token; None if no process
            records a row of the batch.
        greedy: whether there is one greedy completion per row, which is not logged (ReMax).
        blind: whether questions are answered without their images, for rewards of another rollout.

        Generated:
        messages: the prompts as conversations with their images.
        prompts: prompts of the first turn, with their own images; None before it.
        noise: perturbation of some rows for generation; None: no row was perturbed.
        generated: signals measured during generation, (N, T'); None: none were.
        turns: turns of completions that may call tools; None without tools.
        engine_logps: log-probabilities that the engine returned, 0 for tokens of tools; None: it returns none, or
            they have become the old ones.

        Scored:
        scores: scores of the completions under the policy; None: nothing needs them.
        reference: scores under the reference model; None: nothing needs them.
        signals: signals of the completions, and after the selection of the groups that are trained on.

        Rewarded:
        rewards: unweighted rewards, (N of all processes, number of functions).
        token_weights: weights that reward files have returned, by completion of this process; None without a file.
        kl_penalty: (N, T), the KL term in each token's reward, at most 0 for most estimators.
        batch: batch to train on; a stage that adds to it replaces it.
        perturbed_images: row -> images perturbed to measure the dependency.
        teacher_images: row -> images that the teacher sees.
        teacher_top: the teacher's k most likely tokens, (N, T, k), and log-probabilities, (N, T, k + 1); the last
            column is the rest of the vocabulary; 0 for unused rows. None: nothing reads them.
        changes: (N, T), changes of the log-probabilities when images are perturbed.

        Selected:
        selection: groups with a gradient, and their rewards.
        replaced: numbers of the groups that were replaced by groups of other prompts.
        with_gradient: (N,) bool, rows with a gradient.
        metrics: metrics of the perturbed views.
        credit: name of a credit rule -> its weights, (N, T).
    """

    rows: list[dict[str, Any]]
    first: int = 0
    recorded: tuple[int, ...] | None = None
    greedy: bool = False
    blind: bool = False
    messages: list[Any] = field(init=False)
    prompts: Prompts | None = None
    noise: Noise | None = None
    generated: RolloutSignals | None = None
    turns: Turns | None = None
    engine_logps: list[list[float]] | None = None
    scores: Scores | None = None
    reference: Scores | None = None
    signals: RolloutSignals | None = None
    rewards: torch.Tensor = field(init=False)
    token_weights: list[Any] | None = None
    kl_penalty: torch.Tensor | None = None
    batch: Batch = field(init=False)
    perturbed_images: dict[int, list[Any]] = field(default_factory=dict)
    teacher_images: dict[int, list[Any]] = field(default_factory=dict)
    teacher_top: tuple[torch.Tensor, torch.Tensor] | None = None
    changes: torch.Tensor | None = None
    selection: GroupSelection = field(init=False)
    replaced: list[int] = field(default_factory=list)
    with_gradient: torch.Tensor = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict)
    credit: dict[str, torch.Tensor] = field(default_factory=dict)


def normalise_image_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace null images, which TRL cannot read, with []."""
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
    """Return "row with …" with the row's `id`, or "row whose prompt ends with …" without one."""
    if row.get("id") is not None:
        return f"row with the id {row['id']!r}"
    prompt = row.get("prompt") or ""
    text = prompt if isinstance(prompt, str) else " ".join(texts_of(prompt[-1:]))
    return f"row whose prompt ends with {text.strip()[-80:]!r}"


def weighted_sums(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sums (N,) of rewards (N, F); NaN for a completion that no reward applies to."""
    return (rewards * weights.to(rewards)).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def refuse_infinite(rewards: torch.Tensor, names: Sequence[str], rows: Sequence[Mapping[str, Any]], first: int) -> None:
    """Raise `RewardError` on all processes if a reward is infinite; a reward that does not apply is NaN.

    Args:
        rewards: (N of all processes, number of functions).
        names: names of the functions.
        rows: rows of this process.
        first: number of the first of these rows among all.
    """
    infinite = rewards.isinf().nonzero().tolist()
    if not infinite:
        return
    row, function = infinite[0]
    location = f", the {describe_row(rows[row - first])}" if first <= row < first + len(rows) else ""
    value = f"{rewards[row, function].item()} for row {row} of the {len(rewards)} of the rollout batch{location}"
    cure = "return a finite float32 number, or None where the reward does not apply"
    raise RewardError(f"The reward {names[function]} is {value}: {cure}.")
