"""What watches a run: measures of a step, signs of a collapse, trackers, signals that end it."""

import math
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import integration_utils
from transformers.utils import logging

from vgr_trl.batch import valid_tokens
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.loss import collapse_warning
from vgr_trl.metrics import MetricHistory, collapse_sentence, find_collapse
from vgr_trl.rollout import ConstructedTrainer, TrainingPass
from vgr_trl.utils import ConfigError, NotFiniteError, patched_attribute

if TYPE_CHECKING:
    from vgr_trl.trainer import DAPOTrainer

logger = logging.get_logger(__name__)
EXIT_STATUS = 128 + signal.SIGTERM  # what a shell says of a process that the signal has ended
SECONDS_OF_ONE_REQUEST = 10


def _pass_over_signals(initialise: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    if initialise is not None:
        initialise(worker)


class SaveOnTermination(TrainerCallback):
    """Saves a checkpoint at the end of the step in which any process got SIGTERM, and stops the training there.

    A second signal ends the process at once, unless it comes within seconds: a scheduler signals all processes, and a
    launcher among them signals its own once more. Only in the main thread, where Python takes signals.

    Attributes:
        stopped: whether the training was ended by it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.stopped = False
        self._accelerator, self._before = accelerator, signal.getsignal(signal.SIGTERM)
        self._asked_at: float | None = None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            logger.warning("SIGTERM: the run saves a checkpoint at the end of this step and stops.")
        elif time.monotonic() - self._asked_at > SECONDS_OF_ONE_REQUEST:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Listen, and let processes that load data pass over what is sent to them as well."""
        self._before = signal.signal(signal.SIGTERM, self._ask)
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # that of accelerate's
        if getattr(loader, "num_workers", 0):
            loader.worker_init_fn = partial(_pass_over_signals, loader.worker_init_fn)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save and stop if any process was asked to."""
        asked = torch.tensor([self._asked_at is not None], device=self._accelerator.device)
        if self._accelerator.gather(asked).any():
            self.stopped = control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave signals as they were."""
        signal.signal(signal.SIGTERM, self._before)


LONGEST = 5  # steps in a row whose gradient is not finite, after which the run ends


class FiniteUpdates(TrainerCallback):
    """Leaves out updates whose gradient is NaN or infinite: weights and moments stay as they are.

    DeepSpeed leaves them out itself, and is asked whether it has. With fp16 nothing is done here: by such steps the
    scaler of the loss looks for its scale.
    """

    def __init__(self, accelerator: Accelerator, count: Callable[[], None]) -> None:
        self._accelerator, self._count = accelerator, count
        self._left_out, self._streak = False, 0

    @property
    def _is_off(self) -> bool:
        return bool(self._accelerator.mixed_precision == "fp16")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients away if any is not finite: optimizers pass over parameters without one."""
        if self._is_off:
            return
        finite = are_finite(value.grad for value in kwargs["model"].parameters())
        self._left_out = not self._accelerator.gather(finite.to(self._accelerator.device).view(1)).all()
        if self._left_out:
            kwargs["optimizer"].zero_grad()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count, say it at the first of several in a row, and end the run at the last that is borne.

        Raises:
            NotFiniteError: there were `LONGEST` in a row.
        """
        if self._is_off:
            return
        if not (self._left_out or self._accelerator.optimizer_step_was_skipped):
            self._streak = 0
            return
        self._streak += 1
        self._count()
        step = state.global_step + 1
        if self._streak == LONGEST:
            raise NotFiniteError(
                f"The gradient was NaN or infinite in {LONGEST} steps in a row, up to step {step}, and nothing was "
                "trained in them: continue from the newest checkpoint with a lower learning_rate or max_grad_norm, or "
                "find where it comes from (bfloat16 instead of float16, rewards, torch.autograd.set_detect_anomaly)."
            )
        if self._streak == 1 and state.is_world_process_zero:
            logger.warning(
                f"The gradient of step {step} is NaN or infinite: the update is left out, and weights and optimizer "
                f"stay as they were (metric skipped/updates); {LONGEST} such steps in a row end the run."
            )


def are_finite(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return whether all gradients, of which this process may have a part, are finite; () bool."""
    here = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    if not here:
        return torch.tensor(True)
    return nn.utils.get_total_norm(here).isfinite()


PERCEPTION_HISTORY = 40  # steps in which signs of a perception loss that is won by breaking the policy are looked for


class CollapseWatch(TrainerCallback):
    """Warns once of the signs of collapse, and ends the training if `stop_on_collapse` is on.

    Attributes:
        found: the sentence of the warning; None while there is none.
    """

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self.found: str | None = None
        self._trainer = trainer
        self._histories: dict[str, MetricHistory] = {}
        self._perception: deque[dict[str, float]] = deque(maxlen=PERCEPTION_HISTORY)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the newest value of every metric, which TRL keeps until it is logged; all processes have the same."""
        if self.found is not None:
            return
        found = self._trainer.newest_metrics()
        newest = {name: value for name, value in found.items() if value == value}  # NaN: nothing to average
        for name, value in newest.items():
            self._histories.setdefault(name, MetricHistory()).add(value)
        weights = dict(zip(self._trainer.reward_func_names, self._trainer.reward_weights.tolist(), strict=True))
        if signs := find_collapse(self._histories, weights):
            self.found = collapse_sentence(signs, state.global_step)
        elif args.perception_loss_weight > 0:
            self._perception.append(newest)
            self.found = collapse_warning(self._perception)
        if self.found is not None:
            if state.is_world_process_zero:
                logger.warning(self.found)
            control.should_training_stop |= args.stop_on_collapse


_VALID_MEANS = ("entropy_penalty", "perception_loss", "perturbed_entropy", "kl", "kl/mean")
_RATIO_MEANS = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def approximate_kl(logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return per completion the sum over its valid tokens of the k3 estimate of KL(old policy ‖ policy).

    k3 = ratio − 1 − ln ratio with ratio = π/π_old of a token sampled from π_old, never negative and unbiased
    (Schulman, http://joschu.net/blog/kl-approx.html).

    Args:
        logps: log-probabilities under the policy, (N, T).
        old_logps: those under the policy that generated the tokens, (N, T).
        mask: valid tokens, (N, T).

    Returns:
        (N,), at least 0.
    """
    log_ratio = (logps - old_logps).float() * mask
    return (log_ratio.exp() - 1 - log_ratio).sum(dim=1)


def live_means(args: DAPOConfig) -> tuple[str, ...]:
    """Return TRL's metrics of a micro-batch that are means over the tokens which train.

    Args:
        args: of the trainer; with importance ratios of sequences, what is clipped is counted by completions.
    """
    by_completion = args.importance_sampling_level == "sequence" and not args.has_token_advantages
    return ("entropy",) if by_completion else ("entropy", *_RATIO_MEANS)


def over_live_tokens(
    metrics: MutableMapping[str, list[float]], names: Iterable[str], valid: float, live: float
) -> None:
    """Make the newest means over valid tokens, of which those that are not live count as 0, means over live tokens.

    Args:
        valid, live: tokens of the newest micro-batch, over all processes; of no live token the mean is NaN.
    """
    for name in names:
        if values := metrics.get(name):
            values[-1] = values[-1] * valid / live if live else math.nan


def weigh_by_tokens(metrics: MutableMapping[str, list[float]], names: Iterable[str], counts: Sequence[float]) -> None:
    """Replace the values of micro-batches by one mean in which every token counts the same.

    Args:
        metrics: values by name; those that do not have one value for each micro-batch stay as they are.
        counts: tokens of each micro-batch, over all processes.
    """
    for name in names:
        values = metrics.get(name, [])
        if len(values) != len(counts):
            continue
        pairs = [(value, count) for value, count in zip(values, counts, strict=True) if not math.isnan(value)]
        if total := sum(count for _, count in pairs):
            metrics[name] = [sum(value * count for value, count in pairs) / total]


class StepMetrics:
    """Counts and means of the micro-batches since the last log."""

    def __init__(self, trainer: "DAPOTrainer") -> None:
        self._trainer = trainer
        self._valid: list[float] = []  # tokens of each micro-batch that count in the loss
        self._live: list[float] = []  # those of them that were scored
        self._tokens = self._samples = self._skipped_rows = self._skipped_tokens = 0.0
        self._prompts_too_long = 0  # of streams, in the whole run
        self._updates_left_out = 0

    def count_prompt_too_long(self) -> None:
        """Count a prompt of a stream that is left out."""
        self._prompts_too_long += 1

    def count_update_left_out(self) -> None:
        """Count a step that changes nothing because its gradient is not finite."""
        self._updates_left_out += 1

    def measure(self, passed: TrainingPass, of_trl: MutableMapping[str, list[float]] | None = None) -> dict[str, float]:
        """Count a micro-batch, over all processes, and return its metrics, which are means over its live tokens.

        Args:
            of_trl: TRL's metrics, of which the newest values are made such means, too.
        """
        assert passed.logps is not None
        inputs, logps = passed.inputs, passed.logps.detach()
        mask = valid_tokens(inputs)  # (N, T)
        live = mask if passed.loss_mask is None else passed.loss_mask
        old_logps = inputs.get("old_per_token_logps", logps)  # TRL leaves them out while they equal the new ones
        kl = approximate_kl(logps, old_logps, live)  # (N,)
        tokens = inputs["prompt_mask"].sum() + inputs["completion_mask"].sum()
        rows = len(mask)
        counts = [mask.sum(), live.sum(), tokens, rows, rows if passed.loss_mask is None else passed.rows_run]
        local = torch.stack([kl.sum(), *(torch.as_tensor(count, device=kl.device).float() for count in counts)])
        kl_sum, valid, scored, all_tokens, all_rows, run = self._trainer.accelerator.reduce(
            local, reduction="sum"
        ).tolist()
        if scored != valid:
            over_live_tokens({} if of_trl is None else of_trl, live_means(self._trainer.args), valid, scored)
        self._valid.append(valid)
        self._live.append(scored)
        self._tokens += all_tokens
        self._samples += all_rows
        self._skipped_rows += all_rows - run
        self._skipped_tokens += valid - scored
        return {"approx_kl": kl_sum / scored if scored else math.nan}

    def merge(self, metrics: MutableMapping[str, list[float]]) -> None:
        """Make one value of those of the micro-batches, before they are logged."""
        weigh_by_tokens(metrics, _VALID_MEANS, self._valid)
        weigh_by_tokens(metrics, ("approx_kl", *live_means(self._trainer.args)), self._live)
        self._valid.clear()
        self._live.clear()

    def of_window(self, seconds: float) -> dict[str, float]:
        """Return what is logged of the micro-batches since the last log, and of the run; start a new window.

        Those are tokens and completions per second, generation and scoring included; completions that did not run and
        tokens that were not scored; the weights of the rewards.
        """
        weights = zip(self._trainer.reward_func_names, self._trainer.reward_weights.tolist(), strict=True)
        found = {
            "perf/tokens_per_second": self._tokens / seconds,
            "perf/samples_per_second": self._samples / seconds,
            "skipped/rows": self._skipped_rows,
            "skipped/tokens": self._skipped_tokens,
            **{f"reward_weights/{name}": weight for name, weight in weights},
        }
        if self._updates_left_out:
            found["skipped/updates"] = self._updates_left_out
        if self._prompts_too_long:
            found["data/prompts_too_long"] = self._prompts_too_long
        self._tokens = self._samples = self._skipped_rows = self._skipped_tokens = 0.0
        self._updates_left_out = 0
        return found


_LATER = ("on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_predict", "on_train_end")


def _trackers(trainer: ConstructedTrainer) -> Iterator[TrainerCallback]:
    """Those of `report_to`."""
    return (each for each in trainer.callback_handler.callbacks if type(each).__module__ == integration_utils.__name__)


def outlive_trackers(trainer: ConstructedTrainer) -> None:
    """Let a tracker that cannot be started end the run in one sentence, and one that fails later not end it.

    Raises, in the run:
        ConfigError: a tracker cannot be started.
    """
    for tracker in _trackers(trainer):
        name = type(tracker).__name__.removesuffix("Callback")
        tracker.on_train_begin = partial(_start, tracker.on_train_begin, name)  # type: ignore[method-assign]
        failed: set[str] = set()
        for event in _LATER:
            setattr(tracker, event, partial(_go_on, getattr(tracker, event), name, failed))


def _start(begin: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return begin(*args, **kwargs)
    except Exception as error:
        raise ConfigError(
            f"Tracker {name} of report_to cannot be started ({_words(error)}): fix that, keep its data here "
            "(WANDB_MODE=offline for wandb), or give report_to none."
        ) from error


def _go_on(call: Callable[..., Any], name: str, failed: set[str], *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if not failed:
            logger.warning(
                f"Tracker {name} failed ({_words(error)}); training continues without it. What it misses is in "
                "trainer_state.json and rollouts/logs.jsonl."
            )
        failed.add(name)
        return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def name_for_trackers(trainer: ConstructedTrainer) -> None:
    """Let the trackers of the trainer log as `metric_names` says, and without what a step has no value of."""
    processes = None if trainer.args.metric_names == "trl" else trainer.accelerator.num_processes
    for tracker in _trackers(trainer):
        tracker.on_log = partial(_log, tracker.on_log, processes)  # type: ignore[method-assign]


def _log(on_log: Any, processes: int | None, *args: Any, logs: Any = None, **kwargs: Any) -> Any:
    """Log numbers; under the names of verl without the `train/` and `eval/` that transformers puts in front."""
    logs = logs and {name: value for name, value in logs.items() if value is not None}
    if logs is None or processes is None:
        return on_log(*args, logs=logs, **kwargs)
    with patched_attribute(integration_utils, "rewrite_logs", dict):
        return on_log(*args, logs=in_verl(logs, processes), **kwargs)


VERL_NAMES: dict[str, tuple[str, ...]] = {  # what verl, EasyR1 and MTRL call these metrics
    "policy_loss": ("actor/pg_loss",), "grad_norm": ("actor/grad_norm",), "learning_rate": ("actor/lr",),
    "entropy": ("actor/entropy",), "approx_kl": ("actor/approx_kl",),
    "clip_ratio/region_mean": ("actor/clipfrac", "actor/pg_clipfrac"),
    "kl": ("actor/kl_loss",), "kl/mean": ("actor/kl_loss",), "kl/completion": ("actor/kl_penalty",),
    "kl/coefficient": ("actor/kl_coef",), "critic/value_loss": ("critic/vf_loss",),
    "critic/explained_variance": ("critic/vf_explained_var",), "critic/learning_rate": ("critic/lr",),
    "reward": ("critic/rewards/mean", "reward/overall"), "eval_reward": ("val/reward_score",),
    "completions/mean_length": ("response_length/mean",), "completions/min_length": ("response_length/min",),
    "completions/max_length": ("response_length/max",), "completions/clipped_ratio": ("response_length/clip_ratio",),
    "step_time": ("perf/time_per_step", "timing_s/step"), "timing/generation": ("timing_s/gen",),
    "timing/reward": ("timing_s/reward",), "timing/old_logps": ("timing_s/old",),
    "timing/reference": ("timing_s/ref",), "timing/perceive": ("timing_s/aug",), "timing/choose": ("timing_s/adv",),
    "timing/values": ("timing_s/values",),
} | {name: (f"actor/{name}",) for name in (
    "entropy_token_fraction", "perception_token_fraction", "combined_token_fraction", "sensitivity_score_mean",
    "scaling_factor_mean", "dynamic_scaling_max", "low_var_kl_mean_selected", "low_var_kl_mean_rejected",
    "low_var_kl_threshold", "entropy_mean_selected", "entropy_mean_rejected", "entropy_threshold",
)}  # fmt: skip


def in_verl(logs: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """Return what is logged under verl's names; metrics that it has no name for keep theirs.

    `actor/pg_loss` is the whole loss where TRL logs no part of it; `perf/throughput` tokens per second and process;
    `timing_s/update_actor` passes and optimizer together.

    Args:
        processes: of the run.
    """
    found: dict[str, Any] = {}
    for name, value in logs.items():
        for other in _names_in_verl(name):
            if other == name or other not in logs:
                found[other] = value
    if "loss" in logs:
        found.setdefault("actor/pg_loss", logs["loss"])
    if "perf/tokens_per_second" in logs:
        found["perf/throughput"] = logs["perf/tokens_per_second"] / processes
    if seconds := [found.pop(name) for name in ("timing/update", "timing/optimizer") if name in found]:
        found["timing_s/update_actor"] = sum(seconds)
    return found


def _names_in_verl(name: str) -> tuple[str, ...]:
    plain = name.removeprefix("eval_")
    if name in VERL_NAMES:
        return VERL_NAMES[name]
    if reward := re.fullmatch("rewards/(.*)/mean", plain):
        return (f"reward/{reward[1]}" if plain == name else f"val/{reward[1]}_reward",)
    if plain != name and plain.startswith("reward/"):
        return (f"val/{plain.removeprefix('reward/')}_reward",)
    if plain != name and plain.startswith("completions/") and plain in VERL_NAMES:
        return tuple(f"val_{other}" for other in VERL_NAMES[plain])
    return (name,)
