import subprocess
import sys

PACKAGES = ("config", "credit", "integrations", "loss", "metrics", "pixels", "rewards", "batch", "sharing", "signals")
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["trl"] = None
for name in sys.argv[1:]:
    package = importlib.import_module(f"vgr_trl.{name}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{package.__name__}."):
        if not module.name.startswith(%r):
            importlib.import_module(module.name)
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("vgr_trl.")}))
"""
NEED_MORE = (
    "vgr_trl.dapo_config", "vgr_trl.integrations.verl.inside_verl.", "vgr_trl.integrations.verl.inside_easyr1.",
)  # fmt: skip


def test_imports_without_trl():
    command = [sys.executable, "-c", IMPORT_ALL % (NEED_MORE,), *PACKAGES]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    imported = set(eval(result.stdout))
    assert set(PACKAGES) <= imported
    assert not imported & {"trainer", "rollout", "demo", "cli"}
