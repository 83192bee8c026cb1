"""The forward passes of a step: what is around each, scoring, training over tokens with loss, dynamic batching."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from vgr_trl.batch import valid_tokens
from vgr_trl.efficiency.loss_mask import (
    Extent,
    Window,
    extents_of,
    find_loss_mask,
    find_text,
    find_window,
    group_by_length,
    only_tokens,
    pack_rows,
    scatter_back,
    take_rows,
    tokens_of,
    trim,
)
from vgr_trl.efficiency.vision_cache import VisionCache, tower_trains
from vgr_trl.rollout import TrainingPass
from vgr_trl.sampling import OLD_LOGPS
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.prefix_forward import find_groups, has_images, is_image_token
from vgr_trl.sharing.sharing import SharedPasses, shuffle_by_group, whole_groups
from vgr_trl.signals.scoring import read_hidden_states
from vgr_trl.utils import DataError, Feature, NotFiniteError, patched_attribute

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

Scored = tuple[torch.Tensor, torch.Tensor | None, Any]  # log-probabilities, entropies (N, T), loss of the router
Score = Callable[..., Scored]  # TRL's `_get_per_token_logps_and_entropies`
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]  # TRL's `_compute_loss`


class ForwardPasses:
    """Wraps the forward passes of a run, in this order: image features, the narrow head, shared prompts, a dummy image.

    Args:
        features: what is shared and skipped, by name.
        vision_cache: keeps image features.
        shared: shares prompts.
        dummy_image: lets a process without images run the vision tower; None: not needed.
    """

    def __init__(
        self,
        features: Mapping[str, Feature],
        vision_cache: VisionCache,
        shared: SharedPasses,
        dummy_image: "DummyImage | None",
    ) -> None:
        self.features, self.vision_cache, self.shared, self.dummy_image = features, vision_cache, shared, dummy_image

    @contextmanager
    def around(
        self, model: nn.Module, completion_length: int | None = None, *, packs: bool = False, counts: bool = True
    ) -> Iterator[None]:
        """Wrap the passes of this block.

        Args:
            completion_length: T of a scored batch; None where the model generates.
            packs: whether completions pass without padding between them.
            counts: whether metrics count these passes; those of an evaluation are left out.
        """
        generates, trains = completion_length is None, torch.is_grad_enabled()
        stage = "generation" if generates else "training" if trains else "scoring"
        with (
            self.vision_cache.around(model, counts=counts),
            nullcontext() if generates or trains else score_labelled_tokens(model),
            self.shared.around(self.features[f"share_{stage}"], model, completion_length, packs=packs, counts=counts),
            nullcontext() if self.dummy_image is None else self.dummy_image.around(model, generates),
        ):
            yield


def score_labelled_tokens(model: nn.Module) -> AbstractContextManager[None]:
    """Let TRL's fused head skip padding, which it scores too where it has no Triton."""
    causal = causal_model(model)
    base = base_of(causal)
    return nullcontext() if base is causal or is_compiled(model) else only_tokens(causal, base, None)


