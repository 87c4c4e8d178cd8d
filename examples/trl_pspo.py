"""TRL's GRPOTrainer with a loss of pspo, on the embedded model: ``python examples/trl_pspo.py``, a minute on a CPU.

pip install -c constraints.txt -e '.[trl]'
python examples/trl_pspo.py SAPO 1          # another loss and seed; the loss TRL is TRL's own
pspo view runs/trl-*                        # every token, as in a run of pspo
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig

from pspo.model.find import ASSETS
from pspo.tasks import load_problems
from pspo.tasks.problem import SYSTEM_PROMPT
from pspo.tasks.rewards import math_reward
from pspo_bridge.trl import GRPOTrainer, Record


def reward(completions, gold, **_):
    return [math_reward(turns[0]["content"], int(answer)) for turns, answer in zip(completions, gold, strict=True)]


def make_dataset(problems):
    system = {"role": "system", "content": SYSTEM_PROMPT}
    prompts = [[system, {"role": "user", "content": problem.prompt}] for problem in problems]
    return Dataset.from_dict({"prompt": prompts, "gold": [str(problem.answer) for problem in problems]})


if __name__ == "__main__":
    loss, seed = sys.argv[1:] or ("PSPO", "0")
    name = f"runs/trl-{loss}-{seed}"
    torch.set_num_threads(1)  # faster for so small a model
    problems = load_problems("arithmetic", "train")
    config = GRPOConfig(
        f"{name}/trl", max_steps=32, learning_rate=1e-4, lr_scheduler_type="constant", num_iterations=2, seed=int(seed),
        per_device_train_batch_size=32, num_generations=4, max_completion_length=48, temperature=0.6, top_p=0.85,
        loss_type="dapo", scale_rewards="none", logging_steps=1, save_strategy="no", report_to="none", bf16=False,
        per_device_eval_batch_size=128,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(ASSETS / "tiny-base"),
        reward,
        config,
        make_dataset(problems[:1000]),
        make_dataset(problems[1500:1628]),
        surrogate=None if loss == "TRL" else loss,
        callbacks=[Record(name)],
    )
    trainer.train()
    print(trainer.evaluate()["eval_reward"])  # of 128 held-out problems
