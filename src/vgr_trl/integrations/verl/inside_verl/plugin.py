"""Hangs this library in verl, in every process that imports verl with `VERL_USE_EXTERNAL_MODULES` naming this module.

Estimators and losses get their names (`registered.py`), the trainer the mode `vgr_sync`, and the engine the vendor
`vgr`, which `VERL_ENGINE_VENDOR=vgr` chooses.

Raises:
    ConfigError: the installed verl lacks something that is relied on.
"""

from vgr_trl.integrations.verl.options import OF_VERL, check_points

check_points(OF_VERL, "verl 0.9.1")  # before what it looks for is imported

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402

from vgr_trl.integrations.verl.inside_verl import engine as registered  # noqa: E402
from vgr_trl.integrations.verl.inside_verl.engine import SignalEngine, SignalTrainer, hide_newer_trl  # noqa: E402

MODE, VENDOR = "vgr_sync", "vgr"

hide_newer_trl()
registered.register()
if MODE not in TRAINER_REGISTRY:
    register_trainer(MODE)(SignalTrainer)
    EngineRegistry.register(
        model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR
    )(SignalEngine)
