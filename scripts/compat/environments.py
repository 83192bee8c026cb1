"""The environments of `make compat`, and the tests that run in each."""

from dataclasses import dataclass

TESTS = (
    "tests/compat",
    "tests/config/test_config.py",
    "tests/credit/test_trl_losses.py",
    "tests/sharing/test_grpo_steps.py",
    "tests/sharing/test_families.py",
    "tests/sharing/test_row_attention.py",
    "tests/signals/test_attention.py",
    "tests/signals/test_scoring.py",
    "tests/efficiency/test_skipped_steps.py",
    "tests/efficiency/test_vision_cache.py",
    "tests/efficiency/test_image_steps.py",
    "tests/training/test_adapters.py",
    "tests/training/checkpoints/test_checkpoints.py",
    "tests/sampling/test_select_groups.py",
    "tests/training/test_loss_terms.py",
    "tests/training/test_measuring.py",
    "tests/training/checkpoints/test_resuming.py",
    "tests/training/start/test_release.py",
    "tests/test_trainer.py",
)
TESTING = ("pytest>=8.4", "hypothesis>=6.130")
COMPARED = ("torch", "transformers", "accelerate", "peft", "datasets", "trl")
CPU_BUILD = "torch==2.13.0"  # takes the build for CPUs where there is one


@dataclass(frozen=True)
class Environment:
    """What is installed beside this library, whose own bounds choose the rest.

    Attributes:
        name: of its folder and its row.
        torch: installed first, by itself.
        packages: requirements beside those of this library.
        replaced: what the tests put in the place of something that cannot run here.
        refused: a release of TRL that is laid over the environment, and has to be refused in one sentence.
    """

    name: str
    torch: str = CPU_BUILD
    packages: tuple[str, ...] = ()
    replaced: str = ""
    refused: str | None = None


OLDEST = (
    "accelerate==1.12.0", "datasets==4.7.0", "filelock==4.0.0", "jinja2==3.1.6", "math-verify==0.9.0", "numpy==1.26.0",
    "packaging==24.0", "pandas==2.2.0", "peft==0.20.0", "pillow==11.0.0", "pyarrow==21.0.0", "pyyaml==6.0.1",
    "rich==14.0.0", "safetensors==0.5.0", "tqdm==4.66.3", "transformers==5.9.0", "xxhash==3.5.0",
)  # fmt: skip
EXPERTS = "the tests compute experts one by one"
HEAD = "TRL's fused head, a Triton kernel before 1.16, by one in torch"

ENVIRONMENTS = (
    Environment(
        "oldest", torch="torch==2.8.0", packages=("trl==1.16.0", "torchvision==0.23.0", *OLDEST), replaced=EXPERTS
    ),
    Environment("transformers-5.17", torch="torch==2.11.0", packages=("torchvision==0.26.0", "transformers==5.17.0")),
    Environment("transformers-5.23", packages=("transformers==5.23.0",)),
    Environment("transformers-5.24", packages=("transformers==5.24.0",)),
    Environment("newest", torch="torch"),
    Environment("trl-1.15", packages=("trl==1.15.0",), replaced=HEAD),
    Environment("trl-1.14", torch="torch", refused="1.14.2"),
    Environment("trl-1.13", torch="torch", refused="1.13.0"),
)
