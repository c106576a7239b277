"""The IFBench families about each word of a response (Pyatkin et al. 2025, arXiv 2507.02833)."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from .registry import check
from .text import Positive, Text, lines, sentences, tokens

_CLUSTER = re.compile("[bcdfghjklmnpqrstvwxyz]{2}", re.IGNORECASE)


@check("words:alphabet", "start each word with the next letter of the alphabet, A again after Z")
def alphabet(response: str) -> bool:
    """From any letter on; every word must start with a letter a-z."""
    initials = [word[0].lower() for word in tokens(response)]
    letters = bool(initials) and all("a" <= letter <= "z" for letter in initials)
    return letters and all((ord(b) - ord(a)) % 26 == 1 for a, b in pairwise(initials))


@check("words:vowel", "write one paragraph that uses only three different vowels")
def vowel(response: str) -> bool:
    """One line, at most three of a, e, i, o, u."""
    return len(lines(response)) == 1 and len(set("aeiou") & set(response.lower())) <= 3


@check("words:consonants", "use only words with two consonants next to each other")
def consonants(response: str) -> bool:
    """In every word; y is a consonant."""
    found = tokens(response)
    return bool(found) and all(_CLUSTER.search(word) for word in found)


@check("words:palindrome", "include at least 10 palindromes of five letters or more")
def palindrome(response: str) -> bool:
    """Single words that read the same backwards, whatever the case; a repeated one counts each time."""
    found = [word.lower() for word in tokens(response)]
    return sum(len(word) >= 5 and word == word[::-1] for word in found) >= 10


@check("words:prime_lengths", "use only words whose number of letters is a prime")
def prime_lengths(response: str) -> bool:
    """Punctuation inside a word ("don't") does not count."""
    lengths = [sum(character.isalnum() for character in word) for word in tokens(response)]
    return bool(lengths) and all(n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)) for n in lengths)


@check("words:repeats", "use no word more than {small_n} times")
def repeats(response: str, *, small_n: Positive) -> bool:
    """Whatever the case."""
    return all(count <= small_n for count in Counter(word.lower() for word in tokens(response)).values())


@check("words:no_consecutive", "let no two neighbouring words start with the same letter")
def no_consecutive(response: str) -> bool:
    """Whatever the case."""
    return all(a[0].lower() != b[0].lower() for a, b in pairwise(tokens(response)))


@check("words:last_first", "start each sentence with the last word of the sentence before")
def last_first(response: str) -> bool:
    """Whatever the case; at least two sentences."""
    found = [tokens(sentence) for sentence in sentences(response)]
    return len(found) > 1 and all(a[-1].lower() == b[0].lower() for a, b in pairwise(found))


@check("words:paragraph_last_first", "end each paragraph with the word it starts with, one paragraph a line")
def paragraph_last_first(response: str) -> bool:
    """Whatever the case; a line without a word is no paragraph."""
    found = [tokens(line) for line in lines(response)]
    return all(line[0].lower() == line[-1].lower() for line in found if line)


@check("words:keywords_specific_position", "use {keyword} as word {m} of sentence {n}")
def keywords_specific_position(response: str, *, keyword: Text, n: Positive, m: Positive) -> bool:
    """Words as split by white space, whatever the case."""
    found = sentences(response)
    place = tokens(found[n - 1]) if len(found) >= n else []
    return len(place) >= m and place[m - 1].lower() == keyword.strip().lower()


@check("words:words_position", "make {keyword} the second word and the last but one")
def words_position(response: str, *, keyword: Text) -> bool:
    """Whatever the case."""
    found = [word.lower() for word in tokens(response)]
    return len(found) > 1 and found[1] == found[-2] == keyword.strip().lower()