def rows_per_pass(
    batch_size: int,
    group: int | None,
    *,
    most_tokens: int | None,
    columns: tuple[int, int],
    gather: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> int:
    """Return how many rows pass at a time in scoring, the same on every process.

    Args:
        batch_size: as TRL asks for.
        group: G where prompts are shared, so that whole groups pass; None: they are not.
        most_tokens: `max_tokens_per_micro_batch`.
        columns: P + T and T of this process.
    """
    size = group or 1
    batch_size = whole_groups(batch_size, size)
    if most_tokens is None:
        return batch_size
    every = gather(torch.tensor(columns, device=device)).view(-1, 2).amax(0)
    longest, completion = map(int, every.tolist())
    if group is None:
        return min(batch_size, max(most_tokens // longest, 1))
    if (groups := most_tokens // (longest + (size - 1) * completion)) > 0:
        return min(batch_size, groups * size)
    return min(batch_size, max((most_tokens - longest) // completion + 1, 1))


def refuse_nan(logps: torch.Tensor, mask: torch.Tensor, step: int) -> None:
    """Raise `NotFiniteError` if log-probabilities are NaN; signals would take them for those of rows without images."""
    if count := int((logps.isnan() & mask).any(dim=1).sum()):
        raise NotFiniteError(
            f"The model's log-probabilities of {count} of {len(mask)} completions are NaN, at step {step + 1}: its "
            "weights are broken, or what it computes overflows, so look at the newest checkpoint, or use bfloat16 "
            "instead of float16."
        )


class DummyImage:
    """Lets every process call the vision tower of a pass if one of them does, or leaves its images out.

    Engines expect all processes to use the same parameters: under ZeRO-3 and FSDP2 their parts are gathered by all,
    under ZeRO-2 and DDP with checkpointing the gradients are. A process that left the tower out would wait for the
    others, or mix its gradients up with theirs. The features of the dummy image are added to the embeddings of the
    pass, times 0: where those of images are inserted, so that parts of parameters and gradients come in the same order.
    With gradients of 0 an optimizer moves a tower that trains as it would for images without a loss.

    Args:
        sharded: whether passes without gradients need the tower, too.

    Attributes:
        stands_in: whether the latest training pass of this process leaves its images out.
    """

    stands_in = False

    def __init__(self, processor: Any, accelerator: Accelerator, sharded: bool) -> None:
        self._accelerator, self._sharded = accelerator, sharded
        gray = Image.new("RGB", (56, 56), (127, 127, 127))  # which processors enlarge to what they take
        self._inputs = dict(processor(images=[gray], return_tensors="pt"))

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

        with patched_attribute(owner, name, taking_part):
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
        return self._with_images(mine or self.stands_in) > 0 and not mine

    def _with_images(self, mine: bool) -> int:
        """How many processes have images."""
        if self._accelerator.num_processes == 1:
            return mine
        return int(self._accelerator.gather(torch.tensor([mine], device=self._accelerator.device)).sum())

    def _features(self, base: Any) -> Any:
        names = signature(base.get_image_features).parameters
        inputs = {name: value.to(self._accelerator.device) for name, value in self._inputs.items() if name in names}
        return base.get_image_features(**inputs)


@contextmanager
def nothing_added(base: Any, features: Callable[[Any], Any]) -> Iterator[None]:
    """Add 0 times what `features` returns, called with `base`, to the first embeddings of this block."""

    def add(module: nn.Module, inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        hook.remove()
        outputs = features(base)
        if (pooled := getattr(outputs, "pooler_output", None)) is not None:  # all that decoders read, but for deepstack
            outputs = pooled, getattr(outputs, "deepstack_features", None)
        found = [value for value in tree_leaves(outputs) if torch.is_tensor(value) and value.is_floating_point()]
        nothing = sum((tensor.float() * 0).sum() for tensor in found)
        return embedded + torch.as_tensor(nothing, device=embedded.device).to(embedded.dtype)

    hook = base.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()


# Training passes over what the loss reads, and over nothing else


def training_pass(
    trainer: "DAPOTrainer",
    model: nn.Module,
    plain: Score,
    inputs: dict[str, Any],
    batch_size: int | None,
    passed: TrainingPass | None,
) -> Scored:
    """Return what a pass with gradients gives for the tokens of a micro-batch with loss, and constants for the others.

    Those are the old log-probabilities, or 0, and an entropy of 0: with an advantage of 0 their loss is 0.

    Args:
        plain: TRL's method.
        batch_size: this size, of passes that are not over the micro-batch.
        passed: the micro-batch; it learns which tokens have loss, and what its first pass gives.
    """
    features = trainer.features
    if passed is None or model is not passed.model or not torch.is_grad_enabled():  # of perturbed images, an evaluation
        with trainer.passes.around(model, inputs["logits_to_keep"], counts=trainer.model.training):
            return plain(model, **inputs, batch_size=batch_size)
    loss_mask = _loss_mask(trainer, passed.inputs)
    window = _window(trainer, model, loss_mask, inputs)
    cut = loss_mask if features["skip_padding"].enabled else None
    try:
        part = trim(inputs, window, cut)
    except DataError:  # whose pixels belong to which row is not known: none is left out
        window = replace(window, rows=list(range(len(loss_mask))))
        part = trim(inputs, window, cut)
    passed.loss_mask, passed.rows_run = loss_mask, len(window.rows)
    causal = causal_model(model)
    head = only_tokens(causal, base_of(causal), loss_mask[window.rows, : window.completion])
    packs = features["pack_completions"].enabled
    if trainer.dummy_image is not None:
        trainer.dummy_image.stands_in = has_images(inputs) and not has_images(part)
    head_values = None if trainer.critic is None else trainer.critic.head
    keeps_hidden = trainer.kl.full is not None or head_values is not None
    with ExitStack() as stack:
        if features["skip_head"].enabled:
            stack.enter_context(head)
        stack.enter_context(trainer.passes.around(model, window.completion, packs=packs))
        states = stack.enter_context(read_hidden_states(model, window.completion)) if keeps_hidden else []
        logps, entropies, aux_loss = plain(model, **part)
    logps = scatter_back(logps, window, loss_mask, passed.inputs.get(OLD_LOGPS))
    if passed.logps is None:
        if (old := passed.inputs.get(OLD_LOGPS)) is not None:
            # TRL's `_compute_loss` reads the inputs only after its pass through the model, so what is completed here is
            # what it divides by; `tests/credit/test_trl_losses.py` fails if that changes. Later iterations read it too.
            passed.inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)
        passed.logps, passed.hidden = logps, next(iter(states), None)
        if head_values is not None:
            passed.values = scatter_back(head_values(states[0].detach()), window, loss_mask, None)
    return logps, None if entropies is None else scatter_back(entropies, window, loss_mask, None), aux_loss


def _window(trainer: "DAPOTrainer", model: nn.Module, loss_mask: torch.Tensor, inputs: dict[str, Any]) -> Window:
    """The smallest part of a micro-batch that has all tokens with loss."""
    features, completion, multiple = trainer.features, inputs["logits_to_keep"], trainer.pad_to_multiple_of or None
    rows, padding = features["skip_zero_advantage"].enabled, features["skip_padding"].enabled
    runs_images = not features["skip_images"].enabled and inputs.get("pixel_values") is not None
    if rows and padding and not runs_images and not loss_mask.any():
        is_image = is_image_token(inputs["input_ids"], causal_model(model).config)
        if (window := find_text(is_image, completion, multiple)) is not None:
            return window
    num_images = inputs.get("num_images") if runs_images else None
    prompt_mask = inputs["attention_mask"][:, :-completion]
    return find_window(loss_mask, prompt_mask, num_images, rows=rows, padding=padding, multiple=multiple)


def _loss_mask(trainer: "DAPOTrainer", batch: dict[str, Any]) -> torch.Tensor:
    """The tokens whose log-probabilities the loss reads, (N, T) bool."""
    rows, tokens = (trainer.features[name].enabled for name in ("skip_zero_advantage", "skip_zero_advantage_tokens"))
    return find_loss_mask(batch["advantages"], valid_tokens(batch), rows=rows, tokens=tokens)


def _extents(trainer: "DAPOTrainer", batch: dict[str, Any]) -> list[Extent]:
    """What runs of each row of a batch of TRL."""
    rows, padding = trainer.features["skip_zero_advantage"].enabled, trainer.features["skip_padding"].enabled
    return extents_of(_loss_mask(trainer, batch), batch["prompt_mask"], rows=rows, padding=padding)


def shuffle_rows(trainer: "DAPOTrainer") -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what takes the place of TRL's `shuffle_sequence_dict`; None: nothing does."""
    if not trainer.features["group_by_length"].enabled:
        return shuffle_by_group if trainer.features["regroup"].enabled else None
    args = trainer.args
    accumulated, generated = args.gradient_accumulation_steps, args.steps_per_generation or 1
    window = args.per_device_train_batch_size * min(accumulated, generated)  # rows of a rollout in an optimizer step

    def by_length(batch: dict[str, Any]) -> dict[str, Any]:
        lengths = [extent.completion if extent.runs else 0 for extent in _extents(trainer, batch)]
        return shuffle_by_group(batch, lambda order, groups: group_by_length(order, groups, lengths, window))

    return by_length


# Dynamic batching: micro-batches in as many parts as a number of tokens needs, with the update of the whole


_PER_WINDOW = ("dapo", "cispo", "vespo")  # TRL divides their sums by the tokens of the optimizer step


def loss_in_parts(trainer: "DAPOTrainer", model: nn.Module, inputs: dict[str, Any], compute: Loss) -> torch.Tensor:
    """Return the loss of a micro-batch, through which the gradient of its last part is still to come.

    Gradients of all parts but the last are added on the way, where no process waits for the gradients of another and
    DeepSpeed makes no step.

    Args:
        inputs: as TRL's `_compute_loss` takes them; what a pass adds to its part is added to them.
    """
    accelerator = trainer.accelerator
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    options = {"scale_wrt_gas": False} if deepspeed else {}
    *parts, last = _parts(trainer, inputs)
    before: torch.Tensor | float = 0.0
    for rows in parts:
        state = accelerator.gradient_state
        synchronises = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with accelerator.no_sync(model):
                loss = _loss_of_rows(trainer, rows, model, inputs, compute)
                accelerator.backward(loss, **options)
        finally:
            state._set_sync_gradients(synchronises)
        before = before + loss.detach()
    return _loss_of_rows(trainer, last, model, inputs, compute) + before


def _parts(trainer: "DAPOTrainer", inputs: dict[str, Any]) -> list[list[int]]:
    """Rows of each part, the same on every process: TRL gathers metrics of rows after each."""
    count, accelerator = len(inputs["prompt_ids"]), trainer.accelerator
    shares = trainer.features["share_training"].enabled
    groups = find_groups(inputs["prompt_ids"], inputs["prompt_mask"]) if shares else range(count)
    mine = [
        [extent.prompt, extent.completion, extent.runs, group]
        for extent, group in zip(_extents(trainer, inputs), groups, strict=True)
    ]
    of_all = accelerator.gather(torch.tensor(mine, device=accelerator.device)).view(-1, count, 4).tolist()
    processes = [([Extent(*row[:3]) for row in rows], [row[3] for row in rows]) for rows in of_all]
    most = int(trainer.args.max_tokens_per_micro_batch or 0)
    return pack_rows(count, lambda rows: max(tokens_of(rows, *each) for each in processes), most)


def _loss_of_rows(
    trainer: "DAPOTrainer", rows: list[int], model: nn.Module, inputs: dict[str, Any], compute: Loss
) -> torch.Tensor:
    """The loss of a part, times what its mean counts in the mean over all of the micro-batch."""
    if len(rows) == len(inputs["prompt_ids"]):
        return compute(model, inputs)
    part = take_rows(inputs, rows)
    loss = compute(model, part)
    if (old := part.get(OLD_LOGPS)) is not None:  # a first pass may have completed them
        inputs[OLD_LOGPS][rows] = old
    if trainer.args.loss_type in _PER_WINDOW:
        return loss
    if trainer.args.loss_type == "bnpo":
        tokens, of_all = (float(valid_tokens(batch).sum().clamp(min=1)) for batch in (part, inputs))
        return loss * (tokens / of_all)
    return loss * (len(rows) / len(inputs["prompt_ids"]))
