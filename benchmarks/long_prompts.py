"""What long prompts cost with and without sharing: the tables of docs/long_prompts.md, by the model of cost.py.

python benchmarks/long_prompts.py
"""

from dataclasses import replace

from cost import Load, Machine, memory, seconds
from sharing_models import MODEL_SHAPES, Size
from sharing_operations import Update, executed_update

PROMPTS = (2_048, 8_192, 16_384, 32_768, 65_536)  # tokens, all but 256 of them of images
COMPLETION, GENERATIONS, GPUS = 1024, 8, 8
CARD = 80e9
_MOST = 1 << 20


def load(prompt: int, *, shared: bool, rows: int = GENERATIONS) -> Load:
    """One prompt of a Qwen2.5-VL-7B on each of 8 GPUs under ZeRO-2, `rows` completions of it in a micro-batch."""
    size = Size(prompt, prompt - 256, COMPLETION, rows)
    return Load(MODEL_SHAPES["qwen2.5-vl-7b"], size, 1, Update(), GPUS, shared=shared)


def longest(*, shared: bool, rows: int) -> int:
    """The longest prompt, in tokens, whose micro-batch fits the memory of a GPU."""
    low, high = 512, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(memory(load(middle, shared=shared, rows=rows)).values()) <= CARD
        low, high = (middle, high) if fits else (low, middle)
    return low


def rows_of_table() -> list[str]:
    """The first table: a prompt of the given length, shared and not."""
    machine, found = Machine(), []
    for prompt in PROMPTS:
        one, each = load(prompt, shared=True), load(prompt, shared=False)
        counted = [
            executed_update(item.shape, item.size, item.update, shared=item.shared) / 1e15 for item in (one, each)
        ]
        passes = [seconds(item, machine)["update"] for item in (one, each)]
        alone = load(prompt, shared=False, rows=1)
        held = [sum(memory(item).values()) / 1e9 for item in (one, each, alone)]
        numbers = [*(f"{value:.1f}" for value in (*counted, *passes)), *(f"{value:.0f}" for value in held)]
        found.append(f"| {prompt:,} | {' | '.join(numbers)} |")
    return found


def main() -> None:
    """Print the tables."""
    print("\n".join(rows_of_table()))
    for shared, rows in ((True, GENERATIONS), (False, GENERATIONS), (False, 1)):
        print(f"shared={shared}, {rows} rows: longest prompt {longest(shared=shared, rows=rows):,} tokens")
    sharded = replace(load(32_768, shared=True), shard=3)
    print(f"ZeRO-3, shared, 32,768: {sum(memory(sharded).values()) / 1e9:.0f} GB")


if __name__ == "__main__":
    main()
