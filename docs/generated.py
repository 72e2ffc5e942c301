"""Makes those pages of the site whose content is written elsewhere, so that nothing is written twice.

MkDocs loads the file as a hook, and griffe, which reads docstrings, as an extension.
"""

import json
import re
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

from deltalab.cli.app import app
from deltalab.study.specs.json_schema import schema

ROOT = Path(__file__).parents[1]
COPIED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "agents.md": "AGENTS.md",
    "changelog.md": "CHANGELOG.md",
    "reference/rules.md": "plugins/RULES.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here. Some have a file in docs/ that says in a checkout where to read them."""
    pages = {to: copied(source, to) for to, source in COPIED.items()}
    pages["reference/cli.md"] = command_line()
    pages["reference/schema.md"] = study_schema()
    pages["llms.txt"] = re.sub(r"\(([\w/-]+)\.md\)", r"(\1/)", (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8"))
    for name, text in pages.items():
        if (note := files.get_file_from_path(name)) is not None:
            files.remove(note)
        files.append(File.generated(config, name, content=text))
    return files


def copied(source: str, to: str) -> str:
    """A page of the repository, with its links to docs/ made links within the site."""
    up = "../" * to.count("/")
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", f"]({up}")
    for page, original in COPIED.items():
        text = text.replace(f"]({original})", f"]({up}{page})")
    return text


def command_line() -> str:
    """The page of all commands with their options, from the help texts."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="deltalab", title="The command `deltalab`")
    text = text.replace("][", "]\\[")  # Two optional words in a row are no link.
    return text.replace("```console\n$ ", "```text\n")


def study_schema() -> str:
    """Tables of what a study file may say, from its JSON schema."""
    study = schema()
    lines = [
        "# Schema of a study file",
        "",
        "Made from the models that read a study. `deltalab study schema` prints the JSON schema, for editors.",
        "[Study files](study.md) explains the keys.",
    ]
    for name, section in {"A study": study, **study["$defs"]}.items():
        lines += [
            "",
            f"## {name}",
            "",
            markdown(section.get("description", "")),
            "",
            "| key | takes | default |",
            "| --- | --- | --- |",
        ]
        for key, value in section.get("properties", {}).items():
            default = "required" if key in section.get("required", ()) else f"`{json.dumps(value.get('default'))}`"
            lines.append(f"| `{key}` | {takes(value)} | {default} |")
    return "\n".join(lines) + "\n"


def takes(value: dict[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(map(takes, value["anyOf"]))
    if "enum" in value or "const" in value:
        return " or ".join(f"`{option}`" for option in value.get("enum", [value.get("const")]))
    kind = value.get("type", "anything")
    if kind == "array":
        inner = value.get("items") or value.get("prefixItems", [{}])[0]
        return f"list of {takes(inner)}"
    if kind == "object":
        inner = value.get("additionalProperties") or next(iter(value.get("patternProperties", {}).values()), None)
        return f"mapping of names to {takes(inner)}" if isinstance(inner, dict) and inner else "mapping"
    bounds = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above"}
    limits = [f"{words} {value[bound]:g}" for bound, words in bounds.items() if bound in value]
    return " ".join([kind, ", ".join(limits)]).strip()


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Makes links to copied pages links within the site, and adds the list of the records to the page of decisions."""
    up = "../" * page.file.src_uri.count("/")
    for name, original in COPIED.items():
        markdown = markdown.replace(f"]({up}../{original}", f"]({up}{name}")
    if page.file.src_uri != "decisions/index.md":
        return markdown
    titles = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        titles.append(f"- [{title}]({file.name})")
    return markdown + "\n" + "\n".join(titles) + "\n"


class Docstrings(griffe.Extension):
    """Docstrings of this house are plain text in Google's form; the site wants Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.__class__ = PlainDocstring


class PlainDocstring(griffe.Docstring):
    """A docstring whose sections show `<`, `*` and `_` as they are written."""

    def parse(self, *args: Any, **options: Any) -> list[griffe.DocstringSection]:
        """The sections with their text as Markdown. Names and types stay as they are."""
        return [shown(section) for section in super().parse(*args, **options)]


def shown(section: griffe.DocstringSection) -> griffe.DocstringSection:
    """A section of a docstring with its text as Markdown."""
    if isinstance(section, griffe.DocstringSectionText):
        section.value = markdown(section.value)
    elif isinstance(section, griffe.DocstringSectionExamples):
        text = griffe.DocstringSectionKind.text
        section.value = [(kind, markdown(part) if kind is text else part) for kind, part in section.value]
    elif isinstance(section, griffe.DocstringSectionAdmonition):
        # `References:` too: griffe takes a heading that it does not know for an admonition, which would be folded.
        return griffe.DocstringSectionText(f"**{section.title}:** {markdown(section.value.description)}")
    else:
        for item in section.value:
            item.description = markdown(item.description)
    return section


EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*", flags=re.MULTILINE)
EQUATION = re.compile(r"[^\s=]+ = ")
SPECIAL = re.compile(r"[*_\[\]]")


def markdown(text: str) -> str:
    """Plain text as Markdown: examples are fenced, an equation starts a line, `<`, `*` and `_` are themselves."""
    parts, end = [], 0
    for example in EXAMPLE.finditer(text):
        parts += [prose(text[end : example.start()]), f"```pycon\n{example[0].rstrip()}\n```\n"]
        end = example.end()
    return "".join([*parts, prose(text[end:])])


def prose(text: str) -> str:
    """Plain text without examples as Markdown. Indented blocks stay as they are: Markdown shows them as code."""
    blocks = re.split(r"(\n\s*\n)", text)
    return "".join(block if block.startswith("    ") or not block.strip() else paragraph(block) for block in blocks)


def paragraph(text: str) -> str:
    """A paragraph of plain text as Markdown."""
    lines: list[str] = []
    for line in text.splitlines():
        spans = re.split(r"(`[^`]*`)", line.strip())
        escaped = "".join(s if s.startswith("`") else SPECIAL.sub(r"\\\g<0>", s).replace("<", "&lt;") for s in spans)
        if lines and not EQUATION.match(line):
            lines[-1] += f" {escaped}"
        else:
            lines.append(escaped)
    return "  \n".join(lines)
