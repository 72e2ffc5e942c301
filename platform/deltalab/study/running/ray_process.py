"""Ray's process: has Ray Tune run a study's stacks on the machines of a cluster.

Only this module imports Ray. It reads stacks from its standard input and writes what became of them to its standard
output, one line of JSON a message. A trial of Tune's is a place, which runs one stack after another for as long as the
study lasts: to start its process takes seconds. Stacks reach a place through a mailbox, and its results are those of
Tune's trial. It ends, with Ray, when the driver closes the pipe, or has died. Tune restores nothing: the ledger is the
only memory.
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deltalab.study.running.weights_at_url import worker
from deltalab.study.workers.jobs import Lost, stack_from_json, to_json
from deltalab.study.workers.worker import share

REPORTS = 2.0
"""Seconds between two reports of the cluster's machines."""

LOOKS = 1.0
"""Seconds between two looks at a stack's step."""

ENDS = 10.0
"""Seconds for Ray to shut down."""

IDLE = {"step": -1}
"""The result of a place without a stack: Tune wants its metric, `step`, in each."""


class Mailbox:
    """Stacks on their way to places. An actor of Ray's."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Queue[str]] = defaultdict(asyncio.Queue)

    async def put(self, name: str, stack: str) -> None:
        self._boxes[name].put_nowait(stack)

    async def take(self, name: str) -> str | None:
        """The next stack for a place; None where there is none within `LOOKS` seconds."""
        try:
            return await asyncio.wait_for(self._boxes[name].get(), LOOKS)
        except TimeoutError:
            return None


class Place(tune.Trainable):
    """Executes stacks, one at a time, on a machine that Ray has chosen.

    A result of Tune's has the step of the last evaluation while a stack runs, and the records, or why it is lost,
    once it has ended.
    """

    def setup(self, config: dict[str, Any], given: dict[str, Any], mailbox: Any) -> None:  # type: ignore[override]
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
        self._mailbox, self._begun, self._runs = mailbox, False, False
        self._step, self._ended = 0, threading.Event()

    def step(self) -> dict[str, Any]:
        if not self._begun:  # says at once that the place is there
            self._begun = True
            return IDLE
        if not self._runs:
            stack = ray.get(self._mailbox.take.remote(self.trial_id))
            if stack is None:
                return IDLE
            self._step, self._runs = 0, True
            self._ended.clear()
            threading.Thread(target=self._execute, args=(stack,), daemon=True).start()
        if not self._ended.wait(LOOKS):
            return {"step": self._step, "device": self._worker.device}
        self._runs = False
        # Tune flattens mappings.
        return {"step": self._step, "result": json.dumps({**self._result, "device": self._worker.device})}

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
    """Has Tune keep `places` places, and gives them the driver's stacks, and the driver their results."""

    def __init__(self, places: int, mailbox: Any) -> None:
        super().__init__(metric="step", mode="max")
        self.why: dict[str, str] = {}
        self._mailbox, self._lock = mailbox, threading.Lock()
        self._down = list(range(places))  # places without a trial
        self._place: dict[str, int] = {}  # of each trial
        self._trial: dict[int, str] = {}  # of each place that has begun
        self._busy: set[int] = set()

    def send(self, place: int, stack: str) -> None:
        """Gives a place its next stack."""
        with self._lock:
            trial = self._trial.get(place)
            if trial is None:  # it ended while the stack was on its way
                _say(place=place, lost="Ray lost the worker", of="infrastructure")
                return
            self._busy.add(place)
        ray.get(self._mailbox.put.remote(trial, stack))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if not self._down:
            return None
        self._place[trial_id] = self._down.pop()
        return {}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        place = self._place[trial_id]
        with self._lock:
            if "result" in result:
                self._busy.discard(place)
                _say(place=place, **json.loads(result["result"]))
                _say(free=place)
            elif place not in self._trial:
                self._trial[place] = trial_id
                _say(free=place)
            elif result["step"] >= 0:
                _say(place=place, step=result["step"], device=result["device"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        place, why = self._place.pop(trial_id), self.why.pop(trial_id, "Ray lost the worker")
        with self._lock:
            begun = self._trial.pop(place, None) is not None
            if place in self._busy:
                _say(place=place, lost=why, of="infrastructure")
            _say(down=place, why=None if begun else why)
            self._busy.discard(place)
            self._down.append(place)

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
    line = sys.stdin.readline()
    if not line:
        _end()
    given = json.loads(line)
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        pipe = Pipe(given["places"], mailbox)
        for serve in (lambda: _listen(pipe), _report):
            threading.Thread(target=serve, daemon=True).start()
        _tuner(given, pipe, mailbox, first["folder"]).fit()
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


def _tuner(given: dict[str, Any], pipe: Pipe, mailbox: Any, folder: str) -> tune.Tuner:
    resources = {"cpu": given["cpu"], "gpu": given["gpu"]}
    if given["memory"] is not None:
        resources["memory"] = given["memory"]
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(Place, given=given, mailbox=mailbox), resources),
        tune_config=tune.TuneConfig(
            search_alg=pipe,
            scheduler=Reasons(pipe),
            num_samples=-1,
            max_concurrent_trials=given["places"],
        ),
        run_config=tune.RunConfig(
            name="study",
            storage_path=f"{folder}/tune",
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the worker has checkpoints of its own
        ),
    )


def _listen(pipe: Pipe) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        try:
            pipe.send(message["place"], message["stack"])
        except Exception as error:
            _gone(error)
    _end()


def _end() -> NoReturn:
    """Ends Ray and this process: the driver has closed the pipe."""
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
