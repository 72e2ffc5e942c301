"""Starts children that train within milliseconds, by forks of a process that has imported torch and deltalab.

A fresh process would take seconds for these imports. A fork of the driver would inherit its threads, locks and CUDA
context, with which torch does not work. The server is a fresh interpreter with one thread, which never computes. The
fork server of `multiprocessing` would import the user's main module a second time.

Nothing outlives the driver, even after kill -9: the server ends when the driver's socket closes, and Linux kills the
children with the server.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

_START = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from deltalab.study.workers.fork_server import serve; serve({})"
)

DESCRIPTORS = 4
"""How many descriptors a request has: the child's connection, output and pulse, and the pipe that tells its end."""


def search_path() -> list[str]:
    """This process's `sys.path`, for a process in another folder."""
    return [str(Path(folder).absolute()) for folder in sys.path]


class ForkServer:
    """The driver's end of a server. `fork_server()` is the server of this process."""

    def __init__(self) -> None:
        """Starts the server."""
        self._socket, server_socket = socket.socketpair()
        with server_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(server_socket.fileno()), json.dumps(search_path())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A process that has asked the driver of CUDA for its GPUs can fork no children that use them.
                env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                cwd="/",  # A folder /plugins belongs to no study.
                pass_fds=[server_socket.fileno()],
                process_group=0,  # Ctrl-C on a terminal is for the driver, which ends the server.
            )

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process.poll() is None

    def fork(self, descriptors: list[int]) -> None:
        """Asks for a child.

        Args:
            descriptors: What the child is given, as many as `DESCRIPTORS`.

        Raises:
            OSError: The server has died.
        """
        assert len(descriptors) == DESCRIPTORS
        try:
            socket.send_fds(self._socket, [b"+"], descriptors)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the server, and with it the children."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


_servers: dict[int, ForkServer] = {}
"""The server of this process by the process id, since a process forked from the driver needs another server."""


def fork_server() -> ForkServer:
    """Returns the server of this process, and starts it if there is none."""
    server = _servers.get(os.getpid())
    if server is None or not server.alive:
        if server is not None:
            server.close()
        server = _servers[os.getpid()] = ForkServer()
        _close_at_exit()
    return server


@cache
def _close_at_exit() -> None:
    """Has the server closed when this process exits."""

    def close() -> None:
        if server := _servers.get(os.getpid()):
            server.close()

    atexit.register(close)


def serve(descriptor: int) -> NoReturn:
    """Runs the server until the driver closes its socket: forks a child per request, and tells how each child ended.

    The garbage collector is off so far: what imports make stays, and to look through it takes a fifth of their time.

    Args:
        descriptor: The server's end of the socket.
    """
    from deltalab.study.workers.child import preload

    preload()
    gc.freeze()  # The garbage collector would copy the pages that all children share.
    gc.enable()
    control = socket.socket(fileno=descriptor)
    ended, wake = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    waits: list[Any] = [control, ended]
    while True:
        ready, _, _ = select.select(waits, [], [])
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 512)
            _reap(children)
        if control in ready:
            asked, descriptors = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                asked, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
            if not asked:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            *of_child, told = descriptors
            pid = os.fork()
            if pid == 0:
                control.close()
                for other in (ended, wake, told, *children.values()):
                    os.close(other)
                _become_child(of_child)
            for other in of_child:
                os.close(other)
            children[pid] = told
            _tell(told, f"{pid}\n")


def _reap(children: dict[int, int]) -> None:
    """Tells the driver, for each child that has ended, the exit code, or minus the number of the signal."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        told = children.pop(pid)
        _tell(told, f"{os.waitstatus_to_exitcode(status)}\n")
        os.close(told)


def _tell(descriptor: int, line: str) -> None:
    """Writes a line for the driver."""
    with contextlib.suppress(BrokenPipeError):  # The driver no longer wants to know.
        os.write(descriptor, line.encode())


def _become_child(descriptors: list[int]) -> NoReturn:
    """Runs the child in the forked process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setpgid(0, 0)  # A process that a rule starts is killed with the child.
        _die_with_parent()
        from deltalab.study.workers.child import main

        main(*descriptors)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, and before others if the machine is out of memory."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):
        set_death_signal, parent = 1, os.getppid()
        prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(1)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
