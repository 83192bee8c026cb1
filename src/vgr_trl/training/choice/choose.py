"""Which groups are trained on: advantages by estimator, then dead groups replaced by fresh or replayed ones."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers.utils import logging

from vgr_trl.batch.inputs import valid_tokens
from vgr_trl.credit.advantages import estimate_advantages
from vgr_trl.credit.masked import masked_mean
from vgr_trl.sampling import (
    DeadStreak,
    Group,
    Placement,
    Resampling,
    correct_num_items,
    dead_groups,
    filter_rewards,
    filtered_groups,
    group_means,
    groups_from_batch,
    quantile_bounds,
    write_groups_into_batch,
)
from vgr_trl.signals import Wanted
from vgr_trl.training.checkpoints.shares import load_shares, save_share
from vgr_trl.training.choice.further_prompts import FurtherPrompts
from vgr_trl.training.choice.greedy_baseline import greedy_baseline
from vgr_trl.training.choice.replay import OLD_LOGPS, Replay
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout, Verdict, weighted_sums

logger = logging.get_logger(__name__)


class GroupChoice:
    """Replaces dead groups of rollout batches, and keeps what replay and resampling need over steps."""

    def __init__(self, host: Host, wanted: Wanted, prompts: FurtherPrompts | None) -> None:
        self.host, self.args, self.wanted = host, host.args, wanted
        self.replay = Replay(host, wanted) if self.args.replay_buffer_size > 0 else None
        self.prompts = prompts
        self.streak = DeadStreak(self.args)
        self._quantiles: tuple[float, float] | None = None  # of the rollout at hand
        self._size = int(self.args.num_generations or 1)  # completions per prompt

    # One rollout batch

    def choose(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout to train on, some of its groups replaced, and metrics."""
        self._quantiles = None
        verdict = self.judge(rollout)
        if not self.args.chooses_groups:
            self._warn_of_dead_streak(len(verdict.live))
            return replace(rollout, live=verdict.live_rows()), {}
        rounds = [rollout]
        fresh, metrics = self._resample(rounds)
        self._warn_of_dead_streak(len(verdict.live) + len(fresh))
        missing = [group for group in verdict.dead if group not in fresh]
        replayed = {} if self.replay is None else dict(zip(missing, self.replay.draw(len(missing)), strict=False))
        if self.args.advantage_estimator == "reinforce_plus_plus":
            fresh = self._with_one_deviation(rounds, fresh, replayed)
        replacements = fresh | replayed
        if self.replay is not None:
            self._keep(rollout, fresh, self.replay)
        chosen, signals = rollout.batch, rollout.signals
        if replacements:
            chosen, signals = write_groups_into_batch(
                chosen,
                replacements,
                verdict.placement,
                pad_token_id=self.host.tokenizer.pad_token_id,
                pad_to_multiple_of=self.host.pad_to_multiple_of,
                signals=signals,
                gather=gather_object,
            )
            chosen = correct_num_items(chosen, self.host.accelerator.gather)
        if self.replay is not None:
            chosen = self.replay.numbered(chosen)
            metrics |= self.replay.metrics(len(replayed) / verdict.placement.num_groups)
        metrics["sampling/live_fraction"] = (len(verdict.live) + len(replacements)) / verdict.placement.num_groups
        live = verdict.live_rows(replacements)
        # A filtered group that nothing replaces has rewards that differ; without this it would be trained on.
        chosen = {**chosen, "advantages": chosen["advantages"] * live.to(chosen["advantages"].device)}
        return replace(rollout, batch=chosen, signals=signals, live=live, replaced=sorted(replacements)), metrics

    def judge(self, rollout: Rollout) -> Verdict:
        """Find advantages by the estimator and the dead groups; correct the advantages of the rollout and the table."""
        host, args = self.host, self.args
        accelerator, size = host.accelerator, self._size
        placement = Placement(
            len(rollout.batch["prompt_ids"]), size, accelerator.process_index, accelerator.num_processes
        )
        assert rollout.rewards is not None
        verdict = Verdict(
            placement,
            rewards=weighted_sums(rollout.rewards, host.reward_weights),
            advantages=accelerator.gather(rollout.batch["advantages"]),
        )
        if args.uses_critic:
            of_tokens = rollout.batch["token_advantages"].nan_to_num()  # (N, T)
            verdict.advantages = accelerator.gather(masked_mean(of_tokens, valid_tokens(rollout.batch)).squeeze(1))
        elif args.advantage_estimator != "grpo":
            baseline = greedy_baseline(rollout, host, placement) if args.advantage_estimator == "remax" else None
            verdict.advantages = estimate_advantages(verdict.rewards, size, args.advantage_estimator, baseline)
        if args.advantage_estimator != "grpo":
            rollout.batch = {**rollout.batch, "advantages": verdict.advantages[verdict.here]}
            host.correct_logged_advantages(verdict.advantages.tolist())
        dead: list[int] = []
        if not args.uses_critic:
            epsilon, estimator = args.replay_var_epsilon, args.advantage_estimator
            dead = dead_groups(verdict.advantages, verdict.rewards, size, estimator=estimator, epsilon=epsilon)
        filtered: list[int] = []
        means = torch.empty(0)
        if args.online_filtering:
            compared = filter_rewards(args.filter_key, host.reward_names, rollout.rewards, verdict.rewards)
            filtered = self._outside(compared)
            means = group_means(compared, size)
        self.streak.add(placement.num_groups, dead, filtered, means.tolist())
        verdict.filtered = sorted(set(filtered).difference(dead))
        verdict.dead = sorted({*dead, *filtered})
        rollout.verdict = verdict
        return verdict

    def _outside(self, compared: torch.Tensor) -> list[int]:
        """Numbers of the groups that online filtering leaves out; quantiles are those of the first round."""
        low, high, quantile = self.args.filter_low, self.args.filter_high, self.args.filter_mode == "quantile"
        if quantile:
            if self._quantiles is None:
                self._quantiles = quantile_bounds(compared, self._size, low=low, high=high)
            low, high = self._quantiles
        return filtered_groups(compared, self._size, low=low, high=high, inclusive=quantile)

    def _warn_of_dead_streak(self, live: int) -> None:
        sentence = self.streak.end_rollout(self.host.state.global_step, live)
        if sentence is not None and self.host.accelerator.is_main_process:
            logger.warning(sentence)

    def _with_one_deviation(
        self, rounds: list[Rollout], fresh: dict[int, Group], replayed: Iterable[int]
    ) -> dict[int, Group]:
        """Divide all advantages by the deviation over what is trained on; return the fresh groups with theirs.

        Replayed groups keep theirs, and a filtered group that nothing replaces is not trained on.
        """
        verdicts, size = [_verdict(rollout) for rollout in rounds], self._size
        verdict = verdicts[0]
        own = torch.ones(verdict.placement.num_groups, dtype=torch.bool, device=verdict.rewards.device)
        own[[*verdict.filtered, *fresh, *replayed]] = False
        of_fresh = [group.rewards.to(verdict.rewards) for group in fresh.values()]
        trained = torch.cat([verdict.rewards.view(-1, size)[own].flatten(), *of_fresh])

        def divided(rewards: torch.Tensor) -> torch.Tensor:
            return estimate_advantages(rewards, size, "reinforce_plus_plus", trained=trained.to(rewards.device))

        for found in verdicts:
            found.advantages = divided(found.rewards)
        rounds[0].batch = {**rounds[0].batch, "advantages": verdict.advantages[verdict.here]}
        self.host.correct_logged_advantages([value for found in verdicts for value in found.advantages.tolist()])
        return {place: replace(group, advantages=divided(group.rewards)) for place, group in fresh.items()}

    def _resample(self, rounds: list[Rollout]) -> tuple[dict[int, Group], dict[str, float]]:
        """Groups of further prompts, by the number of the dead group whose place they take; add to the `rounds`."""
        if self.prompts is None:
            return {}, {}
        self.prompts.count_rollout()
        rollout, verdict = rounds[0], _verdict(rounds[0])
        plan = Resampling(list(verdict.dead), self.args.dynamic_sampling_max_rounds)
        replacements: dict[int, Group] = {}
        if plan.wants_more:
            self.prompts.begin(rollout.rows, verdict.placement)
        with self.host.as_one_batch(verdict.placement.rows) as completions:
            while plan.wants_more:
                rows, count = self.prompts.draw(len(plan.missing), verdict.placement)
                if not rows:
                    break
                completions.append(len(rows))
                rounds.append(further := self.host.judge(rows, self.judge))
                places = plan.take(_verdict(further).live, count)
                groups = self._groups(further, list(places.values()))
                replacements |= dict(zip(places, groups, strict=True))
        return replacements, {
            "dynamic_sampling/rounds": plan.rounds,
            "dynamic_sampling/generated_groups": plan.generated,
            "dynamic_sampling/discarded_groups": plan.discarded,
        }

    def _groups(self, rollout: Rollout, wanted: list[int]) -> list[Group]:
        verdict = _verdict(rollout)
        return groups_from_batch(
            rollout.batch,
            wanted,
            verdict.placement,
            advantages=verdict.advantages,
            rewards=verdict.rewards,
            pad_token_id=self.host.tokenizer.pad_token_id,
            step=self.host.state.global_step,
            signals=rollout.signals,
            gather=gather_object,
        )

    def _keep(self, rollout: Rollout, fresh: dict[int, Group], replay: Replay) -> None:
        """Give the live groups and the fresh ones to the buffer."""
        verdict = _verdict(rollout)
        admitted = replay.admits(verdict.advantages, verdict.rewards)
        wanted = [group for group in verdict.live if admitted[group]]
        groups = dict(zip(wanted, self._groups(rollout, wanted), strict=True)) | fresh
        measured = rollout.signals is not None and self.wanted.head
        replay.keep(groups, verdict.placement, scored=measured or OLD_LOGPS in rollout.batch)

    # What is saved

    def save(self, folder: Path) -> None:
        """Write the share of this process into a checkpoint, whole or not at all."""
        accelerator = self.host.accelerator
        if self.replay is not None or self.prompts is not None:
            state = {
                "buffer": None if self.replay is None else self.replay.buffer.state_dict(),
                "prompts": None if self.prompts is None else self.prompts.stream.state_dict(),
            }
            save_share(state, folder, accelerator.process_index, accelerator.num_processes, "choice")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, which another number of processes may have written."""
        if self.replay is None and self.prompts is None:
            return
        shares = load_shares(folder, "choice")
        buffers = [share["buffer"] for share in shares if share["buffer"] is not None]
        positions = [share["prompts"] for share in shares if share["prompts"] is not None]
        if self.replay is not None:
            if buffers:
                self.replay.load(buffers, folder)
            else:
                logger.warning(_starts_anew(folder, "replay buffer", "replay_buffer_size"))
        if self.prompts is not None:
            if positions:
                self.prompts.stream.load_state_dict(positions[0])
            else:
                logger.warning(_starts_anew(folder, "position in the prompts", "dynamic_sampling"))


def _verdict(rollout: Rollout) -> Verdict:
    assert rollout.verdict is not None
    return rollout.verdict


def _starts_anew(folder: Path, what: str, option: str) -> str:
    return f"{folder} has no {what}, which starts anew: the checkpoint was written without {option}."
