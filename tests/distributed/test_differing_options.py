"""Processes of one run with different options are refused, on all of them."""

from support.launching import launch

SCRIPT = """
import os, sys
from vgr_trl import DAPOConfig
from vgr_trl.patches.transformers import close_group_at_exit
from vgr_trl.utils import ConfigError
from vgr_trl.validate.options import refuse_differing_options

rank = int(os.environ["RANK"])
close_group_at_exit()
options = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 4}
options |= {"output_dir": f"runs/{rank}", "run_name": str(rank)}
refuse_differing_options(DAPOConfig(num_generations=4, **options))
try:
    refuse_differing_options(DAPOConfig(num_generations=[4, 2][rank], **options))
except ConfigError as error:
    assert "num_generations is 4 in process 0 and 2 in process 1" in str(error), error
    sys.exit(0)
sys.exit(1)
"""


def test_options_that_differ_are_named_by_all_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launch(tmp_path / "script.py", processes=2)
