"""Ray's process: has Ray Tune run a study's stacks on the machines of a cluster.

Only this module imports Ray. It reads stacks from its standard input and writes what became of them to its standard
output, one line of JSON a message. Tune's trial is a stack of ours; its searcher is the pipe. It ends, with Ray, when
the driver closes the pipe, or has died. Tune restores nothing: the ledger is the only memory.
"""

import json
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from deltalab.study.job import Lost, stack_from_json, to_json
from deltalab.study.storage import worker
from deltalab.study.worker import share

REPORTS = 2.0
"""Seconds between two reports of the cluster's machines."""

LOOKS = 1.0
"""Seconds between two looks at a stack's step."""

ANSWERS = 0.05
"""Seconds for the driver to give the next stack after one has ended, before Tune turns to the others."""

ENDS = 10.0
"""Seconds for Ray to shut down."""


class Stack(tune.Trainable):
    """Executes a stack on a machine that Ray has chosen, and then another one that needs the same resources.

    A result of Tune's has the step of the last evaluation; the last one has the records, or why the stack is lost.
    """

    def setup(self, config: dict[str, Any], given: dict[str, Any]) -> None:  # type: ignore[override]
        memory = given["memory"]
        if memory is None:
            # As many places as this machine can have: other machines may have fewer than their share.
            machine = _machines()[ray.get_runtime_context().get_node_id()]
            fit = machine["CPU"] / given["cpu"]
            fit = min(fit, machine["GPU"] / given["gpu"]) if given["gpu"] else fit
            memory = share(max(1, min(given["places"], math.floor(fit))))
        # Tune has gone to a folder of its own. A study may name a corpus by a path relative to the driver's folder,
        # which another machine need not have.
        os.chdir(given["folder"] if Path(given["folder"]).is_dir() else os.environ.get("TUNE_ORIG_WORKING_DIR", "/"))
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
        runs = given["runs"] if "://" in given["runs"] else Path(given["runs"])
        self._worker = worker(runs, threads=given["threads"], memory=memory)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._step, self._ended = 0, threading.Event()
        threading.Thread(target=self._execute, args=(new_config["stack"],), daemon=True).start()
        return True

    def step(self) -> dict[str, Any]:
        if self._ended.wait(LOOKS):
            result = {**self._result, "device": self._worker.device}
            return {"step": self._step, "done": True, "result": json.dumps(result)}  # Tune flattens mappings
        return {"step": self._step, "device": self._worker.device}

    def cleanup(self) -> None:
        self._worker.close()

    def _execute(self, stack: str) -> None:
        try:
            records = self._worker.execute(stack_from_json(stack), self._watch)
            self._result: dict[str, Any] = {"records": [to_json(record) for record in records]}
        except Lost as lost:
            self._result = {"lost": str(lost), "of": lost.of}
        except Exception as error:
            self._result = {"lost": _line(error), "of": "infrastructure"}
        self._ended.set()

    def _watch(self, step: int) -> None:
        self._step = step


class Pipe(Searcher):
    """Gives Tune the driver's stacks, and the driver Tune's results."""

    def __init__(self, stacks: "queue.Queue[dict[str, Any]]") -> None:
        super().__init__(metric="step", mode="max")
        self.why: dict[str, str] = {}
        self._stacks, self._places, self._asked = stacks, dict[str, int](), False

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        try:
            message = self._stacks.get(block=self._asked, timeout=ANSWERS)
        except queue.Empty:
            self._asked = False
            return None
        self._places[trial_id] = message["place"]
        return {"stack": message["stack"]}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if "result" not in result and trial_id in self._places:
            _say(place=self._places[trial_id], step=result["step"], device=result["device"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        place = self._places.pop(trial_id, None)
        if place is None:
            return
        lost = {"lost": self.why.pop(trial_id, "Ray lost the worker"), "of": "infrastructure"}
        _say(place=place, **(lost if result is None or "result" not in result else json.loads(result["result"])))
        _say(free=place)
        self._asked = True

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its searcher in order to restore it later, which a study never does.
        return {}

    def __deepcopy__(self, memo: object) -> "Pipe":
        return self

    def save(self, checkpoint_path: str) -> None:
        """The ledger is the only memory."""

    def restore(self, checkpoint_path: str) -> None:
        """The ledger is the only memory."""


class Reasons(FIFOScheduler):
    """Tune's plain order of trials. Tells the pipe why one was lost, which Tune tells no searcher."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pipe = pipe

    def on_trial_error(self, tune_controller: object, trial: Any) -> None:
        text = Path(trial.error_file).read_text()
        self._pipe.why[trial.trial_id] = _words(text.partition("\n")[2])  # the first line has the number and the date


def main() -> None:
    """Serves the driver at the other end of standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)  # Ray and its libraries print
    first = json.loads(sys.stdin.readline())
    _say(imported=True)
    try:
        _join(first["address"], first["folder"])
        _say(machines=list(_machines().values()))
    except Exception as error:
        _gone(error)
    given = json.loads(sys.stdin.readline() or "{}")
    stacks: queue.Queue[dict[str, Any]] = queue.Queue()
    for serve in (lambda: _listen(stacks), _report):
        threading.Thread(target=serve, daemon=True).start()
    try:
        if given:
            for place in range(given["places"]):
                _say(free=place)
            _tuner(given, Pipe(stacks), first["folder"]).fit()
            _gone(RuntimeError("Ray Tune has ended"))
    except Exception as error:
        _gone(error)


def _join(address: str | None, folder: str) -> None:
    given: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        # Without "local" Ray joins whatever cluster it finds on this machine.
        given |= {"address": "local", "include_dashboard": False, "_temp_dir": folder}
    else:
        given |= {"address": address}
    ray.init(**given)


def _tuner(given: dict[str, Any], pipe: Pipe, folder: str) -> tune.Tuner:
    resources = {"cpu": given["cpu"], "gpu": given["gpu"]}
    if given["memory"] is not None:
        resources["memory"] = given["memory"]
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(Stack, given=given), resources),
        tune_config=tune.TuneConfig(
            search_alg=pipe,
            scheduler=Reasons(pipe),
            num_samples=-1,
            reuse_actors=True,
            max_concurrent_trials=given["places"],
        ),
        run_config=tune.RunConfig(
            name="study",
            storage_path=f"{folder}/tune",
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the worker has checkpoints of its own
        ),
    )


def _listen(stacks: "queue.Queue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        stacks.put(json.loads(line))
    # The driver has closed the pipe.
    threading.Timer(ENDS, os._exit, [1]).start()
    ray.shutdown()
    os._exit(0)


def _report() -> None:
    while True:
        time.sleep(REPORTS)
        try:
            _say(machines=list(_machines().values()))
        except Exception as error:
            _gone(error)


def _machines() -> dict[str, dict[str, float]]:
    """What each machine of the cluster has, by its id."""
    return {
        node["NodeID"]: {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU", "memory")}
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


_out = 1
_lock = threading.Lock()


def _say(**message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    with _lock:
        while data:
            data = data[os.write(_out, data) :]


def _gone(error: Exception) -> None:
    """Ends this process, and says why."""
    _say(gone=_line(error))
    os._exit(1)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {_words(str(error))}"


def _words(text: str) -> str:
    """What Ray says, in one line, without the identifiers of actors and processes."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("\t")]
    if lines and "ray::" in lines[0]:
        lines = lines[-1:]  # a traceback
    return " ".join(" ".join(lines).split())[:400]
