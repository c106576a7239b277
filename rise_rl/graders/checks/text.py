"""What counts as a word, a sentence, a list item: the one place where the checks take these choices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Relation = Literal["less than", "at least"]

_ABBREVIATIONS = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "e.g", "i.e", "cf"))
_SENTENCE_END = re.compile(
    r"""[.!?\u2026]+["'\u201d\u2019)\]*_]*(?=\s|$)   # Western: the mark must be followed by white space
      | [\u3002\uff01\uff1f\u0964\u06d4\u061f]+["\u201d\u300d\u300f)]*  # Chinese, Hindi, Urdu, Arabic: not
      | \n\s*\n""",
    re.VERBOSE,
)
_BULLET = re.compile(r"^[ \t]*(?:[*-][ \t]+|\u2022[ \t]*)(?=\S).*\w.*$", re.MULTILINE)
_NUMBERED = re.compile(r"^[ \t]*\d+[.)][ \t]+\S.*$", re.MULTILINE)


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def compare(found: int, relation: Relation, wanted: int) -> bool:
    return found < wanted if relation == "less than" else found >= wanted


def words(text: str) -> list[str]:
    r"""Runs of word characters (`\w+`), as IFEval counts them: "don't" and "well-known" are two words each."""
    return re.findall(r"\w+", text)


def tokens(text: str) -> list[str]:
    """Words as split by white space, punctuation around them left out: "don't" and "well-known" are one word each."""
    found = (re.sub(r"^[\W_]+|[\W_]+$", "", part) for part in text.split())
    return [word for word in found if word]


def sentences(text: str) -> list[str]:
    """Ends at . ! ? or their kin, and at a blank line; not after an abbreviation, an initial or a list's "1."."""
    parts, start = [], 0
    for end in _SENTENCE_END.finditer(text):
        before = re.search(r"[\w.]*$", text[start : end.start()])
        last = before.group() if before else ""
        initial = len(last) == 1 and last.isupper() and last not in "IA"
        marker = last.isdigit() and not text[: end.start()].rpartition("\n")[2].strip(last + " \t")
        if end.group() == "." and (last.lower() in _ABBREVIATIONS or initial or marker) and end.end() < len(text):
            continue
        parts.append(text[start : end.end()])
        start = end.end()
    parts.append(text[start:])
    return [part.strip() for part in parts if re.search(r"\w", part)]


def paragraphs(text: str) -> list[str]:
    """Blocks apart by a blank line, empty ones left out."""
    return [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def bullets(text: str) -> list[str]:
    """Lines that start with * or - and a space, or a bullet sign, and go on with text (rules and bold text do not)."""
    return _BULLET.findall(text)


def numbered(text: str) -> list[str]:
    """Lines that start with a number and a dot or parenthesis: `1. ...`, `2) ...`."""
    return _NUMBERED.findall(text)


def mentions(text: str, phrase: str) -> bool:
    """Whole words, whatever the case; an edge that is no word character ("!", "[") needs no word boundary."""
    return _bounded(phrase, re.IGNORECASE).search(text) is not None


def any_mentioned(text: str, phrases: Iterable[str]) -> bool:
    return any(mentions(text, phrase) for phrase in phrases)


def count_mentions(text: str, phrase: str) -> int:
    return len(_bounded(phrase, re.IGNORECASE).findall(text))


def starts_with(text: str, phrase: str) -> bool:
    """Whatever the case; white space and quotation marks before it do not count."""
    opening = text.lstrip(" \t\r\n\"'\u201c\u201e\u2018\u00ab")
    return _bounded(phrase, re.IGNORECASE).match(opening) is not None


def _bounded(phrase: str, flags: re.RegexFlag) -> re.Pattern[str]:
    body = r"\s+".join(re.escape(part) for part in phrase.split()) or re.escape(phrase)
    before = r"(?<!\w)" if re.match(r"\w", phrase) else ""
    after = r"(?!\w)" if re.search(r"\w$", phrase) else ""
    return re.compile(f"{before}{body}{after}", flags)
