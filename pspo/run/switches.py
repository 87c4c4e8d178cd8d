"""The table of switches: which of them may change between the starts of a run or in a fork, which make a setting."""

FREE = {  # changes no number of the run
    "data.path", "distributed.timeout", "optimizer.halve_on_oom", "optimizer.max_skipped", "reward.on_error",
    "reward.timeout", "reward.workers", "rollout.engine_memory", "rollout.servers", "run.keep", "run.name", "run.quiet",
    "run.tracker",
}  # fmt: skip
STEERED = {  # how far a step goes, and what is written when; not what is optimized, nor on which samples
    "algorithm.beta", "algorithm.entropy_coef", "optimizer.lr", "optimizer.max_grad_norm",
    "run.record_tokens", "run.samples", "run.save_every", "run.validate_every",
}  # fmt: skip
LONGER = {"run.max_steps", "run.max_tokens"}  # may grow, unless the learning rate depends on them
ROUNDING = {"model.attn_implementation", "model.compile", "model.gradient_checkpointing", "optimizer.microbatch_tokens",
            "optimizer.one_pass", "distributed.gather", "distributed.shard"}  # fmt: skip
FIXED = {  # in a fork, too, in which all others may change
    "distributed.strategy", "model.dtype", "model.lora.alpha", "model.lora.name_or_path", "model.lora.rank",
    "model.lora.target_modules", "model.name_or_path", "model.revision", "optimizer.name",
}  # fmt: skip
REDRAWN = ("rollout.", "reward.", "algorithm.")  # a fork with others draws and scores its rollouts anew
NO_SETTING = FREE | ROUNDING | {  # ignored when grouping runs into settings
    "distributed.rollout", "distributed.strategy", "rollout.max_rows", "run.fork_from",
    "run.output_dir", "run.record_tokens", "run.resume", "run.samples", "run.save_every", "run.test_limit",
    "run.validate_every", "run.validation_limit",
}  # fmt: skip
