"""What to do about errors of the libraries below that users meet at the start."""

_ADVICE = (  # part of the error, what to do
    ("support bf16/gpu", "No GPU here computes in bfloat16: give --bf16 false, and --use_cpu where there is none."),
    ("DeepSpeed is not installed", 'The configuration asks for DeepSpeed: pip install "vgr_trl[deepspeed]".'),
    ("requires deepspeed", 'The configuration asks for DeepSpeed: pip install "vgr_trl[deepspeed]".'),
    ("requires the following packages that were not found", "A package is missing: install it as named below."),
    ("vLLM is not available", 'use_vllm is on: pip install "vgr_trl[vllm]", or give --use_vllm false.'),
    (
        "not used by the HfArgumentParser",
        "A word stands among the flags that belongs to none: take it out, or quote it.",
    ),
    ("fail_with_unknown_args", "The configuration file has a key that is no option: --help-all lists them."),
    ("bitsandbytes", "Quantised weights or 8-bit optimizers need bitsandbytes: pip install bitsandbytes."),
    ("CUDA out of memory", "Not enough GPU memory: lower per_device_train_batch_size or max_completion_length."),
)


def with_advice(error: str) -> str:
    """Return the text of an error, behind one sentence that says which flag to use if that is known."""
    text = " ".join(error.split())
    advice = next((sentence for part, sentence in _ADVICE if part.lower() in text.lower()), None)
    return text if advice is None else f"{advice} ({text})"
