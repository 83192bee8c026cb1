"""The forward passes of a step: what is around each, scoring, training over tokens with loss, dynamic batching."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
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
from vgr_trl.efficiency.vision_cache import tower_trains
from vgr_trl.measure import measure_pass, shift_of_pass
from vgr_trl.rollout import Rollout, TrainingPass
from vgr_trl.sampling import OLD_LOGPS
from vgr_trl.sharing.model_support import base_of, causal_model, is_compiled
from vgr_trl.sharing.prefix_forward import find_groups, has_images, is_image_token
from vgr_trl.sharing.sharing import shuffle_by_group, whole_groups
from vgr_trl.signals.scoring import leaves_rows_out, policy_is_active
from vgr_trl.utils import DataError, NotFiniteError, patched_attribute

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

Scored = tuple[torch.Tensor, torch.Tensor | None, Any]  # log-probabilities, entropies (N, T), loss of the router
Score = Callable[..., Scored]  # TRL's `_get_per_token_logps_and_entropies`
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]  # TRL's `_compute_loss`


@contextmanager
def forward_context(
    trainer: "DAPOTrainer", model: nn.Module, completion_length: int | None = None, packs: bool = False
) -> Iterator[None]:
    """Compute prompts and image features once in passes of this block, and keep the hidden states that are asked for.

    Args:
        completion_length: T of a scored batch; None where the model generates.
        packs: whether completions pass without padding between them.
    """
    stage = "generation" if completion_length is None else "training" if torch.is_grad_enabled() else "scoring"
    feature = trainer.features[f"share_{stage}"]
    with ExitStack() as stack:
        counts = trainer.model.training  # metrics of training leave out the passes of an evaluation
        stack.enter_context(trainer.vision_cache.around(model, counts=counts))
        if completion_length is not None and not torch.is_grad_enabled():
            stack.enter_context(_head_without_padding(model))
        stack.enter_context(trainer.shared_passes.around(feature, model, completion_length, packs=packs, counts=counts))
        for hook in (trainer.value_hook, trainer.hidden_hook):
            if hook is not None and completion_length is not None:
                stack.enter_context(hook.around(model, completion_length))
        if trainer.dummy_image is not None:
            stack.enter_context(trainer.dummy_image.around(model, completion_length is None))
        yield


def _head_without_padding(model: nn.Module) -> AbstractContextManager[None]:
    """TRL's head scores padding too where it has no Triton; a head of some rows wants whole ones."""
    causal = causal_model(model)
    base = base_of(causal)
    if base is causal or is_compiled(model) or leaves_rows_out(model):
        return nullcontext()
    return only_tokens(causal, base, None)


def model_role(trainer: "DAPOTrainer", model: nn.Module) -> str:
    """Return "policy", "reference" or "other"; a policy whose adapter is off is its own reference."""
    if model is trainer.ref_model or not policy_is_active(model):
        return "reference"
    return "policy" if model is trainer.model else "other"


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


# Passes without gradients, over a rollout or over anything else


def scoring_pass(
    trainer: "DAPOTrainer",
    model: nn.Module,
    plain: Score,
    inputs: dict[str, Any],
    batch_size: int | None,
    rollout: Rollout | None,
) -> Scored:
    """Return what TRL's `_get_per_token_logps_and_entropies` does, without gradients; measure the policy's first pass.

    Args:
        plain: TRL's method.
        batch_size: rows of a chunk, made whole groups, so that there is something to share.
        rollout: the current one, which keeps what is measured.
    """
    ids, completion, role = inputs["input_ids"], inputs["logits_to_keep"], model_role(trainer, model)
    scored: Scored
    of_policy = rollout if role == "policy" else None
    stage = {"policy": "old_logps", "reference": "reference", "other": "values"}[role]
    with trainer.clock.stage(stage, trainer.model.training):
        if of_policy is not None and first_pass_gives_old_logps(trainer, of_policy):
            return torch.full((len(ids), completion), torch.nan, device=ids.device), None, None
        rows = batch_size and _rows_of_chunk(trainer, inputs, batch_size)
        score = partial(_without_nan, trainer, model, inputs, partial(plain, model, **inputs, batch_size=rows))
        with forward_context(trainer, model, completion):
            if of_policy is not None and of_policy.signals is None and trainer.measurement.scoring:
                scored = measure_pass(trainer, of_policy, model, inputs, score)
                return scored
            scored = score()
            if of_policy is not None and of_policy.hidden is not None and "shift" in trainer.measurement.needed:
                of_policy.shift = shift_of_pass(trainer, of_policy, model)
            if rollout is not None and role == "reference":
                rollout.reference_logps, rollout.reference_hidden = (
                    scored[0],
                    None if trainer.hidden_hook is None else trainer.hidden_hook.take(),
                )
            return scored


