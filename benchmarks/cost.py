"""What a step costs: operations, bytes and seconds of every stage, from a model's shape and P, V, T, G (docs/cost.md).

python benchmarks/cost.py

prints the tables of docs/cost.md. Pure arithmetic; what is assumed about a machine is in `Machine`.
"""

from bisect import bisect
from dataclasses import dataclass, field, replace

from sharing_models import MERGE, MODEL_SHAPES, ModelShape, Size
from sharing_operations import (
    Update,
    executed_update,
    forward_of,
    layer_weights,
    merger_weights,
    tower_layer_weights,
)


@dataclass(frozen=True)
class Machine:
    """One H200 and its connection; all but `operations`, `bandwidth` and `network` is assumed until it is measured.

    Attributes:
        operations: dense bfloat16 operations per second.
        bandwidth: bytes of its memory per second, as reading weights reaches them.
        network: bytes per second to the other GPUs, in and out at once.
        host: bytes per second from the host's memory, which is not pinned.
        efficiency: share of `operations` that passes reach.
        launch: seconds per layer and new token in which the host starts kernels, generating with transformers.
        plan: seconds in which cuDNN plans the attention of a shape that it has not seen; 0 while it is off.
    """

    operations: float = 989e12
    bandwidth: float = 4.3e12
    network: float = 450e9
    host: float = 12e9
    efficiency: float = 0.40
    launch: float = 1e-3
    plan: float = 0.0


@dataclass(frozen=True)
class Load:
    """What one GPU does in a step.

    Attributes:
        shape, size: model, and P, V, T, G.
        prompts: different prompts.
        update: what is trained.
        gpus: over which the optimizer's state is sharded.
        shard: ZeRO's stage: 2 shards gradients and optimizer, 3 the weights too.
        shared: whether prompts are computed once.
        rows: completions in a micro-batch; None: all of the GPU's.
        perception: whether a pass is made over perturbed images, one for each completion, so that nothing is shared.
        scored: whether a scoring pass is made.
    """

    shape: ModelShape
    size: Size
    prompts: int = 1
    update: Update = field(default_factory=Update)
    gpus: int = 1
    shard: int = 2
    shared: bool = True
    rows: int | None = None
    perception: bool = False
    scored: bool = True


def language_parameters(shape: ModelShape) -> int:
    """Matrices of layers, embedding and head."""
    return shape.layers * layer_weights(shape) + (1 if shape.tied else 2) * shape.hidden * shape.vocabulary


def tower_parameters(shape: ModelShape) -> int:
    """Matrices of the vision tower."""
    embedding = 3 * 2 * shape.patch**2 * shape.vision_hidden
    return shape.vision_layers * tower_layer_weights(shape) + merger_weights(shape) + embedding


def operations(load: Load) -> dict[str, float]:
    """Of every stage of a step, on one GPU."""
    shape, size = load.shape, load.size
    forward = forward_of(shape, size, shared=load.shared)
    keys = size.prompt + size.completion  # values are as wide as heads
    probe = 4 * shape.layers * shape.heads * shape.head_width * size.generations * size.completion * keys
    return {
        "generation": load.prompts * (forward.total),
        "scoring": load.prompts * (forward.total + probe) if load.scored else 0,
        "perception": load.prompts * forward_of(shape, size, shared=False).total if load.perception else 0,
        "update": load.prompts * executed_update(shape, size, load.update, shared=load.shared),
    }


def seconds(load: Load, machine: Machine) -> dict[str, float]:
    """Of every stage of a step: operations at the assumed share of the peak, and what reads memory or the network."""
    found = {stage: count / machine.operations / machine.efficiency for stage, count in operations(load).items()}
    found["generation"] = _generation(load, machine)
    found["optimizer"] = 2 * optimizer_bytes(load) / machine.bandwidth
    found["communication"] = communicated(load) / machine.network
    found["pixels"] = TRANSFERS * load.prompts * load.size.generations * pixel_bytes(load) / machine.host
    found["plans"] = NEW_SHAPES[load.shared] * machine.plan
    return found


TRANSFERS = 2  # of a rollout's pixels to the device, a copy for each completion: generation, training
NEW_SHAPES = {True: 6, False: 2}  # of attention in a step with uneven lengths


