"""Two ranks against one process: gradients, rollouts, and what ranks send each other. On the CPU, through gloo."""

import importlib.util
import sys
from dataclasses import replace

import naive
import pytest
import torch
from batches import by_root, by_token, row_mean_weights
from processes import ranks

from pspo import distributed as dist
from pspo.config import DistributedConfig, LoraConfig, ModelConfig, TrainConfig
from pspo.losses import GMPO, P3O, PSPO, TOPR, Clip, NoClip
from pspo.model import load_policy, load_tokenizer, stop_token_ids
from pspo.rollout import Prompts, Rollout, Sampling, encode_prompts
from pspo.rollout.sampler import How, PolicySampler
from pspo.rollout.types import Nucleus
from pspo.tasks import Problem
from pspo.update import drawn_logprobs, update
from pspo.update.learner import make_learner

if not torch.distributed.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)
CPU = torch.device("cpu")
STRATEGIES = ("ddp", "fsdp2")


def make_config(surrogate, aggregation, model="tied", autocast="none", checkpointed=False, **algorithm):
    optimizer = {"name": "sgd", "lr": 0.1, "max_grad_norm": 0.5, "microbatch_tokens": 150}
    config = naive.make_config(surrogate, aggregation=aggregation, optimizer=optimizer, **algorithm)
    return replace(config, model=ModelConfig(model, autocast=autocast, gradient_checkpointing=checkpointed))


CASES = {
    "minibatches": make_config(PSPO(0.3), "dapo", epochs=2, minibatches=2),
    "sequences, checkpointed": make_config(TOPR(), "grpo", checkpointed=True, epochs=2),
    "KL": make_config(NoClip(), "dr_grpo", epochs=2, minibatches=2, beta=0.1),
    "named reference": make_config(NoClip(), "dapo", epochs=2, beta=0.1, reference="untied"),
    "bf16": make_config(Clip(), "dapo", autocast="bf16", epochs=2),
    "untied": make_config(P3O(), "grpo", model="untied", epochs=2),
    "corrected": make_config(GMPO(), "grpo", epochs=2, correction="sequence_truncate", correction_cap=1.3),
    "decoupled": make_config(NoClip(), "dapo", epochs=2, ratio_to="proximal", correction="sequence_truncate"),
    "own pieces": make_config(GMPO(), by_root, epochs=2, advantages=by_token, correction=row_mean_weights),
    "replayed": make_config(Clip(), "dapo", epochs=2, minibatches=2, nucleus="replay", beta=0.1),
}
CASES["decoupled"] = replace(CASES["decoupled"], rollout=replace(CASES["decoupled"].rollout, lag=1))
if importlib.util.find_spec("peft") is not None:
    adapted = make_config(PSPO(0.3), "dapo", epochs=2, beta=0.1)
    for name, dtype in (("LoRA", "float32"), ("LoRA, bf16", "bfloat16")):
        CASES[name] = replace(adapted, model=replace(adapted.model, dtype=dtype, lora=LoraConfig(rank=4)))


def make_rows() -> tuple[Rollout, torch.Tensor]:
    """32 rows of prompts and completions of all lengths, with what engines and nuclei add, and their advantages."""
    rollout, advantages = naive.make_rollout(groups=8)
    mask, lengths = rollout.completion_mask, rollout.completion_mask.sum(dim=1)
    nucleus_ids = (rollout.completion_ids[..., None] + torch.arange(3)).flatten(1)  # each token and the next two
    nucleus = Nucleus([ids[: 3 * n] for ids, n in zip(nucleus_ids, lengths, strict=True)], 3 * mask)
    sampler_logprobs = -6.3 + 0.3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    return replace(rollout, sampler_logprobs=sampler_logprobs, nucleus=nucleus), advantages.float()


