"""The process in which Ray Tune runs a study's stacks on the machines of a cluster.

Only this module imports Ray. The process reads stacks from its standard input, and writes the records of each stack, or
why the stack is lost, to its standard output. Each message is one line of JSON. To start a trial of Tune takes seconds.
So a trial of Tune is a place, which runs one stack after another as long as the study lasts. Stacks reach a place
through a mailbox, and a place reports by the results of its trial of Tune. The process ends, with Ray, when the driver
closes the pipe or has died. Tune restores nothing: the ledger is the only memory.
"""

import asyncio
import contextlib
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

from deltalab.study.running.weights_at_url import make_worker
from deltalab.study.workers.jobs import Lost, record_to_json, stack_from_json
from deltalab.study.workers.worker import share

REPORTS = 2.0
"""Seconds between two reports of the cluster's machines."""

LOOKS = 1.0
"""Seconds between two results of a place. A result tells the step that the place's stack has reached."""

STILL = 60.0
"""Seconds without a result of a place after which its process is ended, if the process is stopped, as by SIGSTOP."""

ENDS = 10.0
"""Seconds that Ray has to shut down, after which this process ends anyway."""

IDLE = {"step": -1}
"""The result that a place without a stack reports. Tune wants the metric `step` in each result."""


class Mailbox:
    """Holds stacks on their way to places, as an actor of Ray."""

    def __init__(self) -> None:
        """Begins empty."""
        self._boxes: dict[str, asyncio.Queue[str]] = defaultdict(asyncio.Queue)

    async def put(self, name: str, stack: str) -> None:
        """Puts a stack, as JSON, into a place's box."""
        self._boxes[name].put_nowait(stack)

    async def take(self, name: str) -> str | None:
        """Waits for the next stack of a place; None if no stack comes within `LOOKS` seconds."""
        try:
            return await asyncio.wait_for(self._boxes[name].get(), LOOKS)
        except TimeoutError:
            return None


class Place(tune.Trainable):
    """Executes stacks, one at a time, on a machine that Ray has chosen.

    While a stack runs, a result of Tune has the step of the last evaluation. Once the stack has ended, a result has its
    records, or why the stack is lost.
    """

    def setup(self, config: dict[str, Any], study: dict[str, Any], mailbox: Any) -> None:  # type: ignore[override]
        """Makes the worker.

        Args:
            config: What Tune's searcher suggests, which is nothing.
            study: The second message of the driver: resources, folders and places.
            mailbox: The actor that brings stacks.
        """
        memory = study["memory"]
        if memory is None:
            # Divide this machine's memory by the places that can run on it; machines may differ in their places.
            machine = _machines()[ray.get_runtime_context().get_node_id()]
            fit = machine["CPU"] / study["cpu"]
            fit = min(fit, machine["GPU"] / study["gpu"]) if study["gpu"] else fit
            memory = share(max(1, min(study["places"], math.floor(fit))))
        # Tune has changed the folder. A study may name a corpus by a path relative to the driver's folder, which
        # another machine need not have.
        os.chdir(study["folder"] if Path(study["folder"]).is_dir() else os.environ.get("TUNE_ORIG_WORKING_DIR", "/"))
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
        runs = study["runs"] if "://" in study["runs"] else Path(study["runs"])
        self._worker = make_worker(runs, threads=study["threads"], memory=memory)
        self._here = {"node": ray.get_runtime_context().get_node_id(), "process": os.getpid()}
        self._mailbox, self._begun, self._runs = mailbox, False, False
        self._step, self._ended = 0, threading.Event()

    def step(self) -> dict[str, Any]:
        """Takes a stack if the place has none. Reports after `LOOKS` seconds, or once the stack has ended."""
        if not self._begun:  # The first result reports at once that the place has begun.
            self._begun = True
            return IDLE | self._here
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
        # Tune flattens mappings, so the result is a text.
        return {"step": self._step, "result": json.dumps({**self._result, "device": self._worker.device})}

    def cleanup(self) -> None:
        """Ends the worker."""
        self._worker.close()

    def _execute(self, stack: str) -> None:
        """Executes a stack, in a thread."""
        try:
            records = self._worker.execute(stack_from_json(stack), self._watch)
            self._result: dict[str, Any] = {"records": [record_to_json(record) for record in records]}
        except Lost as lost:
            self._result = {"lost": str(lost), "of": lost.of, "at": lost.at}
        except Exception as error:
            self._result = {"lost": _line(error), "of": "infrastructure"}
        self._ended.set()

    def _watch(self, step: int) -> None:
        self._step = step


