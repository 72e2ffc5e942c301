"""The commands `deltalab dashboard` and `deltalab mcp`, which serve until they are ended."""

import ipaddress
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from deltalab import progress
from deltalab.cli.options import AsJson, Db, not_empty, print_result
from deltalab.errors import InputError

SHORTEST_TOKEN = 16
"""The fewest characters of a token that a user wrote."""


def dashboard(
    ctx: typer.Context,
    db: Db = None,
    host: Annotated[
        str, typer.Option("--host", callback=not_empty, help="The address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8501,
    token: Annotated[
        bool | None,
        typer.Option(help="Whether readers are asked for a token; by default if others can reach the address."),
    ] = None,
    browser: bool = True,
    as_json: AsJson = False,
) -> None:
    """Compare studies in the browser, on 127.0.0.1 unless --host names another address."""
    import importlib.util

    from deltalab.store import Store

    with Store.open(db, create=False):
        pass
    spec = importlib.util.find_spec("deltalab_dashboard")
    if spec is None or spec.origin is None:
        raise InputError("the dashboard is not installed")
    file = _token_file() if (token is None and not _is_loopback(host)) or token else None
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": not browser,
        "browser.gatherUsageStats": False,
        "runner.magicEnabled": False,  # otherwise a page shows every string that stands alone in its file
        "theme.light.textColor": "#111111",  # captions take 60% of this color, and Streamlit's own is too pale
        "server.fileWatcherType": "none",  # a reloaded plugin would not be the source that this process hashed
    }
    if host in ("0.0.0.0", "::"):
        options["browser.serverAddress"] = socket.gethostname()  # otherwise Streamlit asks the internet for an address
    flags = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    command = [
        sys.executable,
        "-P",  # A file of the working folder is no module.
        "-m",
        "deltalab_dashboard.serve",
        "run",
        str(Path(spec.origin).parent / "app.py"),
        *flags,
    ]
    # A database's URL may hold a password, and other users can read a process's arguments. So the URL goes through the
    # environment, and Streamlit replaces this process, whose arguments may hold it too.
    environment = {**os.environ, **({"DELTALAB_DB": db} if db else {})}
    environment.pop("DELTALAB_TOKEN_FILE", None)
    if ctx.obj:
        environment["DELTALAB_PLUGINS"] = os.pathsep.join(map(str, ctx.obj))
    if file is not None:
        environment["DELTALAB_TOKEN_FILE"] = str(file)
        progress.note(f"the dashboard asks for the token that {file} holds")
    if as_json:
        name = f"[{host}]" if ":" in host else host
        asked = {} if file is None else {"token_file": file}
        print_result(as_json, "", address=f"http://{name}:{port}", **asked)
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what Streamlit prints
    os.execve(sys.executable, command, environment)


def _is_loopback(host: str) -> bool:
    """Returns whether an address is of this machine alone. Raises `InputError` if it is no address to listen on."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, flags=socket.AI_PASSIVE)}
        for address in found:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as probe:
                probe.bind((address, 0))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"'{host}' is no address of this machine: {reason}", where="--host", key=host) from None
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _token_file() -> Path:
    """Returns the file that holds the user's token for dashboards. The first call makes it, with a token by chance.

    Raises:
        InputError: The file cannot be made or read, others may read it, or its token is too short.
    """
    from deltalab.trust import configuration

    file = configuration() / "dashboard-token"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(f"{secrets.token_urlsafe(32)}\n")
        if file.stat().st_mode & 0o077:
            raise InputError(f"{file}: other users may read it", mend=f"delete it for a new one, or chmod 600 {file}")
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"{file}: no token can be kept there: {error}") from None
    if len(text) < SHORTEST_TOKEN:
        raise InputError(f"{file}: a token has at least {SHORTEST_TOKEN} characters", mend="delete it for a new one")
    return file


def mcp(
    ctx: typer.Context,
    allow: Annotated[
        str, typer.Option("--allow", help="With commas: run, export. Without it, tools read and check, and no more.")
    ] = "",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="The most minutes that a run may take.")] = 60.0,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Serve the platform's commands to a program, by the Model Context Protocol on stdin and stdout.

    Stdout holds the protocol alone. `--json` is for an error that hinders the start.
    """
    from deltalab.mcp.server import serve

    if sys.stdin.isatty():
        progress.note("waits for a client of the Model Context Protocol on stdin; Ctrl-C ends it")
    serve(ctx.obj, db, allow=[name.strip() for name in allow.split(",") if name.strip()], most_minutes=minutes)
