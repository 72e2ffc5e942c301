"""The tools of the server: list, show, check, plan, report, compare, diff, trace, run, export, poll and cancel."""

import asyncio
import inspect
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from deltalab import __version__
from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.mcp.processes import Processes

ALLOWED = ("run", "export")
"""The tools that a server offers only if its user allows them: they compute for long, or write files."""
LONGEST_WAIT = 300.0
MINUTES = 10.0
"""The minutes of a run for which the client gives none, if the server allows as many."""

INSTRUCTIONS = """\
deltalab tests whether a change to a recurrent update rule helps, by how much, and at what cost.
Write a rule as a Python file, hold it to the contract by check, name it as an arm in a study's file, look at plan, and
run the study. The report says of each arm whether its difference from the base is decided; an undecided difference is
no improvement, however large. Rules and tasks are read from their files at each call.
An answer whose state is "running" is a task: ask for it by poll, and stop it by cancel. A study that was stopped goes
on where it was when it is run again. "failed" comes with a result that says what failed; "refused" with an error whose
fields say what is wrong, what is allowed, and how to mend it.
"""

Name = Annotated[str, Field(description="A name, or the path of a Python file that defines it.")]
Study = Annotated[str, Field(description="A study's file, its name, NAME:PROFILE, or its id in the database.")]
StudyProfile = Annotated[str | None, Field(description="One of the study's profiles.")]
Settings = Annotated[tuple[str, ...], Field(description="Settings in place of the file's, as KEY=VALUE.")]
Wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT, description="Seconds to wait before a task is handed back.")]
Answer = dict[str, Any]


