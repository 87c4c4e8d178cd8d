"""The same minibatch through TRL's own GRPO loss and through `pspo.losses`: do loss and gradient agree?

    python3 -m venv trl-env && trl-env/bin/pip install -r benchmarks/requirements.txt
    trl-env/bin/python -m benchmarks.trl_loss_parity          # from the repository root; about 20 s, no network

trl is pinned in that environment (benchmarks/requirements.txt) and is no dependency of pspo: what is called here is
a private method, `GRPOTrainer._compute_loss`, on a real trainer around a tiny random Qwen2 model. Prompts,
completions, masks, advantages and old log-probs are random, fixed by a seed, and the same for both sides.

One minibatch of 8 rows is accumulated over 2 microbatches of 4, so that the normalisers are tested and not only the
per-token losses. Both sides get the same counts: TRL's dapo divides by the ``num_items_in_batch`` that its rollout
counts, its dr_grpo by rows x ``max_completion_length``, and its grpo and sapo average over the tokens of a row, the
rows of a microbatch and the microbatches, which is pspo's ``grpo`` where microbatches have one size. Lengths differ,
prompts are left-padded, one row is masked out altogether and one has advantage 0. TRL multiplies its KL term by the
ratio unless told not to (``use_bias_correction_kl``); pspo's KL term is the plain k3, so here it is told not to.

Prints a table and exits with 1 if a loss differs by more than 1e-5, or a gradient by more than 1e-5 of the largest
entry of the same parameter's gradient.
"""

import copy
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass, field

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from pspo.losses import SAPO, Clip, Counts, Surrogate, aggregate, kl_estimate, token_weights

TOLERANCE = 1e-5
ROWS, MICROBATCH = 8, 4
PROMPT, COMPLETION = 6, 12  # columns
MAX_COMPLETION_TOKENS = 16  # the configured limit, above the longest completion of the batch
VOCABULARY = 97
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Case:
    name: str
    surrogate: Surrogate
    how: str
    trl: dict = field(default_factory=dict)  # GRPOConfig arguments
    beta: float = 0.0
    lora: bool = False  # TRL on a PeftModel, ours on the model within it, both with adapters alone to train


CASES = [
    Case("dapo, clip 0.2", Clip(0.2), "dapo", {"loss_type": "dapo", "epsilon": 0.2}),
    Case("grpo, clip 0.2", Clip(0.2), "grpo", {"loss_type": "grpo", "epsilon": 0.2}),
    Case("dr_grpo, clip 0.2", Clip(0.2), "dr_grpo", {"loss_type": "dr_grpo", "epsilon": 0.2}),
    Case("dapo, clip 0.2/0.28", Clip(0.2, 0.28), "dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
    Case("dapo, clip, delta 1.5", Clip(0.2, delta=1.5), "dapo", {"loss_type": "dapo", "delta": 1.5}),
    Case(
        "grpo, clip, k3 beta 0.1", Clip(0.2), "grpo", {"loss_type": "grpo", "use_bias_correction_kl": False}, beta=0.1
    ),
    Case(
        "sapo 1.0/3.0",
        SAPO(1.0, 3.0),
        "grpo",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 3.0},
    ),
    Case(
        "sapo 1.0/1.05",
        SAPO(1.0, 1.05),
        "grpo",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    Case("dapo, clip 0.2, LoRA", Clip(0.2), "dapo", {"loss_type": "dapo"}, lora=True),
]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # far from uniform, so that log-probs differ from token to token
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    return Qwen2ForCausalLM(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_minibatch(model: Qwen2ForCausalLM) -> dict[str, Tensor]:
    """Eight rows; the behaviour policy's log-probs are the model's with noise, so that clipping has work to do."""
    generator = torch.Generator().manual_seed(1)
    prompt_lengths = torch.tensor([6, 3, 5, 6, 4, 6, 2, 5])[:, None]
    completion_lengths = torch.tensor([12, 1, 7, 9, 3, 0, 11, 5])[:, None]  # row 5: masked out
    prompt_mask = torch.arange(PROMPT) >= PROMPT - prompt_lengths
    completion_mask = torch.arange(COMPLETION) < completion_lengths
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + COMPLETION), generator=generator)
    advantages = torch.randn(ROWS, 1, generator=generator)
    advantages[3] = 0.0
    batch = {
        "prompt_ids": ids[:, :PROMPT].where(prompt_mask, 0),  # (B, P)
        "prompt_mask": prompt_mask,  # (B, P) bool
        "completion_ids": ids[:, PROMPT:].where(completion_mask, 0),  # (B, T)
        "completion_mask": completion_mask,  # (B, T) bool
        "advantages": advantages,  # (B, 1)
    }
    with torch.no_grad():
        logprobs = plain_logprobs(model, *list(batch.values())[:4], TEMPERATURE)
    for name, spread in (("old_logprobs", 0.4), ("ref_logprobs", 0.7)):
        batch[name] = logprobs + spread * torch.randn(logprobs.shape, generator=generator)  # (B, T)
    return batch


