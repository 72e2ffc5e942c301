"""A database that goes away comes back to the same ledger, and a password is told to nobody but the server."""

import shutil
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store import (
    Arm,
    ArmRecord,
    ArmTrial,
    Metric,
    RuleRecord,
    Run,
    RunRecord,
    Store,
    Study,
    Trial,
    TrialRecord,
    database,
    outage,
)
from deltalab.store.outage import Outage, waited

SECRET = "s3cret@1/x"  # what URLs need to quote


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(outage, "LONGEST_PAUSE", 0.2)


def end(*connections: socket.socket) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class Proxy:
    """A TCP port that leads to a server's Unix socket.

    tls: speak TLS, with this certificate. lose_commit: end the next connection that commits, after the server has
    committed and before the client hears of it.
    """

    def __init__(self, server: Path, tls: ssl.SSLContext | None = None) -> None:
        self.server, self.tls = server, tls
        self.lose_commit, self.lost = False, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        with suppress(OSError):  # until the listener is closed
            while True:
                client = self.listener.accept()[0]
                try:
                    self.connect(client)
                except OSError:
                    end(client)

    def connect(self, client: socket.socket) -> None:
        if self.tls:
            client.recv(8)  # the request for TLS
            client.sendall(b"S")
            client = self.tls.wrap_socket(client, server_side=True)
        server = socket.socket(socket.AF_UNIX)
        server.connect(str(self.server))
        committing = threading.Event()
        threading.Thread(target=self.forward, args=(client, server, committing), daemon=True).start()
        threading.Thread(target=self.back, args=(client, server, committing), daemon=True).start()

    def forward(self, client: socket.socket, server: socket.socket, committing: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self.lose_commit and b"COMMIT" in data:
                    committing.set()
                server.sendall(data)
        end(client, server)

    def back(self, client: socket.socket, server: socket.socket, committing: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if committing.is_set():
                    self.lose_commit, self.lost = False, self.lost + 1
                    break
                client.sendall(data)
        end(client, server)


@pytest.fixture
def proxy(postgres_server: Any) -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def through(tls: ssl.SSLContext | None = None) -> Proxy:
        made.append(Proxy(Path(postgres_server.get_postmaster_info().socket_dir) / ".s.PGSQL.5432", tls))
        return made[-1]

    yield through
    for each in made:
        end(each.listener)


def name_of(url: str) -> str:
    return str(database.address(url).database)


def begin(store: Store, **given: Any) -> int:
    arms = [ArmRecord("base", True, {}, {})]
    return store.begin_study(**{"name": "s", "profile": None, "identity": "s", "spec": {}, "arms": arms, **given})


def trial(key: str, **given: Any) -> TrialRecord:
    rule = RuleRecord("comba", "abc", "class Comba: ...")
    runs = [RunRecord(0, metrics=[("test", "accuracy", 1, 0.5)])]
    record = {"state": "done", "seconds": 1.0, "rule": rule, "runs": runs, **given}
    return TrialRecord(key, "mqar", 1, "confirm", {}, started_at=1.0, finished_at=2.0, **record)


def counts(store: Store) -> dict[str, int]:
    with store._reading() as session:
        return {
            table.__tablename__: session.scalar(select(func.count()).select_from(table)) or 0
            for table in (Study, Arm, Trial, ArmTrial, Run, Metric)
        }


@pytest.mark.slow
def test_a_server_that_stops_is_waited_for(
    postgres: Callable[[], str], postgres_server: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with Store.open(postgres()) as store:
        study = begin(store, provenance={})
        store.record_trial(study, "base", trial("before"), 0, {})
        postgres_server.stop()
        again = threading.Timer(1.0, postgres_server.ensure_postgres_running)
        again.start()
        store.record_trial(study, "base", trial("during"), 1, {})
        again.join()
        assert [row.key for row in store.trials(study)] == ["before", "during"]
    said = [line for line in capfd.readouterr().err.splitlines() if "the database" in line]
    assert len(said) == 2
    assert "waiting for the database, up to 5 min" in said[0]
    assert said[1].startswith("the database is back after ")


def test_a_driver_that_is_stopped_amid_a_write_keeps_nobody_from_writing(
    postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "STOPPED_SECONDS", 1)
    url = postgres()
    with Store.open(url) as stopped, Store.open(url) as other:
        study = begin(stopped, provenance={})

        def stopped_write() -> None:
            with stopped._writing() as session:
                session.execute(select(Study.id))
                other.record_trial(study, "base", trial("meanwhile"), 0, {})
                session.execute(select(Study.id))

        with pytest.raises(Outage):
            stopped_write()
        assert [row.key for row in stopped.trials(study)] == ["meanwhile"]


def test_a_commit_whose_answer_is_lost_doubles_nothing(
    postgres: Callable[[], str], proxy: Callable[..., Proxy]
) -> None:
    way = proxy()
    with Store.open(f"postgresql://postgres@127.0.0.1:{way.port}/{name_of(postgres())}") as store:
        study = 0

        def losing(operation: Callable[[], Any]) -> Any:
            way.lose_commit, lost = True, way.lost
            result = operation()
            assert way.lost == lost + 1
            return result

        study = losing(lambda: begin(store, provenance={"git": "1"}))
        losing(lambda: store.record_trial(study, "base", trial("a"), 0, {}))
        store.record_trial(study, "base", trial("bad", state="failed", runs=[]), 1, {})
        losing(lambda: store.attach(study, "base", "a", 2, {}))
        losing(lambda: store.forget_trial("bad"))
        losing(lambda: store.finish_study(study, "done"))
        assert counts(store) == {"study": 1, "arm": 1, "trial": 1, "arm_trial": 2, "run": 1, "metric": 1}
        assert (store.study(study).state, store.study(study).provenance) == ("done", {"git": "1"})


def test_patience_ends_in_one_line_and_the_next_operations_do_not_wait(
    postgres: Callable[[], str], proxy: Callable[..., Proxy], capfd: pytest.CaptureFixture[str]
) -> None:
    way = proxy()
    real, way.server = way.server, way.server
    with Store.open(f"postgresql://postgres@127.0.0.1:{way.port}/{name_of(postgres())}", patience=0.5) as store:
        study = begin(store, provenance={})
        way.server = Path("/nowhere")
        store._engine.dispose()
        with pytest.raises(InputError, match=r"^postgresql://postgres@127.*; waited 0.5 s for the database$") as caught:
            store.record_trial(study, "base", trial("a"), 0, {})
        assert "\n" not in str(caught.value)
        start = time.monotonic()
        with pytest.raises(InputError):
            store.finish_study(study, "interrupted")
        assert time.monotonic() - start < 0.4
        assert capfd.readouterr().err.count("waiting for the database") == 1
        way.server = real
        store.record_trial(study, "base", trial("a"), 0, {})
        assert counts(store)["trial"] == 1


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    with Store.open(tmp_path / "lab.db") as store:
        study = begin(store, provenance={})
        with store._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 40")
        rows = [("train", "loss", step, 0.0) for step in range(20_000)]
        long = trial("long", runs=[RunRecord(0, metrics=rows)])

        def room() -> None:
            with store._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA max_page_count = 100000")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outage.time, "sleep", lambda _: room())
            store.record_trial(study, "base", long, 0, {})
        assert counts(store)["metric"] == 20_000


def test_what_waiting_cannot_mend_is_not_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lab.db"
    Store.open(file).close()
    with Store.open(f"sqlite:///file:{file}?mode=ro&uri=true") as store, pytest.raises(InputError, match="readonly"):
        begin(store, provenance={})
    assert "waiting" not in capfd.readouterr().err


def test_only_one_of_several_threads_says_that_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    class Gone:
        patience = outage.Patience(60)
        back = threading.Event()

        @waited
        def ask(self) -> int:
            if not self.back.is_set():
                raise Outage("gone")
            return 1

    gone = Gone()
    threads = [threading.Thread(target=gone.ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    gone.back.set()
    for thread in threads:
        thread.join()
    said = capfd.readouterr().err
    assert (said.count("waiting"), said.count("is back")) == (1, 1)


@pytest.fixture
def account(postgres: Callable[[], str], postgres_server: Any) -> tuple[str, str]:
    """The name of a database and of its owner, who needs a password."""
    name = name_of(postgres())
    owner = f"owner_of_{name}"
    postgres_server.psql(f"CREATE ROLE {owner} LOGIN PASSWORD '{SECRET}'; ALTER DATABASE {name} OWNER TO {owner};")
    rules = Path(postgres_server.pgdata) / "pg_hba.conf"
    rules.write_text(f"local all {owner} scram-sha-256\n" + rules.read_text())
    postgres_server.psql("SELECT pg_reload_conf();")
    without = database.address(str(postgres_server.get_uri(database=name))).set(username=owner)
    with suppress(InputError):
        while True:  # the server reads its rules a moment later
            Store.open(without.render_as_string()).close()
    return name, owner


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate of 127.0.0.1 that signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    file, key = tmp_path / "server.crt", tmp_path / "server.key"
    subject = ["-subj", "/CN=lab", "-addext", "subjectAltName=IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*new, "-keyout", key, "-out", file], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return file, context


def test_a_password_and_tls_over_tcp(
    account: tuple[str, str],
    certificate: tuple[Path, ssl.SSLContext],
    proxy: Callable[..., Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name, owner), (file, context) = account, certificate
    way = proxy(context)
    quoted = SECRET.replace("@", "%40").replace("/", "%2F")
    secure = f"127.0.0.1:{way.port}/{name}?sslmode=verify-full&sslrootcert={file}"
    with Store.open(f"postgresql://{owner}:{quoted}@{secure}") as store:
        begin(store, provenance={})
        assert SECRET not in repr(store)
    monkeypatch.setenv("PGPASSWORD", SECRET)
    with Store.open(f"postgresql://{owner}@{secure}") as store:
        assert len(store.studies()) == 1
    monkeypatch.delenv("PGPASSWORD")
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:*:{name}:{owner}:{SECRET}\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    with Store.open(f"postgresql://{owner}@{secure}") as store:
        assert len(store.studies()) == 1
    monkeypatch.delenv("PGPASSFILE")
    for url, reason in (
        (f"postgresql://{owner}:wr0ng-one@{secure}", "password authentication failed"),
        (f"postgresql://{owner}:{quoted}@127.0.0.1:{way.port}/{name}?sslmode=verify-full&sslrootcert=/no", "/no"),
    ):
        with pytest.raises(InputError, match=reason) as caught:
            Store.open(url).close()
        assert not any(word in str(caught.value) for word in (SECRET, quoted, "wr0ng-one", "\n"))


@pytest.mark.parametrize(
    "where",
    [
        "postgresql:me:s3cret@h/db",
        "postgresql//me:s3cret@h/db",
        "'postgresql://me:s3cret@h/db'",
        "me:s3cret@h/db",
        "jdbc:postgresql://me:s3cret@h/db",
        "host=h user=me password=s3cret",
        "postgresql://me:p@s3cret@h/db",
        "postgresql://me:p@h/s3cret@h/db",
        "postgresql://h/db&password=s3cret",
        "postgresql://h/db&user=me&password=s3cret",
        "postgresql://me:s3cret/h/db",
    ],
)
def test_a_mistyped_url_is_no_file_and_is_not_repeated(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="the database's URL cannot be read; allowed: PATH") as caught:
        Store.open(where)
    assert "s3cret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["results@home.db", "a:b.db", "post/gres.db", "sub folder/lab.db"])
def test_a_path_is_a_file(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / where).parent.mkdir(exist_ok=True)
    Store.open(where).close()
    assert (tmp_path / where).is_file()


@pytest.mark.parametrize("word", ["postgresql://me:s3cret@h/db", "postgresql://me@h/db?password=s3cret"])
def test_a_password_among_the_arguments_is_refused(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["platform", "study", "list", "--db", word])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "environment variable DELTALAB_DB" in said
    assert "s3cret" not in said


@pytest.mark.parametrize(
    "word",
    [
        "--db=postgresql://me:s3cret@host/lab",
        "postgresql://me:p@s3cret@host/lab",
        "postgresql://me:s3cret@host/lab?password=s3@cret&sslpassword=s3cret",
        "host=h password = s3cret",
    ],
)
def test_a_recorded_command_has_no_password(word: str) -> None:
    found = database.without_password(word)
    assert "s3" not in found
    assert "cret" not in found
    assert "***" in found


def test_bytes_that_are_damaged_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "lab.db"
    with Store.open(file) as store:
        study = begin(store, provenance={})
        for number in range(20):
            store.record_trial(study, "base", trial(f"{number}"), number, {})
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = file.read_bytes()
    said = set()
    for page in range(1, len(whole) // 4096):
        file.write_bytes(whole[: 4096 * page] + b"\x07" * 4096 + whole[4096 * (page + 1) :])
        for suffix in ("-wal", "-shm"):
            Path(f"{file}{suffix}").unlink(missing_ok=True)
        try:
            with Store.open(file, create=False, patience=0) as store:
                store.trials(store.study("s").id)
                store.final_metrics(study)
                store.known_trials(["1"])
        except InputError as error:
            said.add(str(error))
    assert not any("\n" in line for line in said)
    assert any("malformed: restore a copy" in line for line in said)
