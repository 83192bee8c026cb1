"""What passes of a model compute, and what they leave out: with gradients, without, and around every pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn

from vgr_trl.batch import valid_tokens
from vgr_trl.efficiency.loss_mask import (
    Extent,
    SkippingPlan,
    Window,
    deal_by_length,
    extents_of,
    find_text,
    find_window,
    live_tokens,
    narrowed,
    only_tokens,
    pack_rows,
    take_rows,
    tokens_of,
    widened,
)
from vgr_trl.efficiency.vision_cache import VisionCache, tower_trains
from vgr_trl.measure import region_mask
from vgr_trl.metrics import StageClock
from vgr_trl.rollout import Host, Rollout, TrainingPass
from vgr_trl.sampling import OLD_LOGPS, Replay
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.prefix_forward import find_groups, has_images, is_image_token
from vgr_trl.sharing.sharing import Place, SharedPasses, SharingPlan, shuffle_by_group, whole_groups
from vgr_trl.signals.scoring import Head, Measurement, leaves_rows_out
from vgr_trl.utils import DataError, NotFiniteError, replaced

# ---------------------------------------------------------------------------------------------------------------------
# A blank image through the vision tower of a process that has none where another has some.
#
# Engines expect all processes to use the same parameters: under ZeRO-3 and FSDP2 their parts are gathered by all,
# under
# ZeRO-2 and DDP with checkpointing the gradients are. A process that left the tower out would wait for the others, or
# mix
# its gradients up with theirs.


SIZE = (56, 56)  # pixels; processors enlarge it to what they take


class BlankImage:
    """Lets every process call the vision tower of a pass if one of them does.

    Its features are added to the embeddings of the pass, times 0: where those of images are inserted, so that parts of
    parameters and gradients come in the same order.

    Args:
        sharded: whether passes without gradients need the tower, too.
    """

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        made = processor(images=[Image.new("RGB", SIZE, (127, 127, 127))], return_tensors="pt")
        self._inputs = dict(made)

    @contextmanager
    def around(self, model: nn.Module, generates: bool) -> Iterator[None]:
        """Take part in the passes of this block.

        Args:
            generates: whether the passes are those of `generate`, in which that cannot be had.

        Raises:
            DataError: parameters are sharded, and only some processes generate for images; it is raised in all.
        """
        causal = causal_model(model)
        base = base_of(causal)
        owner, name = (causal, "generate") if generates else (base, "forward")
        plain = getattr(owner, name)

        @wraps(plain)
        def taking_part(*args: Any, **kwargs: Any) -> Any:
            if generates:
                self._refuse_uneven(kwargs)
            elif self._is_due(base, kwargs):
                with nothing_added(base, self._features):
                    return plain(*args, **kwargs)
            return plain(*args, **kwargs)

        with replaced(owner, name, taking_part):
            yield

    def _refuse_uneven(self, inputs: Mapping[str, Any]) -> None:
        if self._sharded and 0 < self._with_images(has_images(inputs)) < self._accelerator.num_processes:
            raise DataError(
                "The model generates for images in some processes and for text alone in others, and its parameters "
                "are sharded: give every row an image, or none, or use vLLM, ZeRO-2 or DDP."
            )

    def _is_due(self, base: Any, inputs: Mapping[str, Any]) -> bool:
        """Whether the tower is to run though the pass has no images."""
        mine = has_images(inputs)
        learns = torch.is_grad_enabled() and tower_trains(base)
        if learns and self._accelerator.distributed_type == DistributedType.DEEPSPEED:
            return not mine  # ZeRO-3 adds to what an earlier step has left where the first micro-batch has no gradient
        if not (learns or self._sharded):
            return False
        return self._with_images(mine) > 0 and not mine

    def _with_images(self, mine: bool) -> int:
        """How many processes have images."""
        return int(self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).sum())

    def _features(self, base: Any) -> Any:
        names = signature(base.get_image_features).parameters
        inputs = {name: value.to(self._accelerator.device) for name, value in self._inputs.items() if name in names}
        return base.get_image_features(**inputs)


@contextmanager
def nothing_added(base: Any, features: Callable[[Any], Any]) -> Iterator[None]:
    """Add 0 times what `features` returns to the first embeddings of this block.

    Args:
        features: called with `base`, behind its embeddings.
    """

    def add(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        hook.remove()
        found = sum((tensor.float() * 0).sum() for tensor in _tensors(features(base)))
        return embedded + torch.as_tensor(found, device=embedded.device).to(embedded.dtype)

    hook = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, list | tuple):
        for value in found:
            yield from _tensors(value)


# ---------------------------------------------------------------------------------------------------------------------
# What is read off the hidden states that emit completions, beside the passes that make them.


Make = Callable[[torch.Tensor], torch.Tensor]


class EmittedReader:
    """Keeps what is made of the hidden states of the positions that emit completions, in the latest block.

    Args:
        make: of hidden states (N, T, D), what is kept, (N, T, …); None: themselves.
        reads: whether the passes of a model are read; None: those of all.

    Attributes:
        output_type: class of what base models return.
    """

    def __init__(self, make: Make | None = None, reads: Callable[[nn.Module], bool] | None = None) -> None:
        self._make, self._reads = make, reads
        self._found: list[torch.Tensor] = []
        self.output_type: Any = None

    @contextmanager
    def around(self, model: nn.Module, completion_length: int | None) -> Iterator[None]:
        """Read passes of this block.

        Args:
            completion_length: T; None where the model generates, of which nothing is read.
        """
        if completion_length is None or not (self._reads is None or self._reads(model)):
            yield
            return
        base = base_of(causal_model(model))
        plain, self._found = base.forward, []

        @wraps(plain)
        def read(*args: Any, **kwargs: Any) -> Any:
            outputs = plain(*args, **kwargs)
            self.output_type = type(outputs)
            hidden = outputs.last_hidden_state[:, -completion_length - 1 : -1]  # (N, T, D)
            self._found.append(hidden if self._make is None else self._make(hidden))
            return outputs

        with replaced(base, "forward", read):
            yield

    def take(self) -> torch.Tensor | None:
        """Return what was read in the latest block of which something was, once."""
        found, self._found = self._found, []
        return torch.cat(found) if found else None


# ---------------------------------------------------------------------------------------------------------------------
# What is around every pass of a run: prompts and image features computed once, and what is read off beside.


class Passes:
    """The passes of a run, as its plans say.

    Args:
        blank: for processes without images among others; None where there are none.
    """

    def __init__(
        self, sharing: SharingPlan, vision: VisionCache, accelerator: Accelerator, blank: BlankImage | None = None
    ) -> None:
        self.vision = vision
        self._blank = blank
        self._shared = SharedPasses(sharing, partial(_all_agree, accelerator), evens_images=blank is not None)
        self.values = EmittedReader(reads=lambda model: False)  # of a critic's head, where there is one
        self.hidden = EmittedReader(reads=lambda model: False)  # for what compares whole distributions

    @contextmanager
    def around(
        self, place: Place, model: nn.Module, completion_length: int | None = None, *, packs: bool = False
    ) -> Iterator[None]:
        """Leave out of passes of this block what can be; the arguments are those of `SharedPasses.around`."""
        values, hidden = (reader.around(model, completion_length) for reader in (self.values, self.hidden))
        scores = completion_length is not None and not torch.is_grad_enabled()
        head = _head_without_padding(model) if scores else nullcontext()
        tower = nullcontext() if self._blank is None else self._blank.around(model, completion_length is None)
        shared = self._shared.around(place, model, completion_length, packs=packs)
        with self.vision.around(model), head, shared, values, hidden, tower:
            yield

    def metrics(self) -> dict[str, float]:
        """Return what was left out since the last call."""
        return self._shared.metrics() | self.vision.metrics()


def _all_agree(accelerator: Accelerator, shares: bool) -> bool:
    return bool(accelerator.gather(torch.tensor([shares], device=accelerator.device)).all())


def _head_without_padding(model: nn.Module) -> AbstractContextManager[None]:
    """TRL's head scores padding too where it has no Triton; a head of some rows wants whole ones."""
    causal = causal_model(model)
    base = base_of(causal)
    if base is causal or is_compiled(model) or leaves_rows_out(model):
        return nullcontext()
    return only_tokens(causal, base, None)


