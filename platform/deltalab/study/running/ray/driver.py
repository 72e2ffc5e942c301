"""Runs a study's stacks on Ray Tune: on this machine, or on a cluster.

Ray lives in a separate process (`process`), which gets stacks through a pipe and sends back records. Ray ends the
process that uses it if the head of its cluster is gone, may wait for minutes if nobody answers, and handles signals in
its own way. In a separate process, Ray does none of this to the driver. A stack that Ray loses is `Lost` through the
infrastructure, and the schedule runs it again.
"""

import contextlib
import json
import logging
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltalab.errors import InputError
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.ray.folders import ray_folder
from deltalab.study.running.schedule import StackSource
from deltalab.study.specs.sections.resources import Resources
from deltalab.study.workers.fork_server import search_path
from deltalab.study.workers.jobs import Job, Lost, record_from_json, stack_to_json

_log = logging.getLogger("deltalab")

ANSWERS = 5.0
"""Seconds that the head of a cluster has to accept a connection."""

CONNECTS = 14.0
"""Seconds that Ray has to join a cluster. Together with `ANSWERS`, a wrong address is refused within 20 s."""

STARTS = 300.0
"""Seconds that a local Ray has to start, and that any Ray has to be imported, on a busy machine."""

STARTED = 3
"""How often a local Ray is started at most. Ray gives up after 30 s, and a busy machine may need longer."""

SILENT = 90.0
"""The most seconds without a word from Ray's process, which reports its machines every 2 s. Ray itself waits 60 s for a
lost head."""

PATIENCE = 300.0
"""Seconds for which a cluster that ran the study may be gone, or too small for any stack."""

WAIT = 0.1
"""The most seconds to wait for a message before the schedule is asked for a stack again."""

_TUNE = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",
}
"""Variables that make Ray Tune print nothing, change no folder, and write no results and no state, since the ledger has
them. They also keep a call after Ray's end from starting a second Ray in /tmp/ray, which nobody would end."""

_PLACES = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from deltalab.study.running.ray.process import main; main()"
)


class _RayGone(Exception):
    """Ray's process or the cluster has ended. The message is one line."""


def run_all(
    schedule: StackSource, runs: str | Path, progress: ProgressBars, *, workers: int | None, address: str | None
) -> None:
    """Runs every stack that the schedule gives, until the schedule has ended.

    Args:
        schedule: The stacks.
        runs: The folder of weights and checkpoints, or its URL.
        progress: Shows the stacks.
        workers: Stacks at a time; None for as many as fit.
        address: The address of a cluster; None starts a Ray on this machine.

    Raises:
        InputError: The address does not answer, the cluster lacks the resources, or the cluster stays away. Errors of
            the ledger pass through.
    """
    study = _RayStudy(schedule, runs, progress, workers, address)
    while True:
        try:
            with ray_folder() as folder, _started(address, folder) as ray:
                study.run(ray)
                return
        except _RayGone as gone:
            study.wait(gone)


