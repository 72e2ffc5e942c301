"""What a rule, a task, the machine or the disk may do to the process that trains: every end has a name and an owner."""

import logging
import os
import re
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml
from tests.support.delta_rule import delta_rule

from deltalab import plugin_files, registry
from deltalab.store import Store
from deltalab.study.planning.make import make_plan
from deltalab.study.reports.report import report
from deltalab.study.running import schedule as scheduling
from deltalab.study.running.run import StudyResult, run_study_file
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers import printed_output
from deltalab.study.workers import worker as workers
from deltalab.study.workers.fork_server import _servers, fork_server
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.train_stack import execute
from deltalab.study.workers.worker import Worker, share

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "mlp": False, "chunk_size": 16},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 3, "eval_batches": 1},
    },
    "seeds": 2,
}

TASK = '''"""A task that ends the process of a model with large logits."""

import os
from dataclasses import dataclass
from typing import ClassVar

from deltalab.tasks.mqar import MQAR


@dataclass(frozen=True, kw_only=True)
class Deadly(MQAR):
    """MQAR that ends the process of a model with large logits."""

    name: ClassVar[str] = "deadly"

    def measure(self, batch, logits):
        if logits.abs().max() > 30:
            os._exit(7)
        return super().measure(batch, logits)
'''


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PAUSES", (0.0, 0.0, 0.0))


def plug_in(name: str, trouble: str = "pass", *, at_import: str = "pass") -> str:
    """A rule that does something in the child: at its import, or from its fifth call on."""
    file = Path(f"{name}.py")
    at_call = f"if IN_CHILD and calls > 4:\n{indent(trouble, '    ')}"
    file.write_text(delta_rule(name, at_call, at_import=f"if IN_CHILD:\n{indent(at_import, '    ')}"))
    with pytest.MonkeyPatch.context() as patch:  # the driver's own trial of an import would see the trouble first
        patch.setattr(plugin_files, "_require_end", lambda *_: None)
        registry.add_plugin(file)
    return name


def study(**given: Any) -> Path:
    file = Path("s.yaml")
    file.write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))
    return file


def one_arm(rule: str, **given: Any) -> Path:
    return study(base={**STUDY["base"], "rule": rule}, **given)


def ran(file: Path, db: str = "lab.db") -> StudyResult:
    return run_study_file(file, db=db, executor="inline")


def errors(result: StudyResult, db: str = "lab.db") -> dict[str, str]:
    """What the ledger says of the failed trials, by arm."""
    with Store.open(db) as store:
        return {row.arm: row.error or "" for row in store.trials(result.study_id) if row.state == "failed"}


def metrics(db: str) -> list[Any]:
    ask = "SELECT key, seed, split, name, step, value FROM metric JOIN run ON run.id = run_id JOIN trial ON trial_id = "
    with closing(sqlite3.connect(db)) as connection:
        return sorted(connection.execute(ask + "trial.id"))


def jobs(file: Path) -> list[Job]:
    plan = make_plan(load_study(file))
    return [plan.job(arm, "confirm", 0, {}) for arm in plan.arms]


# What the rule or the task does is a failed trial, by name.

ENDS = {
    "sys.exit(3)": "the rule or the task called sys.exit(3)",
    "os._exit(9)": "the rule or the task ended the process with os._exit(9), at step 3 of 6 (step)",
    "os.kill(os.getpid(), signal.SIGSEGV)": "the rule or the task ended the process by SIGSEGV (Segmentation fault)",
    "os.abort()": "the rule or the task ended the process by SIGABRT (Aborted)",
    "os.kill(os.getpid(), signal.SIGTERM)": "its own process SIGTERM (Terminated), at step 3 of 6 (step)",
    "signal.raise_signal(signal.SIGINT)": "the rule or the task sent its own process SIGINT (Interrupt), at step ",
    "os.killpg(0, signal.SIGKILL)": "the rule or the task sent its own process SIGKILL (Killed), at step 3 of 6 (step)",
    "signal.pthread_kill(__import__('threading').get_ident(), signal.SIGHUP)": "its own process SIGHUP (Hangup), at",
    "os.kill(os.getpid(), signal.SIGSTOP)": "the rule or the task stopped its own process, at step 3 of 6 (step)",
    "os.kill(os.getppid(), signal.SIGTERM)": "the rule or the task sent SIGTERM (Terminated) to the fork server, at",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise ValueError('boom')": "ValueError: boom",
}


