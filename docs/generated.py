"""Makes the pages of the site that are written down elsewhere, so that nothing is said twice.

The file is a MkDocs hook, and a griffe extension for docstrings.
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
    "changelog.md": "CHANGELOG.md",
    "reference/rules.md": "plugins/RULES.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {to: copied(source, to) for to, source in COPIED.items()}
    pages["reference/cli.md"] = command_line()
    pages["reference/schema.md"] = study_schema()
    for name, text in pages.items():
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
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="platform", title="The command `platform`")
    return text.replace("```console\n$ ", "```text\n")


def study_schema() -> str:
    """Tables of what a study file may say, from its JSON schema."""
    found = schema()
    lines = [
        "# Schema of a study file",
        "",
        "Made from the models that read a study. `platform study schema` prints the JSON schema, for editors.",
        "[Study files](study.md) explains the keys.",
    ]
    for name, about in {"A study": found, **found["$defs"]}.items():
        lines += [
            "",
            f"## {name}",
            "",
            markdown(about.get("description", "")),
            "",
            "| key | takes | default |",
            "| --- | --- | --- |",
        ]
        for key, value in about.get("properties", {}).items():
            default = "required" if key in about.get("required", ()) else f"`{json.dumps(value.get('default'))}`"
            lines.append(f"| `{key}` | {takes(value)} | {default} |")
    return "\n".join(lines) + "\n"


def takes(value: dict[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(takes(one) for one in value["anyOf"])
    if "enum" in value or "const" in value:
        return " or ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
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
    """Adds the list of the records to the page of decisions."""
    if page.file.src_uri != "decisions/index.md":
        return markdown
    titles = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        titles.append(f"- [{title}]({file.name})")
    return markdown + "\n" + "\n".join(titles) + "\n"


class Docstrings(griffe.Extension):
    """Docstrings of this house are plain text; the site wants Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*", flags=re.MULTILINE)
PARAMETER = re.compile(r"\w[\w, ]*(?: \[[^\]]*\])?:|\w[\w, ]* \[[^\]]+\]|Raises |Returns ")
SPECIAL = re.compile(r"[*_\[\]]")


def markdown(text: str) -> str:
    """Plain text as Markdown: examples are fenced, each parameter starts a line, `<`, `*` and `_` are themselves."""
    parts, end = [], 0
    for example in EXAMPLE.finditer(text):
        parts += [prose(text[end : example.start()]), f"```pycon\n{example[0].rstrip()}\n```\n"]
        end = example.end()
    return "".join([*parts, prose(text[end:])])


def prose(text: str) -> str:
    blocks = re.split(r"(\n\s*\n)", text)
    return "".join(block if block.startswith("    ") or not block.strip() else paragraph(block) for block in blocks)


def paragraph(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        spans = re.split(r"(`[^`]*`)", line.strip())
        shown = "".join(s if s.startswith("`") else SPECIAL.sub(r"\\\g<0>", s).replace("<", "&lt;") for s in spans)
        if lines and not PARAMETER.match(line):
            lines[-1] += f" {shown}"
        else:
            lines.append(shown)
    return "  \n".join(lines)
