"""VEPO: credit for tokens whose distribution changes with the image and that are uncertain."""

from dataclasses import dataclass

import torch

from vgr_trl import registries
from vgr_trl.batch.signals import RolloutSignals
from vgr_trl.config.option import option
from vgr_trl.config.ranges import Fraction, Share, check_values
from vgr_trl.credit.filters import top_fraction_mask
from vgr_trl.credit.masked import check_shapes, min_max
from vgr_trl.credit.trajectory import Gather
from vgr_trl.registries import declares


@dataclass
class VEPOOptions:
    """Numbers of VEPO."""

    top_p_vepo_tokens: Fraction = option(0.2, "Share of a completion's tokens that VEPO keeps, in (0, 1].")
    vepo_alpha: Share = option(0.7, "How much the divergence counts against the change of entropy, in [0, 1].")

    def __post_init__(self) -> None:
        check_values(self)


@registries.credit_rules.register("vepo")
@declares(needs=("entropies", "shift"), options=VEPOOptions)
def vepo(
    advantages: torch.Tensor,
    signals: RolloutSignals,
    mask: torch.Tensor,
    options: VEPOOptions,
    *,
    gather: Gather | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return weights: 0, or for the tokens of largest score the number of tokens over the number of those.

    With j, g, h the Jensen-Shannon divergence, the change of entropy |H' - H| and the entropy H, each scaled to [0, 1]
    within its completion, a token's score is (1 - (1 - j)^alpha (1 - g)^(1 - alpha)) · h. A loss that is divided by all
    tokens is so divided by those that are kept. All tokens of a completion without an image are kept. Source:
    https://huggingface.co/papers/2606.03937 and its code.

    Args:
        signals: with `entropies`, `jsd` and `perturbed_entropies` (N, T).
    """
    assert signals.jsd is not None
    assert signals.perturbed_entropies is not None
    check_shapes("vepo", mask, entropies=signals.entropies, jsd=signals.jsd)
    seen = mask & ~signals.jsd.isnan()
    change = (signals.perturbed_entropies - signals.entropies).abs()
    far, changed, unsure = (min_max(each.float(), seen) for each in (signals.jsd, change, signals.entropies))
    scores = (1 - (1 - far) ** options.vepo_alpha * (1 - changed) ** (1 - options.vepo_alpha)) * unsure
    kept = top_fraction_mask(scores, seen, options.top_p_vepo_tokens) | (mask & ~seen.any(1, keepdim=True))
    counts = torch.stack([mask.sum(), kept.sum()]).float()
    tokens, selected = (counts if gather is None else gather(counts)).view(-1, 2).sum(0)
    share = kept.float().masked_fill(~mask, torch.nan)
    return kept * (tokens / selected.clamp(min=1)), {
        "token_fraction": share,
        "score": scores.masked_fill(~seen, torch.nan),
    }