def pixel_bytes(load: Load) -> int:
    """Of the image of a prompt, in float32."""
    return 4 * MERGE**2 * load.size.vision * 3 * 2 * load.shape.patch**2


def _generation(load: Load, machine: Machine) -> float:
    """The prompts at once; then every new token reads the weights but for the embedding, and the keys and values of
    all rows, while the host starts the next kernels: what takes longer counts."""
    shape, size = load.shape, load.size
    prompts = Size(size.prompt, size.vision, 1, size.generations)
    first = load.prompts * forward_of(shape, prompts, shared=load.shared).total
    rows = load.prompts * size.generations
    weights = shape.layers * layer_weights(shape) + shape.hidden * shape.vocabulary
    read = 2 * weights + rows * (size.prompt + size.completion / 2) * kept_bytes(shape)
    later = size.completion * max(read / machine.bandwidth, shape.layers * machine.launch)
    return first / machine.operations / machine.efficiency + later


def kept_bytes(shape: ModelShape, width: int = 2) -> int:
    """Keys and values of one token in all layers."""
    return 2 * width * shape.layers * shape.key_heads * shape.head_width


def trained_parameters(load: Load, rank: int = 16) -> int:
    """All, or those of adapters of rank 16 on every matrix of the language model's layers."""
    shape = load.shape
    if not load.update.adapters:
        return language_parameters(shape) + tower_parameters(shape)
    heads, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    sides = 2 * (shape.hidden + heads) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.intermediate)
    return shape.layers * rank * sides


def optimizer_bytes(load: Load) -> float:
    """Of AdamW, with weights in float32: 12 per trained parameter, sharded."""
    return 12 * trained_parameters(load) / load.gpus


def communicated(load: Load) -> float:
    """Bytes that every GPU sends in a step: gradients in, updated weights out; under ZeRO-3 weights for every pass."""
    share = (load.gpus - 1) / load.gpus
    weights = 2 * (language_parameters(load.shape) + tower_parameters(load.shape))
    trained = 2 * trained_parameters(load)
    if load.shard < 3:
        return share * 2 * trained
    passes = load.scored + load.perception + 2  # scoring; perturbed; forward and backward
    return share * ((passes + 1) * weights + trained)  # generation gathers them once