def first_pass_gives_old_logps(trainer: "DAPOTrainer", rollout: Rollout) -> bool:
    """Whether what TRL scores of a rollout by the policy before its rewards comes from the first training pass."""
    return trainer.features["reuse_first_pass"].enabled and trainer.model.training and not rollout.rewarding


def _rows_of_chunk(trainer: "DAPOTrainer", inputs: dict[str, Any], batch_size: int) -> int:
    size, most = trainer.completions_per_prompt, trainer.args.max_tokens_per_micro_batch
    if trainer.features["share_scoring"].enabled:
        batch_size = whole_groups(batch_size, size)
    if most is None:
        return batch_size
    accelerator = trainer.accelerator
    longest = torch.tensor([inputs["input_ids"].size(1), inputs["logits_to_keep"]], device=accelerator.device)
    columns, completion = map(int, accelerator.gather(longest).view(-1, 2).amax(0).tolist())
    if not trainer.features["share_scoring"].enabled:
        return min(batch_size, max(most // columns, 1))
    if (groups := most // (columns + (size - 1) * completion)) > 0:
        return min(batch_size, groups * size)
    return min(batch_size, max((most - columns) // completion + 1, 1))


def _without_nan(
    trainer: "DAPOTrainer", model: nn.Module, inputs: dict[str, Any], score: Score, **options: Any
) -> Scored:
    """Refuse log-probabilities that are NaN: signals of them would be taken for those of rows without images."""
    scored = score(**options)
    valid = inputs["attention_mask"][:, -inputs["logits_to_keep"] :].bool()
    if not leaves_rows_out(model) and (count := int((scored[0].isnan() & valid).any(dim=1).sum())):
        raise NotFiniteError(
            f"The model's log-probabilities of {count} of {len(valid)} completions are NaN, at step "
            f"{trainer.state.global_step + 1}: its weights are broken, or what it computes overflows, so look "
            "at the newest checkpoint, or use bfloat16 instead of float16."
        )
    return scored


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
    if passed is None or model is not passed.model:
        with forward_context(trainer, model, inputs["logits_to_keep"]):
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
    with (
        head if features["skip_head"].enabled else nullcontext(),
        forward_context(trainer, model, window.completion, packs),
    ):
        logps, entropies, aux_loss = plain(model, **part)
    logps = scatter_back(logps, window, loss_mask, passed.inputs.get(OLD_LOGPS))
    if passed.logps is None:
        if (old := passed.inputs.get(OLD_LOGPS)) is not None:
            # TRL's `_compute_loss` reads the inputs only after its pass through the model, so what is completed here is
            # what it divides by; `tests/credit/test_trl_losses.py` fails if that changes. Later iterations read it too.
            passed.inputs[OLD_LOGPS] = torch.where(old.isnan(), logps.detach(), old)
        values = None if trainer.value_hook is None else trainer.value_hook.take()
        passed.logps = logps
        passed.hidden = None if trainer.hidden_hook is None else trainer.hidden_hook.take()
        passed.values = None if values is None else scatter_back(values, window, loss_mask, None)
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
