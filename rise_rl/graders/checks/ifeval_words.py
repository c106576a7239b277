"""The IFEval families about words, letters, case and language (Zhou et al. 2023, arXiv 2311.07911)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated

from langdetect import DetectorFactory
from langdetect.detector_factory import PROFILES_DIRECTORY
from pydantic import AfterValidator, Field

from .registry import check
from .text import Count, Relation, Text, Texts, any_mentioned, compare, words


@lru_cache(maxsize=1)
def _detectors() -> DetectorFactory:
    """A factory of our own with a fixed seed: langdetect samples n-grams, and its shared default is unseeded."""
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory


def detect_language(text: str) -> str | None:
    """langdetect's code ("en", "zh-cn"), the same at every call; None where there is no letter to go by."""
    if not any(character.isalpha() for character in text):
        return None
    detector = _detectors().create()
    detector.append(text)
    return detector.detect()


def _known_language(code: str) -> str:
    if code not in _detectors().get_lang_list():
        raise ValueError(
            f"no language of langdetect; expected one of {', '.join(sorted(_detectors().get_lang_list()))}"
        )
    return code


@check("keywords:existence", "include the keywords: {keywords}")
def existence(response: str, *, keywords: Texts) -> bool:
    """Every keyword occurs somewhere, inside a longer word too, whatever the case."""
    return all(keyword.lower() in response.lower() for keyword in keywords)


@check("keywords:frequency", "use the word {keyword} {relation} {frequency} times")
def frequency(response: str, *, keyword: Text, relation: Relation, frequency: Count) -> bool:
    """Occurrences of `keyword`, inside longer words too, whatever the case."""
    return compare(response.lower().count(keyword.lower()), relation, frequency)


@check("keywords:forbidden_words", "do not use the words: {forbidden_words}")
def forbidden_words(response: str, *, forbidden_words: Texts) -> bool:
    """None of them occurs as a whole word, whatever the case."""
    return not any_mentioned(response, forbidden_words)


@check("keywords:letter_frequency", "use the letter {letter} {let_relation} {let_frequency} times")
def letter_frequency(
    response: str,
    *,
    letter: Annotated[str, Field(min_length=1, max_length=1)],
    let_relation: Relation,
    let_frequency: Count,
) -> bool:
    """Occurrences of one character, whatever the case."""
    return compare(response.lower().count(letter.lower()), let_relation, let_frequency)


@check("language:response_language", "answer in the language with the code {language} only")
def response_language(response: str, *, language: Annotated[str, AfterValidator(_known_language)]) -> bool:
    """langdetect (fixed seed) finds this language; a response without a letter is in no language."""
    return detect_language(response) == language


@check("change_case:english_capital", "answer in English, in capital letters only")
def english_capital(response: str) -> bool:
    """No lower-case letter, at least one capital, and English (judged in lower case, which langdetect knows best)."""
    return response.isupper() and detect_language(response.lower()) == "en"


@check("change_case:english_lowercase", "answer in English, in lower-case letters only")
def english_lowercase(response: str) -> bool:
    """No capital letter, at least one small one, and English."""
    return response.islower() and detect_language(response) == "en"


@check("change_case:capital_word_frequency", "use {capital_relation} {capital_frequency} words in capital letters")
def capital_word_frequency(response: str, *, capital_relation: Relation, capital_frequency: Count) -> bool:
    """Words all of whose letters are capitals ("I" and "A" are)."""
    return compare(sum(word.isupper() for word in words(response)), capital_relation, capital_frequency)


@check("punctuation:no_comma", "do not use any commas")
def no_comma(response: str) -> bool:
    """No comma, in Latin, Arabic or Chinese form."""
    return re.search("[,\u060c\uff0c\u3001]", response) is None
