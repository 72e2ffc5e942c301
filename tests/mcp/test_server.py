"""The server of the Model Context Protocol, asked by the SDK's own client."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import STUDY

from deltalab.errors import InputError
from deltalab.mcp.processes import MOST_RUNNING, Process, Processes
from deltalab.mcp.server import ALLOWED, server

mcp = pytest.importorskip("mcp", reason="the SDK is not installed: pip install 'deltalab[mcp]'")

READS = {"list", "show", "plan", "report", "compare", "diff", "trace", "poll"}
LONG = STUDY.replace("steps: 4,", "steps: 100000,").replace("name: tiny", "name: long")

Ask = Callable[..., Awaitable[Any]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    (tmp_path / "long.yaml").write_text(LONG)
    return tmp_path


@pytest.fixture
def processes(folder: Path):
    made = Processes()
    yield made
    made.close()


def talk(made: Any, what: Callable[[Any], Awaitable[Any]]) -> Any:
    """Does something with a client of the server, in this process."""

    async def whole() -> Any:
        async with mcp.Client(made) as client:
            return await what(client)

    return asyncio.run(whole())


def error_of(result: Any) -> dict[str, Any]:
    assert result.is_error
    return json.loads(result.content[0].text)["error"]


async def answer(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


def test_a_server_reads_and_checks_unless_more_is_allowed(processes: Processes) -> None:
    async def tools(client: Any) -> dict[str, Any]:
        return {tool.name: tool for tool in (await client.list_tools()).tools}

    plain = talk(server(processes), tools)
    assert plain.keys() == READS | {"check", "cancel"}
    assert {name for name, tool in plain.items() if tool.annotations.read_only_hint} == READS
    assert all(tool.description for tool in plain.values())
    assert talk(server(processes, allow=["run"]), tools).keys() == plain.keys() | {"run"}
    assert talk(server(processes, allow=ALLOWED), tools).keys() == plain.keys() | {"run", "export"}
    with pytest.raises(InputError, match="--allow: unknown tool 'runs'; did you mean 'run'"):
        server(processes, allow=["runs"])


def test_a_tool_that_is_not_allowed_cannot_be_called(processes: Processes) -> None:
    async def run(client: Any) -> Any:
        return await client.call_tool("run", {"study": "study.yaml"})

    error = error_of(talk(server(processes), run))
    assert (error["kind"], error["key"], error["mend"]) == ("unknown", "run", "deltalab mcp --allow run")
    assert not Path("deltalab.db").exists()


def test_wrong_arguments_are_told_before_anything_runs(processes: Processes) -> None:
    async def wrong(client: Any) -> None:
        run = {"study": "study.yaml", "minutes": 5}
        error = error_of(await client.call_tool("run", run))
        assert (error["where"], error["message"]) == ("minutes", "minutes: is at most 2 here, not 5")
        assert error_of(await client.call_tool("poll", {"task": "7"}))["kind"] == "unknown"
        assert error_of(await client.call_tool("list", {"kind": "rules", "text": "x"}))["where"] == "text"
        assert error_of(await client.call_tool("show", {"kind": "rule", "name": "x", "settings": ["a=1"]}))
        error = error_of(await client.call_tool("list", {"kind": "rule"}))
        assert (error["kind"], error["where"], error["key"], error["nearest"]) == ("unknown", "list", "rule", "rules")
        error = error_of(await client.call_tool("list", {"kindd": "rules"}))
        assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "kindd", "kind")
        error = error_of(await client.call_tool("run", {"study": "study.yaml", "workers": 0}))
        assert (error["kind"], error["where"], error["key"]) == ("input", "run", "workers")
        error = error_of(await client.call_tool("plan", {"study": "study.yaml", "settings": "seeds=3"}))
        assert (error["key"], error["message"]) == ("settings", "plan: settings: must be a list")
        error = error_of(await client.call_tool("plan", {}))
        assert (error["where"], error["key"]) == ("plan", "study")
        error = error_of(await client.call_tool("polls", {}))
        assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "polls", "poll")

    talk(server(processes, allow=ALLOWED, most_minutes=2), wrong)
    assert not processes._all


@pytest.mark.slow
def test_a_client_lists_shows_plans_and_is_told_what_is_wrong(processes: Processes) -> None:
    async def read(client: Any) -> None:
        rules = await answer(client, "list", kind="rules")
        assert "comba" in [rule["name"] for rule in rules["result"]]
        card = await answer(client, "show", kind="rule", name="deltanet")
        assert (card["state"], card["result"]["name"]) == ("done", "deltanet")
        plan = await answer(client, "plan", study="study.yaml", settings=["seeds=3"])
        assert plan["result"]["study"] == "tiny"
        error = error_of(await client.call_tool("show", {"kind": "rule", "name": "comb"}))
        assert (error["kind"], error["key"], error["nearest"]) == ("unknown", "comb", "comba")
        error = error_of(await client.call_tool("plan", {"study": "--out=stolen"}))
        assert (error["kind"], error["key"]) == ("unknown", "--out=stolen"), "a word of the client is never an option"
        error = error_of(await client.call_tool("report", {"study": "tiny"}))
        assert "no such database" in error["message"], "a report as Markdown has its errors in JSON"

    talk(server(processes), read)


@pytest.mark.slow
def test_a_study_runs_as_a_task_and_is_reported(processes: Processes) -> None:
    async def run(client: Any) -> None:
        told = await answer(client, "run", study="study.yaml", executor="inline", wait=0)
        assert told["state"] == "running"
        while told["state"] == "running":
            told = await answer(client, "poll", task=told["task"], wait=60)
        assert (told["state"], told["result"]["study"]) == ("done", "tiny")
        assert (told["progress"]["done"], told["progress"]["total"]) == (4, 4)
        assert "| without_d |" in (await answer(client, "report", study="tiny"))["result"]
        report = await answer(client, "report", study="tiny", markdown=False)
        assert report["result"]["state"] == "done"
        against = await answer(client, "compare", study="tiny", against="without_d", markdown=False)
        assert against["result"] != report["result"]
        trials = (await answer(client, "trace", study="tiny"))["result"]
        trace = await answer(client, "trace", study="tiny", trial=trials[0]["key"])
        assert trace["result"]["curves"]
        diff = await answer(client, "diff", left="tiny", right="tiny", arms=["base", "without_d"])
        assert diff["result"]["arms"]
        exported = await answer(client, "export", study="tiny", directory="model", arm="base")
        assert exported["result"]["parameters"] > 0
        assert Path("model/recipe.yaml").is_file()

    talk(server(processes, allow=ALLOWED, most_minutes=3), run)  # fewer than those of a run by default


def steps(process: Process) -> bool:
    """Whether a study has begun to train."""
    return "progress" in process.told()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.2)
    raise AssertionError("it did not come about within two minutes")


@pytest.mark.slow
def test_a_task_is_cancelled_and_a_run_ends_at_its_limit(processes: Processes) -> None:
    async def cancel(client: Any) -> None:
        told = await answer(client, "run", study="long.yaml", executor="inline", wait=0)
        await until(lambda: steps(processes.find(told["task"])))
        told = await answer(client, "cancel", task=told["task"])
        assert (told["state"], told["stopped"]) == ("stopped", "the client cancelled it")
        assert told["error"]["kind"] == "interrupted"
        told = await answer(client, "run", study="long.yaml", executor="inline", minutes=0.2, wait=120)
        assert (told["state"], told["stopped"]) == ("stopped", "it ran 0.2 minutes, its limit")

    talk(server(processes, allow=ALLOWED), cancel)


@pytest.mark.slow
def test_a_command_stops_whose_call_the_client_cancels_and_a_task_whose_poll_it_cancels_does_not(
    processes: Processes,
) -> None:
    async def cancel(client: Any) -> None:
        told = await answer(client, "run", study="long.yaml", executor="inline", wait=0)
        for tool, arguments in (("poll", {"task": told["task"]}), ("check", {"kind": "rule", "name": "comba"})):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.call_tool(tool, {**arguments, "wait": 60}), 1)
        task, call = (process for process in processes._all.values())
        await until(lambda: call.state != "running")
        assert (call.state, call.told()["stopped"]) == ("stopped", "the client cancelled the call")
        assert (task.state, task.stopped) == ("running", None)

    talk(server(processes, allow=ALLOWED), cancel)


@pytest.mark.slow
def test_tasks_stop_when_the_client_hangs_up(folder: Path) -> None:
    """Over stdin and stdout, as a client starts the server: nothing but the protocol is on stdout."""

    async def whole() -> str:
        command = mcp.StdioServerParameters(
            command=sys.executable, args=["-m", "deltalab", "mcp", "--allow", "run"], env=dict(os.environ), cwd=folder
        )
        async with mcp.Client(command) as client:
            told = await answer(client, "run", study="long.yaml", executor="inline", wait=0)
            while "progress" not in told:
                told = await answer(client, "poll", task=told["task"], wait=1)
            return str(told["command"])

    words = asyncio.run(whole())
    assert words.startswith("deltalab study run")
    asyncio.run(until(lambda: not running(folder)))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_at_once(number: signal.Signals, folder: Path) -> None:
    command = [sys.executable, "-m", "deltalab", "mcp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        child.stdin.flush()
        assert json.loads(child.stdout.readline())["id"] == 1, "it serves"
        child.send_signal(number)
        assert child.wait(20) == 128 + number


def running(folder: Path) -> list[int]:
    """Processes that run a study in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            here, words = os.readlink(process / "cwd"), (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if here == str(folder) and b"run" in words:
            found.append(int(process.name))
    return found


@pytest.mark.slow
def test_a_process_that_is_killed_is_lost_and_so_many_run_at_a_time(processes: Processes) -> None:
    started = [processes.start(["study", "calibrate", "none"]) for _ in range(MOST_RUNNING)]
    with pytest.raises(InputError, match=f"{MOST_RUNNING} tasks run, at most {MOST_RUNNING} do: cancel one"):
        processes.start(["version"])
    started[0].child.send_signal(signal.SIGKILL)
    started[0].child.wait()
    assert (started[0].state, started[0].told()["error"]["kind"]) == ("lost", "lost")
    began = time.monotonic()
    processes.close()
    for process in started:
        process.child.wait(60)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_result_that_is_too_large_is_refused(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.mcp.processes.MOST_BYTES", 3)
    process = processes.start(["version", "--json"])
    process.child.wait(60)
    told = process.told()
    assert (told["error"]["kind"], "result" in told) == ("too_large", False)


def test_an_argument_that_a_tool_lacks_is_refused(folder: Path, processes: Processes) -> None:
    async def asked(client: Any) -> Any:
        return await client.call_tool("plan", {"study": "study.yaml", "settingss": ["train.steps=1"]})

    error = error_of(talk(server(processes), asked))
    assert (error["where"], error["key"], error["nearest"]) == ("plan", "settingss", "settings")
