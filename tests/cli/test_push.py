"""`deltalab export --push` fills a repository of a Hub that runs here, and shows its token to nobody else."""

import json
import logging
import re
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.support.command import Platform

TOKEN = "hf_" + "s3cret" * 5


class Hub(ThreadingHTTPServer):
    """A Hub with the repositories of one user, `me`: the files of each by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Requests)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []


class Requests(BaseHTTPRequestHandler):
    """What the Hub's client asks of it."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any, code: int = 200, **headers: str) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path == "/api/whoami-v2":
            given = self.headers.get("Authorization", "")
            if given != f"Bearer {TOKEN}":
                return self.answer({"error": f"who is {given}?"}, 401)
            return self.answer({"type": "user", "name": "me", "orgs": []})
        found = re.match(r"/api/models/([^/]+/[^/?]+)", self.path)
        if found is None or found[1] not in self.server.repositories:
            return self.answer({"error": "not found"}, 404)
        name, files = found[1], self.server.repositories[found[1]]
        if "/tree/" in self.path:
            return self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in files.items()])
        return self.answer({"id": name, "siblings": [{"rfilename": path} for path in files]})

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        if self.path.endswith("/commit/main"):
            return self.commit()
        given = json.loads(self.body() or b"{}")
        if self.path == "/api/repos/create":
            owner = given.get("organization", "me")
            name = f"{owner}/{given['name']}"
            if owner != "me":
                return self.answer({"error": f"{self.headers['Authorization']} has no rights there"}, 403)
            self.server.private.setdefault(name, given.get("visibility") == "private" or given.get("private", False))
            known = name in self.server.repositories
            self.server.repositories.setdefault(name, {".gitattributes": b""})
            return self.answer({"url": f"{self.server.address}/{name}", "name": name}, 409 if known else 200)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            kind = {True: "lfs", False: "regular"}
            files = [{"path": f["path"], "uploadMode": kind[f["path"].endswith("tensors")]} for f in given["files"]]
            return self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        assert self.path.endswith(".git/info/lfs/objects/batch"), self.path
        upload = {"upload": {"href": f"{self.server.address}/large"}}
        objects = [
            {**each, "actions": {"upload": {"href": f"{upload['upload']['href']}/{each['oid']}"}}}
            for each in given["objects"]
        ]
        return self.answer({"transfer": "basic", "objects": objects})

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def commit(self) -> None:
        name = re.match(r"/api/models/([^/]+/[^/]+)/", self.path)[1]  # type: ignore[index]
        files = self.server.repositories[name]
        for line in map(json.loads, self.body().splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        self.answer({"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Hub]:
    """Its address and the user's token are set. All that any library logs is kept."""
    caplog.set_level(logging.DEBUG)
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        server.shutdown()
        thread.join()
    assert TOKEN not in caplog.text


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.usefixtures("done")
def test_a_private_repository_holds_the_folder(platform: Platform, hub: Hub, here: Path) -> None:
    said = platform("export", "tiny", "out", "--arm", "without_d", "--push", "me/tiny", "--json")
    assert said.code == 0, (said.err, hub.asked)
    assert (said.code, json.loads(said.out)["pushed"]) == (0, f"{hub.address}/me/tiny"), said.err
    assert hub.repositories == {"me/tiny": {".gitattributes": b"", **files_of(here / "out")}}
    assert "model.safetensors" in hub.repositories["me/tiny"]
    assert hub.private == {"me/tiny": True}
    assert TOKEN not in said.out + said.err

    again = platform("export", "./out", "smaller", "--no-weights", "--push", "me/tiny")
    assert (again.code, again.out) == (2, "")
    assert again.err.splitlines()[-1].startswith(
        "error: --push me/tiny: the repository has files that smaller lacks: model.safetensors: name a new one"
    )
    assert hub.repositories["me/tiny"]["model.safetensors"] == files_of(here / "out")["model.safetensors"]
    assert (here / "smaller" / "config.json").exists()

    of_others = platform("export", "./out", "third", "--push", "you/tiny")
    assert (of_others.code, of_others.err.count("\n")) == (2, 1)
    assert of_others.err.startswith(f"error: --push you/tiny: {hub.address} refuses: ")
    assert "*** has no rights there" in of_others.err
    assert "hf upload you/tiny third puts it there" in of_others.err


@pytest.mark.usefixtures("done")
def test_what_cannot_be_pushed_is_not_exported(
    platform: Platform, hub: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> str:
        said = platform("export", "tiny", "out", "--arm", "base", "--push", name)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert not (here / "out").exists()
        return said.err

    assert "--push: 'tiny' is no name on the Hub: give USER/NAME" in refused("tiny")
    assert "--push: me/a b: " in refused("me/a b")
    assert hub.asked == []
    monkeypatch.setenv("HF_TOKEN", "hf_ofanother")
    assert f"--push: {hub.address} refuses: " in refused("me/tiny")
    assert "hf_ofanother" not in refused("me/tiny")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "none"))
    assert "--push: the Hub asks for a token: hf auth login, or set HF_TOKEN" in refused("me/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "--push: http://127.0.0.1:9 cannot be used: " in refused("me/tiny")
