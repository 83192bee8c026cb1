"""What the libraries below refuse, in one sentence, behind what to do about it where that is known."""

from collections.abc import Iterator
from contextlib import contextmanager

from pyarrow.lib import ArrowException

from vgr_trl.errors import ConfigError, VGRError

_ADVICE = (  # part of an error of the libraries below, what to do
    ("support bf16/gpu", "No GPU here computes in bfloat16: give --bf16 false, and --use_cpu where there is none."),
    ("requires the following packages that were not found", "A package is missing: install it as named below."),
    ("vLLM is not available", 'use_vllm is on: pip install "vgr_trl[vllm]", or give --use_vllm false.'),
    (
        "not used by the HfArgumentParser",
        "A word stands among the flags that belongs to none: take it out, or quote it.",
    ),
    ("fail_with_unknown_args", "The configuration file has a key that is no option: --help-all lists them."),
    ("bitsandbytes", "Quantised weights or 8-bit optimizers need bitsandbytes: pip install bitsandbytes."),
    (
        "must be divisible by num_generations",
        "A rollout is no whole number of groups: change num_generations or per_device_train_batch_size, which is "
        "multiplied by the processes and, unless steps_per_generation is given, by gradient_accumulation_steps.",
    ),
    (
        "generations used for evaluation",
        "An evaluation batch is no whole number of groups: change per_device_eval_batch_size, or give "
        "--num_generations_eval.",
    ),
    (
        "Please specify `target_modules`",
        "use_peft is on, and PEFT knows no modules of this model: give --lora_target_modules all-linear, or names such "
        "as q_proj v_proj.",
    ),
    (
        "not found in the base model",
        "No module of the model has a name that lora_target_modules gives: give all-linear, or names such as q_proj "
        "v_proj.",
    ),
    ("CUDA out of memory", "Not enough GPU memory: lower per_device_train_batch_size or max_completion_length."),
)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Turn what the libraries below refuse before any work is done into a `ConfigError` of their words."""
    try:
        yield
    except VGRError:
        raise
    except (
        ArrowException,
        AttributeError,
        ImportError,
        KeyError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ConfigError(with_advice(f"{type(error).__name__}: {error}"[:500])) from error


def with_advice(error: str) -> str:
    """Return the text of an error, behind one sentence that says which flag to use if that is known."""
    text = " ".join(error.split())
    advice = next((sentence for part, sentence in _ADVICE if part.lower() in text.lower()), None)
    return text if advice is None else f"{advice} ({text})"
