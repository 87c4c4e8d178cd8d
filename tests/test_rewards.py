"""Rewards: their exact values, plug-ins, and what is refused."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from pspo.tasks.problem import Problem
from pspo.tasks.rewards import FormatReward, MathReward, Reward, math_reward, total_rewards


@pytest.mark.parametrize(
    ("completion", "gold", "reward"),
    [
        ("#### 5", 5, 1.0), ("#### 5 apples", 5, 1.0), ("it is 5", 5, 1.0),  # 1 + 0.05 is clipped
        ("#### 6", 5, 0.05), ("#### 6 apples", 5, 0.0), ("it is 6", 5, 0.0), ("", 5, 0.0), ("####", 0, 0.0),
        ("5\n#### 6", 5, 0.05), ("#### 3/0", 3, 0.0), ("#### 1e9999", 5, 0.05),
        ("#### 0.333333", Fraction(1, 3), 1.0),
        ("#### 0.33333", Fraction(1, 3), 0.05), ("#### 1/3", Fraction(1, 3), 1.0),
        ("#### 1.000001", 1, 1.0), ("#### 0.999999", 1, 1.0),  # exactly the tolerance away
        ("#### 1.0000010000000000000001", 1, 0.05), ("#### 0.9999989999999999999999", 1, 0.05),
        ("#### 9007199254740993", 2**53 + 1, 1.0), ("#### 9007199254740993", 2**53, 0.05),  # equal as floats
    ],
)  # fmt: skip
def test_math_reward(completion, gold, reward):
    assert math_reward(completion, gold) == reward


def batch(*rows):
    return [text for text, _ in rows], [Problem("?", Fraction(gold)) for _, gold in rows]


def test_rewards_are_per_row():
    completions, problems = batch(("#### 5", 5), ("#### 6", 5), ("six", 6))
    assert MathReward()(completions, problems) == [1.0, 0.05, 0.0]
    assert FormatReward()(completions, problems) == [1.0, 1.0, 0.0]


def test_math_reward_options():
    completions, problems = batch(("#### 5\n#### 6", 5), ("#### 5.05", 5), ("#### 9", 5))
    assert MathReward(marker="first")(completions, problems) == [1.0, 0.05, 0.05]
    assert MathReward(tolerance="0.05", format_bonus=0.0)(completions, problems) == [0.0, 1.0, 0.0]
    assert MathReward(tolerance=0, format_bonus=1)(completions, problems) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("tolerance", ["1e-6", 1e-6, "0.000001"])
def test_tolerance_is_the_decimal_as_written(tolerance):
    """As a binary float 1e-6 is slightly less, and would refuse an answer exactly 1e-6 away."""
    assert MathReward(tolerance=tolerance)(*batch(("#### 1.000001", 1))) == [1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": "-1"}, "tolerance must be"), ({"tolerance": "tiny"}, "tolerance must be"),
        ({"tolerance": float("nan")}, "tolerance must be"), ({"tolerance": float("inf")}, "tolerance must be"),
        ({"format_bonus": -0.1}, "format_bonus must"), ({"format_bonus": 1.1}, "format_bonus must"),
        ({"format_bonus": float("nan")}, "format_bonus must"), ({"marker": "middle"}, "marker must"),
    ],
)  # fmt: skip
def test_parameters_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        MathReward(**arguments)


@dataclass(frozen=True)
class Returns(Reward):
    """A user's reward, without registration."""

    value: object

    def __call__(self, completions, problems):
        return self.value


def test_total_is_the_weighted_sum():
    completions, problems = batch(("#### 5", 5), ("#### 6", 5))
    functions = [MathReward(), FormatReward(), Returns([3, -2]), Returns(np.array([0.5, 0.25], dtype=np.float32))]
    totals, by_name = total_rewards(functions, [1.0, 0.5, 2.0, 4.0], completions, problems)
    assert totals == [1.0 + 0.5 + 6.0 + 2.0, 0.05 + 0.5 - 4.0 + 1.0]
    assert by_name == {
        "MathReward": [1.0, 0.05],
        "FormatReward": [1.0, 1.0],
        "Returns": [3.0, -2.0],
        "Returns_2": [0.5, 0.25],
    }
    assert total_rewards([MathReward()], None, completions, problems)[0] == [1.0, 0.05]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "Returns returned 1 values for 2 completions"), ([1.0] * 3, "returned 3 values for 2"),
        ([1.0, "1"], "returned '1' for completion 1"), ([None, 1.0], "returned None for completion 0"),
        ([float("nan"), 1.0], "returned nan for completion 0"),
        ([1.0, float("-inf")], "returned -inf for completion 1"),
        ([1.0, 1j], "for completion 1"), (None, "Returns returned None"), (1.0, "Returns returned 1.0"),
    ],
)  # fmt: skip
def test_a_bad_return_value_names_the_reward(value, message):
    with pytest.raises(ValueError, match=message):
        total_rewards([MathReward(), Returns(value)], None, *batch(("#### 5", 5), ("#### 6", 5)))


def test_bad_calls():
    completions, problems = batch(("#### 5", 5))
    with pytest.raises(ValueError, match="1 rewards but 2 weights"):
        total_rewards([MathReward()], [1.0, 1.0], completions, problems)
    with pytest.raises(ValueError, match="0 rewards"):
        total_rewards([], None, completions, problems)
    with pytest.raises(ValueError, match="1 completions but 2 problems"):
        total_rewards([MathReward()], None, completions, problems * 2)