class Tools:
    """The tools, each of which runs a command of the platform with `--json`.

    Args:
        processes: The commands of this server.
        most_minutes: The most minutes that a run may take before it is asked to stop.
    """

    def __init__(self, processes: Processes, most_minutes: float = 60.0) -> None:
        self.processes, self.most_minutes = processes, most_minutes

    async def list(
        self, kind: Literal["studies", "shipped", "rules", "tasks", "models"], text: str | None = None
    ) -> Answer:
        """Lists the studies of the database, the studies that come with deltalab, rules, tasks, or published hybrids.

        `text` keeps only the studies with these words in name, tags, notes or arms.
        """
        if text is not None and kind != "studies":
            raise InputError("takes studies of the database only", where="text", key=text)
        words = {
            "studies": ["study", "list", *_after([text])],
            "shipped": ["study", "list", "--shipped"],
            "rules": ["rule", "list"],
            "tasks": ["task", "list"],
            "models": ["model", "list"],
        }[kind]
        return await self._answer(words)

    async def show(self, kind: Literal["rule", "task", "model"], name: Name, settings: Settings = ()) -> Answer:
        """Shows a rule's card (equation, knobs, gates, cost), a task with one example, or a hybrid with its layers."""
        if settings and kind == "rule":
            raise InputError("a rule's card takes none", where="settings", key=settings[0])
        return await self._answer([kind, "show", *_after([name, *settings])])

    async def check(
        self,
        kind: Literal["rule", "task", "module"],
        name: Name,
        settings: Settings = (),
        quick: bool = False,
        wait: Wait = 120.0,
    ) -> Answer:
        """Holds a rule, a task or a torch.nn.Module to its contract. It runs the file's code, for up to some minutes.

        `quick` runs the checks of a rule that take seconds, which a study does not accept in place of all.
        """
        if kind == "rule" and settings:
            raise InputError("the checks of a rule take none", where="settings", key=settings[0])
        if kind != "rule" and quick:
            raise InputError("only a rule has quick checks", where="quick")
        words = [kind, "check", *(["--quick"] if quick else [])]
        words += ["--progress", "json"] if kind == "rule" else []
        return await self._answer([*words, *_after([name, *settings])], wait=wait)

    async def plan(self, study: Study, settings: Settings = (), profile: StudyProfile = None) -> Answer:
        """Plans a study: arms, trials, the time they take here, and the smallest effect that it can find."""
        return await self._answer(["study", "plan", *_profile(profile), *_after([study, *settings])])

    async def report(
        self,
        study: Study,
        settings: Settings = (),
        profile: StudyProfile = None,
        markdown: Annotated[bool, Field(description="As Markdown, which is shorter than JSON.")] = True,
    ) -> Answer:
        """Reports a study: each arm's score, its difference from the base with interval and p, and what is decided."""
        words = ["study", "report", *_form(markdown), *_profile(profile), *_after([study, *settings])]
        return await self._answer(words)

    async def compare(self, study: Study, against: str, profile: StudyProfile = None, markdown: bool = True) -> Answer:
        """Reports a study with all arms compared with the arm `against` in place of the base."""
        words = ["study", "report", *_form(markdown), *_profile(profile)]
        return await self._answer([*words, f"--against={against}", *_after([study])])

    async def diff(
        self, left: Study, right: Study, arms: Annotated[tuple[str, ...], Field(max_length=2)] = ()
    ) -> Answer:
        """Says what differs between two studies, or between two arms: what they compute, and their settings."""
        return await self._answer(["study", "diff", *(f"--arm={arm}" for arm in arms), *_after([left, right])])

    async def trace(
        self,
        study: Study,
        trial: Annotated[str | None, Field(description="The beginning of a trial's key.")] = None,
        profile: StudyProfile = None,
        points: Annotated[int, Field(ge=1, le=500, description="Points of a curve.")] = 50,
    ) -> Answer:
        """Lists the trials of a study; or shows one: settings, seeds, curves, and the traceback of a failure."""
        words = ["study", "trace", f"--points={points}", *_profile(profile)]
        return await self._answer([*words, *_after([study, trial])])

    async def run(
        self,
        study: Study,
        settings: Settings = (),
        profile: StudyProfile = None,
        executor: Literal["ray", "inline"] = "ray",
        workers: Annotated[int | None, Field(ge=1, description="Stacks of trials at a time.")] = None,
        minutes: Annotated[
            float | None, Field(gt=0, description="Minutes after which it is asked to stop; 10 if not given.")
        ] = None,
        wait: Wait = 20.0,
    ) -> Answer:
        """Runs a study, or goes on with one, for a bounded time. The answer is its report, or a task if it runs."""
        minutes = min(MINUTES, self.most_minutes) if minutes is None else minutes
        if minutes > self.most_minutes:
            raise InputError(f"is at most {self.most_minutes:g} here, not {minutes:g}", where="minutes")
        words = ["study", "run", f"--executor={executor}", "--progress", "json", *_profile(profile)]
        words += [] if workers is None else [f"--workers={workers}"]
        return await self._answer([*words, *_after([study, *settings])], wait=wait, seconds=60 * minutes)

    async def export(
        self,
        study: Study,
        directory: Annotated[str, Field(description="The folder to write.")],
        arm: Annotated[str | None, Field(description="Which arm; without it, the best in the report.")] = None,
        to: Literal["hf", "torchtitan", "fla"] = "hf",
        scale: Annotated[str | None, Field(description="A paper's size, such as 340M; untrained.")] = None,
        recipe: Annotated[str | None, Field(description="A paper's training: comba, rla, gka or llama.")] = None,
        profile: StudyProfile = None,
        wait: Wait = 120.0,
    ) -> Answer:
        """Writes an arm's model as a folder for transformers, torchtitan or FLA, with its recipe and its weights."""
        words = ["export", f"--to={to}", *_profile(profile), *(["--best"] if arm is None else [f"--arm={arm}"])]
        words += [f"--{name}={value}" for name, value in (("scale", scale), ("recipe", recipe)) if value is not None]
        return await self._answer([*words, *_after([study, directory])], wait=wait)

    async def poll(self, task: str, wait: Wait = 20.0) -> Answer:
        """Says how far a task is; returns its result once it has ended."""
        process = self.processes.find(task)
        await process.wait(wait)
        return process.told()

    async def cancel(self, task: str) -> Answer:
        """Stops a task in order, as Ctrl-C does. A study keeps the trials that have ended."""
        process = self.processes.find(task)
        process.stop("the client cancelled it")
        await process.wait(30.0)
        return process.told()

    async def _answer(
        self, words: Sequence[str], *, wait: float = LONGEST_WAIT, seconds: float | None = None
    ) -> Answer:
        """Runs a command; returns its answer, or the task if it runs longer than `wait` seconds.

        A client that cancels its call has no number by which to cancel the task, so that the command stops then.
        """
        ask = [] if "--markdown" in words else ["--json"]
        first = words.index("--") if "--" in words else len(words)
        process = self.processes.start([*words[:first], *ask, *words[first:]], seconds=seconds)
        try:
            await process.wait(wait)
        except asyncio.CancelledError:
            process.stop("the client cancelled the call")
            raise
        return process.told()


