"""Train on a generator of reasoning-gym, whose own check is the reward.

    pip install reasoning-gym
    python examples/from_reasoning_gym.py chain_sum

The embedded model solves hardly any problem. For results, add `model="Qwen/Qwen2.5-0.5B-Instruct"` to the call. A
generator whose answers are texts needs `data={"train": problems, "answer_kind": "text"}`.
"""

import sys

import reasoning_gym

import pspo

GENERATOR = sys.argv[1] if len(sys.argv) > 1 else "chain_sum"
STEPS = 20
gym = reasoning_gym.create_dataset(GENERATOR, size=500, seed=0)


def checked(completions: list[str], entry: list[dict], **kwargs: object) -> list[float]:
    """The generator's score, from 0 to 1, of the text behind the last ####."""
    answers = [completion.rpartition("####")[2].strip() for completion in completions]
    return [gym.score_answer(answer, problem) for answer, problem in zip(answers, entry, strict=True)]


if __name__ == "__main__":
    problems = [{"prompt": problem["question"], "answer": problem["answer"], "entry": problem} for problem in gym]
    pspo.train(data=problems, reward=checked, run={"max_steps": STEPS})
