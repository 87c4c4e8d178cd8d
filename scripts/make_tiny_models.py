"""WIP: train the two embedded models."""

import argparse
import json
import math
import random
import time
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from pspo.tasks.arithmetic import problems

SYSTEM = (
    "You are a careful math solver. Think through the solution and show the steps. Use English only. "
    "End the response with the final answer only in the format: '#### <final numeric answer only>'"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def make_tokenizer(vocab_size):
    blank = Qwen2Tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 3, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    texts = [SYSTEM, "system", "user", "assistant"] * 1000
    for p in islice(problems("train", seed=1), 5000):
        texts += [p.prompt, p.solution]
    tok = Tokenizer(models.BPE())
    tok.normalizer, tok.pre_tokenizer = normalizers.NFC(), blank.backend_tokenizer.pre_tokenizer
    tok.train_from_iterator(texts, trainer)
    state = json.loads(tok.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"], merges=[tuple(m) for m in state["merges"]], eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"], model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer, args):
    torch.manual_seed(args.seed)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=args.inter, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    ))


def chat(tokenizer, text):
    return tokenizer.apply_chat_template(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


def train(model, tokenizer, examples, steps, batch, lr, log):
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1, (i + 1) / 50) * max(0.5 * (1 + math.cos(math.pi * i / steps)), 0.02))
    head, _ = chat(tokenizer, "\0").split("\0")
    prefix = torch.tensor([tokenizer(head)["input_ids"]])
    t0 = time.time()
    avg = None
    for i in range(steps):
        pairs = list(islice(examples, batch))
        prompts = tokenizer([chat(tokenizer, q)[len(head):] for q, _ in pairs])["input_ids"]
        answers = tokenizer([a + tokenizer.eos_token for _, a in pairs])["input_ids"]
        T = max(len(p) + len(a) for p, a in zip(prompts, answers)) - 1
        ids = torch.full((batch, T), tokenizer.pad_token_id)
        labels = torch.full((batch, T), -100)
        for r, (p, a) in enumerate(zip(prompts, answers)):
            ids[r, : len(p) + len(a) - 1] = torch.tensor((p + a)[:-1])
            labels[r, len(p) - 1 : len(p) + len(a) - 1] = torch.tensor(a)
        cache = model.model(prefix, use_cache=True).past_key_values
        cache.batch_repeat_interleave(batch)
        hidden = model.model(ids, past_key_values=cache).last_hidden_state
        m = labels != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[m]), labels[m])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sched.step(); opt.zero_grad()
        avg = loss.item() if avg is None else 0.95 * avg + 0.05 * loss.item()
        if (i + 1) % log == 0:
            print(f"  step {i+1} loss {avg:.4f} {time.time()-t0:.0f}s prefix {prefix.shape[1]} T {T}", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="/work/cache/tiny/clean")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--vocab", type=int, default=512)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--inter", type=int, default=384)
    ap.add_argument("--steps", type=int, default=1000)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(args.vocab)
    print(len(tokenizer), tokenizer.tokenize(chat(tokenizer, next(problems("train")).prompt)), [len(tokenizer.tokenize(p.solution)) for p in islice(problems("train"), 8)])
    model = make_model(tokenizer, args)
    print(sum(p.numel() for p in model.parameters()))
    def clean():
        for p in problems("train", seed=args.seed):
            yield p.prompt, p.solution
    if args.steps:
        train(model, tokenizer, clean(), args.steps, args.batch, args.lr, 50)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(args.out); tokenizer.save_pretrained(args.out)
