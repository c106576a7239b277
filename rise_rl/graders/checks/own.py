"""Checks of this project, under `rise:`, for criteria that the public families cannot put simply."""

from __future__ import annotations

from .registry import check
from .text import Positive, Text, Texts, any_mentioned, bullets, numbered, starts_with, words


@check("rise:contains_any", "mention {words}")
def contains_any(response: str, *, words: Texts) -> bool:
    """At least one of `words` occurs as a whole word or phrase, whatever the case."""
    return any_mentioned(response, words)


@check("rise:contains_none", "do not use {words}")
def contains_none(response: str, *, words: Texts) -> bool:
    """None of `words` occurs as a whole word or phrase, whatever the case."""
    return not any_mentioned(response, words)


@check("rise:contains_text", "include {text} exactly as written here")
def contains_text(response: str, *, text: Text) -> bool:
    """`text` occurs as it stands, upper and lower case included."""
    return text in response


@check("rise:starts_with", "begin with {phrases}")
def begins_with(response: str, *, phrases: Texts) -> bool:
    """The response starts with one of `phrases`, whatever the case; opening quotation marks do not count."""
    return any(starts_with(response, phrase) for phrase in phrases)


@check("rise:max_words", "answer in at most {num_words} words")
def max_words(response: str, *, num_words: Positive) -> bool:
    """At most `num_words` words."""
    return len(words(response)) <= num_words


@check("rise:bullet_list", "write a bulleted list of at least {min_items} items")
def bullet_list(response: str, *, min_items: Positive) -> bool:
    """At least `min_items` lines that start with * or - and a space, or with a bullet sign."""
    return len(bullets(response)) >= min_items


@check("rise:numbered_list", "write a numbered list of at least {min_items} items")
def numbered_list(response: str, *, min_items: Positive) -> bool:
    """At least `min_items` lines that start with a number and a dot or parenthesis."""
    return len(numbered(response)) >= min_items
