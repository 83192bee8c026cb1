"""The critic's own optimizer, which steps where the policy's does."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn

from vgr_trl.config.stages.critic import LEARNING_RATES
from vgr_trl.training.host import Host


class Learner:
    """Trains a module that each process has whole: gradients are averaged over processes, then clipped."""

    def __init__(self, module: nn.Module, host: Host) -> None:
        self.host, args = host, host.args
        self.named = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.highest = args.critic_learning_rate or LEARNING_RATES[args.critic]
        self.optimizer = torch.optim.AdamW(
            list(self.named.values()),
            lr=self.highest,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.steps = 0
        if host.accelerator.num_processes > 1:
            for value in self.named.values():  # an adapter is drawn by each process
                value.data.copy_(broadcast(value.data))

    def step(self) -> dict[str, float]:
        """Update the module by the gradients that have been gathered, unless they are not finite; return metrics."""
        args, accelerator = self.host.args, self.host.accelerator
        for value in self.named.values():
            gradient = torch.zeros_like(value) if value.grad is None else value.grad
            value.grad = accelerator.reduce(gradient, reduction="mean")
        limit = args.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.named.values(), limit)
        rate = self.highest * min(1.0, (self.steps + 1) / (args.critic_warmup_steps + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"critic/grad_norm": norm.item(), "critic/learning_rate": rate}

    def state_dict(self) -> dict[str, Any]:
        """Return what is trained, and how far."""
        return {
            "parameters": {name: value.detach() for name, value in self.named.items()},
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, of a critic that trains the same parameters."""
        with torch.no_grad():
            for name, value in self.named.items():
                value.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
