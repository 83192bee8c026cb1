"""Score completions: log-probabilities, entropies, hidden states, values and attention, with the model's own head.

The trainer's `run_pass` and the public `RolloutScorer` both call `score_in_chunks`, which sets no context: sharing,
gradients and dropout are the caller's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers.integrations import is_deepspeed_zero3_enabled

from vgr_trl.batch import Batch
from vgr_trl.errors import ConfigError
from vgr_trl.patching import patched_attribute, patched_method
from vgr_trl.sharing.model_support import base_of, causal_model, replace_hidden_states
from vgr_trl.signals.probe import AttentionProbe, SimilarityProbe, find_decoder
from vgr_trl.signals.ratios import AttentionMass, build_modality_masks, entropies_of, jensen_shannon, join_masses


class Purpose(Enum):
    """Purpose of a pass, stated by its caller; its value names the clock stage of a pass without gradients."""

    ROLLOUT = "old_logps"
    REFERENCE = "reference"
    VIEW = "perturbed"
    TRAINING = "update"
    EVALUATION = "evaluation"
    CRITIC = "values"


@dataclass(frozen=True)
class AttentionPlan:
    """Attention that a scoring pass measures.

    Attributes:
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        mass: whether the attention mass is measured.
        region: (N, P) bool, vision tokens whose attention is measured apart; None: none.
        keep_rows: rows whose attention to the vision tokens is kept token by token.
        keep_layers: layers whose attention is kept, numbered among the layers with attention; None: all.
        measure_prompt: whether the prompt's instruction tokens are measured as queries too.
        similarity: layer and pooling of `SimilarityProbe`; None: hidden states are not compared with the image.
        per_image: whether the attention to each image is measured apart.
    """

    vision_token_ids: Sequence[int]
    special_token_ids: Sequence[int] = ()
    mass: bool = True
    region: Tensor | None = None
    keep_rows: Sequence[int] = ()
    keep_layers: Sequence[int] | None = None
    measure_prompt: bool = False
    similarity: tuple[int, str] | None = None
    per_image: bool = False


@dataclass(frozen=True)
class Want:
    """Quantities that a pass returns beside log-probabilities, and the tokens of interest.

    Attributes:
        entropies: entropies of the distributions that tokens are drawn from.
        hidden: hidden states of the emitting positions.
        values: head of a critic, which maps hidden states (N, T, D) to values (N, T); None: no values.
        attention: attention to measure; None: none.
        router_loss: load-balancing loss of a mixture of experts.
        tokens: (N, T) bool, tokens that the caller reads; `run_pass` skips the others. None: all, a tool's too.
    """

    entropies: bool = False
    hidden: bool = False
    values: Callable[[Tensor], Tensor] | None = None
    attention: AttentionPlan | None = None
    router_loss: bool = False
    tokens: Tensor | None = None

    @property
    def reads_states(self) -> bool:
        """Whether hidden states are read."""
        return self.hidden or self.values is not None


@dataclass(frozen=True)
class Scores:
    """Result of a pass over N completions of T tokens; quantities that were not wanted are None.

    Attributes:
        logps: (N, T), log-probabilities of the tokens.
        mask: (N, T) bool, tokens of interest; others are not to be read.
        entropies: (N, T), in nats.
        hidden: (N, T, D), hidden states at the predicting positions; arbitrary where none ran.
        values: (N, T), values of a critic's head.
        attention: attention mass (L, N, T), whose mask is `mask`.
        prompt_attention: attention mass of the prompt's instruction tokens, (L, N, 1).
        maps: row -> attention to its vision tokens, (layers, T, V).
        similarity: (N, T) float32.
        per_image: per row, the attention to each of its images in [0, 1]; None where it is undefined or unknown.
        router_loss: scalar, load-balancing loss of a mixture of experts.
        rows_run: number of rows that ran.
    """

    logps: Tensor
    mask: Tensor
    entropies: Tensor | None = None
    hidden: Tensor | None = None
    values: Tensor | None = None
    attention: AttentionMass | None = None
    prompt_attention: AttentionMass | None = None
    maps: Mapping[int, Tensor] | None = None
    similarity: Tensor | None = None
    per_image: list[list[float | None]] | None = None
    router_loss: Tensor | None = None
    rows_run: int = 0


Compute = Callable[[nn.Module, Batch, Want], Scores]


def cut_rows(count: int, most: int, group: int = 1) -> list[range]:
    """Cut `count` rows into chunks of at most `most`; chunks smaller than a group of rows end with it."""
    size = max(most, group)
    starts = [start for first in range(0, count, size) for start in range(first, min(first + size, count), most)]
    return [range(start, stop) for start, stop in pairwise([*starts, count])]


def score_in_chunks(model: nn.Module, batch: Batch, want: Want, compute: Compute, chunks: Sequence[range]) -> Scores:
    """Score completions in chunks, and measure all wanted quantities in the same passes.

    Args:
        model: transformers model, also wrapped.
        batch: completions; several chunks need `num_images`. Tokens of tools do not count; their images are vision and
            their texts instruction.
        want: quantities to return beside log-probabilities.
        compute: runs one call of the model; hidden states that it returns are dropped unless they are wanted.
        chunks: rows of each chunk.

    Raises:
        DataError: pixel inputs cannot be assigned to the rows of a chunk.
        ConfigError: the attention of the model cannot be measured.
    """
    parts = [_score_chunk(model, batch, want, rows, compute) for rows in chunks]
    return parts[0] if len(parts) == 1 else _join(parts)


def _score_chunk(model: nn.Module, batch: Batch, want: Want, rows: range, compute: Compute) -> Scores:
    batch = batch.take(rows)
    probe, similar = _build_probes(model, batch, want.attention, rows)
    with ExitStack() as stack:
        for block in (probe, similar):
            stack.enter_context(block or nullcontext())
        scores = compute(model, batch, want)
    hidden: Any = scores.hidden
    more: dict[str, Any] = {"hidden": hidden if want.hidden else None, "similarity": similar and similar.similarity}
    if want.values is not None:
        more["values"] = want.values(hidden.detach())
    if probe is not None and (plan := want.attention) is not None:
        seen = {} if batch.by_policy is None else _count_seen(probe.sets, batch.length)
        more["attention"] = replace(probe.mass, mask=scores.mask, **seen)
        if plan.per_image:
            more["per_image"] = _measure_images(probe, scores.mask, plan.keep_layers, batch.images.num_images)
        more["prompt_attention"] = probe.prompt_mass if plan.measure_prompt else None
        more["maps"] = {rows[row]: kept for row, kept in probe.kept.items()}
    return replace(scores, **more)


def compute_by_base(temperature: float, model: nn.Module, batch: Batch, want: Want) -> Scores:
    """Run the base model, and score its hidden states with `Head`; logits are divided by `temperature`."""
    causal = causal_model(model)
    with read_hidden_states(model, batch.length) as states:
        causal.base_model(**batch.model_inputs, use_cache=False)
    logps, entropies = Head(causal).score(states[0], batch.completion_ids, batch.completion_mask.bool(), temperature)
    return Scores(logps, batch.valid, entropies if want.entropies else None, states[0], rows_run=len(batch))


def _build_probes(
    model: nn.Module, batch: Batch, plan: AttentionPlan | None, rows: range
) -> tuple[AttentionProbe | None, SimilarityProbe | None]:
    """Build the probes of a chunk; `rows` are the numbers of its rows in the whole batch."""
    if plan is None:
        return None, None
    whole = None if batch.by_policy is None else batch.width  # P, if masks cover whole rows
    ids, unwritten = (batch.prompt_ids, batch.prompt_mask.bool()) if whole is None else (batch.ids, batch.unwritten)
    masks = build_modality_masks(
        ids, unwritten, vision_token_ids=plan.vision_token_ids, special_token_ids=plan.special_token_ids
    )
    similar = None if plan.similarity is None else SimilarityProbe(model, masks.vision, *plan.similarity, whole)
    if not plan.mass:
        return None, similar
    if plan.per_image:
        numbers = batch.images.number(masks.vision)  # (B, P or S)
        most = torch.arange(1, max(batch.images.num_images or [0]) + 1, device=masks.vision.device)
        masks.images = numbers.unsqueeze(-1) == most
    if plan.region is not None:
        masks.region = plan.region[rows.start : rows.stop].to(masks.vision) & masks.vision
    keep = [row - rows.start for row in plan.keep_rows if row in rows]
    return AttentionProbe(model, masks, None, keep, plan.measure_prompt, plan.keep_layers, prompt=whole), similar


def _count_seen(sets: Tensor, length: int) -> dict[str, Tensor]:
    """Count the vision and instruction tokens in front of each completion token, (N, T) int each.

    Args:
        sets: (N, S, 2 or more) bool, whole rows.
        length: T.
    """
    seen = sets[..., :2].cumsum(1)[:, -length - 1 : -1].int()  # (N, T, 2)
    return {"seen_vision": seen[..., 0], "seen_instruction": seen[..., 1]}


def _measure_images(
    probe: AttentionProbe, mask: Tensor, layers: Sequence[int] | None, num_images: Sequence[int] | None
) -> list[list[float | None]]:
    """Average each row's attention to each of its images over layers and over the valid tokens behind the image.

    Args:
        mask: (N, T) bool, valid tokens.
        layers: numbers of the layers; None: all.
        num_images: (N,) images of each row; None: no row has any.
    """
    mass = probe.image_mass if layers is None else probe.image_mass[list(layers)]
    images = probe.sets[..., probe.sides :].cumsum(1)  # (N, P or S, K)
    seen = images[:, [min(position, images.size(1) - 1) for position in probe.plan.positions]]  # (N, T, K)
    after = mask.unsqueeze(-1) & (seen > 0) & (seen == images[:, -1:])
    means = ((mass.mean(0) * after).sum(1) / after.sum(1)).tolist()  # (N, K)
    return [
        [None if value != value else value for value in row[:count]]
        for row, count in zip(means, num_images or [0] * len(means), strict=True)
    ]


_JOIN: Mapping[type, Callable[[list[Any]], Any]] = {
    AttentionMass: join_masses,
    Tensor: torch.cat,
    int: sum,
    list: lambda parts: [row for rows in parts for row in rows],
    dict: lambda parts: {row: kept for rows in parts for row, kept in rows.items()},
}


def _join(parts: Sequence[Scores]) -> Scores:
    """Concatenate the scores of chunks that were scored with the same `Want`."""
    joined: dict[str, Any] = {}
    for name, first in vars(parts[0]).items():
        if first is not None:
            join = next(join for kind, join in _JOIN.items() if isinstance(first, kind))
            joined[name] = join([vars(part)[name] for part in parts])
    return Scores(**joined)


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the policy's weights are active: its adapters are on, or it has none, and no reference is on."""
    wrappers = (module for module in model.modules() if isinstance(module, PeftModel))
    return all(wrapper.has_active_enabled_adapter and "ref" not in wrapper.active_adapters for wrapper in wrappers)