class _RayStudy:
    """Runs a study on Ray. It stays when a Ray ends, so that the next Ray goes on with the study."""

    def __init__(
        self, schedule: StackSource, runs: str | Path, progress: ProgressBars, workers: int | None, address: str | None
    ) -> None:
        self.schedule, self.runs, self.progress, self.workers, self.address = schedule, runs, progress, workers, address
        self._out: dict[int, list[Job]] = {}
        self._well: float | None = None  # When Ray last had a place for a stack.
        self._warned = False
        self._starts = 0

    def run(self, ray: "_RayProcess") -> None:
        """Gives stacks to Ray until the schedule has ended. Raises `_RayGone`."""
        schedule, wanted = self.schedule, self.schedule.plan.spec.resources
        machines: list[dict[str, float]] = ray.machines
        fit = sum(_places(wanted, machine) for machine in machines)
        if not fit and self._well is None:
            raise InputError(f"{schedule.plan.study_file}: {_too_small(wanted, machines)}")
        if idle := wanted.idle(sum(machine["GPU"] for machine in machines)):
            _log.warning(idle)
        places = min(fit, self.workers or fit)
        self.progress.activity.places = places
        ray.send(
            {
                "places": places,
                "cpu": wanted.cpu,
                "gpu": wanted.gpu,
                "memory": wanted.bytes,
                "threads": wanted.threads,
                "runs": str(self.runs),
                "folder": os.getcwd(),
            }
        )
        free: list[int] = []
        while True:
            while free and (stack := schedule.next(places)):
                place = free.pop()
                self._out[place] = stack
                self.progress.started(stack)
                ray.send({"place": place, "stack": stack_to_json(stack)})
            if not self._out:
                if not free:
                    schedule.refresh()
                if schedule.ended:
                    return
            message = ray.receive(WAIT)
            if "machines" in message:
                fit = sum(_places(wanted, machine) for machine in message["machines"])
                if fit or free or self._out:
                    self._fits()
                elif self._well is not None and time.monotonic() - self._well > PATIENCE:
                    raise InputError(f"{_too_small(wanted, message['machines'])}: the same command goes on from here")
            elif "step" in message and message["place"] in self._out:
                self.progress.advanced(self._out[message["place"]], message["step"], message["device"])
            elif "free" in message:
                self._fits()
                free.append(message["free"])
            elif "down" in message:
                free = [place for place in free if place != message["down"]]
                if message["why"] is not None and (stack := schedule.next(places)):
                    # The place did not begin. A stack counts as lost, so that a study whose places never begin ends.
                    schedule.unfinished(stack, Lost(message["why"], "infrastructure"))
            elif "records" in message:
                stack = self._out.pop(message["place"])
                for record in map(record_from_json, message["records"]):
                    schedule.finished(record)
                self.progress.finished(stack, message["device"])
            elif "lost" in message:
                self._lose(message["place"], Lost(message["lost"], message["of"], message.get("at")))

    def wait(self, gone: _RayGone) -> None:
        """Gives the stacks that Ray had back to the schedule, and waits a little for Ray to come back.

        Raises `InputError` if Ray was never there, or has been gone for too long.
        """
        for place in list(self._out):
            self._lose(place, Lost(str(gone), "infrastructure"))
        name = "Ray" if self.address is None else f"--address {self.address}"
        if self._well is None:
            self._starts += 1
            if self.address is None and self._starts < STARTED:
                return
            raise InputError(f"{name}: {gone}") from None
        if time.monotonic() - self._well > PATIENCE:
            raise InputError(f"{name}: {gone}, for {PATIENCE:.0f} s: the same command goes on from here") from None
        if not self._warned:
            _log.warning("%s: %s; trying again for %.0f s", name, gone, PATIENCE)
        self._warned = True
        time.sleep(min(5.0, 1 + (time.monotonic() - self._well) / 10))

    def _fits(self) -> None:
        """Notes that Ray has a place for a stack now. From the latest note, `wait` measures how long Ray is gone."""
        self._well, self._warned = time.monotonic(), False

    def _lose(self, place: int, lost: Lost) -> None:
        """Gives a place's stack back to the schedule."""
        stack = self._out.pop(place)
        self.schedule.unfinished(stack, lost)
        self.progress.finished(stack)


