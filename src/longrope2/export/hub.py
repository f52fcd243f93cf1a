"""`longrope2 push`: an export goes to the hub, where people find it."""

from pathlib import Path

from longrope2.console import say
from longrope2.errors import LongRopeError, first_line
from longrope2.export.gguf import card_path, is_exported_file
from longrope2.export.huggingface import CARD, is_exported_folder
from longrope2.models import HUB_ID, check_manifest


def push(exported: Path, name: str, *, private: bool = False) -> str:
    """Upload an export as a repository of the hub, made if it is not there; returns its address.

    Refuses what is no export, and one whose files are not as they were written.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    if not HUB_ID.fullmatch(name) or "@" in name:
        raise LongRopeError(f"{name!r} is no name of a repository", hint="write OWNER/NAME, such as alice/llama-128k")
    files = _files(exported)
    api = HfApi()
    try:
        owner = api.whoami()["name"]  # before anything large is sent
        say(f"uploading {exported} as {name} ({owner})")
        address = str(api.create_repo(name, private=private, exist_ok=True))
        changes = [CommitOperationAdd(path_in_repo=inside, path_or_fileobj=path) for inside, path in files.items()]
        api.create_commit(name, changes, commit_message="Upload an export of longrope2")  # of all files, or none
    except Exception as error:  # of whatever package the hub's client uses
        raise LongRopeError(
            f"{name}: the hub did not take it ({first_line(error)})",
            hint="check the network; `hf auth login` with a token that may write; the same command goes on",
        ) from error
    return address


def _files(exported: Path) -> dict[str, Path]:
    """What to upload, by its name there."""
    if exported.is_file() and is_exported_file(exported):
        return {CARD: card_path(exported), exported.name: exported}
    if exported.is_dir() and is_exported_folder(exported):
        check_manifest(exported)
        return {path.relative_to(exported).as_posix(): path for path in sorted(exported.rglob("*")) if path.is_file()}
    raise LongRopeError(
        f"{exported}: not an export", hint="`longrope2 export` writes one; check it with `longrope2 verify`"
    )
