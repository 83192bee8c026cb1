"""The port at which the processes of a test meet is given to nobody else before they are there."""

import socket
import subprocess

import pytest
from support import launching
from torch.distributed import TCPStore


def test_a_held_port_is_refused_to_others_and_taken_by_who_is_told_its_number(port):
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.set("key", "found")
    assert TCPStore("127.0.0.1", port).get("key") == b"found"


def test_the_port_of_a_launch_is_held_until_its_processes_are_there(tmp_path, monkeypatch):
    """Another test that asks for a port of its own meanwhile."""
    ports, start = [], subprocess.Popen

    def late(command, env, **more):
        ports.append(int(env["MASTER_PORT"]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", ports[-1]))
        return start(command, env=env, **more)

    monkeypatch.setattr(launching.subprocess, "Popen", late)
    (tmp_path / "empty.py").touch()
    launching.launch(tmp_path / "empty.py", processes=2)
    assert len(ports) == 2