def _places(wanted: Resources, machine: dict[str, float]) -> int:
    """Returns how many stacks can run at a time on a machine."""
    fit = wanted.places(machine["CPU"], machine["GPU"])
    return fit if wanted.bytes is None else min(fit, int(machine["memory"] // wanted.bytes))


def _too_small(wanted: Resources, machines: list[dict[str, float]]) -> str:
    """Says that no machine has room for a stack."""
    memory = f", {wanted.memory:g} GiB" if wanted.memory else ""
    has = " or ".join(
        sorted(
            {
                f"{machine['CPU']:g} CPU, {machine['GPU']:g} GPU, {machine['memory'] / 2**30:.1f} GiB"
                for machine in machines
            }
        )
    )
    return (
        f"resources: a stack wants {wanted.cpu:g} CPU and {wanted.gpu:g} GPU{memory} of one machine; "
        f"Ray's machines have {has or 'nothing'}"
    )


class _RayProcess:
    """The driver's side of Ray's process. A message to or from it is a mapping, sent as one line of JSON.

    Attributes:
        machines: CPU, GPU and bytes of memory of each machine of the cluster, at the time of joining it.
    """

    def __init__(self, address: str | None, folder: Path) -> None:
        # PYTHONPATH may name folders from the working folder, which is another one there.
        environment = {**os.environ, **_TUNE, "PYTHONPATH": os.pathsep.join(search_path())}
        if address is None:
            # A local Ray is for this machine and this study alone. It listens on loopback, not on every address as Ray
            # would by default, and no other study knows its token.
            environment |= {
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }
            environment.pop("RAY_AUTH_TOKEN_PATH", None)
        with (folder / "ray.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PLACES, json.dumps(search_path())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd="/",  # Ray's workers import from the folder in which Ray starts.
                process_group=0,  # Ctrl-C on a terminal is for the driver, which ends Ray.
            )
        self._inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.send({"address": address, "folder": str(folder)})
            self._expect("imported", STARTS, "Ray is not imported")
            patience = STARTS if address is None else CONNECTS
            problem = "Ray does not start" if address is None else "no Ray cluster answers"
            self.machines: list[dict[str, float]] = self._expect("machines", patience, problem)
        except BaseException:
            self.close()
            raise

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises `_RayGone` if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def receive(self, patience: float) -> dict[str, Any]:
        """Returns the next message, or an empty one after `patience` seconds. Raises `_RayGone` if Ray has ended."""
        try:
            message = self._inbox.get(timeout=patience)
        except queue.Empty:
            if time.monotonic() - self._heard > SILENT:
                raise _RayGone(f"Ray has not answered for {SILENT:.0f} s") from None
            return {}
        self._heard = time.monotonic()
        if message is None:
            raise self._ended()
        if "gone" in message:
            raise _RayGone(message["gone"])
        return message

    def close(self) -> None:
        """Ends the process and every process that it started on this machine."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CONNECTS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _expect(self, word: str, patience: float, otherwise: str) -> Any:
        """Waits for a message with a key, and returns the key's value; raises `_RayGone` after `patience` seconds."""
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            if word in (message := self.receive(left)):
                return message[word]
        self._process.kill()
        raise _RayGone(f"{otherwise} within {patience:.0f} s")

    def _listen(self) -> None:
        """Reads messages, in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._inbox.put(json.loads(line))
        self._inbox.put(None)

    def _ended(self) -> _RayGone:
        """Says how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _RayGone(f"Ray's process has ended with exit code {self._process.wait(5)}")
        return _RayGone("Ray's process has closed its pipe")


@contextmanager
def _started(address: str | None, folder: Path) -> Iterator[_RayProcess]:
    """Starts Ray's process, and ends the process at the end of the block."""
    if address is not None:
        _knock(address)
    ray = _RayProcess(address, folder)
    try:
        yield ray
    finally:
        ray.close()


def _knock(address: str) -> None:
    """Raises `_RayGone` if no gRPC server listens at the address. Ray itself would try for two minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        if address == "auto":
            return
        raise InputError(f"--address {address}: give HOST:PORT, such as head.example.org:6379, ray://HOST:PORT or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                # gRPC stands on HTTP/2: a client sends a preface and empty SETTINGS, and a server sends its SETTINGS.
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                if connection.recv(9, socket.MSG_WAITALL)[3:4] != b"\x04":
                    raise _RayGone("something else than Ray listens there")
    except TimeoutError:
        raise _RayGone(f"no answer within {ANSWERS:.0f} s") from None
    except (OSError, OverflowError, UnicodeError) as error:
        raise _RayGone(getattr(error, "strerror", None) or str(error)) from None
