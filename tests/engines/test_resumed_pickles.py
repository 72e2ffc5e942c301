"""An engine goes on from a checkpoint whose pickles ask for data alone; any other folder is to be trusted first."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from deltalab import trust
from deltalab.engines.resumed_pickles import require_harmless
from deltalab.errors import InputError


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


class Stateful:
    """A part of a distributed checkpoint whose state is not a tensor."""

    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a checkpoint that both engines write, with what they hold."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(trust, "_named", [])
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    folder.mkdir(parents=True)
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, folder / "rng_state.pth")
    distributed(folder / "optimizer_0", {"step": 4, "lrs": [0.1]})
    return folder


def distributed(folder: Path, state: object) -> None:
    writer = FileSystemWriter(folder)
    save({"weight": torch.ones(2), "train_state": Stateful(state)}, storage_writer=writer, no_dist=True)


def test_what_engines_write_is_data(checkpoint: Path) -> None:
    require_harmless(checkpoint)


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state_1.pth", "random_states_0.pkl", "scaler.bin"]
)
@pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
def test_a_file_that_asks_for_code_is_named_and_not_run(checkpoint: Path, tmp_path: Path, name: str, form: str) -> None:
    ran = tmp_path / "ran"
    if form == "pickle":
        (checkpoint / name).write_bytes(pickle.dumps(Hostile(ran)))
    else:
        torch.save(Hostile(ran), checkpoint / name, _use_new_zipfile_serialization=form == "torch")
    with pytest.raises(InputError) as refused:
        require_harmless(checkpoint)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"{checkpoint / name}: ")
    assert ("posix.system" in line) == (form == "torch")
    assert f"`deltalab trust {tmp_path / 'run'}`" in line
    assert not ran.exists()
    trust.record(tmp_path / "run")
    require_harmless(checkpoint)


def test_a_state_in_a_distributed_checkpoint_that_asks_for_code_is_named_and_not_run(
    checkpoint: Path, tmp_path: Path
) -> None:
    distributed(checkpoint, Hostile(tmp_path / "ran"))
    with pytest.raises(InputError, match=r"\.metadata: train_state\.state asks for posix\.system, which no data needs"):
        require_harmless(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_asks_for_code_and_a_link_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "optimizer_0" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(
        InputError, match=r"optimizer_0/\.metadata: is no index of a checkpoint: it asks for posix\.system"
    ):
        require_harmless(checkpoint)
    (checkpoint / "optimizer_0" / ".metadata").unlink()
    (checkpoint / "scheduler.pt").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"scheduler\.pt: is no plain file"):
        require_harmless(checkpoint)
    assert not (tmp_path / "ran").exists()
