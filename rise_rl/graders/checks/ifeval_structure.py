"""The IFEval families about length, format, openings and endings (Zhou et al. 2023, arXiv 2311.07911)."""

from __future__ import annotations

import json
import re

from .registry import check
from .text import Positive, Relation, Text, compare, paragraphs, sentences, words

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


@check("length_constraints:number_words", "answer with {relation} {num_words} words")
def number_words(response: str, *, num_words: Positive, relation: Relation) -> bool:
    """Words are runs of word characters."""
    return compare(len(words(response)), relation, num_words)


@check("length_constraints:number_sentences", "answer with {relation} {num_sentences} sentences")
def number_sentences(response: str, *, num_sentences: Positive, relation: Relation) -> bool:
    """Sentences as the section on counting says."""
    return compare(len(sentences(response)), relation, num_sentences)


@check("length_constraints:number_paragraphs", "write {num_paragraphs} paragraphs separated by ***")
def number_paragraphs(response: str, *, num_paragraphs: Positive) -> bool:
    """Exactly so many parts between `***` dividers; one at the very start or end is allowed, an empty part is not."""
    parts = [part.strip() for part in re.split(r"\*\*\*", response.strip())]
    parts = parts[1 if not parts[0] else 0 :]
    parts = parts[: -1 if parts and not parts[-1] else None]
    return all(parts) and len(parts) == num_paragraphs


@check(
    "length_constraints:nth_paragraph_first_word",
    "write {num_paragraphs} paragraphs separated by blank lines and start paragraph {nth_paragraph} with {first_word}",
)
def nth_paragraph_first_word(
    response: str, *, num_paragraphs: Positive, nth_paragraph: Positive, first_word: Text
) -> bool:
    """Exactly so many paragraphs, and this word first in the n-th, whatever the case."""
    blocks = paragraphs(response)
    if len(blocks) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    opening = words(blocks[nth_paragraph - 1])
    return bool(opening) and opening[0].lower() == first_word.strip().lower()


@check(
    "detectable_content:number_placeholders",
    "use at least {num_placeholders} placeholders in square brackets, such as [address]",
)
def number_placeholders(response: str, *, num_placeholders: Positive) -> bool:
    """`[...]` pairs on one line, at least so many."""
    return len(re.findall(r"\[[^\[\]\n]*\]", response)) >= num_placeholders


@check("detectable_content:postscript", "add a postscript that starts with {postscript_marker}")
def postscript(response: str, *, postscript_marker: Text) -> bool:
    """The marker occurs, whatever the case; white space between its letters is allowed."""
    body = r"\s?".join(re.escape(character) for character in postscript_marker.replace(" ", ""))
    return re.search(rf"(?<!\w){body}", response, re.IGNORECASE) is not None


@check(
    "detectable_format:constrained_response",
    "answer with one of: My answer is yes. My answer is no. My answer is maybe.",
)
def constrained_response(response: str) -> bool:
    """One of the three sentences occurs."""
    return any(sentence in response for sentence in _CONSTRAINED)


@check("detectable_format:json_format", "write the whole answer as JSON")
def json_format(response: str) -> bool:
    """The whole response, or what a single Markdown fence around it holds, is valid JSON."""
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", response.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(fenced.group(1) if fenced else response, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return False
    return True


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@check(
    "detectable_format:multiple_sections",
    "write at least {num_sections} sections, each headed {section_spliter} and its number",
)
def multiple_sections(response: str, *, section_spliter: Text, num_sections: Positive) -> bool:
    """At least so many times the section word followed by a number."""
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


@check("detectable_format:number_bullet_lists", "write exactly {num_bullets} bullet points, with * or -")
def number_bullet_lists(response: str, *, num_bullets: Positive) -> bool:
    """Exactly so many lines that start with one * or with - (a rule, `---`, is none)."""
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!-+\s*$)).*\S", response, re.MULTILINE)) == num_bullets


@check("detectable_format:number_highlighted_sections", "highlight at least {num_highlights} passages with *asterisks*")
def number_highlighted_sections(response: str, *, num_highlights: Positive) -> bool:
    """`*...*` and `**...**` on one line with something between, at least so many."""
    found = re.findall(r"(\*{1,2})(?!\*)([^*\n]+)\1", response)
    return sum(bool(inside.strip()) for _, inside in found) >= num_highlights


@check("detectable_format:title", "give a title in double angular brackets, such as <<title>>")
def title(response: str) -> bool:
    """`<<...>>` on one line with something between."""
    return re.search(r"<<[^\n<>]*[^\s<>][^\n<>]*>>", response) is not None


@check("combination:two_responses", "give two different answers separated by ******")
def two_responses(response: str) -> bool:
    """Exactly two different parts; a divider at the very start or end is allowed, an empty part between is not."""
    parts = [part.strip() for part in response.strip().split("******")]
    inner = parts[1 if not parts[0] else 0 : -1 if not parts[-1] else None]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


@check("combination:repeat_prompt", "first repeat this request word for word, then answer it: {prompt_to_repeat}")
def repeat_prompt(response: str, *, prompt_to_repeat: Text) -> bool:
    """The response starts with the request, whatever the case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@check("startend:end_checker", "finish with exactly these words: {end_phrase}")
def end_checker(response: str, *, end_phrase: Text) -> bool:
    """The last words, whatever the case; a closing quotation mark does not count."""
    return response.strip().strip('"').strip().lower().endswith(end_phrase.strip().strip('"').strip().lower())


@check("startend:quotation", "wrap the whole answer in double quotation marks")
def quotation(response: str) -> bool:
    """The first and the last character are straight double quotation marks."""
    stripped = response.strip()
    return len(stripped) > 1 and stripped.startswith('"') and stripped.endswith('"')
