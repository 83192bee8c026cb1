"""EasyR1's worker and trainer with the signals of the actor in its batches."""

from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer import ray_trainer
from verl.workers import fsdp_workers
from verl.workers.actor import dp_actor

from vgr_trl.errors import ConfigError
from vgr_trl.integrations.verl.at_hand import SignalsAtHand, columns_in, lay_at_hand
from vgr_trl.integrations.verl.inside_easyr1.actor import KEY, SignalActor
from vgr_trl.integrations.verl.options import SignalOptions
from vgr_trl.integrations.verl.perturbed import told
from vgr_trl.integrations.verl.presets import options_of
from vgr_trl.integrations.verl.token_weights import as_weights
from vgr_trl.replacing import replaced

PRESET = "preset"


class SignalWorker(fsdp_workers.FSDPWorker):  # type: ignore[misc]
    """EasyR1's worker, with a `SignalActor`, whose columns go with the old log-probabilities."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Build the model; the actor that EasyR1 imports meanwhile is ours."""
        with replaced(dp_actor, "DataParallelPPOActor", SignalActor):
            super().init_model()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_probs(self, data: Any) -> Any:
        """Return old log-probabilities, and what was measured with them."""
        output = super().compute_log_probs(data)
        columns, self.actor.columns = self.actor.columns, {}
        if columns:
            output = output.union(DataProto.from_dict(tensors={name: each.cpu() for name, each in columns.items()}))
        return output


def read_options(given: Mapping[str, Any], estimator: str, filters: bool = False) -> tuple[str, SignalOptions]:
    """Return the name of our estimator and the options of a run.

    Args:
        given: options, and under `preset` the name of our estimator, `vgr` if there is none.
        estimator: EasyR1's, whose advantages are shaped.
        filters: whether `algorithm.online_filtering` is on.

    Raises:
        ConfigError: an option is unknown, out of range, or cannot be followed in this run.
    """
    preset = given.get(PRESET, "vgr")
    options = options_of(preset, {name: value for name, value in given.items() if name != PRESET})
    if options.enable_entropy_filtering:
        raise ConfigError("enable_entropy_filtering reads entropies, which EasyR1's actor does not compute.")
    if estimator == "gae" and options.rewards_attention:
        raise ConfigError(
            "Rewards made of attention are compared within a prompt: give another adv_estimator than gae."
        )
    if options.collect_attentions and filters:
        raise ConfigError(
            "algorithm.online_filtering drops and reorders rows after their rewards, so that nobody knows whose "
            "token_weights they are: switch it off, or leave collect_attentions out, and the actor measures."
        )
    options.estimator = estimator
    return preset, options


class SignalTrainer(ray_trainer.RayPPOTrainer):  # type: ignore[misc]
    """EasyR1's trainer. Its `fit` calls functions of its module; two of them are wrapped for the duration.

    `_balance_batch`: tells the actor, by `meta_info`, what to measure.
    `fit`: advantages with signals at hand; `token_weights` of the reward are taken out of its metrics.
    """

    signal_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        algorithm = self.config.algorithm
        self.preset, self.options = read_options(
            self.signal_options, algorithm.adv_estimator, filters=algorithm.online_filtering
        )
        self._weights: Any = None

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._balance_batch(batch, metrics, *args, **kwargs)
        processor = self.processor if self.processor is not None else self.tokenizer
        batch.meta_info[KEY] = told(self.options, int(self.global_step), processor)
        self._metrics = metrics

    def fit(self) -> None:
        """Train."""
        plain_reduce, plain_advantage = ray_trainer.reduce_metrics, ray_trainer.compute_advantage

        def compute_advantage(data: Any, adv_estimator: Any, gamma: float = 1.0, lam: float = 1.0) -> Any:
            return self.advantages(plain_advantage, data, gamma, lam)

        with (
            replaced(ray_trainer, "reduce_metrics", lambda metrics: plain_reduce(self.without_weights(metrics))),
            replaced(ray_trainer, "compute_advantage", compute_advantage),
        ):
            super().fit()

    def without_weights(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return metrics of a reward without token weights, of which EasyR1 would take means; those are kept."""
        others = dict(metrics)
        weights = others.pop("token_weights", None)
        if not self.config.algorithm.online_filtering:  # which drops and reorders rows afterwards
            self._weights = self._weights if weights is None else weights
        return others

    def advantages(self, plain: Any, data: Any, gamma: float, lam: float) -> Any:
        """Return the batch with advantages by our estimator, and where `apply_to` is mask with a weighted mask."""
        mask = data.batch["response_mask"]
        weights, self._weights = self._weights, None
        given = as_weights(weights, mask) if weights is not None and self.options.token_weights else None
        with lay_at_hand(SignalsAtHand(self.options, columns_in(data.batch), given)) as found:
            data = plain(data, self.preset, gamma, lam)
        if found.response_mask is not None:
            data.batch["response_mask"] = found.response_mask
        self._metrics.update(found.metrics)
        return data
