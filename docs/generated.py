"""A MkDocs hook: makes the pages of the site that are written down elsewhere, so that nothing is said twice."""

import json
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from deltalab.cli import app
from deltalab.study.spec import schema

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
    pages["decisions/index.md"] = decisions()
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
        lines += ["", f"## {name}", "", about.get("description", ""), "", "| key | takes | default |", "| --- | --- | --- |"]
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


def decisions() -> str:
    """The list of the decision records, by their titles."""
    lines = [
        "# Decisions",
        "",
        "What was tried, what it gave, and what we do since. Records 0NN are of the platform, 1NN of the kernels, 2NN of",
        "training.",
        "",
    ]
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = re.match(r"# (.*)", file.read_text(encoding="utf-8"))
        lines.append(f"- [{title[1] if title else file.stem}]({file.name})")
    return "\n".join(lines) + "\n"
