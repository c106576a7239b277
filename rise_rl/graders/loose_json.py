"""Reads the JSON that language models write: inside prose or fences, with Python's quotes, trailing commas, cut short.

Strict JSON is tried first. What is read loosely is read by one rule at a time, and what no rule reads is an error:
nothing is repaired by searching it for a likely value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32


class Pairs(list[tuple[str, Any]]):
    """A JSON object as (key, value) pairs, in order: a key given twice is still seen twice. closed: not cut short."""

    closed = True


class Unreadable(ValueError):
    """Something that begins like an object and is none: whatever else the text holds can no longer be trusted."""


@dataclass(frozen=True)
class Found:
    """One outermost value of a text: an object, or a list of objects, and where it stood. complete: not cut short."""

    value: Pairs | list[Any]
    start: int
    end: int
    complete: bool = True


_KEY = r"""(?:"[^"\n]{1,60}"|'[^'\n]{1,60}'|[“”][^“”\n]{1,60}[“”]|[A-Za-z_]\w{0,59})\s*:"""
_START = re.compile(rf"\[\s*(?=\{{\s*{_KEY})|\{{\s*(?={_KEY})")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_BARE = re.compile(r"[^\s,\]}:\"'“”{\[][^,\]}\n\"“”{\[]*")
_AFTER_COMMA = re.compile(rf"""\s*,\s*(?:{_KEY}|[}}\]]|["'“]?[\w -]{{0,60}}\Z)""")
_CLOSERS = {'"': '"', "'": "'", "“": "”"}
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_STRICT = json.JSONDecoder(object_pairs_hook=Pairs, strict=False)


def find_objects(text: str) -> list[Found]:
    """The outermost objects, and lists of objects, in `text`. Raises Unreadable if one of them cannot be read."""
    found = []
    position = 0
    while match := _START.search(text, position):
        start, complete = match.start(), True
        try:
            value, end = _STRICT.raw_decode(text, start)
        except (ValueError, RecursionError):
            reader = _Reader(text, start)
            value, end, complete = reader.value("item", 0), reader.position, not reader.cut
            if reader.cut and reader.guessed_quote:
                raise Unreadable("an unescaped quote in a text that is cut short") from None
        found.append(Found(value, start, end, complete))
        position = end
    return found


class _Cut(Exception):
    """The text ends before a value does."""


class _Reader:
    """Recursive descent over loose JSON. `cut`: the text ended early, and only values complete by then are kept."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self.cut = False
        self.guessed_quote = False

    def peek(self) -> str:
        """The next character that is not white space. Raises _Cut at the end of the text."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        if self.position == len(self.text):
            raise _Cut
        return self.text[self.position]

    def value(self, role: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        character = self.peek()
        if character == "{":
            return self.object(depth)
        if character == "[":
            return self.array(depth)
        if character in _CLOSERS:
            return self.string(role)
        return self.bare()

    def object(self, depth: int) -> Pairs:
        self.position += 1
        pairs = Pairs()
        pairs.closed = False
        try:
            while True:
                if self.peek() == "}":
                    self.position += 1
                    pairs.closed = True
                    return pairs
                key = self.key()
                if self.peek() != ":":
                    raise Unreadable("a key without a colon")
                self.position += 1
                value = self.value("value", depth + 1)
                if value is not _Nothing:
                    pairs.append((key, value))
                if self.cut:
                    return pairs
                if not self.separator("}"):
                    pairs.closed = True
                    return pairs
        except _Cut:
            self.cut = True
            return pairs

    def array(self, depth: int) -> list[Any]:
        self.position += 1
        items: list[Any] = []
        try:
            while True:
                if self.peek() == "]":
                    self.position += 1
                    return items
                value = self.value("item", depth + 1)
                if value is not _Nothing:
                    items.append(value)
                if self.cut or not self.separator("]"):
                    return items
        except _Cut:
            self.cut = True
            return items

    def separator(self, closer: str) -> bool:
        """Passes a comma (True) or the closer (False)."""
        character = self.peek()
        if character not in (",", closer):
            raise Unreadable(f"expected ',' or '{closer}', found {character!r}")
        self.position += 1
        return character == ","

    def key(self) -> str:
        if self.peek() in _CLOSERS:
            return self.string("key")
        match = _IDENTIFIER.match(self.text, self.position)
        if not match:
            raise Unreadable(f"expected a key, found {self.text[self.position]!r}")
        self.position = match.end()
        return match.group()

    def string(self, role: str) -> str:
        closer = _CLOSERS[self.text[self.position]]
        self.position += 1
        characters = []
        while self.position < len(self.text):
            character = self.text[self.position]
            self.position += 1
            if character == "\\":
                characters.append(self.escape())
            elif character != closer:
                characters.append(character)
            elif self.closes(role):
                return "".join(characters)
            elif role == "key":
                raise Unreadable("an unescaped quote in a key")
            else:  # a quotation mark or an apostrophe that the model forgot to escape
                self.guessed_quote |= closer != "'"
                characters.append(character)
        raise _Cut

    def closes(self, role: str) -> bool:
        """Whether the quote just passed ends its string: only if what follows can follow a string of this role."""
        rest = self.text[self.position : self.position + 200].lstrip()
        if role == "key":
            return rest.startswith(":")
        if not rest or rest[0] in "}]":
            return True
        if role == "item":
            return rest[0] == ","
        return _AFTER_COMMA.match(self.text, self.position) is not None

    def escape(self) -> str:
        if self.position == len(self.text):
            raise _Cut
        character = self.text[self.position]
        self.position += 1
        digits = self.text[self.position : self.position + 4]
        if character == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            self.position += 4
            return chr(int(digits, 16))
        return _ESCAPES.get(character, character)

    def bare(self) -> Any:
        """true, a number, or words without quotes (as text). A number at the very end may have lost its last digits."""
        match = _BARE.match(self.text, self.position)
        if not match:
            raise Unreadable(f"expected a value, found {self.text[self.position]!r}")
        self.position = match.end()
        word = match.group().strip()
        if word in _LITERALS:
            return _LITERALS[word]
        if self.position == len(self.text):
            self.cut = True
            return _Nothing
        try:
            return json.loads(word)
        except ValueError:
            return word


_Nothing = object()