class Pipe(Searcher):
    """Passes stacks from the driver to places, and results back. It is a searcher so that Tune keeps `places` places.

    Attributes:
        why: Why Ray lost a trial of Tune, by the trial's id.
    """

    def __init__(self, places: int, mailbox: Any) -> None:
        """Begins with no place.

        Args:
            places: How many places to keep.
            mailbox: The actor that brings stacks to places.
        """
        super().__init__(metric="step", mode="max")
        self.why: dict[str, str] = {}
        self._mailbox, self._lock = mailbox, threading.Lock()
        self._down = list(range(places))
        self._place: dict[str, int] = {}
        self._trial: dict[int, str] = {}
        self._busy: set[int] = set()
        self._process: dict[int, tuple[str, int]] = {}
        self._silent: dict[int, int] = {}

    def send(self, place: int, stack: str) -> None:
        """Gives a place its next stack."""
        with self._lock:
            trial = self._trial.get(place)
            if trial is None:  # The place ended while the stack was on its way.
                _say(place=place, lost="Ray lost the worker", of="infrastructure")
                return
            self._busy.add(place)
        ray.get(self._mailbox.put.remote(trial, stack))

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Lets a new trial of Tune be a place that is down. Returns None if no place is down."""
        if not self._down:
            return None
        self._place[trial_id] = self._down.pop()
        return {}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tells the driver that a place is free, at which step its stack is, or what became of the stack."""
        place = self._place[trial_id]
        with self._lock:
            self._silent[place] = 0
            if "node" in result:
                self._process[place] = result["node"], result["process"]
            if "result" in result:
                self._busy.discard(place)
                _say(place=place, **json.loads(result["result"]))
                _say(free=place)
            elif place not in self._trial:
                self._trial[place] = trial_id
                _say(free=place)
            elif result["step"] >= 0:
                _say(place=place, step=result["step"], device=result["device"])

    def end_stopped(self) -> None:
        """Ends the processes of places that are stopped, so that Tune loses them. Is called every `REPORTS` seconds.

        Calls are counted, and not seconds, in which this process may have stood still, too. A place tells of itself
        every `LOOKS` seconds however long a step takes, and one that is late but not stopped is left alone.
        """
        with self._lock:
            for place in self._trial:
                self._silent[place] += 1
            silent = [place for place in self._trial if self._silent[place] * REPORTS > STILL]
            self._silent |= dict.fromkeys(silent, 0)  # One look at a process is enough for the next while.
            processes = [self._process[place] for place in silent]
        for node, process in processes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(_end_if_stopped).options(num_cpus=0, scheduling_strategy=there).remote(process)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells the driver that Ray lost a place, and the place's stack if it ran one."""
        place, why = self._place.pop(trial_id), self.why.pop(trial_id, "Ray lost the worker")
        with self._lock:
            begun = self._trial.pop(place, None) is not None
            if place in self._busy:
                _say(place=place, lost=why, of="infrastructure")
            _say(down=place, why=None if begun else why)
            self._busy.discard(place)
            self._down.append(place)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles nothing: Tune pickles its searcher in order to restore it later, which a study never does."""
        return {}

    def __deepcopy__(self, memo: object) -> "Pipe":
        """Returns the pipe itself."""
        return self

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the ledger is the only memory."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: the ledger is the only memory."""


