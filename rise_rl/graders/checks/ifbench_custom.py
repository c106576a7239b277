"""IFBench's one-of-a-kind tasks that a program can check (Pyatkin et al. 2025, arXiv 2507.02833)."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from datetime import date
from itertools import pairwise

from .registry import check, judged
from .text import lines, sentences, tokens

_CITY = ("ID", "Country", "City", "Year", "Count")
_PRODUCT = ("ProductID", "Category", "Brand", "Price", "Stock")
_STUDENT = ("StudentID", "Subject", "Grade", "Semester", "Score")

judged("words:start_verb", "start with a verb")
judged("words:odd_even_syllables", "alternate between words with odd and even numbers of syllables")
judged("format:thesis", "begin each section with a thesis statement in italics, written in HTML")
judged(
    "custom:word_reverse", "name the animal that is the symbol of the US, in a sentence with its words in reverse order"
)
judged(
    "custom:character_reverse",
    "name the animal that is the symbol of the US, in a sentence with its letters in reverse order",
)
judged("custom:reverse_newline", "list the countries of Africa in reverse alphabetical order, each on a new line")
judged(
    "custom:european_capitals_sort",
    "list the European capitals north of 45 degrees, separated by commas, from the highest latitude to the lowest",
)


@check("custom:multiples", "count from 10 to 50 but write only the multiples of 7")
def multiples(response: str) -> bool:
    """The numbers in the response are 14, 21, 28, 35, 42, 49, in this order."""
    return re.findall(r"\d+", response) == ["14", "21", "28", "35", "42", "49"]


@check("custom:sentence_alphabet", "tell a story in 26 sentences that start with the letters of the alphabet in order")
def sentence_alphabet(response: str) -> bool:
    """Exactly 26 sentences, whatever the case."""
    return [tokens(sentence)[0][0].lower() for sentence in sentences(response)] == list("abcdefghijklmnopqrstuvwxyz")


@check(
    "custom:date_format_list", "list the dates of Napoleon's battles as YYYY-MM-DD, separated by commas, nothing else"
)
def date_format_list(response: str) -> bool:
    """Only dates of Napoleon's lifetime (1769 to 1821) in this form; whether a battle began then is not checked."""
    return all(_napoleonic(entry.strip()) for entry in response.split(","))


def _napoleonic(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text, re.ASCII):
        return False
    try:
        return 1769 <= date.fromisoformat(text).year <= 1821
    except ValueError:
        return False


@check(
    "custom:mcq_count_length",
    'write 4 multiple-choice questions with 5 options each, each labelled "Question", each longer than the one before',
)
def mcq_count_length(response: str) -> bool:
    """Nothing before the first label; options are lines that start with a letter a-e and a dot or parenthesis."""
    before, *questions = re.split(r"^\W*Question\b\W*\d*\W*", response.strip(), flags=re.MULTILINE)
    option = re.compile(r"\s*[A-Ea-e][.)]\s*\S")
    texts, counts = [], []
    for question in questions:
        found = lines(question)
        counts.append(sum(option.match(line) is not None for line in found))
        first = next((i for i, line in enumerate(found) if option.match(line)), len(found))
        texts.append(" ".join(line.strip() for line in found[:first]))
    return not before and counts == [5, 5, 5, 5] and all(len(a) < len(b) for a, b in pairwise(texts))


@check("custom:csv_city", "write comma-separated data with the columns ID, Country, City, Year, Count and 7 rows")
def csv_city(response: str) -> bool:
    """This header, seven rows, five cells each."""
    return _table(response, ",", _CITY, 7) is not None


@check(
    "custom:csv_special_character",
    "write comma-separated data with the columns ProductID, Category, Brand, Price, Stock and 14 rows, and one quoted "
    "field with a special character",
)
def csv_special_character(response: str) -> bool:
    """This header, 14 rows, five cells each; somewhere "..." with a character that is no letter, digit or space."""
    table = _table(response, ",", _PRODUCT, 14)
    return table is not None and any(re.search(r"[^\w\s]", cell) for cell in re.findall(r'"([^"\n]*)"', response))


@check(
    "custom:csv_quotes",
    "write tab-separated data with the columns StudentID, Subject, Grade, Semester, Score, 3 rows, all quoted",
)
def csv_quotes(response: str) -> bool:
    """This header, three rows, five cells each, every cell in double quotation marks."""
    cells = [cell.strip() for line in lines(response) for cell in line.split("\t")]
    quoted = all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
    return quoted and _table(response, "\t", _STUDENT, 3) is not None


def _table(response: str, delimiter: str, header: Sequence[str], rows: int) -> list[list[str]] | None:
    """The cells, if the response is such a table and nothing else."""
    parsed = list(csv.reader(lines(response), delimiter=delimiter, skipinitialspace=True))
    cells = [[cell.strip() for cell in row] for row in parsed]
    fits = len(cells) == rows + 1 and tuple(cells[0]) == tuple(header) and all(len(row) == len(header) for row in cells)
    return cells if fits else None
