"""Two stages, one packed row, or gathered paths: attention of a layer, forward and backward; adds to `gpu.jsonl`.

    PYTHONPATH=src:benchmarks python -m gpu.kernels --shapes qwen2.5-vl-3b qwen2.5-vl-7b

Everything else in a layer works on the same P + G * T tokens in all of them, so that what a whole update would gain is
the difference here, times the layers. Every strategy is compared with a float32 reference before it is timed.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu import strategies
from gpu.kernel_plan import STRATEGIES, Attention, attentions
from gpu.measure import interleaved, release, synchronise
from gpu.plan import SHAPES, TINY
from gpu.results import FILE, Line, append, machine, read


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing until it is done or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=[*SHAPES, *TINY])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=FILE)
    flags = parser.parse_args(arguments)
    started, where = time.monotonic(), machine(flags.device)
    command = f"python -m gpu.kernels --shapes {' '.join(flags.shapes)} --device {flags.device} --dtype {flags.dtype}"
    for one in attentions(flags.shapes):
        late = time.monotonic() - started > 60 * flags.minutes
        if late or (one.name in read(flags.output) and not flags.again):
            print(f"{one.name}: {'not run, the time is over' if late else 'is there'}", flush=True)
            continue
        found = measure(one, flags.device, getattr(torch, flags.dtype), flags.repeats)
        append(flags.output, Line(one.name, where, command, found))
        print(one.name, found, flush=True)
        release()


def measure(one: Attention, device: str, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Per strategy: seconds, seconds of the first call, peak memory, largest errors; or why it cannot run."""
    size, shape = one.size, one.model_shape
    prompt = size.prompt - 1
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        length = prompt + size.generations * size.completion
        return torch.randn(heads, length, shape.head_width, device=device, generator=generator)

    inputs = draw(shape.heads), draw(shape.key_heads), draw(shape.key_heads)
    weights = draw(shape.heads)
    sizes = (prompt, size.completion, size.generations, device)
    exact = _outputs(strategies.make("reference", *sizes), inputs, weights)
    low = (inputs[0].to(dtype), inputs[1].to(dtype), inputs[2].to(dtype))
    found: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name in STRATEGIES:
        try:
            started = time.perf_counter()
            gradients = device != "cpu" or name != "packed"  # FlexAttention has none on a CPU
            run = partial(_outputs, strategies.make(name, *sizes), low, weights.to(dtype), gradients=gradients)
            outputs = run()
            synchronise(device)
            found[name] = {"first": round(time.perf_counter() - started, 3), "errors": _errors(outputs, exact)}
            runs[name] = run
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
    for name, timed in interleaved(runs, device=device, repeats=repeats).items():
        found[name] |= timed
    return found


def _outputs(
    strategy: strategies.Strategy, inputs: strategies.Tensors, weights: torch.Tensor, *, gradients: bool = True
) -> list[torch.Tensor]:
    """Attention outputs, and gradients of a weighted sum of them in queries, keys and values."""
    leaves = [one.detach().requires_grad_(gradients) for one in inputs]
    output = strategy(*leaves)
    if not gradients:
        return [output]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def _errors(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """Relative to the norm: of outputs and of the gradients of queries, keys and values."""
    names = ("output", "query", "key", "value")
    pairs = zip(names, outputs, exact, strict=False)
    return {name: float((one.float() - other).norm() / other.norm()) for name, one, other in pairs}


if __name__ == "__main__":
    main()