def plain_logprobs(model, prompt_ids, prompt_mask, completion_ids, completion_mask, temperature) -> Tensor:
    """Log-probs of the completion tokens (B, T) the short way: all logits, one log_softmax."""
    logits = model(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, completion_mask], dim=1).long(),
    ).logits[:, prompt_ids.shape[1] - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]


def find_logprobs():
    """The package's own log-probs where it has them."""
    if importlib.util.find_spec("pspo.model") is None:
        return plain_logprobs
    from pspo.model import token_logprobs

    return token_logprobs


def microbatches(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    starts = range(0, ROWS, MICROBATCH)
    return [{name: tensor[start : start + MICROBATCH] for name, tensor in batch.items()} for start in starts]


def gradients(model) -> dict[str, Tensor]:
    trained = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name.removeprefix("base_model.model."): gradient for name, gradient in trained}


def with_adapters(model: Qwen2ForCausalLM) -> PeftModel:
    """Adapters on every linear layer, with random values in B, too."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config)


def trl_loss(case: Case, model: Qwen2ForCausalLM, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=ROWS // MICROBATCH,
            num_generations=4,
            max_completion_length=MAX_COMPLETION_TOKENS,
            temperature=TEMPERATURE,
            beta=0.0,  # a reference model would be loaded by name; its log-probs are given instead, see below
            use_cpu=True,
            bf16=False,
            report_to="none",
            **case.trl,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * ROWS}),
            processing_class=make_tokenizer(),
        )
    trainer.beta = case.beta
    trainer.current_gradient_accumulation_steps = ROWS // MICROBATCH  # the Trainer's loop sets this
    model.train()  # TRL normalises by the accumulation steps in train mode only
    total = 0.0
    for microbatch in microbatches(batch):
        inputs = {
            "prompt_ids": microbatch["prompt_ids"],
            "prompt_mask": microbatch["prompt_mask"].long(),
            "completion_ids": microbatch["completion_ids"],
            "completion_mask": microbatch["completion_mask"].long(),
            "advantages": microbatch["advantages"][:, 0],
            "old_per_token_logps": microbatch["old_logprobs"],
            "ref_per_token_logps": microbatch["ref_logprobs"],
            "num_items_in_batch": batch["completion_mask"].sum(),  # of the whole generation batch
        }
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def pspo_loss(case: Case, model: Qwen2ForCausalLM, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    token_logprobs = find_logprobs()
    counts = Counts(int(batch["completion_mask"].sum()), ROWS, MAX_COMPLETION_TOKENS)
    total = 0.0
    for microbatch in microbatches(batch):
        mask = microbatch["completion_mask"]
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        logprobs = token_logprobs(model, *(microbatch[name] for name in names), TEMPERATURE)
        per_token_loss = case.surrogate(logprobs, microbatch["old_logprobs"], microbatch["advantages"], mask)
        if case.beta > 0:
            per_token_loss = per_token_loss + case.beta * kl_estimate(logprobs, microbatch["ref_logprobs"], mask)
        loss = aggregate(per_token_loss, mask, case.how, counts)
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def main() -> int:
    model = make_model()
    batch = make_minibatch(model)
    kept = batch["completion_mask"]
    on_own_logprobs = (find_logprobs()(model, *list(batch.values())[:4], TEMPERATURE).detach(), batch["old_logprobs"])
    ignored = (token_weights(Clip(0.2), *on_own_logprobs, batch["advantages"], kept) == 0) & (batch["advantages"] != 0)
    print(f"pspo log-probs: {find_logprobs().__name__}; {kept.sum()} tokens, clip 0.2 ignores {(ignored & kept).sum()}")
    print(f"{'case':26}{'TRL loss':>14}{'pspo loss':>14}{'loss diff':>12}{'max rel grad diff':>20}")
    beyond = []
    for case in CASES:
        their_model = with_adapters(model) if case.lora else copy.deepcopy(model)
        our_model = copy.deepcopy(their_model)
        theirs, their_gradients = trl_loss(case, their_model, batch)
        ours, our_gradients = pspo_loss(case, our_model.base_model.model if case.lora else our_model, batch)
        assert their_gradients.keys() == our_gradients.keys()
        gradient_difference = max(
            ((our_gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
            for name, gradient in their_gradients.items()
        )
        print(f"{case.name:26}{theirs:14.8f}{ours:14.8f}{abs(ours - theirs):12.1e}{gradient_difference:20.1e}")
        if not (abs(ours - theirs) <= TOLERANCE and gradient_difference <= TOLERANCE):  # NaN is beyond it too
            beyond.append(case.name)
    print(f"beyond {TOLERANCE:g}: {', '.join(beyond)}" if beyond else f"all within {TOLERANCE:g}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
