"""The replay buffer of a trainer: what is drawn, what enters and when, what is logged and saved of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.utils import logging

from vgr_trl.batch.token_columns import EXTRA, VIEWS
from vgr_trl.credit.rules import active_rules
from vgr_trl.registries import VIEW, is_measurement, short_name
from vgr_trl.sampling import Group, Placement, ReplayBuffer, merge_states, split_state, with_old_logps
from vgr_trl.signals import Wanted
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import TrainingPass

logger = logging.get_logger(__name__)

OLD_LOGPS = "old_per_token_logps"
_MEASURED = (OLD_LOGPS, "signals.entropies")  # NaN where no pass measured them


class Replay:
    """Groups of earlier rollout batches, which take the place of dead ones.

    Where neither TRL nor a measurement has scored a rollout batch, its groups wait for the first training pass over
    them, which knows the log-probabilities of the policy that generated them.
    """

    def __init__(self, host: Host, wanted: Wanted) -> None:
        self.host, self.wanted, args = host, wanted, host.args
        self.buffer = ReplayBuffer(
            args.replay_buffer_size,
            min_reward=args.filter_min_reward,
            variance_epsilon=args.replay_var_epsilon,
            max_age=args.replay_max_age,
            seed=args.seed,
            estimator=args.advantage_estimator,
        )
        self._waiting: dict[int, Group] = {}
        self._waiting_placement: Placement | None = None
        self._first_logps: torch.Tensor | None = None
        self._rows_seen = 0

    def draw(self, count: int) -> list[Group]:
        """Return up to `count` groups for the batch at hand; those that have become too old leave before."""
        self.buffer.advance(self.host.state.global_step)
        return self.buffer.sample(count)

    def admits(self, advantages: torch.Tensor, rewards: torch.Tensor) -> list[bool]:
        """Whether each group of a batch would enter by itself.

        Args:
            advantages: (N of all,).
            rewards: (N of all,), weighted sums.
        """
        size = int(self.host.args.num_generations or 1)
        return self.buffer.admits(*(value.cpu().view(-1, size) for value in (advantages, rewards)))

    def keep(self, groups: Mapping[int, Group], placement: Placement, scored: bool) -> None:
        """Put groups into the buffer, or let them wait for the first training pass over them.

        Args:
            groups: number in the batch that is trained on -> group.
            scored: whether their log-probabilities came with them, from TRL or from the measurement.
        """
        if scored:
            for group in groups.values():
                self.buffer.add(_with_measured_logps(group))
        else:
            self._waiting, self._waiting_placement = dict(groups), placement
            self._first_logps, self._rows_seen = None, 0

    @property
    def waits(self) -> bool:
        """Whether groups wait."""
        return bool(self._waiting)

    def numbered(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch such that `first_pass` knows its rows again, if groups of it wait."""
        if not self._waiting:
            return batch
        return {**batch, "rollout_row": torch.arange(len(batch["prompt_ids"]))}

    def rows_read(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """Return the rows of a micro-batch whose groups wait for its log-probabilities, (N,) bool; None: no row's."""
        if not self._waiting or self._waiting_placement is None:
            return None
        waiting = torch.zeros(self._waiting_placement.rows, dtype=torch.bool)
        for group in self._waiting:
            waiting[[row for row, _ in self._waiting_placement.here(group)]] = True
        return waiting[inputs["rollout_row"].cpu()]

    def first_pass(self, passed: TrainingPass) -> None:
        """Take the log-probabilities (N, T) of the first training pass for those of the policy that generated.

        They complete the groups that wait to enter the buffer; one of which they are NaN does not enter.
        """
        inputs, logps = passed.inputs, passed.logps
        assert logps is not None
        if not self._waiting or self._waiting_placement is None:
            return
        if self._first_logps is None:
            self._first_logps = logps.new_zeros(self._waiting_placement.rows, logps.size(1))
        self._first_logps[inputs["rollout_row"]] = logps.detach()
        self._rows_seen += len(logps)
        if self._rows_seen == self._waiting_placement.rows:
            known = with_old_logps(self._waiting, self._first_logps, self._waiting_placement, gather_object)
            undefined = self._undefined(self._first_logps, self._waiting_placement)
            for number, group in known.items():
                if not undefined[number]:
                    self.buffer.add(group)
            self._waiting, self._first_logps = {}, None

    def _undefined(self, logps: torch.Tensor, placement: Placement) -> list[bool]:
        """Whether each group of the batch, whose rows here have `logps`, has any that is NaN."""
        counts = torch.zeros(placement.num_groups, device=logps.device)
        for group in self._waiting:
            counts[group] = logps[[row for row, _ in placement.here(group)]].isnan().sum()
        return [count > 0 for count in self.host.accelerator.reduce(counts, reduction="sum").tolist()]

    def metrics(self, replaced_fraction: float) -> dict[str, float]:
        """Return what is logged of the buffer, the same on every process, which all call it.

        Args:
            replaced_fraction: groups of the batch that came from the buffer, of all.
        """
        accelerator = self.host.accelerator
        megabytes = accelerator.gather(torch.tensor([self.buffer.megabytes], device=accelerator.device))
        return {
            "replay/size": len(self.buffer),
            "replay/megabytes": megabytes.sum().item(),
            "replay/replaced_fraction": replaced_fraction,
            "replay/mean_age": self.buffer.mean_age,
        }

    def load(self, states: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Continue with the buffer that the processes of a run have saved, as many as they were.

        It starts empty, with a warning, if its groups cannot be trained on with the options of this run.
        """
        accelerator = self.host.accelerator
        merged = merge_states(states)
        reason = why_unusable(merged, self.host, self.wanted)
        if reason is None:
            self.buffer.load_state_dict(split_state(merged, accelerator.process_index, accelerator.num_processes))
        elif accelerator.is_main_process:
            logger.warning(f"The replay buffer of {folder} starts empty: {reason}.")


def why_unusable(state: Mapping[str, Any], host: Host, wanted: Wanted) -> str | None:
    """Return why the groups of a saved buffer cannot be trained on with the options of a trainer, None if they can."""
    args, needed = host.args, _needed_columns(host, wanted)
    if state.get("estimator", args.advantage_estimator) != args.advantage_estimator:
        return f"advantage_estimator is {args.advantage_estimator}, and was {state['estimator']}"
    for group in state["groups"]:
        if (size := len(group["advantages"])) != args.num_generations:
            return f"num_generations is {args.num_generations}, and its groups have {size} completions"
        rows = group["rows"]
        for name, option in needed.items():
            if name not in rows["columns"] or (name in _MEASURED and bool(rows["columns"][name].isnan().all())):
                return f"its groups have no {name}, which {option} needs"
        if args.uses_perception_loss and any(row and "perturbed_pixel_values" not in row for row in rows["images"]):
            return "its groups have no perturbed_pixel_values, which perception_loss_weight or der_loss_weight2 needs"
    return None


def _needed_columns(host: Host, wanted: Wanted) -> dict[str, str]:
    """What the batches of a run have and groups put into them cannot be without -> the option it is there for."""
    args = host.args
    needed = {OLD_LOGPS: "replay_buffer_size"}
    if args.beta != 0:
        needed["ref_per_token_logps"] = "beta"
    if args.kl_coef > 0:
        needed["ref_per_token_logps"] = "kl_coef"
    if args.has_kl_loss and args.kl_penalty == "full":
        needed["reference_hidden"] = "kl_penalty full"
    if args.use_vllm and args.vllm_importance_sampling_correction:
        needed |= dict.fromkeys(("importance_sampling_ratio", "sampling_per_token_logps"), "vLLM")
    for name, options in (
        ("signals.attention.vision", wanted.attention),
        ("signals.entropies", wanted.entropies),
        ("signals.similarity", wanted.similarity),
        ("signals.dependency", wanted.dependency),
    ):
        if options:
            needed[name] = options[0]
    for rule in active_rules(args):
        for need in rule.needs:
            if need == "views":
                needed |= {f"{VIEWS}{name}": rule.switch for name in args.perturbations}
            elif need.startswith(VIEW):
                needed[f"{VIEWS}{need.removeprefix(VIEW)}"] = rule.switch
            elif not is_measurement(need):
                needed[f"{EXTRA}{short_name(need)}"] = rule.switch
    return needed


def _with_measured_logps(group: Group) -> Group:
    if group.rows is None or OLD_LOGPS in group.rows.columns:
        return group
    columns = {**group.rows.columns, OLD_LOGPS: group.rows.columns["signals.logps"]}
    return replace(group, rows=replace(group.rows, columns=columns))
