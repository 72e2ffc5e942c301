"""The pages of docs/ say what is so: their code runs, their tables are what was measured, their lists are whole."""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from tests.support.folders import ROOT

from deltalab import registry
from deltalab.cli.app import main
from deltalab.models.published import presets
from deltalab.statistics.joint_test import seeds_needed
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study
from deltalab.tasks import BUILTIN

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
TUTORIAL = [
    DOCS / "tutorial" / f"{name}.md" for name in ("first-study", "reading-a-report", "first-rule", "first-task")
]
BASE = """
name: base
task: {mqar: {length: 8, pairs: 2, vocab_size: 16}}
base: {rule: deltanet, train: {steps: 10, lr: 0.1, batch_size: 1}}
seeds: 1
"""


def shown(page: Path) -> str:
    """A page's path: its bare name may be that of a marker, such as gpu."""
    return str(page.relative_to(ROOT))


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


class Block(NamedTuple):
    language: str
    title: str
    code: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', page.read_text(encoding="utf-8"), re.M | re.S)
    return [Block(*block) for block in found]


def commands(block: Block) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.code.splitlines() if line.startswith("deltalab ")]


def small(study: str) -> str:
    """The same study at a size that a test can wait for."""
    study = re.sub(r"steps: \d+", "eval_batches: 1, steps: 10", study)
    return re.sub(r"batch_size: \d+", "batch_size: 4", study)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with registry.isolated():
        yield tmp_path
    torch.set_num_threads(threads)


