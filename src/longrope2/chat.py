"""Chat templates: programs that come with a model, each run within limits, in a process that holds nothing else."""

import atexit
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from longrope2.errors import DataError, damage, first_line

SECONDS = 10
MEMORY_BYTES = 1 << 30
"""Beyond what the process takes at its start."""
GROWTH, FRAME = 4, 1 << 20
"""A chat may have this many times the characters of what goes in, and as many more."""
HINT = "for `longrope2 generate`, use --raw, which skips the template; for `longrope2 evaluate`, omit --chat"


def user_turn(tokenizer: Any, message: str, **options: Any) -> str:
    """A message as the user's turn of a chat, up to where the model's begins, by the tokenizer's own template."""
    return render_chat(tokenizer, [{"role": "user", "content": message}], add_generation_prompt=True, **options)


def render_chat(tokenizer: Any, turns: Sequence[Mapping[str, str]], **options: Any) -> str:
    """A chat as text; options are those of `apply_chat_template`, or the template's own."""
    with damage("the tokenizer's chat template fails", hint=HINT, kind=DataError):
        if not hasattr(tokenizer, "get_chat_template"):  # it has a way of its own, which is no template
            return str(tokenizer.apply_chat_template(turns, tokenize=False, **options))
        job = {"seconds": SECONDS, "conversations": [turns], "chat_template": tokenizer.get_chat_template()}
        answer = _answer(json.dumps({**tokenizer.special_tokens_map, **options, **job}, default=str).encode())
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["text"])


def _answer(job: bytes) -> dict[str, str]:
    child = _child()
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(job + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if answer:
            content: dict[str, str] = json.loads(answer)
            return content
    except OSError:  # it has ended
        pass
    except BaseException:
        _child.cache_clear()  # the next caller must not get the answer to this one
        child.kill()
        raise
    _child.cache_clear()
    reason = f"no end after {SECONDS} seconds" if child.wait() == -_alarm() else "the process that ran it died"
    return {"error": reason}


@cache
def _child() -> "subprocess.Popen[bytes]":
    """A process that renders one chat after another; it ends with this one."""
    # It finds modules where we do, but not in the folder that it happens to be started in.
    places = [place for place in sys.path if place]
    code = f"import sys; sys.path[:] = {places!r}; from longrope2 import chat; chat.serve()"
    child = subprocess.Popen(  # noqa: S603 - nothing of the user's
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(child.kill)
    return child


def _alarm() -> int:
    return int(getattr(signal, "SIGALRM", 0))


def serve() -> None:
    """In the child: render each line of stdin, and end in the middle of one that takes too long."""
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, whose end is ours
    _limit_memory()
    for job in sys.stdin.buffer:
        options = json.loads(job)
        if _alarm():
            signal.alarm(options.pop("seconds"))
        try:
            chats: Any = render_jinja_template(**options)
            answer = {"text": chats[0][0]}
            answer["text"].encode()  # half a character is no text, which tokenizers do not expect
            if (size := len(answer["text"])) > GROWTH * len(job) + FRAME:
                answer = {"error": f"a text of {size:,} characters from {len(job):,}"}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY_BYTES >> 20} MB of memory"}
        except Exception as error:  # whatever a template can bring about
            answer = {"error": first_line(error)}
        if _alarm():
            signal.alarm(0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    if sys.platform == "linux":
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
