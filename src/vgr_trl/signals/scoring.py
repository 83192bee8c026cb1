"""Score completions without gradients: log-probabilities, entropies, hidden states, values and attention.

`score` is the one scoring function, of the trainer and of the public `RolloutScorer`. `Head` computes log-probabilities
from hidden states, a few positions at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from vgr_trl.pixels import counts_by_tokens, image_inputs_of, number_images
from vgr_trl.rows import TOKEN_TYPES, extend_token_types, take_scoring_rows
from vgr_trl.sharing.model_support import (
    base_of,
    causal_model,
    has_sharded_parameters,
    replace_hidden_states,
    replaced,
    why_adapter_reads_whole_rows,
)
from vgr_trl.sharing.prefix_cache import SharingReport
from vgr_trl.sharing.prefix_forward import is_image_token
from vgr_trl.sharing.sharing import share_prompts, whole_groups
from vgr_trl.signals.named import RolloutSignals
from vgr_trl.signals.probe import AttentionProbe, SimilarityProbe, find_decoder
from vgr_trl.signals.ratios import (
    AttentionMass,
    build_modality_masks,
    entropies_of,
    jensen_shannon,
    join_masses,
    vision_token_ids,
)
from vgr_trl.utils import ConfigError, DataError

LOGITS_AT_A_TIME = {"cpu": 2**23, "cuda": 2**26}  # 32 MB and 256 MB in float32; a GPU wants larger products


class _HiddenStates(dict[str, Any]):
    """Stands in for the outputs of a base model: the last hidden states by name and by index, None for the rest."""

    def __init__(self, states: Tensor) -> None:
        super().__init__(last_hidden_state=states)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else () if isinstance(key, slice) else super().__getitem__(key)


class Head:
    """The LM head of a model, with its logit scaling, soft-capping and casts.

    The model's own forward pass runs, with its base model replaced by one that returns given hidden states.

    Args:
        causal: transformers model with a head.
    """

    def __init__(self, causal: Any) -> None:
        self.causal = causal
        self.vocabulary: int = causal.config.get_text_config(decoder=True).vocab_size

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
        with replaced((base, "forward", forward), (decoder, "forward", forward)):
            logits: Tensor = self.causal(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        if calls != 1:
            calls_base = f"{type(self.causal).__name__} called its base model {calls} times instead of once"
            raise ConfigError(f"{calls_base}: its head cannot be used alone, score with its own forward pass.")
        return logits

    def score(self, hidden: Tensor, tokens: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `tokens` and entropies of what they are drawn from, 0 where `mask` is False.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
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

    def shift(self, hidden: Tensor, others: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return how far two passes differ in what tokens are drawn from, and the entropies of the other pass.

        Args:
            hidden: (N, T, D), of the queries that emit the tokens.
            others: (N, T, D), of the same queries in the other pass.
            mask: (N, T) bool.
            temperature: logits are divided by it.

        Returns:
            (N, T) float32 each, the Jensen-Shannon divergence and entropies, in nats; 0 where `mask` is False.
        """

        def measure(states: Tensor, other_states: Tensor) -> Tensor:
            logits, other = (self.logits(each).float() / temperature for each in (states, other_states))
            return torch.stack([jensen_shannon(logits, other), entropies_of(torch.log_softmax(other, dim=-1))])

        return self._measure_by_position(measure, mask, hidden, others, passes=2)

    def positions_at_a_time(self, device: torch.device, passes: int = 1) -> int:
        """Return for how many positions there is room for logits of so many passes."""
        return max(LOGITS_AT_A_TIME.get(device.type, LOGITS_AT_A_TIME["cpu"]) // (passes * self.vocabulary), 1)

    def _measure_by_position(
        self, measure: Callable[..., Tensor], mask: Tensor, *of_tokens: Tensor, passes: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The two numbers of each position of the mask, some at a time, 0 elsewhere."""
        device = of_tokens[0].device
        found = torch.zeros(2, *mask.shape, device=device)
        if mask.any():
            count = self.positions_at_a_time(device, passes)
            parts = zip(*(values[mask].split(count) for values in of_tokens), strict=True)
            found[:, mask] = torch.cat([measure(*part) for part in parts], dim=1)
        return found[0], found[1]


@contextmanager
def read_hidden_states(model: nn.Module, completion_length: int) -> Iterator[list[Tensor]]:
    """Yield a list that gets the hidden states (N, T, D) of the emitting positions of every pass in this block."""
    states: list[Tensor] = []

    def read(hidden: Tensor) -> Tensor:
        states.append(hidden[:, -completion_length - 1 : -1])
        return hidden

    with replace_hidden_states(base_of(causal_model(model)), read):
        yield states


@dataclass(frozen=True)
class AttentionPlan:
    """Attention to be measured by a scoring pass.

    Attributes:
        vision_token_ids: placeholder tokens of images and videos.
        special_token_ids: tokens that belong to no modality.
        mass: whether the attention mass is measured.
        region: (N, P) bool, vision tokens whose attention is measured apart; None: none.
        keep_rows: rows of which attention over the vision tokens is kept token by token.
        keep_layers: of the layers with attention, those it is kept of; None: all.
        measure_prompt: whether the prompt's instruction tokens are measured as queries too.
        similarity: layer and pooling of `SimilarityProbe`; None: hidden states are not compared with the image.
        per_image: whether the attention on each image is measured apart.
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
    """Quantities to read off a scoring pass beside log-probabilities.

    Attributes:
        entropies: entropies of the distributions that tokens are drawn from.
        hidden: hidden states of the emitting positions.
        values: head of a critic, which maps hidden states (N, T, D) to values (N, T); None: no values.
        attention: attention to measure; None: none.
    """

    entropies: bool = False
    hidden: bool = False
    values: Callable[[Tensor], Tensor] | None = None
    attention: AttentionPlan | None = None


@dataclass(frozen=True)
class Scores:
    """Result of a scoring pass over N completions of T tokens; a field is None unless it was wanted.

    Attributes:
        logps: (N, T), log-probabilities of the tokens.
        mask: (N, T) bool, tokens that count.
        entropies: (N, T), in nats.
        hidden: (N, T, D), of the positions that emit the tokens.
        values: (N, T).
        attention: attention mass (L, N, T), whose mask is `mask`.
        prompt_attention: that of the prompt's instruction tokens, (L, N, 1).
        maps: row -> attention over its vision tokens, (layers, T, V).
        similarity: (N, T) float32.
        per_image: per row, the attention on each of its images in [0, 1], None where it is undefined or unknown.
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


# (model, inputs, whether entropies are wanted) -> log-probabilities and entropies (N, T) of the completions
Compute = Callable[[nn.Module, dict[str, Any], bool], tuple[Tensor, Tensor | None]]


@torch.no_grad()
def score(
    model: nn.Module,
    batch: Mapping[str, Any],
    want: Want,
    *,
    compute: Compute | None = None,
    rows_per_pass: int | None = None,
    temperature: float = 1.0,
) -> Scores:
    """Score completions in passes without gradients, and read off them whatever else is wanted.

    Args:
        model: transformers model, also wrapped.
        batch: `input_ids` and `attention_mask` (N, P + T), `logits_to_keep` T, token types, the pixel inputs of the N
            rows, and where they pass in parts `num_images` and `num_tiles` of each row. With tools, `tool_mask` (N, T)
            is 0 for their tokens: these do not count, their images are vision and their texts instruction.
        want: what is returned beside log-probabilities.
        compute: runs one forward pass, as TRL's trainer does. None: the base model runs, and `Head` scores its hidden
            states.
        rows_per_pass: rows that pass at a time; None: all.
        temperature: logits are divided by it, where `compute` is None.

    Raises:
        DataError: pixel inputs cannot be assigned to the rows of a part.
        ConfigError: the attention of the model cannot be measured.
    """
    count, length = len(batch["input_ids"]), batch["logits_to_keep"]
    step, parts = rows_per_pass or count, []
    for start in range(0, count, step):
        rows = range(start, min(start + step, count))
        inputs = take_scoring_rows(batch, rows)
        own = inputs.pop("tool_mask", None)
        mask = inputs["attention_mask"][:, -length:].bool()  # (B, T)
        mask = mask if own is None else mask & own.bool()
        probe, similar = _build_probes(model, inputs, want.attention, rows, own)
        reads = want.hidden or want.values or compute is None
        with ExitStack() as stack:
            states = stack.enter_context(read_hidden_states(model, length)) if reads else []
            stack.enter_context(probe or nullcontext())
            stack.enter_context(similar or nullcontext())
            if compute is not None:
                logps, entropies = compute(model, inputs, want.entropies)
            else:
                names = inputs.keys() - {"logits_to_keep", "num_images", "num_tiles"}
                causal_model(model).base_model(**{name: inputs[name] for name in names}, use_cache=False)
        if compute is None:
            head, tokens = Head(causal_model(model)), inputs["input_ids"][:, -length:]
            logps, entropies = head.score(states[0], tokens, mask, temperature)
        found: dict[str, Any] = {"logps": logps, "mask": mask, "entropies": entropies if want.entropies else None}
        found |= {"hidden": states[0] if want.hidden else None, "values": want.values and want.values(states[0])}
        if probe is not None:
            found["attention"] = replace(probe.mass, mask=mask, **({} if own is None else _seen(probe.sets, length)))
            if want.attention is not None and want.attention.per_image:
                found["per_image"] = _per_image(probe, mask, want.attention.keep_layers, inputs.get("num_images"))
            found["prompt_attention"] = probe.prompt_mass if probe.plan.measure_prompt else None
            found["maps"] = {rows[row]: kept for row, kept in probe.kept.items()}
        parts.append(Scores(**found, similarity=None if similar is None else similar.similarity))
    return parts[0] if len(parts) == 1 else _join(parts)


def _build_probes(
    model: nn.Module, inputs: Mapping[str, Any], plan: AttentionPlan | None, rows: range, own: Tensor | None
) -> tuple[AttentionProbe | None, SimilarityProbe | None]:
    """Return the probes of a pass over these rows of the batch; `own`, (B, T), is 0 for the tokens of tools."""
    if plan is None:
        return None, None
    prompt = inputs["input_ids"].size(1) - inputs["logits_to_keep"]
    stop = prompt if own is None else None
    ids, given = inputs["input_ids"][:, :stop], given_tokens(inputs, own)[:, :stop]
    masks = build_modality_masks(
        ids, given, vision_token_ids=plan.vision_token_ids, special_token_ids=plan.special_token_ids
    )
    whole = None if own is None else prompt  # P, where masks are of whole rows
    similar = None if plan.similarity is None else SimilarityProbe(model, masks.vision, *plan.similarity, whole)
    if not plan.mass:
        return None, similar
    if plan.per_image:
        numbers = number_images(image_inputs_of(inputs), inputs.get("num_images") or [], masks.vision)  # (B, P or S)
        most = torch.arange(1, max(inputs.get("num_images") or [0]) + 1, device=masks.vision.device)
        masks.images = numbers.unsqueeze(-1) == most
    if plan.region is not None:
        masks.region = plan.region[rows.start : rows.stop].to(masks.vision) & masks.vision
    keep = [row - rows.start for row in plan.keep_rows if row in rows]
    return AttentionProbe(model, masks, None, keep, plan.measure_prompt, plan.keep_layers, prompt=whole), similar


def given_tokens(inputs: Mapping[str, Any], own: Tensor | None) -> Tensor:
    """Return the tokens that the policy has not written, (N, P + T) bool: those of prompts and of tools."""
    given, length = inputs["attention_mask"].bool(), inputs["logits_to_keep"]
    of_tools = torch.zeros_like(given[:, -length:]) if own is None else given[:, -length:] & ~own.bool()
    return torch.cat([given[:, :-length], of_tools], dim=1)


def _seen(sets: Tensor, length: int) -> dict[str, Tensor]:
    """Return how many vision and instruction tokens of whole rows (N, S, 2 or more) each of T tokens sees."""
    seen = sets[..., :2].cumsum(1)[:, -length - 1 : -1].int()  # (N, T, 2)
    return {"seen_vision": seen[..., 0], "seen_instruction": seen[..., 1]}


def _per_image(
    probe: AttentionProbe, mask: Tensor, layers: Sequence[int] | None, num_images: Sequence[int] | None
) -> list[list[float | None]]:
    """Return the attention on each image, the mean over layers and over the tokens that count and come after it.

    Args:
        mask: (N, T) bool, tokens that count.
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


def _join(parts: Sequence[Scores]) -> Scores:
    """Return the scores of all rows of the parts, in which the same was wanted."""
    found: dict[str, Any] = {}
    for name, first in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if isinstance(first, AttentionMass):
            found[name] = join_masses(values)
        elif isinstance(first, Tensor):
            found[name] = torch.cat(values)
        elif isinstance(first, list):
            found[name] = [row for value in values for row in value]
        elif first is not None:
            found[name] = {row: kept for value in values for row, kept in value.items()}
    return Scores(**found)


def policy_is_active(model: torch.nn.Module) -> bool:
    """Whether the adapters of `model`, if it has any, are those being trained: not switched off, not a reference."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module.has_active_enabled_adapter and "ref" not in module.active_adapters
    return True


class RolloutScorer:
    """Scores completions with a transformers model, and measures on the way what their tokens looked at.

    Example:
        >>> model, processor = build_tiny_vlm([])  # of vgr_trl.demo.tiny_model
        >>> text = "<|vision_start|><|image_pad|><|vision_end|>which colour is it?"
        >>> images = [[Image.new("RGB", (56, 56), "red")]] * 2
        >>> prompts = processor(text=[text] * 2, images=images, return_tensors="pt")
        >>> columns = prompts.pop("input_ids"), prompts.pop("attention_mask"), *torch.ones(2, 2, 3).long()
        >>> scorer = RolloutScorer(model, special_token_ids=special_token_ids(processor))
        >>> vision_gain_ratio(scorer.score(*columns, num_generations=2, **prompts).attention).shape
        torch.Size([2])

    Args:
        model: any transformers model with a head, also wrapped by DDP or PEFT, or patched by TRL; whole parameters.
        vision_token_ids: placeholder tokens of images and videos. None: those of the model's configuration.
        special_token_ids: tokens that belong to no modality, needed for attention; those of a processor are found by
            `vgr_trl.signals.ratios.special_token_ids`.
        share_prompts: `auto` computes each prompt once where that is exact, `on` raises where it is not, `off` never.
        batch_size: rows that pass at a time, made whole groups where prompts are shared. None: all.
        temperature: logits are divided by it; above 0.
        similarity_layer: hidden states that are compared, as `SimilarityProbe` takes it.
        similarity_over: how they are compared, likewise.

    Raises:
        ConfigError: an argument is not accepted.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vision_token_ids: Sequence[int] | None = None,
        special_token_ids: Sequence[int] | None = None,
        share_prompts: str = "auto",
        batch_size: int | None = None,
        temperature: float = 1.0,
        similarity_layer: int = -1,
        similarity_over: str = "max",
    ) -> None:
        if share_prompts not in ("auto", "on", "off"):
            raise ConfigError(f"share_prompts is {share_prompts!r}: give auto, on or off.")
        self.model, self.causal = model, causal_model(model)
        if has_sharded_parameters(model):
            raise ConfigError("The parameters of the model are sharded: score in DAPOTrainer, or gather them before.")
        if (adapter := why_adapter_reads_whole_rows(model)) is not None:
            raise ConfigError(f"The model has an adapter of the type {adapter}: use another type.")
        self.vision_token_ids, self.special_token_ids = vision_token_ids, special_token_ids
        self.share_prompts, self.batch_size, self.temperature = share_prompts, batch_size, temperature
        self.similarity_layer, self.similarity_over = similarity_layer, similarity_over

    def score(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        num_generations: int = 1,
        attention: bool = True,
        similarity: bool = False,
        regions: Tensor | None = None,
        num_images: Sequence[int] | None = None,
        num_tiles: Sequence[int] | None = None,
        **image_inputs: Tensor,
    ) -> RolloutSignals:
        """Return the signals of N completions of T tokens.

        Args:
            prompt_ids: (N, P), padded on the left; the G completions of a prompt stand together.
            prompt_mask: (N, P), 0 for padding.
            completion_ids: (N, T), padded on the right.
            completion_mask: (N, T), 1 for the tokens of a completion, 0 for the padding behind them, or for all tokens
                of a completion that is left out.
            num_generations: G.
            attention: measure attention mass.
            similarity: measure the similarity of hidden states to the image.
            regions: (N, P) bool, vision tokens whose attention is measured apart; None: none.
            num_images: (N,) images of each row, where rows pass in chunks. None: as many as its tokens are worth.
            num_tiles: (N,) entries of `pixel_values` of each row, where images are cut into tiles and `num_images` is
                given.
            image_inputs: what the processor returns beside the tokens for the N rows; token types are (N, P), or
                (N, P + T), which are taken as they are: for PaliGemma they are 1 in completions (TRL pads with 0, under
                which a completion sees its own future; `DAPOTrainer` corrects that).

        Returns:
            Log-probabilities and entropies (0 where the mask is), the attention mass and the similarity.

        Raises:
            DataError: the shapes do not fit together, or images cannot be assigned to the rows of a chunk.
            ConfigError: attention is wanted and cannot be measured, or `share_prompts` is `on` and prompts cannot be
                shared.
        """
        if not bool(prompt_mask[:, -1].all()):
            raise DataError("A prompt ends with padding: pad prompts on the left, so that completions follow them.")
        if bool((completion_mask[:, 1:] > completion_mask[:, :-1]).any()):
            raise DataError("completion_mask has a 0 before a 1: give 1 for every token of a completion.")
        count, length = completion_ids.shape
        device = self.causal.get_input_embeddings().weight.device
        given = {name: value.to(device) for name, value in image_inputs.items() if value is not None}
        ids = torch.cat([prompt_ids, completion_ids], dim=1).to(device)  # (N, P + T)
        batch: dict[str, Any] = {
            **{name: value for name, value in given.items() if name not in TOKEN_TYPES},
            **extend_token_types(given, self.causal.config, prompt_ids.size(1) + length),
            "input_ids": ids,
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1).to(device),
            "logits_to_keep": length,
            "num_images": num_images,
            "num_tiles": num_tiles,
        }
        step = count if self.batch_size is None else self.batch_size
        if step < count and self.share_prompts != "off":
            step = whole_groups(step, num_generations)
        if step < count and num_images is None and "pixel_values" in given:
            is_image = is_image_token(ids, self.causal.config) & batch["attention_mask"].bool()  # (N, P + T)
            batch |= counts_by_tokens(image_inputs_of(given), is_image)
        want = Want(entropies=True, attention=self._attention_plan(attention, similarity, regions))
        shared = nullcontext(SharingReport()) if self.share_prompts == "off" else share_prompts(self.model, length)
        with _evaluating(self.model), shared as report:
            scores = score(self.causal, batch, want, rows_per_pass=step, temperature=self.temperature)
        reasons = report.plain.keys() - {"no prompt occurs twice"}
        if self.share_prompts == "on" and reasons:
            raise ConfigError(f"share_prompts is on, but prompts could not be shared: {min(reasons)}; use auto or off.")
        measured = ("logps", "entropies", "mask", "attention", "similarity")
        return RolloutSignals(**{name: getattr(scores, name) for name in measured})

    def _attention_plan(self, attention: bool, similarity: bool, regions: Tensor | None) -> AttentionPlan | None:
        if not (attention or similarity):
            return None
        vision = self.vision_token_ids if self.vision_token_ids is not None else vision_token_ids(self.causal)
        if not vision or (attention and self.special_token_ids is None):
            raise ConfigError("Give vision_token_ids, for attention special_token_ids too, or attention=False.")
        similar = (self.similarity_layer, self.similarity_over) if similarity else None
        return AttentionPlan(vision, self.special_token_ids or (), mass=attention, region=regions, similarity=similar)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and gradient checkpointing off for the duration."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
