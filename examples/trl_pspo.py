"""TRL's GRPOTrainer with PSPO's loss, on the embedded model: ``python examples/trl_pspo.py``, two minutes on a CPU.

pip install -c constraints.txt -e '.[trl,lab]'
pspo view runs/trl-pspo                                          # every token, as of a run of pspo
pspo evaluate --model.name_or_path runs/trl-pspo/final           # beside --model.name_or_path tiny-base
"""

from datasets import Dataset
from trl import GRPOConfig

from pspo.model.find import ASSETS
from pspo.tasks import load_problems
from pspo.tasks.problem import SYSTEM_PROMPT
from pspo.tasks.rewards import math_reward
from pspo_bridge.trl import GRPOTrainer, Record


def reward(completions, gold, **_):
    return [math_reward(turns[0]["content"], int(answer)) for turns, answer in zip(completions, gold, strict=True)]


if __name__ == "__main__":
    problems = load_problems("arithmetic", "train")[:2000]
    system = {"role": "system", "content": SYSTEM_PROMPT}
    prompts = [[system, {"role": "user", "content": problem.prompt}] for problem in problems]
    config = GRPOConfig(
        "runs/trl-pspo", max_steps=40, learning_rate=1e-4, lr_scheduler_type="constant", num_iterations=2,
        per_device_train_batch_size=64, num_generations=4, max_completion_length=48, temperature=0.6, top_p=0.85,
        loss_type="dapo", scale_rewards="none", logging_steps=1, save_strategy="no", report_to="none", bf16=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(ASSETS / "tiny-base"),
        reward,
        config,
        Dataset.from_dict({"prompt": prompts, "gold": [str(problem.answer) for problem in problems]}),
        surrogate={"class_path": "PSPO", "init_args": {"alpha": 0.1}},
        callbacks=[Record("runs/trl-pspo")],
    )
    trainer.train()
    trainer.save_model("runs/trl-pspo/final")
