"""The command `vgr-trl`: the table of its commands, and the short commands."""

import argparse
import logging
import os
import re
import shlex
import shutil
import sys
import time
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENAMETOOLONG
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from vgr_trl import __version__
from vgr_trl.atomic_files import naming_full_disk
from vgr_trl.errors import ConfigError, VGRError, naming_torchvision
from vgr_trl.options import check_value
from vgr_trl.recipes import TEMPLATES, read_recipe, recipe_file, recipe_names

RECIPES_LEGEND = """
passes: forward passes over the completions of a rollout, without + with gradients, not counting generation.
vgr-trl recipes NAME prints one, with its departures from the paper; vgr-trl train --recipe NAME starts from it."""
ACCELERATE_CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Warnings of other libraries that users cannot act on: logger -> part of the message.
NOISE = {"DeepSpeed": "Setting accelerator to CPU", "transformers.processing_utils": "defines `image_processor_class"}
# transformers 5.23 warns at every step of TRL 1.16.
DEPRECATION_PATTERN = r"`\w*gradient_checkpointing\w*` is deprecated"


def _make_parser(command: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"vgr-trl {command}", description=_describe(command))


def _describe(command: str) -> str:
    """Return the first line of a command's docstring."""
    return str(COMMANDS[command].__doc__).partition("\n")[0]


def demo(argv: Sequence[str]) -> int:
    """Warm-start a tiny vision-language model, train it, and return 0 if its accuracy on new questions rose."""
    from vgr_trl.demo import Options

    parser = _make_parser("demo")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions, weights and sampling (default 0)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="run folder (default runs/demo)")
    parser.add_argument("--steps", type=int, default=Options.steps, help=f"training steps (default {Options.steps})")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device (default cpu)")
    flags = parser.parse_args(argv)
    check_value("threads", flags.threads, int, ge=1)
    _announce_command("demo")
    from vgr_trl.checkpoints import lock_folder
    from vgr_trl.cli.arguments import keep_offline
    from vgr_trl.cli.train import check_output_dir, write_identity
    from vgr_trl.demo.demo import run_demo

    identity = {"command": "demo", "system_prompt": None}
    keep_offline()
    options = Options(seed=flags.seed, steps=flags.steps, threads=flags.threads, device=flags.device)
    with lock_folder(flags.output_dir):
        check_output_dir(flags.output_dir, identity, None, may_repeat=True)
        write_identity(flags.output_dir, identity)
        return 0 if run_demo(options, flags.output_dir) else 1


def quickstart(argv: Sequence[str]) -> int:
    """Train with sizes that fit this machine, evaluate before and after on held-out rows, and open the report.

    Flags of `train` may follow and override the chosen sizes.
    """
    parser = _make_parser("quickstart")
    parser.usage = "vgr-trl quickstart DATA --model MODEL [--output_dir DIR] [flags of train]"
    parser.add_argument("data", help="a file (JSONL, JSON, CSV, Parquet), a folder, or a name on the hub")
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"), help="(default runs/quickstart)")
    flags, more = parser.parse_known_args(argv)
    if flags.model is None:
        command = "vgr-trl quickstart tiny_vlm/train.parquet --model tiny_vlm/model --system_prompt_file none"
        cure = f"on a CPU, run vgr-trl init --laptop, which writes a tiny model, then {command}"
        raise ConfigError(f"Give --model, such as Qwen/Qwen3-VL-4B-Instruct on a GPU; {cure}.")
    _announce_command("quickstart")
    import torch

    from vgr_trl.cli.arguments import source_option
    from vgr_trl.cli.evaluate import count_parameters
    from vgr_trl.cli.train import suggest_options

    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = on_cpu if device == "cpu" else torch.cuda.mem_get_info()[1]
    options = {"model_name_or_path": flags.model, source_option(flags.data): flags.data}
    options |= {"output_dir": str(flags.output_dir)} | suggest_options(count_parameters(flags.model), memory, device)
    if device == "cuda":
        options |= [choose_generation()]
    overridden = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in more if word.startswith("--")}
    chosen = {name: value for name, value in options.items() if name not in overridden}
    words = [word for name, value in chosen.items() for word in (f"--{name}", value)] + more
    print(f"Equivalent command:\n  vgr-trl train {shlex.join(words)}", flush=True)
    if status := train(words):
        return status
    report([str(flags.output_dir)])
    if sys.stdout.isatty():
        webbrowser.open((flags.output_dir / "report.html").absolute().as_uri())
    return 0


def train(argv: Sequence[str]) -> int:
    """Train a vision-language model with DAPO, also under accelerate launch."""
    from vgr_trl.cli.train import main

    return main(argv)


