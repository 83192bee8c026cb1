"""Files of a checkpoint that would run a program when they are read: they are refused, and nothing runs."""

import ast
import os
import pickle
from pathlib import Path

import pytest
import torch

from vgr_trl.checkpoints import load_shares, save_share
from vgr_trl.utils import ConfigError

SOURCES = Path(__file__).parents[3] / "src"
READ_CODE = {
    "pickle.load",
    "pickle.loads",
    "joblib.load",
    "dill.load",
    "cloudpickle.load",
    "marshal.loads",
    "shelve.open",
}


class Program:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: Path(path).write_bytes(pickle.dumps(value, 2))])
def test_a_share_with_a_program_is_refused(tmp_path, write):
    save_share({"numbers": [1]}, tmp_path, 0, 1, "choice")
    (share,) = tmp_path.iterdir()
    ran = tmp_path / "ran"
    write({"numbers": Program(ran)}, share)
    with pytest.raises(ConfigError, match="A share of the replay buffer in .* cannot be read"):
        load_shares(tmp_path, "choice")
    assert not ran.exists()
    torch.load(share, weights_only=False) if write is torch.save else pickle.loads(share.read_bytes())
    assert ran.exists(), "the program would not have run anyway"


def test_every_load_in_the_sources_takes_values_only():
    loads, bad = 0, []
    for path in sorted(SOURCES.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            name, given = ast.unparse(call.func), {word.arg: ast.unparse(word.value) for word in call.keywords}
            where = f"{path.relative_to(SOURCES)}:{call.lineno}: {name}"
            loads += name == "torch.load"
            if name in READ_CODE or (name == "torch.load" and given.get("weights_only") != "True"):
                bad.append(where)
            if given.get("allow_pickle") == "True" or name == "eval":
                bad.append(where)
    assert not bad
    assert loads >= 2
