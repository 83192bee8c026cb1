"""Advantages by a critic, as stages of a run: values of a rollout, its advantages, the loss of the values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from vgr_trl.batch.inputs import scoring_inputs, valid_tokens
from vgr_trl.compat.loss_normaliser import average_as_loss
from vgr_trl.credit.gae import gae, token_rewards, value_loss, whiten
from vgr_trl.credit.totals import Totals
from vgr_trl.errors import ConfigError
from vgr_trl.training.critic.learning import Learner
from vgr_trl.training.critic.values import ValueHead, ValueModel, hidden_width, value_reader
from vgr_trl.training.host import Host
from vgr_trl.training.rollout import Rollout, TrainingPass, weighted_sums

logger = logging.get_logger(__name__)
Score = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
FILE = "critic.pt"  # in a checkpoint


class Critic:
    """Learns the values of tokens beside a policy.

    Args:
        policy: the trainer's model, not wrapped yet.
    """

    def __init__(self, host: Host, policy: nn.Module) -> None:
        self.host = host
        head = ValueHead(hidden_width(policy)).to(host.accelerator.device)
        self.reader = value_reader(policy, head) if host.args.critic == "head" else None
        self.module: nn.Module = head
        if self.reader is None:
            model = ValueModel(policy, head)
            if host.args.gradient_checkpointing:
                model.module.gradient_checkpointing_enable(host.args.gradient_checkpointing_kwargs)
            self.module = model.to(host.accelerator.device)
        self.learner = Learner(self.module, host)
        self.totals = Totals()  # of the micro-batches since the last optimizer step

    # A rollout

    def judge(self, rollout: Rollout) -> None:
        """Put values, returns and advantages of the tokens (N, T) into the batch of a rollout.

        Completions that no reward applies to get NaN, and train nothing.
        """
        host, batch = self.host, rollout.batch
        mask = valid_tokens(batch).bool()
        values = rollout.values
        if self.reader is None:
            self.module.eval()
            values = host.score(scoring_inputs(batch), model=self.module)
        assert values is not None
        assert rollout.rewards is not None
        judged = rollout.rewards[:, :-1] if host.args.penalises_kl else rollout.rewards  # without the penalty of the KL
        earned = weighted_sums(judged, host.reward_weights[: judged.size(1)])  # (N of all,)
        first = host.accelerator.process_index * len(mask)
        rewards = token_rewards(earned[first : first + len(mask)], mask, rollout.kl_penalty)
        advantages, returns = gae(rewards.nan_to_num(), values, mask, host.args.gamma, host.args.lam)
        unscored = rewards.isnan().any(dim=1, keepdim=True) & mask
        batch["values"] = values.masked_fill(~mask, 0)
        batch["returns"] = returns.masked_fill(unscored, torch.nan)
        batch["token_advantages"] = advantages.masked_fill(unscored, torch.nan)

    def estimate(self, rollout: Rollout) -> tuple[Rollout, dict[str, float]]:
        """Return the rollout with advantages (N, T), whitened over what is trained on in all processes, and metrics."""
        assert rollout.live is not None
        batch = dict(rollout.batch)
        advantages = batch.pop("token_advantages")
        mask = valid_tokens(batch).bool() & rollout.live.to(advantages.device).unsqueeze(1) & ~advantages.isnan()
        gather = self.host.accelerator.gather
        metrics = self._explained(batch["values"], batch["returns"], mask)
        batch["advantages"] = whiten(advantages, mask, gather)
        batch["returns"] = batch["returns"].masked_fill(~mask, torch.nan)
        return replace(rollout, batch=batch), metrics

    def _explained(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
        errors = returns - values
        totals = Totals()
        for name, tensor in (("returns", returns), ("errors", errors)):
            totals.add_mean(name, tensor, mask)
            totals.add_mean(f"{name} squared", tensor.square(), mask)
        totals.add_mean("critic/value_mean", values, mask)
        found = totals.metrics(self.host.accelerator.gather)
        variance, unexplained = (found[f"{name} squared"] - found[name] ** 2 for name in ("returns", "errors"))
        return {
            "critic/value_mean": found["critic/value_mean"],
            "critic/return_mean": found["returns"],
            "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else float("nan"),
        }

    # A micro-batch

    def learn(self, passed: TrainingPass, score: Score) -> dict[str, float]:
        """Take in the value loss of a micro-batch, step at the end of an optimizer step, and return its metrics.

        Args:
            score: passes inputs through a model with gradients, and returns (N, T).
        """
        inputs, host = passed.inputs, self.host
        mask = valid_tokens(inputs).bool() & ~inputs["returns"].isnan()
        values = passed.values
        if self.reader is None:
            self.module.train()
            values = score(self.module, scoring_inputs(inputs))
        assert values is not None
        values = nn.functional.pad(values, (0, mask.size(1) - values.size(1)))  # columns that the pass left out
        per_token = value_loss(values, inputs["values"], inputs["returns"], mask, host.args.cliprange_value)  # (N, T)
        average_as_loss(
            per_token,
            mask,
            inputs,
            host.args,
            accumulation_steps=host.accumulation_steps,
            num_processes=host.accelerator.num_processes,
        ).backward()
        self.totals.add_mean("critic/value_loss", per_token.detach(), mask)
        moved = (values.detach() - inputs["values"]).abs() > host.args.cliprange_value
        self.totals.add_mean("critic/clipped", moved.float(), mask)
        if not host.accelerator.sync_gradients:
            return {}
        metrics, self.totals = self.totals.metrics(host.accelerator.gather), Totals()
        return metrics | self.learner.step()

    def holds_policy(self) -> bool:
        """Whether the policy is not trained yet."""
        return self.host.state.global_step < self.host.args.critic_warmup

    # What is saved

    def save(self, folder: Path) -> None:
        """Write the critic and its optimizer into a checkpoint."""
        if self.host.accelerator.is_main_process:
            torch.save(self.learner.state_dict(), folder / FILE)

    def load(self, folder: Path) -> None:
        """Continue with the critic of a checkpoint, which any number of processes may have written.

        Raises:
            ConfigError: it cannot be read, or is of another kind.
        """
        if not (folder / FILE).exists():
            logger.warning(f"{folder} has no critic, which starts anew: it was written with another estimator.")
            return
        try:
            state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
            self.learner.load_state_dict(state)
        except (OSError, RuntimeError, EOFError, UnpicklingError, KeyError, ValueError) as error:
            raise ConfigError(
                f"The critic in {folder} cannot be continued ({type(error).__name__}: {error}): give the options of "
                "critic, model and adapter that it was saved with, or an earlier checkpoint."
            ) from error