def server(processes: Processes, *, allow: Sequence[str] = (), most_minutes: float = 60.0) -> Any:
    """Returns the server, an `mcp.server.MCPServer`, which has the tools that the user allows.

    Args:
        processes: Runs the commands.
        allow: Tools of `ALLOWED` that the server offers beside those that read and check.
        most_minutes: The most minutes that a run may take.

    Raises:
        InputError: `allow` names another tool, or the SDK is not installed.
    """
    for name in allow:
        if name not in ALLOWED:
            raise unknown("tool", name, ALLOWED, where="--allow")
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
        from mcp.types import CallToolResult, TextContent, ToolAnnotations
    except ImportError:
        raise NotInstalled("a server needs the package mcp, 2 or newer", "'deltalab[mcp]'") from None
    tools = Tools(processes, most_minutes)
    left_out = [name for name in ALLOWED if name not in allow]
    without = f"Not offered here, for want of `deltalab mcp --allow`: {', '.join(left_out)}.\n" if left_out else ""

    class ErrorsAsJson(MCPServer[Any]):  # type: ignore[misc]
        """A server whose errors are JSON alone, before which the SDK sets words of its own.

        It refuses arguments that a tool does not have, which the SDK leaves out without a word.
        """

        async def call_tool(self, name: str, arguments: dict[str, Any], *more: Any) -> Any:
            try:
                _require_known(name, arguments, offered)
                return await super().call_tool(name, arguments, *more)
            except InputError as error:
                told = json.dumps({"error": error.fields()})
            except ToolError as error:
                if isinstance(error.__cause__, ValidationError):
                    told = json.dumps({"error": _of_argument(name, error.__cause__).fields()})
                elif isinstance(error.__cause__, ToolError):
                    told = str(error.__cause__)
                else:
                    raise
            return CallToolResult(content=[TextContent(type="text", text=told)], is_error=True)

    made = ErrorsAsJson("deltalab", instructions=INSTRUCTIONS + without, version=__version__, log_level="WARNING")
    reads = (tools.list, tools.show, tools.plan, tools.report, tools.compare, tools.diff, tools.trace, tools.poll)
    chosen = (*reads, tools.check, tools.cancel, *(getattr(tools, name) for name in allow))
    offered = {tool.__name__: inspect.signature(tool).parameters for tool in chosen}
    for tool in chosen:
        annotations = ToolAnnotations(
            read_only_hint=tool in reads, destructive_hint=tool == tools.cancel, open_world_hint=False
        )
        made.add_tool(_with_errors(tool), annotations=annotations)
    return made


def serve(plugins: Sequence[Path], db: str | None, *, allow: Sequence[str], most_minutes: float) -> None:
    """Serves one client on stdin and stdout until it hangs up or a signal comes. Then all tasks are asked to stop."""
    processes = Processes(plugins, db)
    made = server(processes, allow=allow, most_minutes=most_minutes)

    def end(number: int, _: FrameType | None) -> None:
        # A thread of the SDK waits for the client's next line, which an orderly end of this process would wait for.
        processes.close()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        made.run("stdio")
    finally:
        processes.close()


def _require_known(tool: str, arguments: Mapping[str, Any], offered: Mapping[str, Iterable[str]]) -> None:
    """Raises `InputError` if the tool is not offered, or does not have an argument."""
    if tool in ALLOWED and tool not in offered:
        mend = f"deltalab mcp --allow {tool}"
        raise InputError(f"tool '{tool}' is not offered", key=tool, allowed=[*offered], mend=mend, kind="unknown")
    if tool not in offered:
        raise unknown("tool", tool, offered)
    for key in arguments:
        if key not in offered[tool]:
            raise unknown("argument", key, offered[tool], where=tool)


def _of_argument(tool: str, error: ValidationError) -> InputError:
    """Returns what is wrong with an argument's value: one of the first that pydantic refuses."""
    first = error.errors()[0]
    key, expected = str(first["loc"][0]), first.get("ctx", {}).get("expected")
    if first["type"] == "literal_error" and expected is not None:
        return unknown(key, first["input"], re.findall(r"'(.*?)'", expected), where=tool)
    message = first["msg"].replace("Input should", "must").replace("a valid tuple", "a list")
    return InputError(f"{key}: {message}", where=tool, key=key)


def _with_errors(tool: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
    """Returns the tool with errors that the client is told in full. The SDK hides the text of others."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def with_errors(*args: Any, **kwargs: Any) -> Answer:
        try:
            answer = await tool(*args, **kwargs)
        except InputError as error:
            raise ToolError(json.dumps({"error": error.fields()})) from None
        if answer["state"] in ("refused", "lost"):
            raise ToolError(json.dumps(answer))
        return answer

    return with_errors


def _form(markdown: bool) -> list[str]:
    """Returns the options for a report as Markdown, with JSON on stderr all the same; none for a report as JSON."""
    return ["--markdown", "--progress", "json"] if markdown else []


def _profile(profile: str | None) -> list[str]:
    """Returns the option for a profile."""
    return [] if profile is None else [f"--profile={profile}"]


def _after(words: Sequence[str | None]) -> list[str]:
    """Returns arguments that the command cannot take for options."""
    given = [word for word in words if word is not None]
    return ["--", *given] if given else []
