"""Chat templates are programs that come with a model: they have limits, and are otherwise what transformers makes."""

import pytest

from longrope2 import chat, describe
from longrope2.errors import DataError
from longrope2.models import load_tokenizer


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' * 10**10 }}", "more than 1024 MB of memory"),
        ("{{ 'a' * 10**7 }}", "a text of 10,000,000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ raise_exception('x' * 10**6) }}", "x{400}"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        (
            "{% set n = 99999 %}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}",
            "no end after 1 s",
        ),
    ],
)
def test_a_chat_template_has_limits(monkeypatch, template, reason):
    monkeypatch.setattr(chat, "SECONDS", 1)
    tokenizer = load_tokenizer(describe("tiny"))
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=rf"the tokenizer's chat template fails \(.*{reason}") as caught:
        chat.user_turn(tokenizer, "hello")
    assert len(str(caught.value)) < 800
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ sign }}"
    assert chat.user_turn(tokenizer, "hello 😀", sign="!") == "<s>hello 😀!"


def test_a_chat_is_what_transformers_makes_of_it():
    tokenizer = load_tokenizer(describe("tiny"))
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{{ eos_token }}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True}):
        assert chat.render_chat(tokenizer, turns, **options) == tokenizer.apply_chat_template(
            turns, tokenize=False, **options
        )
