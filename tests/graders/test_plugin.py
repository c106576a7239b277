"""A grader of the user's own by import path."""

import sys

import pytest

from rise_rl.graders.base import GradeItem
from rise_rl.graders.errors import GraderError
from rise_rl.graders.plugin import load_grader
from rise_rl.rubric import Criterion

ITEM = GradeItem(
    "q7", [{"role": "user", "content": "Hi"}], "Hello Anna", [Criterion("Anna", 1.0), Criterion("Bob", 1.0)]
)

SOURCE = """
import json

class ByClass:
    def grade(self, items):
        return [[1.0 for _ in item.criteria] for item in items]

class WithArguments(ByClass):
    def __init__(self, folder):
        self.folder = folder

ready = WithArguments("here")

class NoGrader:
    pass

def contains(item, criterion):
    return criterion.text in item.response

def length_reward(item, criterion):
    return min(len(item.response) / 20, 1.0)

def cannot_say(item, criterion):
    return None

def too_big(item, criterion):
    return 1.7

def nan(item, criterion):
    return float("nan")

def raises(item, criterion):
    raise KeyError("mine")

def takes_one(item):
    return 1

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_graders.py").write_text(SOURCE)
    (tmp_path / "my_broken.py").write_text("import package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_graders"
    for name in ("my_graders", "my_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "name, verdicts",
    [
        ("ByClass", [1.0, 1.0]),
        ("ready", [1.0, 1.0]),
        ("contains", [1.0, 0.0]),
        ("length_reward", [0.5, 0.5]),
        ("cannot_say", [None, None]),
    ],
)
def test_objects_classes_and_functions_are_graders(module, name, verdicts):
    assert load_grader(f"{module}:{name}").grade([ITEM, ITEM]) == [verdicts, verdicts]


@pytest.mark.parametrize(
    "path, message",
    [
        ("my_graders", "expected package.module:name, found 'my_graders'"),
        (":contains", "expected package.module:name"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("my_graders:absent", "module my_graders has no 'absent'"),
        ("my_graders:NoGrader", r"class NoGrader has no method grade\(items\)"),
        ("my_graders:WithArguments", "class WithArguments needs arguments.*folder"),
        ("my_graders:number", "expected a grader, a class or a function, found int 3"),
        ("my_graders:takes_one", r"expected a function of \(item, criterion\)"),
    ],
)
def test_paths_that_lead_nowhere_are_explained(module, path, message):
    with pytest.raises(GraderError, match=message):
        load_grader(path)


def test_an_import_error_inside_the_module_is_shown_as_it_is(module):
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_there"):
        load_grader("my_broken:f")


@pytest.mark.parametrize("name", ["too_big", "nan"])
def test_what_is_no_verdict_stops_the_run(module, name):
    with pytest.raises(GraderError, match=f"my_graders:{name}, row 'q7', criterion 'Anna'.*expected a number in"):
        load_grader(f"{module}:{name}").grade([ITEM])


def test_what_the_function_raises_stops_the_run(module):
    with pytest.raises(KeyError, match="mine"):
        load_grader(f"{module}:raises").grade([ITEM])
