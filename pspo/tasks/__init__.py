"""Problems, answers extracted from completions, and rewards."""

from pspo.tasks.answers import after_thoughts, contains_answer, extract_answer, extract_text, is_correct, matches_format
from pspo.tasks.datasets import load_problems
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import FormatReward, MathReward, Reward, Scores, check_rewards, math_reward, total_rewards
from pspo.tasks.verifiers import ExactMatch, MathVerifyReward, SoftOverlong
