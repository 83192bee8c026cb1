"""Train a critic beside the policy: values of tokens, and advantages by generalised advantage estimation."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers.utils import logging
from trl.trainer.utils import FusedCausalLMOutput

from vgr_trl.advantages import gae, token_rewards, value_loss, whiten
from vgr_trl.batch import Batch
from vgr_trl.config import LEARNING_RATES
from vgr_trl.errors import ConfigError
from vgr_trl.loss.terms import average_as_loss
from vgr_trl.metrics.step_metrics import Totals
from vgr_trl.passes.run_pass import run_pass, score
from vgr_trl.rollout import Rollout
from vgr_trl.run import Run
from vgr_trl.sampling.zero_variance import sum_task_rewards
from vgr_trl.sharing.model_support import base_of, causal_model
from vgr_trl.signals.scoring import Purpose, Want

logger = logging.get_logger(__name__)
FILE = "critic.pt"  # name in a checkpoint


class ValueHead(nn.Module):
    """Maps each hidden state to a value, in float32 under any autocast; 0 before it is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values (N, T) float32 for hidden states (N, T, D)."""
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.linear(hidden.float())  # (N, T, 1)
            return values.squeeze(-1)


class ValueModel(nn.Module):
    """A copy of the policy with a scalar head in place of its LM head, which TRL's scoring can call.

    The weights that train are the weights that train in the policy when it is copied.

    Args:
        policy: the model, before DDP wraps it.
        head: the scalar head.
    """

    def __init__(self, policy: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.module = deepcopy(base_of(causal_model(policy)))  # `causal_model` reads this attribute
        self.head = head

    def forward(
        self, *, labels: Tensor | None, fused_lm_head: bool, shift_labels: Tensor | None = None, **inputs: Any
    ) -> FusedCausalLMOutput:
        """Return the values of predicted tokens in place of log-probabilities.

        Their shape is (N, S - 1) for `labels` (N, S), and (1, K) for the `shift_labels` (1, K) of selected positions.
        """
        hidden = self.module(**{**inputs, "use_cache": False, "return_dict": True}).last_hidden_state
        return FusedCausalLMOutput(log_probs=self.head(hidden if labels is None else hidden[:, :-1]))


class Critic:
    """Learns the values of tokens beside the policy of a run.

    Each process has the whole module: gradients are averaged over processes, then clipped.

    Args:
        run: run whose policy is not wrapped yet.
    """

    def __init__(self, run: Run) -> None:
        self.run, policy, args, accelerator = run, run.model, run.args, run.accelerator
        width = causal_model(policy).config.get_text_config(decoder=True).hidden_size  # D of the last hidden states
        head = ValueHead(width).to(accelerator.device)
        self.head = head if args.critic == "head" else None  # reads the hidden states of the policy's own passes
        self.module: nn.Module = head
        if self.head is None:
            model = ValueModel(policy, head)
            if args.gradient_checkpointing:
                model.module.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
            self.module = model.to(accelerator.device)
        self.named = {name: value for name, value in self.module.named_parameters() if value.requires_grad}
        self.learning_rate = args.critic_learning_rate or LEARNING_RATES[args.critic]  # after the warm-up
        self.optimizer = torch.optim.AdamW(
            list(self.named.values()),
            lr=self.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.steps, self.totals = 0, Totals()  # both count from the last optimizer step
        for value in self.named.values():  # an adapter is drawn by each process
            value.data.copy_(broadcast(value.data))

    def value_tokens(self, rollout: Rollout, reward_weights: Tensor) -> None:
        """Add values, returns and advantages of the tokens (N, T) to the batch of a rollout.

        Completions without a reward get NaN and are not trained on.

        Args:
            rollout: a rewarded rollout.
            reward_weights: (F,), weights of the reward functions.
        """
        run, args, batch = self.run, self.run.args, rollout.batch
        mask = batch.valid
        values: Any = None if rollout.scores is None else rollout.scores.values
        if values is None:
            self.module.eval()
            values = score(run, batch, Want(), self.module, purpose=Purpose.CRITIC).values
        sums = sum_task_rewards(rollout.rewards, reward_weights, args.penalises_kl)  # (N of all,)
        first = run.accelerator.process_index * len(mask)
        rewards = token_rewards(sums[first : first + len(mask)], mask, rollout.kl_penalty)
        advantages, returns = gae(rewards.nan_to_num(), values, mask, args.gamma, args.lam)
        unscored = rewards.isnan().any(dim=1, keepdim=True) & mask
        rollout.batch = batch.with_columns(
            values=values.masked_fill(~mask, 0),
            returns=returns.masked_fill(unscored, torch.nan),
            token_advantages=advantages.masked_fill(unscored, torch.nan),
        )

    def estimate(self, rollout: Rollout) -> dict[str, float]:
        """Set a rollout's advantages (N, T), whitened over trained tokens on all processes; return metrics."""
        batch = rollout.batch
        advantages, values, returns = (batch.columns[name] for name in ("token_advantages", "values", "returns"))
        trained = rollout.with_gradient.to(advantages.device).unsqueeze(1)  # (N, 1)
        mask = batch.valid & trained & ~advantages.isnan()
        metrics = self._explained(values, returns, mask)
        rollout.batch = batch.with_columns(
            advantages=whiten(advantages, mask, self.run.accelerator.gather),
            returns=returns.masked_fill(~mask, torch.nan),
            token_advantages=None,
        )
        return metrics

    def _explained(self, values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
        totals = Totals()
        for name, tensor in (("returns", returns), ("errors", returns - values)):
            totals.add_mean(name, tensor, mask)
            totals.add_mean(f"{name} squared", tensor.square(), mask)
        totals.add_mean("critic/value_mean", values, mask)
        means = totals.metrics(self.run.accelerator.gather)
        variance, unexplained = (means[f"{name} squared"] - means[name] ** 2 for name in ("returns", "errors"))
        return {
            "critic/value_mean": means["critic/value_mean"],
            "critic/return_mean": means["returns"],
            "critic/explained_variance": 1 - unexplained / variance if variance > 1e-12 else float("nan"),
        }

    def learn(self, batch: Batch, scored: Tensor | None, weight: float, steps: int) -> dict[str, float]:
        """Back-propagate the value loss of a micro-batch, step at the end of an optimizer step, and return metrics.

        Args:
            batch: the micro-batch.
            scored: (N, T), values of the training pass; None: the critic is a model of its own.
            weight: weight of the part's mean loss in the mean of its micro-batch.
            steps: micro-batches of the current optimizer step.
        """
        run, args = self.run, self.run.args
        values: Any = scored
        old, returns = batch.columns["values"], batch.columns["returns"]
        mask = batch.valid & ~returns.isnan()
        if values is None:
            self.module.train()
            scores = run_pass(run, self.module, batch, Want(), purpose=Purpose.CRITIC, gradients=True)
            values = scores.values
        per_token = value_loss(values, old, returns, mask, args.cliprange_value)  # (N, T)
        processes = run.accelerator.num_processes
        (average_as_loss(per_token, mask, batch.num_items, args, steps, processes) * weight).backward()
        self.totals.add_mean("critic/value_loss", per_token.detach(), mask)
        moved = (values.detach() - old).abs() > args.cliprange_value
        self.totals.add_mean("critic/clipped", moved.float(), mask)
        if not run.accelerator.sync_gradients:
            return {}
        metrics, self.totals = self.totals.metrics(run.accelerator.gather), Totals()
        return metrics | self._step()

    def _step(self) -> dict[str, float]:
        """Update the module by the averaged gradients, if they are finite; return metrics."""
        args = self.run.args
        for value in self.named.values():
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            value.grad = self.run.accelerator.reduce(gradient, reduction="mean")
        norm = nn.utils.clip_grad_norm_(self.named.values(), args.max_grad_norm or float("inf"))
        rate = self.learning_rate * min(1.0, (self.steps + 1) / (args.critic_warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"critic/grad_norm": norm.item(), "critic/learning_rate": rate}

    def save(self, folder: Path) -> None:
        """Write the critic and its optimizer into a checkpoint."""
        if self.run.accelerator.is_main_process:
            parameters = {name: value.detach() for name, value in self.named.items()}
            state = {"parameters": parameters, "optimizer": self.optimizer.state_dict(), "steps": self.steps}
            torch.save(state, folder / FILE)

    def load(self, folder: Path) -> None:
        """Load the critic of a checkpoint, which any number of processes may have written.

        Raises:
            ConfigError: the checkpoint's critic has another model or adapter.
        """
        if not (folder / FILE).exists():
            logger.warning(f"{folder} has no critic, which starts from scratch: it was written with another estimator.")
            return
        state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        if set(state["parameters"]) != set(self.named):
            raise ConfigError(f"The critic in {folder} has other parameters: give its model, adapter and options.")
        self.module.load_state_dict(state["parameters"], strict=False)  # frozen weights are not saved
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
