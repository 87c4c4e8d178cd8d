"""An environment: a calculator for sums that are too hard for a tiny model (``configs/calculator.yaml``).

user        What is 847 - 63?
assistant   <calc>847 - 63</calc>
user        784
assistant   #### 784
"""

import re
from fractions import Fraction

from pspo.tasks.answers import after_thoughts
from pspo.tasks.arithmetic import APPLY
from pspo.tasks.problem import Problem

_CALL = re.compile(r"<calc>([^<]{1,200})</calc>")
_SUM = re.compile(r"(\d{1,12}) ?([-+*/]) ?(\d{1,12})", re.ASCII)


class Calculator:
    """Environment that answers `<calc>12 * 7</calc>` with the value; a turn without such a call is the last one."""

    def reset(self, problem: Problem) -> str:
        return problem.prompt

    def step(self, text: str) -> tuple[str, float, bool]:
        call = _CALL.search(after_thoughts(text))
        if call is None:
            return "", 0.0, True
        return calculate(call[1]), 0.0, False  # the reward functions judge the last turn


def calculate(expression: str) -> str:
    """Value of two whole numbers joined by + - * or /, exact, such as "84" or "1/3"; "error" for anything else.

    Args:
        expression: such as 12 * 7
    """
    match = _SUM.fullmatch(expression.strip())
    if match is None:
        return "error"
    a = Fraction(match[1])
    b = Fraction(match[3])
    if match[2] != "/":
        return str(APPLY[match[2]](a, b))
    return str(a / b) if b else "error"
