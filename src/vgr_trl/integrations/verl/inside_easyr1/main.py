"""`python -m vgr_trl.integrations.verl.inside_easyr1.main`, in place of `python -m verl.trainer.main`.

It accepts EasyR1's arguments, and options of this library as `vgr.NAME=VALUE`. In the process that runs EasyR1, its
worker and trainer classes are replaced.
"""

import sys
from typing import Any

import yaml

from vgr_trl.patching import patched_attribute

OPTION_PREFIX = "vgr."


def split_arguments(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the arguments into EasyR1's and options of this library."""
    ours = [argument for argument in arguments if argument.startswith(OPTION_PREFIX)]
    pairs = (argument.removeprefix(OPTION_PREFIX).partition("=") for argument in ours)
    return [word for word in arguments if word not in ours], {name: yaml.safe_load(value) for name, _, value in pairs}


def make_runner(options: dict[str, Any]) -> Any:
    """Return EasyR1's runner, which uses `SignalWorker` and `SignalTrainer` in its process."""
    import ray
    from verl.trainer import main as theirs

    plain = theirs.Runner.__ray_metadata__.modified_class

    class SignalRunner(plain):  # type: ignore[misc, valid-type]
        def run(self, config: Any) -> None:
            from vgr_trl.integrations.verl.inside_easyr1.actor import SignalTrainer, SignalWorker  # first

            from verl.trainer import main  # isort: skip

            trainer = type("SignalTrainer", (SignalTrainer,), {"signal_options": options})
            with patched_attribute(main, "FSDPWorker", SignalWorker), patched_attribute(main, "RayPPOTrainer", trainer):
                super().run(config)

    return ray.remote(num_cpus=1)(SignalRunner)


def main() -> None:
    """Run EasyR1 with the given arguments."""
    sys.argv[1:], options = split_arguments(sys.argv[1:])
    from vgr_trl.integrations.verl.inside_easyr1.actor import read_options  # first

    from verl.trainer import main as theirs  # isort: skip

    read_options(options, "grpo")  # raise errors before Ray starts
    with patched_attribute(theirs, "Runner", make_runner(options)):
        theirs.main()


if __name__ == "__main__":
    main()