def memory(load: Load, *, width: int = 2) -> dict[str, float]:
    """Bytes on one GPU while a micro-batch is trained."""
    shape, size = load.shape, load.size
    rows = load.prompts * size.generations if load.rows is None else load.rows
    part = replace(size, generations=min(size.generations, rows))
    prompts = max(load.prompts if load.rows is None else rows // size.generations, 1)
    parameters, trained = language_parameters(shape) + tower_parameters(shape), trained_parameters(load)
    every = load.gpus if load.shard == 3 else 1
    return {
        "weights": width * parameters / every,
        "gradients": width * trained / load.gpus,
        "optimizer": optimizer_bytes(load),
        "activations": prompts * activations(shape, part, load.update, shared=load.shared, width=width),
        "head": 3 * 4 * min(rows * size.completion * shape.vocabulary, HEAD_ENTRIES),
        "probe": 4 * 2 * shape.layers * load.prompts * size.generations * size.completion,
    }


HEAD_ENTRIES = 4096 * 32768  # logits of one tile of TRL's head: tokens and words
# Numbers that a layer keeps of a token for its backward pass, per width: found by counting, good to 15 %.
PER_HIDDEN, PER_INTERMEDIATE, PER_HEADS = 9, 4, 2


def activations(shape: ModelShape, size: Size, update: Update, *, shared: bool, width: int = 2) -> float:
    """Bytes kept for the backward pass of one prompt's completions.

    With checkpointing the inputs of all layers and what one layer keeps; without, what all layers keep.
    """
    copies = 1 if shared else size.generations
    tokens = copies * (size.prompt - 1) + size.generations * size.completion
    patches = copies * MERGE**2 * size.vision
    heads = (shape.heads + 2 * shape.key_heads) * shape.head_width
    layer = PER_HIDDEN * shape.hidden + PER_INTERMEDIATE * shape.intermediate + PER_HEADS * heads
    # Attention with masks also keeps the prompt's keys and values behind every completion; merged attention does not.
    joined = shared * 2 * shape.key_heads * shape.head_width * size.generations * (size.prompt + size.completion)
    tower = PER_HIDDEN * shape.vision_hidden + PER_INTERMEDIATE * shape.vision_intermediate
    tower += PER_HEADS * 3 * shape.vision_hidden
    if not update.checkpointing:
        trained = not update.adapters
        return width * (shape.layers * (tokens * layer + joined) + trained * shape.vision_layers * patches * tower)
    inputs = shape.layers * tokens * shape.hidden + shape.vision_layers * patches * shape.vision_hidden
    return width * (inputs + max(tokens * layer + joined, patches * tower))


def buffer_bytes(shape: ModelShape, size: Size, groups: int) -> int:
    """Of a replay buffer in the memory of the host: images once per group in float32, 60 bytes per token of a row."""
    return groups * (pixel_bytes(Load(shape, size)) + 60 * size.generations * (size.prompt + size.completion))


def gpu_hours(
    load: Load, machine: Machine, *, questions: int, epochs: float, tested: int = 0, every: int = 10
) -> float:
    """Of a training; `tested` questions with 4 completions each are answered every `every` steps."""
    steps = questions * epochs / (load.prompts * load.gpus)
    step = sum(seconds(load, machine).values())
    answered = Size(load.size.prompt, load.size.vision, load.size.completion, 4)
    per_gpu = tested / load.gpus
    rounds = per_gpu * 4 / 8  # at most 8 rows at a time
    test = Load(load.shape, answered, prompts=2, shared=load.shared)
    evaluation = rounds * (
        _generation(test, machine) + operations(test)["scoring"] / machine.operations / machine.efficiency
    )
    return load.gpus * (steps * step + steps / every * evaluation) / 3600


EXPERIMENTS = {  # script: shape, adapters, perception, ZeRO stage, epochs
    "experiment1.sh": ("qwen2.5-vl-7b", False, False, 2, 3),
    "experiment2.sh": ("qwen2.5-vl-7b", False, False, 2, 3),
    "experiment3.sh": ("qwen2.5-vl-7b", False, False, 2, 3),
    "experiment4.sh": ("qwen2.5-vl-7b", False, False, 2, 1),
    "experiment5.sh": ("qwen2.5-vl-7b", False, False, 2, 3),
    "dapo_train.sh": ("qwen2.5-vl-7b", True, False, 2, 1),
    "mdi.sh": ("qwen2.5-vl-3b", False, False, 3, 3),
    "tprl.sh": ("qwen2.5-vl-7b", False, True, 2, 3),
}


def experiment_load(name: str, *, shared: bool = True) -> Load:
    """What one of 8 GPUs does in a step of a script of experiments/: one prompt with 8 completions of 512 tokens."""
    shape, adapters, perception, shard, _ = EXPERIMENTS[name]
    size = Size(1024, 768, 512, 8)
    kept = shared and shard < 3
    return Load(MODEL_SHAPES[shape], size, 1, Update(adapters), 8, shard, kept, perception=perception)


def largest_group(load: Load, bytes_of_gpu: float) -> int:
    """Return the largest G of which an update fits into a GPU with one prompt, at most 1,024; 0: none does."""
    groups = [2**power for power in range(11)]
    sizes = (replace(load, size=replace(load.size, generations=group)) for group in groups)
    fitting = [each.size.generations for each in sizes if sum(memory(each).values()) <= bytes_of_gpu]
    return max(fitting, default=0)


WAYS = {  # of training one prompt with G completions: whether prompts are shared, completions in a micro-batch
    "TRL, whole group": (False, None),
    "TRL, one by one": (False, 1),
    "whole group": (True, None),
}


def group_tables() -> str:
    """Return the tables of groups: their memory, and the largest that fit."""
    lines = [f"| GB of 7B, LoRA | G | {' | '.join(WAYS)} |", "|---:|---:|" + "---:|" * len(WAYS)]
    for prompt in (512, 2048, 8192, 16384):
        for group in (8, 16, 64):
            size = Size(prompt, prompt - 256, 512, group)
            loads = (Load(MODEL_SHAPES["qwen2.5-vl-7b"], size, 1, Update(True), 1, 2, *way) for way in WAYS.values())
            cells = " | ".join(f"{sum(memory(load).values()) / 1e9:.0f}" for load in loads)
            lines.append(f"| P {prompt:,} | {group} | {cells} |")
    lines += ["", f"| largest G | P | {' | '.join(WAYS)} |", "|---|---:|" + "---:|" * len(WAYS)]
    for name in ("qwen2.5-vl-3b", "qwen2.5-vl-7b"):
        for room in (24, 48, 80):
            for prompt in (2048, 8192):
                size = Size(prompt, prompt - 256, 512, 1)
                loads = (Load(MODEL_SHAPES[name], size, 1, Update(True), 1, 2, *way) for way in WAYS.values())
                found = [largest_group(load, 0.9e9 * room) for load in loads]
                cells = " | ".join("none" if most == 0 else "any" if most == 1024 else str(most) for most in found)
                lines.append(f"| {name}, LoRA, {room} GB | {prompt:,} | {cells} |")
    return "\n".join([*lines, ""])


def parts_table() -> str:
    """Return what an update costs where a group passes in parts, relative to one pass; docs/sharing.md has a line."""
    shape, group = MODEL_SHAPES["qwen2.5-vl-7b"], 16
    lines = ["| 7B, LoRA, G 16 | P, T | positions, operations in 2, 4, 16 parts |", "|---|---|---|"]
    for prompt, completion in ((1536, 256), (1536, 2048), (8192, 2048)):
        taken = {}
        for parts in (1, 2, 4, group):
            size = Size(prompt, prompt - 256, completion, group // parts)
            positions = parts * (prompt + size.generations * completion)
            taken[parts] = positions, parts * executed_update(shape, size, Update(True), shared=True)
        cells = [
            ", ".join(f"{one / all_:.2f}" for one, all_ in zip(taken[n], taken[1], strict=True)) for n in (2, 4, 16)
        ]
        lines.append(f"| | {prompt:,}, {completion:,} | {'; '.join(cells)} |")
    return "\n".join([*lines, ""])


def long_prompt_lines() -> str:
    """Return the longest prompt that fits into 80 GB with 8 completions, and the memory of one of 32,768 tokens."""
    load = Load(MODEL_SHAPES["qwen2.5-vl-7b"], Size(0, 0, 1024, 8), gpus=8)

    def needed(prompt: int, load: Load) -> float:
        return sum(memory(replace(load, size=replace(load.size, prompt=prompt, vision=prompt - 256))).values()) / 1e9

    lines = ["| 7B on 8 GPUs of 80 GB | longest prompt |", "|---|---:|"]
    for name, way in WAYS.items():
        one = replace(load, shared=way[0], rows=way[1])
        lines.append(f"| {name} | {bisect(range(2**20), 80.0, 512, key=lambda prompt: needed(prompt, one)) - 1:,} |")
    lines += ["", "| 7B on 8 GPUs, P 32,768 | GB |", "|---|---:|"]
    ways = {"ZeRO-2": load, "ZeRO-2, LoRA": replace(load, update=Update(True)), "ZeRO-3": replace(load, shard=3)}
    lines += [f"| {name} | {needed(32768, one):.1f} |" for name, one in ways.items()]
    return "\n".join([*lines, ""])


REGIMES = ("qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen3-vl-4b", "qwen3-vl-8b")
GENERATED_BY = {"an engine": 0.0, "a static cache": 0.43e-3, "transformers": 1e-3}  # seconds per layer and token


def regime_table() -> str:
    """Return ours divided by TRL's, for a GPU with eight prompts of eight completions: update, step, memory.

    Each cell has two values, for completions of 256 and of 1,024 tokens.
    """
    head = ["update", *(f"step, {by}" for by in GENERATED_BY), "GB, whole groups"]
    lines = [f"| LoRA, T 256 and 1,024 | P | {' | '.join(head)} |", "|---|---:|" + "---:|" * len(head)]
    for name in REGIMES:
        for prompt in (512, 1536, 4096, 8192):
            pairs = [_regime(name, Size(prompt, prompt - 256, completion, 8)) for completion in (256, 1024)]
            cells = " | ".join(map(", ".join, zip(*pairs, strict=True)))
            lines.append(f"| {name} | {prompt:,} | {cells} |")
    return "\n".join([*lines, ""])


def _regime(name: str, size: Size) -> list[str]:
    ours = Load(MODEL_SHAPES[name], size, 8, Update(True), scored=False)
    stock = replace(ours, shared=False)
    cells = [_ratio(ours, stock, Machine(), ["update"])]
    cells += [_ratio(ours, stock, Machine(launch=launch), None) for launch in GENERATED_BY.values()]
    whole = [sum(memory(replace(load, prompts=1, rows=8)).values()) / 1e9 for load in (stock, ours)]
    return [*cells, "{:.0f} → {:.0f}".format(*whole)]


def _ratio(ours: Load, stock: Load, machine: Machine, stages: list[str] | None) -> str:
    """Of the seconds of some stages of a step; None: of all."""
    above, below = (
        sum(taken for stage, taken in seconds(load, machine).items() if stages is None or stage in stages)
        for load in (ours, stock)
    )
    return f"{above / below:.2f}"


def row_table() -> str:
    """Return what passes keep of a plain row, and of 8 rows that share a prompt."""
    prompts = (512, 1536, 4096, 8192)
    lines = [
        f"| GB, LoRA | T | {' | '.join(f'P {prompt:,}' for prompt in prompts)} |",
        "|---|---:|" + "---|" * len(prompts),
    ]
    for name in ("qwen2.5-vl-3b", "qwen2.5-vl-7b"):
        for completion in (256, 1024):
            cells = []
            for prompt in prompts:
                one = Load(
                    MODEL_SHAPES[name], Size(prompt, prompt - 256, completion, 8), 1, Update(True), 8, 3, False, 1
                )
                kept = [memory(load) for load in (one, replace(one, shared=True, rows=None))]
                cells.append("{:.1f} → {:.1f}".format(*((each["activations"] + each["head"]) / 1e9 for each in kept)))
            lines.append(f"| {name} | {completion:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the tables."""
    machine = Machine()
    print(regime_table())
    size = Size(1536, 1280, 1024, 8)
    cases = {
        "7B on 8": Load(MODEL_SHAPES["qwen2.5-vl-7b"], size, 1, Update(), 8),
        "7B on 8, TRL": Load(MODEL_SHAPES["qwen2.5-vl-7b"], size, 1, Update(), 8, shared=False, scored=False),
        "32B on 64": Load(MODEL_SHAPES["qwen2.5-vl-32b"], size, 1, Update(), 64, shard=3),
        "32B on 64, TRL": Load(MODEL_SHAPES["qwen2.5-vl-32b"], size, 1, Update(), 64, 3, shared=False, scored=False),
    }
    print(_table("seconds of a step", {name: seconds(load, machine) for name, load in cases.items()}, 1, "{:.2f}"))
    print(_table("GB on one GPU", {name: memory(load) for name, load in cases.items()}, 1e9, "{:.1f}"))
    print(group_tables())
    print(parts_table())
    print(row_table())
    print(long_prompt_lines())
    columns = ("an engine", "TRL's passes", "transformers", "TRL's passes", "100 test questions")
    print(f"| script | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    engine = replace(machine, launch=0.0)
    for name, (*_, epochs) in EXPERIMENTS.items():
        hours = [
            gpu_hours(experiment_load(name, shared=shared), one, questions=1000, epochs=epochs, tested=tested)
            for one, shared, tested in (
                (engine, True, 0), (engine, False, 0), (machine, True, 0), (machine, False, 0), (engine, True, 100),
            )
        ]  # fmt: skip
        hours[-1] -= hours[0]
        print(f"| `{name}` | {' | '.join(f'{hour:.1f}' for hour in hours)} |")


def _table(title: str, columns: dict[str, dict[str, float]], unit: float, form: str) -> str:
    rows = [f"| {title} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name in next(iter(columns.values())):
        rows.append(f"| {name} | " + " | ".join(form.format(one[name] / unit) for one in columns.values()) + " |")
    sums = " | ".join(f"**{form.format(sum(one.values()) / unit)}**" for one in columns.values())
    return "\n".join([*rows, f"| together | {sums} |", ""])


if __name__ == "__main__":
    main()