def step(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after one rollout's steps, by plain SGD so that they show the gradients; and metrics."""
    torch.manual_seed(7 + dist.rank())  # of adapters; only rank 0's counts
    learner = make_learner(config, CPU)
    rollout, advantages = make_rows()
    rollout = replace(rollout, nucleus=rollout.nucleus if config.algorithm.nucleus == "replay" else None)
    if callable(config.algorithm.advantages):
        advantages = config.algorithm.advantages(advantages, 4, rollout.completion_mask)
    share = torch.tensor(dist.take_rank_share(list(range(len(rollout))), config.algorithm.minibatches))
    rollout, advantages = rollout.rows(share), advantages[share]
    if config.rollout.lag:
        old = drawn_logprobs(learner, rollout, advantages, learner.policy, config)
        update(learner, rollout, advantages, config)  # the policy moves on
        rollout = replace(rollout, behaviour_logprobs=old)
    metrics = update(learner, rollout, advantages, config)
    exported = dist.full_state_dict(learner.policy)
    assert exported is None or not any("base_layer" in name for name in exported)  # adapters alone
    return {name: dist.full_tensor(p.detach()).clone() for name, p in learner.policy.named_parameters()}, metrics


TEXTS = ["Tom has 5 apples and eats 2. How many are left?", "What is 3 + 4?", "1 + 1", "Ann buys 3 pens for $2 each."]


def roll_out(policy, rank: int) -> list[list[int]]:
    """A rank's completions, which may be longer than the other's."""
    tokenizer = load_tokenizer(ModelConfig("tiny-base"))
    stops = stop_token_ids(policy, tokenizer)
    sampling = Sampling(stops, tokenizer.pad_token_id, 1.0, 0.9, max_completion_tokens=8 + 12 * rank)
    torch.manual_seed(rank)
    prompts = Prompts([Problem(text) for text in TEXTS[rank::2]], encode_prompts(tokenizer, TEXTS[rank::2]))
    with dist.unsharded(policy):
        return PolicySampler(tokenizer).draw(prompts, 2, How(sampling, policy)).completion_ids.tolist()


@pytest.fixture(scope="module")
def cases(tiny_model, tmp_path_factory) -> dict[str, TrainConfig]:
    """CASES, their models in folders."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        settings = {"tie_word_embeddings": name == "tied", "num_hidden_layers": 1 if name == "tied" else 2}
        model = tiny_model("Qwen2", vocab_size=512, initializer_range=0.02, **settings)
        model.save_pretrained(folder / name)
    found = {}
    for name, config in CASES.items():
        model = replace(config.model, name_or_path=str(folder / config.model.name_or_path))
        reference = config.algorithm.reference and str(folder / config.algorithm.reference)
        found[name] = replace(config, model=model, algorithm=replace(config.algorithm, reference=reference))
    return found


@pytest.fixture(scope="module")
def computed(cases, tmp_path_factory) -> dict:
    """What two ranks computed."""
    out = tmp_path_factory.mktemp("ranks") / "out.pt"

    def work() -> None:
        dist.init("ddp", 60)
        results = {}
        for strategy in STRATEGIES:
            for name, config in cases.items():
                results[strategy, name] = step(replace(config, distributed=DistributedConfig(strategy)))
        for strategy in STRATEGIES:
            policy = load_policy(ModelConfig("tiny-base"), CPU, DistributedConfig(strategy))
            results[strategy] = dist.gather_objects(roll_out(policy, dist.rank()))
        results["exported"] = dist.full_state_dict(policy)
        if dist.is_main():
            torch.save(results, out)

    assert ranks(work) == [0, 0]
    assert ranks(lambda: sys.exit("a message")) == [1, 1]
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_take_the_steps_of_one(computed, cases, name):
    """The same weights and metrics as in one process, in microbatches of any size."""
    config = cases[name]
    weights, metrics = step(replace(config, optimizer=replace(config.optimizer, microbatch_tokens=10**6)))
    start = dict(load_policy(config.model, CPU).named_parameters())
    moved = float(max((weights[n] - start[n].detach()).abs().max() for n in start))
    assert moved > 1e-3
    rough = "bf16" in name  # other layouts round otherwise
    for strategy in STRATEGIES:
        rank_weights, rank_metrics = computed[strategy, name]
        for n, expected in weights.items():
            torch.testing.assert_close(rank_weights[n], expected, rtol=0, atol=moved * (0.2 if rough else 1e-4))
        for actual, expected in zip(rank_metrics, metrics, strict=True):
            assert actual == pytest.approx(expected, rel=0.1 if rough else 1e-3, abs=2e-2 if rough else 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_rolls_out_what_one_process_would(computed, strategy):
    policy = load_policy(ModelConfig("tiny-base"), CPU)
    assert computed[strategy] == [roll_out(policy, rank) for rank in range(2)]


def test_a_sharded_model_is_exported_whole(computed):
    expected = load_policy(ModelConfig("tiny-base"), CPU)
    assert computed["exported"].keys() >= dict(expected.named_parameters()).keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in computed["exported"].items())