def evaluate(argv: Sequence[str]) -> int:
    """Measure accuracy, mean@k, pass@k and format of a model."""
    from vgr_trl.cli.evaluate import main

    return main(argv)


def data(argv: Sequence[str]) -> int:
    """Convert, merge and inspect question sets; grade completions."""
    from vgr_trl.cli.data import main

    return main(argv)


def choose_generation() -> tuple[str, str]:
    """Return option and value of the fastest generation on this machine: vLLM, else a compiled decoding step."""
    if find_spec("vllm") is not None:
        import torch

        if torch.cuda.is_available():
            return "use_vllm", "true"
    return "cache_implementation", "static"


def report(argv: Sequence[str]) -> int:
    """Write an HTML report with curves and completions of runs; print its path and omissions."""
    from vgr_trl.errors import printable
    from vgr_trl.reporting.page import MEGABYTE, write_report

    parser = _make_parser("report")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="output_dir, or output_file of `evaluate`")
    parser.add_argument("--output", type=Path, help="HTML file (default: report.html in or beside the first RUN)")
    parser.add_argument("--names", nargs="+", help="names to show for the runs, in order")
    parser.add_argument("--max_megabytes", type=float, default=9.5, help="maximum size, 1 to 100 (default 9.5)")
    parser.add_argument("--live", type=float, metavar="SECONDS", help="rewrite the page at this interval until Ctrl-C")
    flags = parser.parse_args(argv)
    check_value("live", flags.live, float | None, ge=1, le=86400)
    first = flags.runs[0].parent if flags.runs[0].is_file() else flags.runs[0]
    output = flags.output or first / "report.html"
    write = partial(write_report, flags.runs, output, max_megabytes=flags.max_megabytes, names=flags.names)
    page = write(live=flags.live)
    print(printable(f"{page.path}: {page.size / MEGABYTE:.1f} MB, {page.records} recorded steps."))
    for name, notes in page.notes.items():
        for note in notes:
            print(printable(f"  {name}: {note}"))
    if flags.live:
        print(f"Rewritten every {flags.live:g} s; Ctrl-C stops and leaves a static page.", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(flags.live)
                write(live=flags.live)
        write()
    return 0


def merge(argv: Sequence[str]) -> int:
    """Merge the LoRA adapter of a run or checkpoint into its base model, for transformers, vLLM and others."""
    parser = _make_parser("merge")
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir or checkpoint of a training with --use_peft")
    parser.add_argument("--output_dir", type=Path, help="folder of the full model (default: merged in RUN)")
    flags = parser.parse_args(argv)
    output = flags.output_dir or flags.run / "merged"
    if not (flags.run / "adapter_config.json").is_file():
        raise ConfigError(f"{flags.run} is no LoRA adapter: give a folder with one; a full model needs no merge.")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output_dir {output} exists: give a new folder.")
    _announce_command("merge")
    from vgr_trl.cli.evaluate import load_for_inference
    from vgr_trl.reporting.records import find_identity

    model, processor = load_for_inference(str(flags.run))
    for part in (model.merge_and_unload(), processor):
        part.save_pretrained(output)
    if flags.output_dir and (identity := find_identity(flags.run)) is not None:  # evaluate reads its prompt
        shutil.copyfile(identity, output / identity.name)
    print(f"Wrote the full model to {output}.")
    return 0


def export(argv: Sequence[str]) -> int:
    """Write the recorded completions of a run as a table with a row per token, own signals and credit included."""
    from vgr_trl.reporting.notebook import export_run

    parser = _make_parser("export")
    parser.add_argument("run", metavar="RUN", type=Path, help="output_dir of a run")
    parser.add_argument("--output", type=Path, help=".csv or .parquet (default: tokens.parquet in RUN)")
    flags = parser.parse_args(argv)
    output = flags.output or flags.run / "tokens.parquet"
    print(f"Wrote {export_run(flags.run, output):,} rows to {output}.")
    return 0


def recipes(argv: Sequence[str]) -> int:
    """List the recipes, or print the file of a recipe."""
    parser = _make_parser("recipes")
    parser.add_argument("name", nargs="?", help="print this recipe: its paper, departures, options and their numbers")
    name = parser.parse_args(argv).name
    if name is not None:
        print(recipe_file(name).read_text(encoding="utf-8"), end="")
        return 0
    width = max(map(len, recipe_names())) + 2
    for name in recipe_names():
        about = read_recipe(name).about
        assert about is not None  # a test checks this for every recipe
        signals, passes = ", ".join(about.signals) or "no signal", " + ".join(map(str, about.passes))
        print(f"{name:<{width}}{about.method}\n{'':<{width}}{about.paper}; {signals}; {passes} passes")
    print(RECIPES_LEGEND)
    return 0


def init(argv: Sequence[str]) -> int:
    """Write a commented YAML file; with `--laptop` also the tiny model and questions it uses, in `tiny_vlm`."""
    parser = _make_parser("init")
    parser.add_argument("file", nargs="?", type=Path, default=Path("train.yaml"), help="(default train.yaml)")
    parser.add_argument("--laptop", action="store_true", help="for a CPU: also write a tiny model and questions")
    flags = parser.parse_args(argv)
    folder = flags.file.parent / "tiny_vlm"
    template = (TEMPLATES / ("laptop.yaml" if flags.laptop else "gpu.yaml")).read_text(encoding="utf-8")
    try:
        with flags.file.open("x", encoding="utf-8") as file:
            option, value = choose_generation()
            file.write(template.format(name=flags.file, tiny=folder, generation=f"{option}: {value}"))
    except OSError as error:
        raise ConfigError(f"{flags.file} cannot be written ({error.strerror}): give another name.") from error
    if flags.laptop:
        from vgr_trl.demo import Options
        from vgr_trl.demo.write_folder import write_warm_folder

        print(f"Warm-starting a tiny vision-language model; writing it and its questions to {folder}.", flush=True)
        write_warm_folder(folder, Options(warm_start_accuracy=0.45))  # demo: 0.55; a lower start rises in fewer steps
    print(f"Wrote {flags.file}. Next: {'' if flags.laptop else 'edit it, then '}vgr-trl train --config {flags.file}")
    return 0


def path(argv: Sequence[str]) -> int:
    """Print the path of a configuration for `accelerate launch --config_file`; without a name, list the names."""
    paths = {file.stem: file for file in sorted(ACCELERATE_CONFIGS.glob("*.yaml"))}
    parser = _make_parser("path")
    parser.add_argument("name", nargs="?", choices=paths, metavar="NAME", help=f"one of {', '.join(paths)}")
    name = parser.parse_args(argv).name
    print(paths[name] if name else "\n".join(paths))
    return 0


def env(argv: Sequence[str]) -> int:
    """Print package versions and devices, and whether torchvision fits torch."""
    _make_parser("env").parse_args(argv)
    from trl.scripts.env import print_env

    print(f"vgr_trl {__version__}")
    print_env()
    if find_spec("torchvision") is not None:
        import_module("torchvision")  # fails if it was built for another torch
    return 0


def _announce_command(command: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"vgr-trl {__version__}: {command}; loading torch, transformers and TRL", file=sys.stderr, flush=True)


_ALL = (quickstart, train, evaluate, merge, report, export, data, demo, recipes, init, path, env)
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {command.__name__: command for command in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named command and return its exit status; print errors of this library as a sentence, not a traceback."""
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("", "-h", "--help"):
        lines = [f"  {command:<12}{_describe(command)}" for command in COMMANDS]
        print("usage: vgr-trl COMMAND [flags]", "", *lines, "", "vgr-trl COMMAND --help lists the flags.", sep="\n")
        return 0 if name else 2
    if name == "--version":
        print(f"vgr_trl {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"vgr-trl: unknown command {name!r}: give one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    for source, words in NOISE.items():
        logging.getLogger(source).addFilter(lambda record, words=words: words not in str(record.msg))  # type: ignore[misc]
    keys: dict[str, str] = {}
    try:
        with naming_torchvision():
            if name in ("train", "evaluate"):
                if name == "train" and rest in (["--help"], ["-h"]):  # print it before the imports, which take seconds
                    print((TEMPLATES / "train_help.txt").read_text(encoding="utf-8"), end="", flush=True)
                else:
                    _announce_command(name)
                from vgr_trl.cli.arguments import convert_flags

                name, rest, keys = convert_flags(name, rest)
            with naming_full_disk("files"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=DEPRECATION_PATTERN, category=FutureWarning)
                return COMMANDS[name](rest)
    except (VGRError, OSError) as error:
        if not isinstance(error, VGRError) and error.errno != ENAMETOOLONG:
            raise
        named = [option for option in keys if "_" in option and re.search(rf"(?<!\w){option}(?!\w)", str(error))]
        origins = "".join(f" Your file sets {option} by {keys[option]}." for option in named)
        print(f"vgr-trl {name}: {error}{origins}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupted:
        print(f"\nvgr-trl {name}: interrupted{'; ' * bool(interrupted.args)}{interrupted}.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
