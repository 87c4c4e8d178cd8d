"""Problems, answers extracted from completions, and rewards."""

from pspo.tasks.answers import after_thoughts, contains_answer, extract_answer, extract_text, is_correct, matches_format
from pspo.tasks.datasets import load_problems
from pspo.tasks.problem import Problem
from pspo.tasks.rewards import ExactMatch, FormatReward, MathReward, MathVerifyReward, Reward, SoftOverlong, math_reward
from pspo.tasks.scoring import Scores, check_rewards, total_rewards