def full_weights(linear: nn.Module) -> dict[str, Any]:
    """Return the weights of a layer by name, whole where FSDP2 divides them; gradients are averaged over processes."""
    weights: dict[str, Any] = linear._parameters
    return {
        name: weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)
        if isinstance(weight, DTensor)
        else weight
        for name, weight in weights.items()
    }


@contextmanager
def head_with_average_gradient(causal: Any) -> Iterator[None]:
    """Average the gradient of an untied head over the processes of FSDP2.

    TRL 1.16 gathers the head without that: each process would train its part of the head on its own rows.
    """
    plain = causal.get_output_embeddings

    def whole() -> Any:
        linear = plain()
        is_divided = any(isinstance(weight, DTensor) for weight in linear.parameters())
        return SimpleNamespace(**full_weights(linear)) if is_divided else linear

    with patched_method(causal, "get_output_embeddings", whole):
        yield


LOGITS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**26}  # 32 MB and 256 MB in float32; a GPU wants larger products


class _HiddenStates(dict[str, Any]):
    """Stands in for the outputs of a base model: last hidden states by name and by index, None for other outputs."""

    def __init__(self, states: Tensor) -> None:
        super().__init__(last_hidden_state=states)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else () if isinstance(key, slice) else super().__getitem__(key)


class Head:
    """The LM head of a model, with its logit scaling, soft-capping and casts.

    The model's own forward pass runs, with its base model replaced by one that returns given hidden states. Where a
    process has parts of the weights only (ZeRO-3, FSDP2), `logits` runs in a block of `whole`.

    Args:
        causal: transformers model with a head.
    """

    def __init__(self, causal: Any) -> None:
        self.causal, self.linear = causal, causal.get_output_embeddings()
        self.vocabulary: int = causal.config.get_text_config(decoder=True).vocab_size

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the head's weights in this block, which all processes enter together."""
        gathered: Any = nullcontext()
        if is_deepspeed_zero3_enabled():
            from trl.trainer.utils import maybe_gather_lm_head_ctx  # verl and EasyR1 run without TRL

            gathered = maybe_gather_lm_head_ctx(*self.linear.parameters())
        with gathered, patched_attribute(self.linear, "_parameters", full_weights(self.linear)):
            yield

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (C, vocabulary) for hidden states (C, D).

        Raises:
            ConfigError: the model's forward pass calls neither its base model nor its decoder.
        """
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return _HiddenStates(hidden.unsqueeze(0))

        base, decoder = self.causal.base_model, find_decoder(self.causal)  # OPT's head calls the decoder of its base
        with ExitStack() as stack:
            for module in {self.causal, base, decoder, self.linear}:  # engines would gather and free weights
                for hooks in ("_forward_pre_hooks", "_forward_hooks"):
                    stack.enter_context(patched_attribute(module, hooks, {}))
            for module in (base, decoder):
                stack.enter_context(patched_method(module, "forward", forward))
            logits: Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        if calls != 1:
            calls_base = f"{type(self.causal).__name__} called its base model {calls} times instead of once"
            raise ConfigError(f"{calls_base}: its head cannot be used alone, score with its own forward pass.")
        return logits

    def score(self, hidden: Tensor, tokens: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the tokens' log-probabilities and the entropies of their distributions, 0 where `mask` is False.

        Args:
            hidden: (N, T, D), hidden states at the predicting positions.
            tokens: (N, T) int64.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, entropies in nats.
        """

        def measure(states: Tensor, chosen: Tensor) -> Tensor:
            logps = torch.log_softmax(self.logits(states).float() / temperature, dim=-1)  # (C, vocabulary)
            return torch.stack([logps.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropies_of(logps)])

        return self._measure_by_position(measure, mask, hidden, tokens)

    def shift(self, hidden: Tensor, other_hidden: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return how far the distributions of two passes differ, and the entropies of the other pass.

        Args:
            hidden: (N, T, D), hidden states at the predicting positions.
            other_hidden: (N, T, D), hidden states at the same positions in the other pass.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, the Jensen-Shannon divergence and entropies, in nats; 0 where `mask` is False.
        """

        def measure(states: Tensor, other_states: Tensor) -> Tensor:
            logits, theirs = (self.logits(side).float() / temperature for side in (states, other_states))
            return torch.stack([jensen_shannon(logits, theirs), entropies_of(torch.log_softmax(theirs, dim=-1))])

        return self._measure_by_position(measure, mask, hidden, other_hidden, passes=2)

    @torch.no_grad()
    def most_likely(self, hidden: Tensor, mask: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens of each position, and their log-probabilities.

        Args:
            hidden: (N, T, D), hidden states at the predicting positions.
            mask: (N, T) bool; other positions get 0.
            count: number of tokens, K; 0, or more than there are: all.
            temperature: logits are divided by it.

        Returns:
            Tokens (N, T, K) int32, the most likely first, and log-probabilities (N, T, K + 1) float32, whose last
            column is the rest of the vocabulary; (N, T, K) if K is the whole vocabulary.
        """
        count = min(count or self.vocabulary, self.vocabulary)
        ids = torch.zeros(*mask.shape, count, dtype=torch.int32, device=hidden.device)
        logps = torch.zeros(*mask.shape, count + (count < self.vocabulary), device=hidden.device)
        with self.whole():
            parts = [
                _top_tokens(self.logits(states).float() / temperature, count) for (states,) in self.split(hidden[mask])
            ]
        if parts:
            ids[mask], logps[mask] = (torch.cat(values) for values in zip(*parts, strict=True))
        return ids, logps

    def split(self, *of_positions: Tensor, passes: int = 1) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors over the same positions into parts whose logits fit into memory for `passes` passes."""
        logits = LOGITS_AT_A_TIME.get(of_positions[0].device.type, LOGITS_AT_A_TIME["cpu"])
        size = max(logits // (passes * self.vocabulary), 1)
        parts = zip(*(values.split(size) for values in of_positions), strict=True)
        return (part for part in parts if len(part[0]))

    def _measure_by_position(
        self, measure: Callable[..., Tensor], mask: Tensor, *of_tokens: Tensor, passes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Measure two numbers of each position of the mask, (N, T) each, 0 elsewhere."""
        measured = torch.zeros(2, *mask.shape, device=of_tokens[0].device)
        with self.whole():
            parts = [measure(*part) for part in self.split(*(values[mask] for values in of_tokens), passes=passes)]
        if parts:
            measured[:, mask] = torch.cat(parts, dim=1)
        return measured[0], measured[1]


def _top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    logps = logits.log_softmax(-1)
    top, ids = logps.topk(count)
    return ids.int(), top if count == logps.size(-1) else torch.cat([top, rest_of(logps, ids)], -1)


def rest_of(logps: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability (…, 1) of the rest of the vocabulary.

    Args:
        logps: (…, vocabulary).
        ids: (…, K), tokens outside the rest.
    """
    # With -inf in place of these tokens, gradients would be NaN where no other token is allowed.
    return logps.scatter(-1, ids.long(), torch.finfo(logps.dtype).min).logsumexp(-1, keepdim=True)


@contextmanager
def read_hidden_states(model: nn.Module, completion_length: int) -> Iterator[list[Tensor]]:
    """Yield a list to which each pass in this block appends hidden states (N, T, D) at its predicting positions.

    Args:
        model: transformers model, also wrapped.
        completion_length: T.
    """
    states: list[Tensor] = []

    def read(hidden: Tensor) -> Tensor:
        states.append(hidden[:, -completion_length - 1 : -1])
        return hidden

    with replace_hidden_states(base_of(causal_model(model)), read):
        yield states
