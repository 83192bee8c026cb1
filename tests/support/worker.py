"""One process of `results_of`: calls the function that the file names, and leaves what it returns."""

import os
import pickle
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    file, name, arguments = pickle.loads((folder / "call").read_bytes())
    sys.path[0] = str(Path(file).parent)
    found = getattr(import_module(Path(file).stem), name)(*arguments)
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(found))
