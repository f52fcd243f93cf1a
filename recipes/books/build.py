"""Build the books of the package from extracted PG19 texts.

    python recipes/books/build.py PG19_TRAIN PG19_VALIDATION --output src/longrope2/assets/books

books.json beside this script lists the books, with the words each text opens and closes on: what comes
before and after (title pages, indexes, advertisements, notes of the transcriber) is left out.
"""

import argparse
import hashlib
import json
import lzma
import re
from pathlib import Path
from typing import Any

from longrope2.files import atomic_path, write_json

# Traces of the transcription that must not stay in a text; \b spares "pretext".
TRACES = re.compile(
    r"(?i:gutenberg|\be-?text|transcriber.s note|proofread|pgdp|archive\.org|https?:)|Produced by [A-Z]"
)


def find(book_id: int, folders: list[Path]) -> Path:
    """The one file of this book among the source folders."""
    found = [path for folder in folders for path in sorted(folder.rglob(f"{book_id}.txt"))]
    if len(found) != 1:
        raise SystemExit(f"book {book_id}: {len(found)} files named {book_id}.txt, exactly one expected")
    return found[0]


def trim(text: str, first: str, last: str, book_id: int) -> str:
    """The author's text, from the words `first` to the words `last`."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    for mark in (first, last):
        if text.count(mark) != 1:
            raise SystemExit(f"book {book_id}: {mark!r} occurs {text.count(mark)} times, exactly one expected")
    kept = text[text.index(first) : text.index(last) + len(last)] + "\n"
    if trace := TRACES.search(kept):
        raise SystemExit(f"book {book_id}: {trace.group()!r} at character {trace.start()} of the trimmed text")
    return kept


def build(book: dict[str, Any], folders: list[Path], output: Path) -> dict[str, Any]:
    """Write one compressed book and return its line of the manifest."""
    raw = find(book["id"], folders).read_bytes().decode("utf-8")
    text = trim(raw, book["first"], book["last"], book["id"])
    encoded = text.encode("utf-8")
    file = f"{book['name']}.txt.xz"
    with atomic_path(output / file) as temporary:
        temporary.write_bytes(lzma.compress(encoded, preset=9 | lzma.PRESET_EXTREME))
    return {
        "file": file,
        "title": book["title"],
        "author": book["author"],
        "year": book["year"],
        "source": f"Project Gutenberg #{book['id']} via PG19 ({book['split']})",
        "characters": len(text),
        "sha256": hashlib.sha256(encoded).hexdigest(),
        # The tiny base model is trained on the train split only.
        "held_out": book["split"] != "train",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the books of the package from extracted PG19 texts.")
    parser.add_argument("folders", type=Path, nargs="+", help="folders that hold the texts as ID.txt, at any depth")
    parser.add_argument("--output", type=Path, required=True, help="folder for the .txt.xz files and manifest.json")
    arguments = parser.parse_args()

    books = json.loads(Path(__file__).with_name("books.json").read_text(encoding="utf-8"))
    manifest = [build(book, arguments.folders, arguments.output) for book in books]
    write_json(arguments.output / "manifest.json", manifest)

    listed = {entry["file"] for entry in manifest}
    for path in arguments.output.glob("*.txt.xz"):
        if path.name not in listed:
            path.unlink()
    size = sum((arguments.output / file).stat().st_size for file in listed)
    print(f"{len(manifest)} books, {size:,} bytes compressed")


if __name__ == "__main__":
    main()