class Reasons(FIFOScheduler):
    """Runs trials in Tune's plain order, and tells the pipe why a trial was lost, since Tune tells no searcher why."""

    def __init__(self, pipe: Pipe) -> None:
        """Keeps the pipe."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._pipe = pipe

    def on_trial_error(self, tune_controller: object, trial: Any) -> None:
        """Reads why a trial was lost from the error file that Tune has written."""
        text = Path(trial.error_file).read_text()
        self._pipe.why[trial.trial_id] = _words(text.partition("\n")[2])  # The first line has the number and the date.


def main() -> None:
    """Runs stacks that the driver sends on standard input, and answers on standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)  # Ray and its libraries print to standard output.
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
    study = json.loads(line)
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        pipe = Pipe(study["places"], mailbox)
        for serve in (lambda: _listen(pipe), lambda: _report(pipe)):
            threading.Thread(target=serve, daemon=True).start()
        _tuner(study, pipe, mailbox, first["folder"]).fit()
        _gone(RuntimeError("Ray Tune has ended"))
    except Exception as error:
        _gone(error)


def _join(address: str | None, folder: str) -> None:
    """Joins a cluster, or starts a Ray on this machine."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        # Without "local" Ray joins whatever cluster it finds on this machine.
        options |= {"address": "local", "include_dashboard": False, "_temp_dir": folder}
    else:
        options |= {"address": address}
    ray.init(**options)


def _tuner(study: dict[str, Any], pipe: Pipe, mailbox: Any, folder: str) -> tune.Tuner:
    """Makes a Tuner that keeps as many places running as a study has."""
    resources = {"cpu": study["cpu"], "gpu": study["gpu"]}
    if study["memory"] is not None:
        resources["memory"] = study["memory"]
    return tune.Tuner(
        tune.with_resources(tune.with_parameters(Place, study=study, mailbox=mailbox), resources),
        tune_config=tune.TuneConfig(
            search_alg=pipe,
            scheduler=Reasons(pipe),
            num_samples=-1,
            max_concurrent_trials=study["places"],
        ),
        run_config=tune.RunConfig(
            name="study",
            storage_path=f"{folder}/tune",
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # The worker writes the checkpoints.
        ),
    )


def _listen(pipe: Pipe) -> None:
    """Passes the driver's stacks on to places, in a thread."""
    for line in sys.stdin:
        message = json.loads(line)
        try:
            pipe.send(message["place"], message["stack"])
        except Exception as error:
            _gone(error)
    _end()


def _end() -> NoReturn:
    """Ends Ray and this process, once the driver has closed the pipe."""
    threading.Timer(ENDS, os._exit, [1]).start()
    ray.shutdown()
    os._exit(0)


def _report(pipe: Pipe) -> None:
    """Reports the machines of the cluster, and ends what is stopped there, in a thread."""
    while True:
        time.sleep(REPORTS)
        try:
            _say(machines=list(_machines().values()))
            pipe.end_stopped()
        except Exception as error:
            _gone(error)


def _end_if_stopped(process: int) -> None:
    """Ends a process of this machine if it is stopped."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            os.kill(process, signal.SIGKILL)


def _machines() -> dict[str, dict[str, float]]:
    """Returns CPU, GPU and memory of each living machine of the cluster, by the machine's id."""
    return {
        node["NodeID"]: {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU", "memory")}
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }


_out = 1
_lock = threading.Lock()


def _say(**message: Any) -> None:
    """Sends the driver a message."""
    data = json.dumps(message).encode() + b"\n"
    with _lock:
        while data:
            data = data[os.write(_out, data) :]


def _gone(error: Exception) -> None:
    """Tells the driver why this process ends, and ends it."""
    _say(gone=_line(error))
    os._exit(1)


def _line(error: Exception) -> str:
    """Writes an error in one line."""
    return f"{type(error).__name__}: {_words(str(error))}"


def _words(text: str) -> str:
    """Writes an error text of Ray in one line, without the identifiers of actors and processes."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("\t")]
    if lines and "ray::" in lines[0]:
        lines = lines[-1:]  # The text is a traceback.
    return " ".join(" ".join(lines).split())[:400]
