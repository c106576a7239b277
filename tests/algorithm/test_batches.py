import pytest

from rise_rl.batches import PromptOrder
from rise_rl.config import ConfigError
from rise_rl.data import Example
from rise_rl.rubric import Criterion, Rubric

EXAMPLES = [
    Example(f"u{i}", ({"role": "user", "content": "q"},), Rubric([Criterion("a", 1)]), "", {}) for i in range(7)
]


def uids(order, steps):
    return [[e.uid for e in order.batch(s)] for s in steps]


def test_an_epoch_is_whole_batches_without_repeats_and_the_next_one_differs():
    order = PromptOrder(EXAMPLES, 3, seed=0)
    assert order.steps_per_epoch == 2
    first, second = uids(order, [0, 1]), uids(order, [2, 3])
    assert len({u for batch in first for u in batch}) == 6
    assert first != second
    seen = {u for batch in uids(order, range(40)) for u in batch}
    assert len(seen) == 7  # what one epoch leaves out, another takes


def test_a_batch_is_a_function_of_seed_and_step_alone():
    order = PromptOrder(EXAMPLES, 2, seed=5)
    forwards = uids(order, range(9))
    assert uids(PromptOrder(EXAMPLES, 2, seed=5), reversed(range(9))) == forwards[::-1]
    assert uids(PromptOrder(EXAMPLES, 2, seed=6), range(9)) != forwards


def test_without_shuffling_the_file_decides():
    order = PromptOrder(EXAMPLES, 3, seed=0, shuffle=False)
    assert uids(order, [0, 1, 2]) == [["u0", "u1", "u2"], ["u3", "u4", "u5"], ["u0", "u1", "u2"]]


def test_too_few_prompts_are_refused():
    with pytest.raises(ConfigError, match="8 prompts a step, but the training data has only 7"):
        PromptOrder(EXAMPLES, 8, seed=0)
