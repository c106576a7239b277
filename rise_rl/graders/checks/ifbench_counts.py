"""The IFBench families about counts, ratios and sentences (Pyatkin et al. 2025, arXiv 2507.02833)."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from .registry import check
from .text import Positive, Text, count_mentions, mentions, sentences, tokens, word_set, words

Percentage = Annotated[float, Field(ge=0, le=100)]

_CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))

_PRONOUNS = word_set(
    """i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves this that these those who whom whose which what whoever
    whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody someone
    something each either neither both all some any none"""
)

_STOP_WORDS = _PRONOUNS | word_set(
    """a an the and but or nor so if because as until while of at by for with about against between into through during
    before after above below to from up down in out on off over under again further then once here there when where why
    how few more most other such no not only own same than too very s t can will just don should now am is are was were
    be been being have has had having do does did doing d ll m o re ve would could might must shall"""
)

_NAMES = word_set(
    """Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin
    Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria
    Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella
    Jonathan"""
)

_JAPANESE = re.compile("[\u3040-\u30ff\u4e00-\u9fff]")


@check("count:word_count_range", "answer with {min_words} to {max_words} words")
def word_count_range(response: str, *, min_words: Positive, max_words: Positive) -> bool:
    """Both ends included."""
    return min_words <= len(words(response)) <= max_words


@check("count:unique_word_count", "use at least {N} different words")
def unique_word_count(response: str, *, N: Positive) -> bool:
    """Whatever the case."""
    return len({word.lower() for word in tokens(response)}) >= N


@check("count:conjunctions", "use at least {small_n} different coordinating conjunctions")
def conjunctions(response: str, *, small_n: Positive) -> bool:
    """Of and, but, for, nor, or, so, yet."""
    return len(_CONJUNCTIONS & {word.lower() for word in words(response)}) >= small_n


@check("count:person_names", f"mention at least {{N}} different names out of: {', '.join(sorted(_NAMES))}")
def person_names(response: str, *, N: Positive) -> bool:
    """Of IFBench's fifty first names, upper and lower case as written."""
    return len(_NAMES & set(words(response))) >= N


@check("count:numbers", "include exactly {N} numbers")
def numbers(response: str, *, N: Positive) -> bool:
    """Numbers in digits; "1,000" and "3.5" are one each."""
    return len(re.findall(r"\d+(?:[.,]\d+)*", response)) == N


@check("count:pronouns", "use at least {N} pronouns")
def pronouns(response: str, *, N: Positive) -> bool:
    """Personal, possessive, reflexive, demonstrative, interrogative and indefinite ones, each use counted."""
    return sum(word.lower() in _PRONOUNS for word in words(response)) >= N


@check("count:punctuation", "use every standard punctuation mark at least once, with ; and : and the interrobang ?!")
def punctuation(response: str) -> bool:
    """One interrobang (?!, !? or \u203d), and besides it each of . , ! ? ; :"""
    rest = re.sub(r"\?!|!\?|\u203d", "", response, count=1)
    return rest != response and all(mark in rest for mark in ".,!?;:")


@check("count:words_japanese", "make every {N}th word Japanese")
def words_japanese(response: str, *, N: Positive) -> bool:
    """Every N-th word as split by white space has a kana or kanji, or is a number; there are N words at least."""
    chosen = tokens(response)[N - 1 :: N]
    return bool(chosen) and all(word.isdigit() or _JAPANESE.search(word) for word in chosen)


@check(
    "count:keywords_multiple",
    "use {keyword1} once, {keyword2} twice, {keyword3} three times, {keyword4} five times and {keyword5} seven times",
)
def keywords_multiple(
    response: str, *, keyword1: Text, keyword2: Text, keyword3: Text, keyword4: Text, keyword5: Text
) -> bool:
    """Exactly 1, 2, 3, 5 and 7 times, as whole words, whatever the case."""
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7))
    return all(count_mentions(response, keyword) == count for keyword, count in wanted)


@check("ratio:stop_words", "keep stop words to at most {percentage}% of all words")
def stop_words(response: str, *, percentage: Percentage) -> bool:
    """By this project's list of English function words; a response without words does not meet it."""
    found = [word.lower() in _STOP_WORDS for word in words(response)]
    return bool(found) and 100 * sum(found) <= percentage * len(found)


@check("ratio:overlap", "share {percentage}% (plus or minus 2) of your word trigrams with the reference text")
def overlap(response: str, *, percentage: Percentage, reference_text: Text) -> bool:
    """Of the response's different trigrams of words, whatever the case, the share that the reference has too."""
    mine, reference = _trigrams(response), _trigrams(reference_text)
    return bool(mine) and abs(100 * len(mine & reference) / len(mine) - percentage) <= 2


def _trigrams(text: str) -> set[tuple[str, ...]]:
    found = [word.lower() for word in words(text)]
    return set(zip(found, found[1:], found[2:]))


def _endings(response: str) -> Counter[str]:
    stripped = (sentence.rstrip("\"'\u201d\u2019)]*_") for sentence in sentences(response))
    return Counter(sentence[-1] for sentence in stripped if sentence)


@check("ratio:sentence_type", "write two statements for every question")
def sentence_type(response: str) -> bool:
    """Twice as many sentences end with a full stop as with a question mark, and there are some."""
    ends = _endings(response)
    return ends["."] == 2 * ends["?"] > 0


@check("ratio:sentence_balance", "use as many statements as questions and exclamations")
def sentence_balance(response: str) -> bool:
    """As many sentences end with . as with ? and with !, and there are some."""
    ends = _endings(response)
    return ends["."] == ends["?"] == ends["!"] > 0


@check("ratio:sentence_words", "write three sentences with the same number of characters and no word in common")
def sentence_words(response: str) -> bool:
    """Exactly three, equally long, no word twice, whatever the case."""
    found = sentences(response)
    used = [word.lower() for word in tokens(response)]
    return len(found) == 3 and len(set(map(len, found))) == 1 and len(set(used)) == len(used)


@check("sentence:keyword", "use the word {word} in sentence {N}")
def sentence_keyword(response: str, *, word: Text, N: Positive) -> bool:
    """As a whole word, whatever the case, in the N-th sentence."""
    found = sentences(response)
    return len(found) >= N and mentions(found[N - 1], word)


@check("sentence:increment", "make each sentence exactly {small_n} words longer than the one before")
def sentence_increment(response: str, *, small_n: Positive) -> bool:
    """Words as split by white space; at least two sentences."""
    lengths = [len(tokens(sentence)) for sentence in sentences(response)]
    return len(lengths) > 1 and all(b - a == small_n for a, b in pairwise(lengths))


@check("sentence:alliteration_increment", "give each sentence a longer run of alliterating words than the one before")
def alliteration_increment(response: str) -> bool:
    """The longest run of neighbouring words with one first letter grows from sentence to sentence; two at least."""
    runs = [_longest_alliteration(tokens(sentence)) for sentence in sentences(response)]
    return len(runs) > 1 and all(a < b for a, b in pairwise(runs))


def _longest_alliteration(found: list[str]) -> int:
    best = run = min(len(found), 1)
    for a, b in pairwise(found):
        run = run + 1 if a[0].lower() == b[0].lower() else 1
        best = max(best, run)
    return best
