"""Hangs this library in verl, in every process that imports verl with `VERL_USE_EXTERNAL_MODULES` naming this module.

Estimators and losses get their names, the trainer the mode `vgr_sync`, and the engine the vendor
`vgr`, which `VERL_ENGINE_VENDOR=vgr` chooses.
"""

import warnings
from importlib.metadata import version

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
from verl.workers.engine.base import EngineRegistry

from vgr_trl.integrations.verl.inside_verl import engine as registered
from vgr_trl.integrations.verl.inside_verl.engine import SignalEngine, SignalTrainer, hide_newer_trl

MODE, VENDOR, TESTED = "vgr_sync", "vgr", "0.9.1"

if version("verl") != TESTED:
    warnings.warn(f"verl {version('verl')} is installed; vgr_trl is tested with verl {TESTED}.", stacklevel=2)
hide_newer_trl()
registered.register()
if MODE not in TRAINER_REGISTRY:
    register_trainer(MODE)(SignalTrainer)
    EngineRegistry.register(
        model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR
    )(SignalEngine)
