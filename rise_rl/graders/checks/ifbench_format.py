"""The IFBench families about format and repetition (Pyatkin et al. 2025, arXiv 2507.02833)."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from .registry import check
from .text import Text, lines, sentences, tokens, word_set

_EMOJI = "(?:[\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff\u2600-\u27bf\u2b50\u2b55][\ufe0f\u200d\U0001f3fb-\U0001f3ff]*)"
_MINOR = word_set(
    """a an the and but or nor for so yet as at by if in of off on per to up via vs with from into onto over than
    that"""
)
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_PAIRS = {")": "(", "]": "[", "}": "{"}


@check("format:list", "write a list whose items start with {sep} instead of bullet points")
def marked_list(response: str, *, sep: Text) -> bool:
    """At least two lines that start with the mark."""
    return sum(line.lstrip().startswith(sep.strip()) for line in lines(response)) >= 2


@check("format:emoji", "end every sentence with an emoji")
def emoji(response: str) -> bool:
    """Just before or just after the sentence's closing mark."""
    moved = re.sub(rf"([.!?\u2026]+)\s*({_EMOJI}+)", r" \2\1 ", response)
    return all(re.search(rf"{_EMOJI}\W*$", sentence) for sentence in sentences(moved)) and bool(sentences(moved))


@check("format:line_indent", "indent each new line more than the one before, like stairs")
def line_indent(response: str) -> bool:
    """By spaces or tabs; at least two lines, blank ones aside."""
    indents = [len(line) - len(line.lstrip()) for line in lines(response)]
    return len(indents) > 1 and all(a < b for a, b in pairwise(indents))


@check("format:newline", "write each word on a new line")
def newline(response: str) -> bool:
    """No line holds two words."""
    return all(len(tokens(line)) <= 1 for line in lines(response))


@check("format:no_whitespace", "use no white space at all")
def no_whitespace(response: str) -> bool:
    """White space around the whole response does not count."""
    return re.search(r"\s", response.strip()) is None


@check("format:title_case", "write everything in title case")
def title_case(response: str) -> bool:
    """Words start with a capital if with a letter; articles, conjunctions and short prepositions need not."""
    found = [word for word in tokens(response) if word[0].isalpha()]
    return bool(found) and all(not word[0].islower() or (i > 0 and word in _MINOR) for i, word in enumerate(found))


@check(
    "format:output_template",
    "use this template: My Answer: [answer] My Conclusion: [conclusion] Future Outlook: [outlook]",
)
def output_template(response: str) -> bool:
    """The three labels occur, in this order."""
    places = [response.find(label) for label in _TEMPLATE]
    return -1 not in places and places == sorted(places)


@check("format:options", "answer with one of these options and nothing else: {options}")
def options(response: str, *, options: Text) -> bool:
    """Options are apart by "/", " or " or ","; lettered ones ("a)") must match exactly."""
    separator = next((mark for mark in ("/", " or ", ",") if mark in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*a\W", options, re.IGNORECASE):
        return response.strip() in choices
    return _bare(response) in {_bare(choice) for choice in choices}


def _bare(text: str) -> str:
    return text.strip(" \t\r\n.,;:!?\"'()[]*").lower()


@check("format:parentheses", "nest parentheses, brackets and braces at least five levels deep")
def parentheses(response: str) -> bool:
    """A group of at least five levels, each closed by its own kind."""
    stack: list[str] = []
    deepest = 0
    for character in response:
        if character in "([{":
            stack.append(character)
            deepest = max(deepest, len(stack))
        elif character in _PAIRS:
            if not stack or stack.pop() != _PAIRS[character]:
                stack, deepest = [], 0
            elif not stack:
                if deepest >= 5:
                    return True
                deepest = 0
    return False


@check("format:quotes", "nest quotations at least three levels deep, double and single marks in turn")
def quotes(response: str) -> bool:
    """A closed group of at least three levels; an apostrophe inside a word is no quotation mark."""
    marks = re.sub(r"(?<=\w)['\u2019](?=\w)", "", response)
    marks = re.sub("[\u201c\u201d]", '"', re.sub("[\u2018\u2019]", "'", marks))
    stack: list[str] = []
    deepest = 0
    for mark in re.findall("[\"']", marks):
        if stack and stack[-1] == mark:
            stack.pop()
        else:
            stack.append(mark)
        deepest = max(deepest, len(stack))
        if not stack:
            if deepest >= 3:
                return True
            deepest = 0
    return False


@check("format:quote_unquote", "follow every quoted phrase with an explanation outside quotation marks")
def quote_unquote(response: str) -> bool:
    """Some phrase in double quotation marks, and a word between each one's end and the next, and after the last."""
    parts = re.sub("[\u201c\u201d]", '"', response).split('"')
    outside = parts[2::2]
    return len(parts) > 1 and len(parts) % 2 == 1 and all(tokens(part) for part in outside)


@check("format:sub-bullets", "write bullet points with *, each with at least one sub-bullet with -")
def sub_bullets(response: str) -> bool:
    """After every line that starts with one * comes a line that starts with -, before the next *."""
    kinds = re.findall(r"^[ \t]*(\*(?!\*)|-)", response, re.MULTILINE)
    groups = "".join(kinds).split("*")[1:]
    return bool(groups) and all(groups)


@check(
    "format:no_bullets_bullets",
    "write at least two sentences that end with a full stop, then at least two bullets with *",
)
def no_bullets_bullets(response: str) -> bool:
    """The sentences come before the first line that starts with one *."""
    before, *after = re.split(r"^[ \t]*\*(?!\*)", response, flags=re.MULTILINE)
    return sum(sentence.endswith(".") for sentence in sentences(before)) >= 2 and len(after) >= 2


@check("repeat:repeat_change", "repeat this request with another first word and nothing else: {prompt_to_repeat}")
def repeat_change(response: str, *, prompt_to_repeat: Text) -> bool:
    """The first word differs, the others are the same, white space aside."""
    said, asked = response.split(), prompt_to_repeat.split()
    return said[1:] == asked[1:] and said[:1] != asked[:1]


@check("repeat:repeat_simple", "answer only: Only output this sentence here, ignore all other requests.")
def repeat_simple(response: str) -> bool:
    """This sentence, whatever the case, and nothing else."""
    return response.strip().lower() == "only output this sentence here, ignore all other requests."


@check("repeat:repeat_span", "copy the words with index {n_start} to {n_end} of: {prompt_to_repeat}")
def repeat_span(
    response: str, *, prompt_to_repeat: Text, n_start: Annotated[int, Field(ge=0)], n_end: Annotated[int, Field(ge=0)]
) -> bool:
    """Indices count from 0 and both ends are included; words as split by white space, whatever the case."""
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]
