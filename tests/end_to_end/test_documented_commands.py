"""Commands and programs of the pages run on a tiny model; those below a comment `# needs …` as far as they get."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from accelerate.commands.launch import launch_command_parser
from support.named_in_pages import fill_shelf
from support.trainers import OPTIONS, letters_reward

from vgr_trl.cli.__main__ import COMMANDS, main
from vgr_trl.cli.arguments import parse
from vgr_trl.dapo_config import DAPOConfig
from vgr_trl.data.convert import convert_rows
from vgr_trl.demo.demo import Questions, draw_questions, run_demo

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
ENGLISH = {name: text for name, text in PAGES.items() if "/zh/" not in name}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOUND = [(page, text, found) for page, text in ENGLISH.items() for found in BLOCK.finditer(text) if found[1] == "bash"]
BASH = {f"{page}:{text.count(chr(10), 0, found.start()) + 1}": found[2] for page, text, found in FOUND}  # by line
NEEDS = re.compile(r"needs (a GPU|an hour|the hub|a package index|lmms-eval|vLLM)(, .*)?")
TESTED_ELSEWHERE = (  # programs
    "docs/evaluation.md", "docs/extending.md", "docs/sharing.md", "docs/tools.md", "docs/verl.md",
)  # fmt: skip
CLONED = ("accelerate_configs", "examples", "experiments")
PROGRAMS = "accelerate make nvidia-smi pip pytest python python3 remark unzip vgr-trl vllm".split()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
NOT_DONE = [f"{module}.{name}" for module in ("demo", "write_folder") for name in ("warm_up", "set_up_process")]
SMALLER = {
    "train": "--use_cpu true --bf16 false --use_vllm false --max_steps 1 --per_device_train_batch_size 16 "
    "--max_completion_length 4 --soft_punish_cache 2 --eval_steps 1 --save_steps 1 --report_to none",
    "evaluate": "--max_completion_length 4 --num_samples 2",
}


class FirstStep(Exception):
    """A command has come as far as it gets without what it needs."""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory, model_folder, question_files) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    fill_shelf(folder, model_folder, question_files, re.findall(r"Qwen/[\w.-]+", "".join(ENGLISH.values())))
    shutil.copy(ROOT / "tests" / "rewards" / "answers.jsonl", folder / "completions.jsonl")
    return folder


@pytest.fixture
def folder(tmp_path, shelf, monkeypatch) -> Path:
    """The working directory, with what commands read of a clone; the demo and trainings are made small."""
    monkeypatch.chdir(tmp_path)
    for name in CLONED:
        shutil.copytree(ROOT / name, name, symlinks=True)
    provide(["", "pictures", "train.parquet", "test.parquet"], shelf)
    drawn = partial(draw_questions, 16, seed=0, multiple_choice=False)
    few = Questions(drawn(split="train"), drawn(split="validation"), drawn(split="test"))
    small = {"steps": 1, "prompts_per_step": 2, "num_generations": 2, "num_samples": 2}
    patches = {
        "demo.demo.run_demo": lambda options, output: run_demo(replace(options, **small), output, few) is not None,
        "demo.write_folder.draw": lambda seed: few,
        "cli.data.convert_rows": lambda *given: convert_rows(*given[:-1], 0),  # by no workers
    }
    patches |= {f"demo.{name}": lambda *given: None for name in NOT_DONE}

    def parse_smaller(groups, name, argv, *more):
        return parse(groups, name, [*argv, *SMALLER[name].split()], *more)

    for name, quick in {**patches, **{f"cli.{name}.parse": parse_smaller for name in SMALLER}}.items():
        monkeypatch.setattr(f"vgr_trl.{name}", quick)
    return tmp_path


def commands_of(block: str, folder: Path) -> list[list[str]]:
    """The words of each command that bash, and the scripts that it starts, would run; a comment is a `remark`."""
    stubs, words = folder / "stubs", folder / "words"
    stubs.mkdir()
    for name in PROGRAMS:
        (stubs / name).write_text(f'#!/bin/sh\nprintf "%s\\037" {name} "$@" >> {words}\necho >> {words}\n')
        (stubs / name).chmod(0o755)
    path = f'if [ "$1" = path ]; then echo {ROOT}/accelerate_configs/"$2".yaml; exit; fi'  # within $(…)
    (stubs / "vgr-trl").write_text((stubs / "vgr-trl").read_text().replace("\n", f"\n{path}\n", 1))
    script = "set -eu\n" + re.sub(r"^# (.*)", r'remark "\1"', block, flags=re.MULTILINE)
    script = script.replace("experiments/check.sh ", "")  # reads what its script prints: see test_scripts.py
    environment = {**os.environ, "PATH": f"{stubs}:{os.defpath}"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split("\037")[:-1] for line in words.read_text(encoding="utf-8").splitlines()]


def provide(words: list[str], shelf: Path) -> None:
    """Put in place what a command reads and none before it has written."""
    for before, word in pairwise(words):
        for name in re.split("[=,]", word):
            is_missing = name not in COMMANDS and before != "--output_dir" and not Path(name).exists()
            if is_missing and (shelf / name).exists():
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if (shelf / name).is_dir() else shutil.copy)(shelf / name, name)
            is_of_a_clone = name.partition("/")[0] in (*CLONED, "tests") and "/" in name
            assert not is_of_a_clone or Path(name).exists() or (ROOT / name).exists(), name


@contextmanager
def hub(shelf: Path) -> Iterator[None]:
    """Folders named like models and data sets on the hub stand for them."""
    links = {Path(folder.name): folder for folder in (shelf / "hub").iterdir()}
    for link, folder in links.items():
        link.symlink_to(folder)
    yield
    for link in links:
        link.unlink()


def call(words: list[str], is_marked: bool) -> int:
    """Run a command in this process and return its status; what is no command of ours is passed over if marked."""
    match words:
        case ["vgr-trl", *flags] | ["python", "-m", "vgr_trl.cli", *flags]:
            return main(flags)
        case ["python", "-m", ("vgr_trl.mtrl" | "vgr_trl.demo.write_folder") as module, *flags]:
            return importlib.import_module(module).main(flags) or 0
        case ["python", script, *_] if script.endswith(".py"):
            sys.argv = words[1:]
            runpy.run_path(script, run_name="__main__")
        case ["accelerate", "launch", *flags]:
            given = launch_command_parser().parse_args(flags)
            program = ["-m"] * bool(given.module) + [given.training_script, *given.training_script_args]
            return call(["python", *program], is_marked)
        case ["make", target]:
            assert target in TARGETS
        case ["pip", "install", *wanted]:
            assert set(wanted) <= {".", "torch", "torchvision", *(f".[{extra}]" for extra in EXTRAS)}
        case _:
            assert is_marked, f"nobody runs {words}"
    return 0


@pytest.mark.parametrize("block", BASH.values(), ids=BASH)
def test_commands(block, folder, shelf, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vgr-trl"])
    monkeypatch.setenv("VGR_TRL_LAUNCHED", "1")  # mtrl starts no processes
    needs = None
    for words in commands_of(block, folder):
        if words[0] == "remark":
            needs = words[1] if words[1].startswith("needs") else None
            assert needs is None or NEEDS.fullmatch(needs), needs
            continue
        provide(words, shelf)
        with monkeypatch.context() as patch, hub(shelf) if needs else nullcontext():
            if needs:
                patch.setattr("vgr_trl.cli.train.resolve_checkpoint", lambda *given: None)
                for name in ("trainer.DAPOTrainer.train", "cli.data.convert_run"):
                    patch.setattr(f"vgr_trl.{name}", Mock(side_effect=FirstStep))
            try:
                status = call(words, needs is not None)
            except SystemExit as ended:
                status = ended.code
            except FirstStep:
                status = 0
                shutil.rmtree("runs", ignore_errors=True)
        assert not status, f"{words} ended with {status}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", [page for page, text in ENGLISH.items() if "```python" in text])
def test_programs(page, folder, shelf, model_folder, vision_trainer, monkeypatch):
    small = OPTIONS | {"max_steps": 1}
    monkeypatch.setattr("vgr_trl.DAPOConfig", lambda *given, **more: DAPOConfig(*given, **more | small))
    names = dict.fromkeys(("my_reward", "rewards"), letters_reward) | {"model": str(model_folder)}
    names |= {"trainer": vision_trainer(max_steps=1), "rows": vision_trainer.rows}
    if "runs/demo" in ENGLISH[page]:
        assert main(["demo"]) == 0
    for text in (text for language, text in BLOCK.findall(ENGLISH[page]) if language == "python"):
        program = compile(re.sub(r"^return ", "", text, flags=re.MULTILINE), page, "exec")
        if page not in TESTED_ELSEWHERE:
            with hub(shelf):
                exec(program, names)
