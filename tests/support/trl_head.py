"""TRL 1.15's fused head for tests on a CPU, where its Triton kernel cannot run; later releases bring their own."""

from importlib.metadata import PackageNotFoundError, version

import torch


class TorchHead:
    """In the place of TRL's `_ChunkedLogProbFunction`, with whole logits."""

    @classmethod
    def apply(cls, *arguments):
        return cls.forward(None, *arguments)

    @staticmethod
    def forward(context, hidden, weight, bias, labels, temperature, chunk_size, softcapping, scale, outputs):
        """Log-probabilities and entropies (K,) of hidden states (K, D); other outputs are not made."""
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        if softcapping is not None:
            logits = torch.tanh(logits / softcapping) * softcapping
        logps = torch.log_softmax(logits / temperature, dim=-1)
        entropies = -(logps.exp() * logps).sum(-1) if "entropy" in outputs else None
        return logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropies, None, None, None


def replace_missing_head() -> None:
    try:
        release = version("trl")
    except PackageNotFoundError:  # rooms that run without it
        return
    if release.startswith("1.15."):
        from trl.trainer import utils

        utils._ChunkedLogProbFunction = TorchHead
