"""A grader of one's own, by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import cast

from ..rubric import Criterion, Verdict, VerdictLike, as_verdict
from .base import GradeItem, Grader
from .errors import GraderError

VerdictFunction = Callable[[GradeItem, Criterion], VerdictLike]


class FunctionGrader:
    """A grader out of a function (item, criterion) -> verdict, called once per criterion, in order.

    A reward function of the whole response is one too: give each prompt a single criterion of weight 1 and return the
    reward, from 0 to 1. What the function raises stops the run; None is how it says that it could not judge.
    """

    def __init__(self, function: VerdictFunction, name: str) -> None:
        self.function, self.name = function, name

    @property
    def identity(self) -> str:
        return self.name

    def grade(self, items: Sequence[GradeItem]) -> list[list[Verdict]]:
        return [[self._verdict(item, criterion) for criterion in item.criteria] for item in items]

    def _verdict(self, item: GradeItem, criterion: Criterion) -> Verdict:
        value = self.function(item, criterion)
        try:
            return as_verdict(value)
        except (ValueError, TypeError) as error:
            raise GraderError(f"grader {self.name}, row {item.uid!r}, criterion {criterion.text!r}: {error}") from error


def load_grader(path: str) -> Grader:
    """`package.module:name` -> a grader.

    name: an object with `grade(items)`, a class of such objects (called without arguments), or a function
    (item, criterion) -> verdict. Raises GraderError that says what is wrong with the path or what it names.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise GraderError(f"grader: expected package.module:name, found {path!r}")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise GraderError(f"grader {path!r}: there is no module {error.name!r} on the import path") from error
        raise  # the module is there; something that it imports is not
    for part in name.split("."):
        if not hasattr(found, part):
            raise GraderError(f"grader {path!r}: module {module_name} has no {name!r}")
        found = getattr(found, part)
    return _as_grader(found, path)


def _as_grader(found: object, path: str) -> Grader:
    if inspect.isclass(found):
        if not callable(getattr(found, "grade", None)):
            raise GraderError(f"grader {path!r}: class {found.__name__} has no method grade(items)")
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise GraderError(
                f"grader {path!r}: class {found.__name__} needs arguments ({error}); name an instance of it instead"
            ) from error
        return cast(Grader, found())
    if callable(getattr(found, "grade", None)):
        return cast(Grader, found)
    if not callable(found):
        raise GraderError(
            f"grader {path!r}: expected a grader, a class or a function, found {type(found).__name__} {found!r}"
        )
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise GraderError(f"grader {path!r}: expected a function of (item, criterion): {error}") from error
    return FunctionGrader(cast(VerdictFunction, found), path)
