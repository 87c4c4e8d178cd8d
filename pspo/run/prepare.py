"""Everything before the first rollout: the run's folder, its parts, and the checkpoint that it starts from."""

import contextlib

from pspo import distributed as dist
from pspo.cli.files import Settings, environment, to_yaml, write_json, write_text
from pspo.config import TrainConfig, require
from pspo.run.resume import find_start, fork, resume
from pspo.run.run import Run


def prepare(config: TrainConfig, settings: Settings) -> Run:
    """Load everything, and make the run's folder or restore the run that it holds; ValueError for the user's errors.

    ``settings`` is the configuration for the folder.
    """
    with contextlib.ExitStack() as resources:  # released if the preparation fails
        dist.run_on_main(lambda: config.check_ranks(dist.world_size()))
        start = dist.run_on_main(lambda: find_start(config, settings, resources))
        output = start.output
        if not config.run.quiet:
            print(f"output  {output}", flush=True)  # before anything that takes seconds
        is_shared = all(dist.gather_objects(output.exists()))
        rule = "must be in a folder that all nodes share"
        dist.run_on_main(lambda: require(is_shared, "run.output_dir", rule, str(output)))
        run = Run(config, settings, output, resources)
        if start.checkpoint is not None:
            resume(run.checkpointer, start.checkpoint)
        dist.run_on_main(lambda: write_start(run))
        if start.parent is not None:
            fork(run.checkpointer, start.parent, settings)
        run.resources = resources.pop_all()
        return run


def write_start(run: Run) -> None:
    """Write config.yaml, and once for a run environment.json."""
    output = run.output
    write_text(output / "config.yaml", to_yaml(run.settings))
    if not (output / "environment.json").exists():
        write_json(output / "environment.json", environment(str(run.learner.policy.device), dist.world_size()))