# ---------------------------------------------------------------------------------------------------------------------
# Training passes over what the loss reads, and over nothing else.


Scored = tuple[torch.Tensor, torch.Tensor | None, Any]


class LivePasses:
    """Runs the part of a micro-batch that has a gradient."""

    def __init__(
        self,
        plan: SkippingPlan,
        host: Host,
        replay: Replay | None,
        passes: Passes,
        place: Place,
    ) -> None:
        self.plan, self._host, self._replay = plan, host, replay
        self._passes, self._place = passes, place
        places = plan.rows, plan.tokens, plan.padding
        self._skips_rows, self._skips_tokens, self._skips_padding = (found.reason_off is None for found in places)

    def run(
        self,
        model: nn.Module,
        plain: Callable[..., Scored],
        inputs: dict[str, Any],
        batch_size: int | None,
        passed: TrainingPass | None,
    ) -> Scored:
        """Return what a pass with gradients gives for the live tokens of a micro-batch, and constants for the others.

        Those are the old log-probabilities, or 0, and an entropy of 0: with an advantage of 0 their loss is 0.

        Args:
            batch_size: this size, of passes that are not over the micro-batch.
            passed: the micro-batch; it learns which tokens are live, and what its first pass gives.
        """
        if passed is None or model is not passed.model:
            with self._passes.around(self._place, model, inputs["logits_to_keep"]):
                return plain(model, **inputs, batch_size=batch_size)
        live = self._live(passed.inputs)
        window = self._window(model, live, inputs)
        cut = live if self._skips_padding else None
        try:
            part = narrowed(inputs, window, cut)
        except DataError:  # whose pixels belong to which row is not known: none is left out
            window = replace(window, rows=list(range(len(live))))
            part = narrowed(inputs, window, cut)
        passed.live, passed.rows_run = live, len(window.rows)
        with (
            self._head(model, live[window.rows, : window.completion]),
            self._passes.around(self._place, model, window.completion, packs=self.plan.packing.reason_off is None),
        ):
            logps, entropies, aux_loss = plain(model, **part)
        logps = widened(logps, window, live, passed.inputs.get(OLD_LOGPS))
        if passed.logps is None:
            values = self._passes.values.take()
            complete_old_logps(passed.inputs, logps)
            passed.logps, passed.values = logps, None if values is None else widened(values, window, live, None)
            passed.hidden = self._passes.hidden.take()
            if self._replay is not None:
                self._replay.first_pass(passed)
        return logps, None if entropies is None else widened(entropies, window, live, None), aux_loss

    def _window(self, model: nn.Module, live: torch.Tensor, inputs: dict[str, Any]) -> Window:
        completion, multiple = inputs["logits_to_keep"], self._host.pad_to_multiple_of
        runs_images = self.plan.images and inputs.get("pixel_values") is not None
        if self._skips_rows and self._skips_padding and not runs_images and not live.any():
            is_image = is_image_token(inputs["input_ids"], causal_model(model).config)
            if (window := find_text(is_image, completion, multiple)) is not None:
                return window
        return find_window(
            live,
            inputs["attention_mask"][:, :-completion],
            inputs.get("num_images") if runs_images else None,
            rows=self._skips_rows,
            padding=self._skips_padding,
            multiple=multiple,
        )

    def gives_old_logps(self, rollout: Rollout) -> bool:
        """Whether what TRL scores of a rollout by the policy before its rewards comes from the first training pass."""
        return self.plan.old_logps.reason_off is None and self._host.mode == "train" and not rollout.judging

    def shuffle(self, by_group: bool) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
        """Return what takes the place of TRL's `shuffle_sequence_dict`; None: nothing does.

        Args:
            by_group: whether the completions of a prompt are kept together where rows are not dealt by length.
        """
        if self.plan.dealing.reason_off is None:
            return self._dealt
        return shuffle_by_group if by_group else None

    def _dealt(self, batch: dict[str, Any]) -> dict[str, Any]:
        lengths = [extent.completion if extent.runs else 0 for extent in self.extents(batch)]
        return shuffle_by_group(batch, lambda order, groups: deal_by_length(order, groups, lengths, self.plan.window))

    def extents(self, batch: dict[str, Any]) -> list[Extent]:
        """Return what runs of each row of a batch of TRL."""
        return extents_of(self._live(batch), batch["prompt_mask"], rows=self._skips_rows, padding=self._skips_padding)

    def _live(self, batch: dict[str, Any]) -> torch.Tensor:
        mask = valid_tokens(batch)
        live = live_tokens(batch["advantages"], mask, rows=self._skips_rows, tokens=self._skips_tokens)
        read = None if self._replay is None else self._replay.rows_read(batch)
        return live if read is None else live | (mask.bool() & read.to(mask.device).unsqueeze(1))

    def _head(self, model: nn.Module, wanted: torch.Tensor) -> AbstractContextManager[None]:
        if not self.plan.head:
            return nullcontext()
        causal = causal_model(model)
        return only_tokens(causal, base_of(causal), wanted)


