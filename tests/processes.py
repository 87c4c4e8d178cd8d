"""Commands in processes of their own, and real faults (a signal, a full disk) at a place of choice.

The processes are forks: nothing is imported again. They compute with one thread, because a fork cannot use its
parent's, and both must add in the same order.
"""

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import pspo.train
import pspo.update.step
from pspo.distributed import run_main
from pspo.files import read_jsonl
from pspo.model import ASSETS
from pspo.run.checkpointer import load_states

torch.set_num_threads(1)
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else a warning about forks
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers' loading threads fail in a fork, in torch's thread pool


@functools.cache
def one_layer() -> str:
    """A folder with tiny-base's first layer alone: runs in which any model will do take half the time with it."""
    folder = tempfile.mkdtemp(prefix="one-layer-")
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(ASSETS / "tiny-base", folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.num_hidden_layers, model.config.layer_types = 1, model.config.layer_types[:1]
    model.model.layers = model.model.layers[:1]
    model.save_pretrained(folder)
    return folder


TINY = (  # the switches of a run of six steps that takes a second
    f"--model.name_or_path={one_layer()}", "--rollout.prompts=2", "--rollout.max_completion_tokens=8",
    "--rollout.temperature=1", "--run.max_steps=6", "--run.validate_every=0", "--run.test_limit=0",
    "--run.save_every=1", "--data.limit=5", "--optimizer.lr=1e-3",
)  # fmt: skip


def run_command(main: Callable[[Sequence[str]], None], *args: str) -> int:
    """Exit code of a command, in this process."""
    try:
        main(args)
    except SystemExit as ended:
        return ended.code or 0
    return 0


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition; fails if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fork(action: Callable[[], int | None]) -> int:
    """Start the action in a process of its own, which ends with the code that it returns; its id."""
    if torch.cuda.is_available():
        pytest.skip("CUDA does not survive a fork")
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        code = action() or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    """Wait for a process; minus the signal if one killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(action: Callable[[], int | None]) -> int:
    return exit_code(fork(action))


def ranks(action: Callable[[], None], number: int = 2) -> list[int]:
    """Exit codes of as many ranks that do this, as if torchrun had started them; they talk by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(number)}

    def of_rank(rank: int) -> Callable[[], None]:
        def start() -> None:
            os.environ.update(address, TORCHELASTIC_RUN_ID="test", RANK=str(rank), LOCAL_RANK=str(rank))
            atexit._clear()  # the parent's
            run_main(action)

        return start

    return [exit_code(child) for child in [fork(of_rank(rank)) for rank in range(number)]]


def before(function: str, action: Callable[..., None], owner: Any = pspo.train, nth: int | None = None) -> None:
    """Do the action before each call of a module's or class's function, or before the nth alone, with its arguments."""
    original = getattr(owner, function)
    calls = count(1)

    def replacement(*args, **kwargs):
        if next(calls) == nth or nth is None:
            action(*args)
        return original(*args, **kwargs)

    setattr(owner, function, replacement)


def send(*signals: signal.Signals) -> None:
    """Send these signals to this process."""
    for number in signals:
        os.kill(os.getpid(), number)


def kill_at_step(step: int) -> None:
    """Kill this process when it is about to take this optimizer step."""
    before("take_step", lambda learner, *_: learner.steps == step and send(signal.SIGKILL), pspo.update.step)


def kill_at_file_event(n: int) -> None:
    """Kill this process before the n-th time that it opens a file to write, makes, renames, removes or syncs one.

    Between two such events nothing on the disk changes but the files that are open for writing.
    """
    events = count(1)

    def watch(event: str, arguments: tuple = ()) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "fsync")) and next(events) == n:
            send(signal.SIGKILL)

    sys.addaudithook(watch)
    before("fsync", lambda _: watch("fsync"), os)


class Payload:
    """Creates a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def metric_lines(run: Path, after: int = 0) -> list[dict[str, float]]:
    """Lines of metrics.jsonl after a step, without times."""
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"] > after]
    return [{name: value for name, value in line.items() if not name.startswith("seconds/")} for line in lines]


def contents(run: Path) -> dict[str, object]:
    """Everything that a run leaves, without times, memory and the folder's name."""
    files: dict[str, object] = {}
    measured = ("seconds", "peak_memory_gb")
    for path in (path for path in run.rglob("*") if path.is_file() and path.name != "manifest.json"):
        content: object = path.read_bytes()
        if path.name == "metrics.jsonl":
            content = metric_lines(run)
        elif path.name == "summary.json":
            record = json.loads(path.read_text())
            content = {key: value for key, value in record.items() if key not in measured}
            content["best_model"] = Path(record["best_model"]).name
            del content["output_dir"]
        elif path.name == "config.yaml":
            content = yaml.safe_load(path.read_text())
            del content["run"]["output_dir"]
        elif path.suffix == ".pt":  # equal texts may be one object or two
            content = plain(load_states(path.parent))
            for name in ("elapsed", "seconds"):
                content.get("recorder", {}).pop(name, None)
        files[str(path.relative_to(run))] = content
    return files


def plain(value: Any) -> Any:
    """Tensors and dataclasses as lists and dictionaries, down to the numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return {name: plain(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value


def assert_same(one: Path, other: Path) -> None:
    left, right = contents(one), contents(other)
    differ = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    assert not differ, f"{one} and {other} differ in {', '.join(differ)}"