def test_an_end_that_the_rule_brings_about_is_a_failed_trial_with_its_name(lab: Path) -> None:
    arms = {f"arm_{i}": {"rule": plug_in(f"rule_{i}", trouble)} for i, trouble in enumerate(ENDS)}
    arms["at_import"] = {"rule": plug_in("at_import", at_import="os._exit(4)")}
    result = ran(study(arms=arms))
    assert (result.trials, result.failed, result.missing) == (len(ENDS) + 2, len(ENDS) + 1, {})
    found = errors(result)
    for arm, said in zip(arms, [*ENDS.values(), "os._exit(4), at step 0 of 6 (importing"], strict=True):
        assert said in found[arm].splitlines()[-1], (arm, found[arm])
    assert "in operands" in found["arm_3"], "where it was when it crashed"
    assert {failure.arm for failure in result.report.failures} == set(arms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble",
    ["time.sleep(1000)", "re.match(r'(a+)+$', 'a' * 99 + 'b')"],
    ids=["in Python", "in C, without a chance for Python"],
)
def test_a_step_that_hangs_past_the_deadline_ends(lab: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.0)
    monkeypatch.setattr(workers, "SURE", 0.2)
    result = ran(one_arm(plug_in("hangs", trouble), deadline=4))
    (error,) = errors(result).values()
    assert "the trial is not done after its deadline of 4 s, at step 3 of 6 (step), which" in error.splitlines()[-1]
    assert "in operands" in error, "where it hangs"