def complete_old_logps(inputs: dict[str, Any], logps: torch.Tensor) -> None:
    """Take the log-probabilities (N, T) of a first training pass for old ones that are NaN.

    TRL's `_compute_loss` reads the inputs only after its pass through the model, so what is completed here is what it
    divides by; `tests/credit/test_trl_losses.py` fails if that changes. Later iterations over the batch read it, too.
    """
    if (old := inputs.get(OLD_LOGPS)) is not None:
        inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches in as many parts as a number of tokens needs, with the update of the whole.


_PER_WINDOW = ("dapo", "cispo", "vespo")  # TRL divides their sums by the tokens of the optimizer step
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


class TokenBudget:
    """Computes losses of micro-batches part by part; gradients of all parts but the last are added on the way.

    Args:
        most: tokens of a part, `max_tokens_per_micro_batch`.
        shares: whether the prompt of a group is computed once.
    """

    def __init__(self, most: int, host: Host, passes: LivePasses, shares: bool) -> None:
        self.most, self._host, self._passes, self._shares = most, host, passes, shares

    def loss(self, model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
        """Return the loss of a micro-batch, through which the gradient of its last part is still to come.

        Args:
            inputs: as TRL's `_compute_loss` takes them; what a pass adds to its part is added to them.
        """
        *parts, last = self._parts(inputs)
        before: torch.Tensor | float = 0.0
        for rows in parts:
            with self._accumulating(model):
                loss = self._loss_of(rows, model, inputs, compute)
                self._host.accelerator.backward(loss, **self._backward_options())
            before = before + loss.detach()
        return self._loss_of(last, model, inputs, compute) + before

    def scored_rows(self, batch_size: int, columns: int, completion: int, num_generations: int) -> int:
        """Return how many rows a pass without gradients takes, at most `batch_size`, whole groups if they fit.

        Args:
            columns: P + T.
            completion: T.
        """
        longest = torch.tensor([columns, completion], device=self._host.accelerator.device)
        columns, completion = self._host.accelerator.gather(longest).view(-1, 2).amax(0).tolist()
        if self._shares:
            of_group = columns + (num_generations - 1) * completion
            if (groups := self.most // of_group) > 0:
                return min(batch_size, groups * num_generations)
            return min(batch_size, max((self.most - columns) // completion + 1, 1))
        return min(batch_size, max(self.most // columns, 1))

    def _parts(self, inputs: dict[str, Any]) -> list[list[int]]:
        """Rows of each part, the same on every process: TRL gathers metrics of rows after each."""
        extents, count = self._passes.extents(inputs), len(inputs["prompt_ids"])
        groups = find_groups(inputs["prompt_ids"], inputs["prompt_mask"]) if self._shares else range(count)
        mine = [
            [extent.prompt, extent.completion, extent.runs, group]
            for extent, group in zip(extents, groups, strict=True)
        ]
        device = self._host.accelerator.device
        of_all = self._host.accelerator.gather(torch.tensor(mine, device=device)).view(-1, count, 4).tolist()
        processes = [([Extent(*row[:3]) for row in rows], [row[3] for row in rows]) for rows in of_all]
        return pack_rows(count, lambda rows: max(tokens_of(rows, *each) for each in processes), self.most)

    def _loss_of(self, rows: list[int], model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
        every = len(inputs["prompt_ids"])
        if len(rows) == every:
            return compute(model, inputs)
        part = take_rows(inputs, rows)
        loss = compute(model, part)
        if (old := part.get("old_per_token_logps")) is not None:  # a first pass may have completed them
            inputs["old_per_token_logps"][rows] = old
        return loss * self._share(part, inputs)

    def _share(self, part: dict[str, Any], inputs: dict[str, Any]) -> float:
        """What the mean over a part counts in the mean over all of the micro-batch."""
        loss_type = self._host.args.loss_type
        if loss_type in _PER_WINDOW:
            return 1.0
        if loss_type == "bnpo":
            tokens, of_all = (float(valid_tokens(batch).sum().clamp(min=1)) for batch in (part, inputs))
            return tokens / of_all
        return len(part["prompt_ids"]) / len(inputs["prompt_ids"])

    @contextmanager
    def _accumulating(self, model: nn.Module) -> Iterator[None]:
        """No process waits for the gradients of another, and DeepSpeed makes no step."""
        state = self._host.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self._host.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    def _backward_options(self) -> dict[str, Any]:
        deepspeed = self._host.accelerator.distributed_type == DistributedType.DEEPSPEED
        return {"scale_wrt_gas": False} if deepspeed else {}


# ---------------------------------------------------------------------------------------------------------------------
# Passes without gradients that TRL asks log-probabilities of: over a rollout, or over anything else.


_STAGES = {"policy": "old_logps", "reference": "reference", "other": "values"}


class ScoringPasses:
    """Computes each prompt once; measures the policy's pass over a rollout."""

    def __init__(
        self,
        host: Host,
        measurement: Measurement,
        sharing: SharingPlan,
        passes: Passes,
        live: LivePasses,
        budget: TokenBudget | None,
        clock: StageClock,
    ) -> None:
        self._host, self._measurement, self._sharing = host, measurement, sharing
        self._passes, self._live, self._budget, self._clock = passes, live, budget, clock

    def run(
        self,
        model: nn.Module,
        plain: Callable[..., Scored],
        inputs: dict[str, Any],
        batch_size: int | None,
        rollout: Rollout | None,
    ) -> Scored:
        """Return what TRL's `_get_per_token_logps_and_entropies` does, without gradients.

        Args:
            batch_size: rows of a chunk, made whole groups, so that there is something to share.
        """
        whose = self._host.whose(model)
        with self._clock.stage(_STAGES[whose], self._host.mode == "train"):
            rows = batch_size and self._chunk(inputs, batch_size)
            score = partial(self._without_nan, partial(plain, model, **inputs, batch_size=rows), model, inputs)
            return self._score(rollout, whose, model, inputs, score)

    def _chunk(self, inputs: dict[str, Any], batch_size: int) -> int:
        """Rows of a chunk, of which TRL takes `batch_size`."""
        size = self._host.num_generations
        if self._sharing.scoring.reason_off is None:
            batch_size = whole_groups(batch_size, size)
        if self._budget is None:
            return batch_size
        return self._budget.scored_rows(batch_size, inputs["input_ids"].size(1), inputs["logits_to_keep"], size)

    def _score(
        self,
        rollout: Rollout | None,
        whose: str,
        model: nn.Module,
        inputs: dict[str, Any],
        score: Callable[..., Scored],
    ) -> Scored:
        ids, completion = inputs["input_ids"], inputs["logits_to_keep"]
        measured = rollout if whose == "policy" else None
        if measured is not None and self._live.gives_old_logps(measured):
            return torch.full((len(ids), completion), torch.nan, device=ids.device), None, None
        with self._passes.around(self._sharing.scoring, model, completion):
            if measured is not None and measured.signals is None and self._measurement.wanted.scoring:
                return self._measure(measured, model, inputs, score)
            scored = score()
            if measured is not None and measured.hidden is not None and self._measurement.wanted.shift:
                measured.shift = self._shift(model, measured)
            if rollout is not None and whose == "reference":
                rollout.reference_logps, rollout.reference_hidden = scored[0], self._passes.hidden.take()
            return scored

    def _measure(
        self, rollout: Rollout, model: nn.Module, inputs: dict[str, Any], score: Callable[..., Scored]
    ) -> Scored:
        ids, completion = inputs["input_ids"], inputs["logits_to_keep"]
        scored, found = self._measurement.measure(
            model,
            ids,
            inputs["attention_mask"],
            completion,
            partial(score, compute_entropy=True),
            generated_mass=rollout.generated_mass,
            rows_with_maps=rollout.recorded or (),
            region=region_mask(rollout, self._host, self._measurement, ids[:, :-completion]),
        )
        rollout.signals, rollout.prompt_mass, rollout.maps = found.signals, found.prompt_mass, found.maps
        rollout.values, rollout.hidden = self._passes.values.take(), self._passes.hidden.take()
        return scored

    def _without_nan(
        self, score: Callable[..., Scored], model: nn.Module, inputs: dict[str, Any], **options: Any
    ) -> Scored:
        """Refuse log-probabilities that are NaN: signals of them would be taken for those of rows without images."""
        scored = score(**options)
        valid = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].bool()
        if not leaves_rows_out(model) and (count := int((scored[0].isnan() & valid).any(dim=1).sum())):
            raise NotFiniteError(
                f"The model's log-probabilities of {count} of {len(valid)} completions are NaN, at step "
                f"{self._host.state.global_step + 1}: its weights are broken, or what it computes overflows, so look "
                "at the newest checkpoint, or use bfloat16 instead of float16."
            )
        return scored

    def _shift(self, model: nn.Module, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """How the latest pass, whose first rows are under the perturbation, differs from that over the rollout."""
        hidden, others = rollout.hidden, self._passes.hidden.take()
        assert hidden is not None
        assert others is not None
        assert rollout.signals is not None
        head = Head(causal_model(model), self._passes.hidden.output_type)
        mask = rollout.signals.mask.bool()
        return head.shift(hidden, others[: len(mask)], mask, self._host.args.temperature)