def platform(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    # In this process: Ray would take seconds of its own for each study.
    inline = ["--executor", "inline"] if words[1:3] == ["study", "run"] else []
    monkeypatch.setattr(sys, "argv", [*words, *inline])
    with registry.isolated(), pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code or 0


def follow(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Does what a page says, in its order; returns the number of commands."""
    ran = 0
    for block in blocks(page):
        if block.title:
            file = folder / block.title
            file.parent.mkdir(exist_ok=True)
            file.write_text(small(block.code) if block.language == "yaml" else block.code, encoding="utf-8")
        elif block.language == "bash":
            for words in commands(block):
                assert platform(monkeypatch, words) == 0, f"{page.name}: {shlex.join(words)}"
                ran += 1
        elif block.language == "python":
            exec(compile(block.code, str(page), "exec"), {})
    return ran


@pytest.mark.slow
def test_the_tutorial_can_be_followed(folder, monkeypatch, capsys):
    counts = [follow(page, folder, monkeypatch) for page in TUTORIAL]
    assert all(count > 1 for count in counts)
    assert "9 trials, 9 of them known before, 0 failed" in capsys.readouterr().out


@pytest.mark.slow(keep="plugins.md")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in TUTORIAL], ids=shown)
def test_what_other_pages_show_runs(page, folder, monkeypatch):
    follow(page, folder, monkeypatch)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "README.md"], ids=shown)
def test_the_site_reads_every_fence(page):
    """MkDocs takes another line for text, and what follows up to the next fence for code."""
    fences = re.findall(r"^```.*", page.read_text(encoding="utf-8"), re.M)
    assert [fence for fence in fences if not re.fullmatch(r'```(\w+( title="[^"]+")?)?', fence)] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=shown)
def test_every_bash_block_is_made_of_commands_that_are_run(page):
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.code.splitlines()]
    assert [line for line in lines if not line.startswith("deltalab ")] == [], "what is not run belongs into `sh`"


SHOWN = [(page, block) for page in PAGES for block in blocks(page) if block.language == "yaml"]


@pytest.mark.parametrize(("page", "block"), SHOWN, ids=[f"{shown(page)}-{i}" for i, (page, _) in enumerate(SHOWN)])
def test_studies_are_ones(page, block, folder):
    """A whole study is planned; a fragment is read on top of a small one."""
    given = yaml.safe_load(block.code)
    file = folder / "study.yaml"
    if "name" not in given:
        file.write_text(BASE + block.code)
        load_study(file)
        return
    file.write_text(block.code)
    (folder / "plugins").mkdir()
    files = [block for other in TUTORIAL for block in blocks(other) if block.title.startswith("plugins/")]
    for other in [*files, *(block for block in blocks(page) if block.title)]:
        (folder / other.title).write_text(other.code)
    spec = load_study(file)
    make_plan(spec)
    for profile in given.get("profiles", {}):
        make_plan(load_study(file, profile=profile), profile=profile)


def first_column(page: str, title: str) -> list[str]:
    rows = (DOCS / page).read_text(encoding="utf-8").split(f"| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_catalogue_names_the_rules_there_are():
    assert sorted(first_column("reference/catalogue.md", "rule")) == registry.list_rules()


def test_every_system_of_the_papers_has_a_rule_that_exists_or_a_reason():
    """The knobs that a row names are ones that its rule takes."""
    table = (DOCS / "reference/catalogue.md").read_text(encoding="utf-8").split("| system |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        system, _, rules, _, how = (cell.strip() for cell in row.strip("|").split("|"))
        names = re.findall(r"`(\w+)`", rules)
        assert names or how, system
        for name in names:
            registry.get_rule(name)
            for knobs in re.findall(r"`([\w]+: [^`]+)`", how):
                registry.get_rule(name, **yaml.safe_load("{" + knobs + "}"))


def test_the_catalogue_names_the_presets_there_are():
    assert sorted(first_column("reference/catalogue.md", "preset")) == sorted(presets())


def test_the_catalogue_names_the_tasks_there_are():
    assert sorted(first_column("reference/catalogue.md", "task")) == sorted(BUILTIN)


def test_the_catalogue_names_the_studies_there_are():
    studies = sorted(file.stem for file in ROOT.glob("studies/*.yaml"))
    assert sorted(first_column("reference/catalogue.md", "study")) == studies


def test_the_fewest_seeds_are_those_of_the_statistics():
    text = (DOCS / "explanation/statistics.md").read_text(encoding="utf-8").lower()
    number = seeds_needed()
    word = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][number]
    assert re.search(rf"\b({number}|{word}) seeds\b", text), f"it names the fewest seeds that can decide, {number}"
    assert "holm" not in text.split("## calibration")[0]


def test_the_tables_of_figures_are_those_of_the_json_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("tables")
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert sorted(name for page in pages for _, name, _ in tables.REGION.findall(page)) == sorted(tables.TABLES)
    for page in pages:
        assert tables.written(page) == page, "run python benchmarks/tables.py"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_between_pages_lead_somewhere(page):
    """In a checkout, too. `make docs` holds the anchors as well, but needs MkDocs."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", without_code(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


PACKAGE = ROOT / "platform" / "deltalab"
FOLDERS = "tests|platform|benchmarks|plugins|dashboard|docs|studies|deltalab|study|store|cli"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=shown)
def test_files_that_a_page_names_exist(page):
    """Files that a reader makes, such as those of the tutorial, do not."""
    made = {"plugins/balanced.py", "plugins/copying.py", "plugins/winner.py", "deltalab/STUDY"}
    patterns = ("NAME", "NNNN")
    paths = [path for path in PATH.findall(without_code(page)) if not any(pattern in path for pattern in patterns)]
    roots = (ROOT, ROOT / "platform", PACKAGE)
    assert [path for path in paths if path not in made and not any((root / path).exists() for root in roots)] == []


def test_every_path_from_a_command_to_its_code_exists():
    page = DOCS / "explanation" / "from-command-to-code.md"
    paths = re.findall(r"`(\w[\w/]*(?:\.py|/))`", page.read_text(encoding="utf-8").split("## ", 1)[1])
    assert len(paths) > 50
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_the_glossary_says_each_word_once():
    page = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| (?!word|---)([^|]+) \|", page, re.M)
    assert len(words) > 60
    assert len(words) == len(set(words))


def test_pages_of_docstrings_say_where_to_read_them():
    """In a checkout, a page of `:::` lines is empty."""
    note = "docstrings: read it on the site (`make docs`), or in"
    pages = [page for page in PAGES if page.read_text(encoding="utf-8").count("\n::: ") > 1]
    assert [shown(page) for page in pages if note not in page.read_text(encoding="utf-8")] == []


def test_every_page_stands_in_the_navigation_of_the_site():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1])
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert pages - set(listed) == {page for page in pages if re.match(r"decisions/\d", page)}


def test_records_are_short_and_numbered():
    for file in (DOCS / "decisions").glob("[0-9]*.md"):
        lines = file.read_text(encoding="utf-8").splitlines()
        assert len(lines) < 60
        assert lines[0].startswith(f"# {file.name[:3]}: ")