@pytest.mark.slow
def test_a_step_that_takes_much_longer_than_those_before_ends_without_a_deadline(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FLOOR", 1.0)
    monkeypatch.setattr(workers, "FACTOR", 3.0)
    monkeypatch.setattr(workers, "SURE", 0.2)
    train = {**STUDY["base"]["train"], "steps": 100, "evaluations": 1}
    rule = plug_in("hangs", "if calls > 60: time.sleep(1000)")
    result = ran(study(base={**STUDY["base"], "rule": rule, "train": train}))
    (error,) = errors(result).values()
    last = error.splitlines()[-1]
    assert last.startswith("the process hangs, at step ")
    assert "of 100 (step), which began" in last


def test_an_import_that_hangs_ends(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IMPORTS", 1.0)
    monkeypatch.setattr(workers, "SURE", 0.2)
    result = ran(one_arm(plug_in("endless", at_import="while True: pass")))
    (error,) = errors(result).values()
    assert "the process hangs, at step 0 of 6 (importing the rule and the task)" in error.splitlines()[-1]


def test_a_slow_trial_that_does_not_hang_keeps_its_process(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends by itself at its next step after the deadline."""
    rule = plug_in("slow", "time.sleep(0.3)")
    with Worker(Path("runs")) as worker:
        (job,) = jobs(one_arm(rule, deadline=1))
        (record,) = worker.execute([job])
        child = worker._child
        assert "Deadline: the trial is not done after its deadline of 1 s" in (record.error or "").splitlines()[-1]
        (fine,) = worker.execute(jobs(study(seeds=1)))
        assert fine.state == "done"
        assert worker._child is child


def test_a_trial_over_its_share_of_memory_ends_before_its_neighbours_do(lab: Path) -> None:
    hog = plug_in("hog", "hog = [b'x' * 2**25 for _ in range(2**12)]")
    result = ran(study(arms={"hog": {"rule": hog}}, resources={"memory": 0.75}))
    assert (result.trials, result.failed) == (2, 1)
    last = errors(result)["hog"].splitlines()[-1]
    assert last.startswith("out of memory: the process used ")
    assert "of the 0.75 GiB that a stack may use, at step 3 of 6" in last


def test_memory_that_an_earlier_trial_has_kept_is_no_fault_of_the_next(lab: Path) -> None:
    """The next runs again in a new process before it is called too large."""
    keeps = "calls == 5 and sys.modules.__setitem__('kept_' + __name__, b'x' * 400 * 2**20)"
    arms = {name: {"rule": plug_in(name, keeps)} for name in ("one", "two")}
    result = ran(study(arms=arms, resources={"memory": 1.0}))
    assert (result.trials, errors(result)) == (3, {})


def test_the_share_of_a_worker_is_of_the_machine_s_memory() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < share(4) == pytest.approx(share(1) / 4, abs=1)
    assert share(1) <= 0.9 * total


def test_who_ends_the_process_of_a_stack_takes_no_neighbour_along(lab: Path) -> None:
    """Neighbours run again without it, and leave the figures that they leave alone."""
    Path("deadly.py").write_text(TASK)
    registry.add_plugin("deadly.py")
    given = {
        "task": {"deadly": STUDY["task"]["mqar"]},
        "tune": {"trials": 3, "train.lr": {"choice": [0.01, 30.0, 0.02]}},
    }
    together = ran(study(**given, resources={"stack": 3}), "together.db")
    assert (together.trials, together.failed) == (3, 1)
    assert "os._exit(7)" in errors(together, "together.db")["base"]
    alone = ran(study(**given, resources={"stack": 1}), "alone.db")
    assert (alone.trials, alone.failed) == (3, 1)
    assert metrics("together.db") == metrics("alone.db") != []
    assert not list(Path("runs/checkpoints").glob("*"))


# What the machine or the disk does is no result.


def kill_child(times: int, how: Callable[[Worker], None]) -> Callable[..., Any]:
    """A `Worker.execute` whose child something happens to in so many stacks, each time three steps later."""
    original, left, reached = Worker.execute, iter(range(times)), 0

    def execute(worker: Worker, stack: Sequence[Job], watch: Any = None) -> Any:
        hit = False

        def watched(step: int) -> None:
            nonlocal hit, reached
            if hit or step < reached + 3:
                return
            hit, reached = True, step
            if next(left, None) is not None:
                how(worker)

        return original(worker, stack, watched, watch or watched)

    return execute


def killed(number: signal.Signals) -> Callable[[Worker], None]:
    def kill(worker: Worker) -> None:
        assert worker._child is not None
        assert worker._child._pid is not None
        os.kill(worker._child._pid, number)

    return kill


def server_killed(worker: Worker) -> None:
    _servers[os.getpid()]._process.kill()


SLOW = {**STUDY["base"], "train": {**STUDY["base"]["train"], "steps": 60, "evaluations": 20}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "times", "said"),
    [
        (killed(signal.SIGKILL), 2, "killed by SIGKILL (Killed), at step "),
        (killed(signal.SIGTERM), 1, "killed by SIGTERM (Terminated), at step "),
        (server_killed, 1, "the fork server was killed, at step "),
    ],
    ids=["SIGKILL", "SIGTERM", "fork server"],
)
def test_a_process_that_is_killed_from_outside_changes_nothing(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any, times: int, said: str
) -> None:
    rule = plug_in("slow", "time.sleep(0.01)")
    file = study(base={**SLOW, "rule": rule}, seeds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute", kill_child(times, how))
        result = ran(file)
    assert (result.trials, result.failed, result.missing) == (1, 0, {})
    assert len([one for one in caplog.messages if said in one and "runs again in 0 s" in one]) == times
    ran(file, "undisturbed.db")
    assert metrics("lab.db") == metrics("undisturbed.db")


@pytest.mark.slow
def test_a_stack_that_is_lost_every_time_leaves_the_study_incomplete_and_the_next_run_goes_on(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = plug_in("slow", "time.sleep(0.01)")
    file = study(base={**SLOW, "rule": rule}, arms={"comba": {"rule": "comba"}}, seeds=1)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute", kill_child(4, killed(signal.SIGKILL)))
        result = ran(file)
    assert (result.trials, result.failed) == (1, 0)
    (missing,) = result.missing.values()
    assert missing.startswith("the process was killed by SIGKILL (Killed), at step ")
    with Store.open("lab.db") as store:
        assert store.study("s").state == "incomplete"
        (named,) = report(store, store.study("s").id).warnings
    assert named == f"base, 1 seed: given up after 4 tries: {missing}"
    again = ran(file)
    assert (again.trials, again.known, again.failed, again.missing) == (2, 1, 0, {})
    with Store.open("lab.db") as store:
        assert store.study("s").state == "done"
        assert report(store, store.study("s").id).warnings == []
        assert "given_up" not in store.study("s").provenance


def test_a_rule_at_whose_step_the_process_is_lost_four_times_is_at_fault(
    lab: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that the rule starts sends the signal, so that nobody sees the sender."""
    rule = plug_in("guilty", "os.system(f'kill -9 {os.getpid()}')")
    result = ran(study(base=SLOW, arms={"guilty": {"rule": rule}}, seeds=1))
    assert (result.trials, result.failed, result.missing) == (2, 1, {})
    last = errors(result)["guilty"].splitlines()[-1]
    place = r"at step \d+ of 60 \([a-z ]+\)"
    assert re.fullmatch(
        rf"the process was killed by SIGKILL \(Killed\), {place}, "
        "4 times in a row, so that the rule or the task is at fault",
        last,
    )
    assert len([one for one in caplog.messages if "runs again in" in one]) == 3


def test_a_child_that_no_server_starts_is_noticed_and_the_next_has_another_server(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "TAKES", 1.0)
    (job,) = jobs(study(seeds=1))
    server = fork_server()
    os.kill(server._process.pid, signal.SIGSTOP)
    with Worker(Path("runs")) as worker:
        with pytest.raises(Lost, match="the fork server starts no process within 1 s") as lost:
            worker.execute([job])
        assert lost.value.of == "infrastructure"
        monkeypatch.undo()
        assert [record.state for record in worker.execute([job])] == ["done"]


@pytest.mark.slow
def test_a_process_that_is_stopped_is_no_hang_of_the_rule(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a minute, and long before a step that takes as long would be a hang."""
    monkeypatch.setattr(workers, "STILL", 2.0)
    rule = plug_in("slow", "time.sleep(0.01)")
    (job,) = jobs(study(base={**SLOW, "rule": rule}, seeds=1))

    def stop(step: int) -> None:
        killed(signal.SIGSTOP)(worker)

    with Worker(Path("runs")) as worker, pytest.raises(Lost, match="the process is stopped, at step") as lost:
        worker.execute([job], stop)
    assert lost.value.of == "infrastructure"


def test_a_child_that_was_killed_while_it_had_nothing_to_do_is_replaced(lab: Path) -> None:
    (job,) = jobs(study(seeds=1))
    with Worker(Path("runs")) as worker:
        worker.execute([job])
        killed(signal.SIGKILL)(worker)
        until = time.monotonic() + 60
        while worker._child is not None and worker._child._use()[1] not in ("", "Z") and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)
        (record,) = worker.execute([job])
    assert record.state == "done"


# The child, and whoever reads the terminal.


def test_a_child_computes_what_this_process_computes(lab: Path) -> None:
    (job,) = jobs(study())
    (here,) = execute([job], Path("here"))
    with Worker(Path("there")) as worker:
        (there,) = worker.execute([job])
    runs: list[Any] = [[(run.seed, run.metrics, run.artifacts[0].sha256) for run in one.runs] for one in (here, there)]
    assert runs[0] == runs[1]


def test_what_a_rule_prints_goes_to_stderr_and_what_deltalab_warns_of_is_logged(
    lab: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rule = plug_in("talks", "print('printed'); logging.getLogger('deltalab').warning('as the platform warns')")
    ran(one_arm(rule))
    said = capsys.readouterr()
    assert "printed\n" in said.err
    assert said.out == ""
    assert {one.levelno for one in caplog.records if one.message == "as the platform warns"} == {logging.WARNING}


MEGABYTE = "print(('x' * 99 + '\\n') * 10_000, file=sys.stderr)"


def test_of_a_rule_that_prints_a_megabyte_a_step_a_few_lines_are_shown_and_the_newest_are_kept(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(printed_output, "LARGEST", 1_000_000)
    loud = plug_in("loud", f"print('first line')\n{MEGABYTE}")
    quiet = plug_in("quiet", "calls == 5 and print('hush')")
    result = ran(study(arms={"loud": {"rule": loud}, "quiet": {"rule": quiet}}))
    assert (result.state, result.failed) == ("done", 0)
    said = capsys.readouterr().err
    assert "first line\n" in said
    assert said.count("x" * 99) <= printed_output.SHOWN_LINES
    assert "hush\n" in said
    (told,) = [one.message for one in caplog.records if "more lines" in one.message]
    file = lab / "runs" / "printed.log"
    assert re.fullmatch(
        rf"loud on mqar, candidate 0, trial \w{{12}}: printed [\d,]{{6,}} more lines, [\d.]+ MB; {file} keeps .*", told
    )
    assert file.stat().st_size <= 1_000_000
    kept = file.read_text()
    assert "--- quiet on mqar, candidate 0, trial " in kept
    assert "hush\n" in kept


@pytest.mark.slow
def test_ray_keeps_what_a_rule_prints_within_the_same_bound(lab: Path) -> None:
    result = run_study_file(one_arm(plug_in("loud", MEGABYTE)), db="lab.db")
    assert (result.state, result.failed) == ("done", 0)
    file = lab / "runs" / "printed.log"
    assert 5_000_000 < file.stat().st_size <= printed_output.LARGEST


def test_a_line_without_an_end_is_cut_and_a_full_disk_is_said(
    lab: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (lab / "runs").write_text("a file, where a folder should be")
    printed = printed_output.PrintedOutput(lab / "runs" / "printed.log")
    printed.begin("arm")
    for _ in range(100):
        printed.take(b"y" * 1000, show=True)
    printed.end()
    assert capsys.readouterr().err == "y" * printed_output.SHOWN_BYTES + "\n"
    assert "arm: printed 0 more lines, less than 0.1 MB; " in caplog.text
    assert "printed.log does not have all of it: " in caplog.text


def test_workers_that_share_a_file_name_what_they_write(lab: Path) -> None:
    one, other = (printed_output.PrintedOutput(lab / "printed.log") for _ in range(2))
    for printed, name in ((one, "a"), (other, "b")):
        printed.begin(name)
    for printed in (one, one, other, one):
        printed.take(b"word\n", show=False)
    assert one.file.read_text() == "--- a\nword\nword\n--- b\nword\n--- a\nword\n"


def test_garbage_is_collected_while_a_rule_trains(lab: Path) -> None:
    """The fork server imports without the collector."""
    assert ran(one_arm(plug_in("collected", "import gc; assert gc.isenabled()"))).failed == 0


def test_a_rule_that_closes_its_output_harms_nobody(lab: Path) -> None:
    assert ran(one_arm(plug_in("closes", "os.closerange(1, 3)"))).failed == 0


@pytest.mark.slow
def test_what_a_rule_starts_ends_with_its_process(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.0)
    monkeypatch.setattr(workers, "SURE", 0.2)
    start = "__import__('subprocess').Popen(['sleep', '1000']); Path('pid').write_text(str(os.getpgid(0)))"
    result = ran(one_arm(plug_in("starts", f"{start}; time.sleep(1000)"), deadline=1))
    assert result.failed == 1
    group = int(Path("pid").read_text())
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process of the rule is left")


def test_the_child_has_the_folder_and_the_environment_of_now(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server()
    monkeypatch.setenv("DELTALAB_TEST", "here")
    (lab / "deeper").mkdir()
    rule = plug_in("looks", "Path('seen').write_text(os.environ['DELTALAB_TEST'])")
    file = one_arm(rule)
    monkeypatch.chdir(lab / "deeper")
    ran(lab / file)
    assert (lab / "deeper" / "seen").read_text() == "here"
