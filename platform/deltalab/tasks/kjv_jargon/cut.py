"""Makes the three text files in this folder from the printed Bible and the Jargon File: python cut.py KJV JARGON.

SOURCE.md says how to get KJV and JARGON.
"""

import re
import sys
from hashlib import sha256
from itertools import groupby
from pathlib import Path


def split_of(chapter: str) -> str:
    """Returns the split of a chapter by the hash of its name, so that every chapter is in one split, 80/10/10.

    Args:
        chapter: The name of a Bible chapter, such as 'Ge 1', or of an entry of the Jargon File, such as ':foo:'.

    Examples:
        >>> split_of("Ge 1"), split_of(":foo:")
        ('validation', 'train')
    """
    tenth = int.from_bytes(sha256(chapter.encode()).digest()[:8], "big") % 10
    return {0: "validation", 1: "test"}.get(tenth, "train")


def chapters(bible: str) -> list[tuple[str, str]]:
    """Returns name and text of every chapter. A line of `bible` is a verse, such as 'Ge1:1 In the beginning ...'."""
    texts = []
    for place, verses in groupby(bible.splitlines(), lambda line: line.split(":")[0]):
        name = re.sub(r"(\d+)$", r" \1", place)
        body = "\n".join(verse.split(":", 1)[1] for verse in verses)
        texts.append((name, f"{name}\n\n{body}\n\n"))
    return texts


def entries(jargon: str) -> list[tuple[str, str]]:
    """Returns name and text of every entry of the lexicon, which opens with ':NAME:'.

    The margin of three blanks is left out, and so is all text before and after the lexicon.
    """
    flat = re.sub(r"^ {1,3}", "", jargon.replace("\xa0", " "), flags=re.MULTILINE)
    lexicon = re.split(r"^ *Part III\. Appendices$", flat, flags=re.MULTILINE)[0]
    _, *pieces = re.split(r"^(:\S.*?:)(?= |$)", lexicon, flags=re.MULTILINE)
    return [(name, f"{name}{body.rstrip()}\n\n") for name, body in zip(pieces[::2], pieces[1::2], strict=True)]


if __name__ == "__main__":
    kjv, jargon = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:])
    for split in ("train", "validation", "test"):
        text = "".join(text for name, text in chapters(kjv) + entries(jargon) if split_of(name) == split)
        Path(__file__).with_name(f"{split}.txt").write_bytes(text.encode())
